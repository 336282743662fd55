"""optimize(): what it takes, what it refuses, and that it never fails for what it does not support."""

from __future__ import annotations

import copy
import signal
import subprocess
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import zendnn_cffi
from tests.support.lowering import net, noise
from tests.tolerance import assert_close


def small() -> nn.Module:
    return net(lambda m, x: F.relu(m[1](m[0](x))), nn.Conv2d(3, 17, 3), nn.BatchNorm2d(17))


X = noise(2, 3, 8, 8)


def same(model: nn.Module, *inputs: Any, examples: Any = None, **options: Any) -> Any:
    """Optimize without an error or a warning of ours, and compare with eager."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*zendnn.*")
        gm = zendnn_cffi.optimize(model, examples, **{"tune": "off", **options})
        with torch.no_grad():
            ours, theirs = gm(*inputs), model(*inputs)
    for a, b in zip(flat(ours), flat(theirs), strict=True):
        assert_close(a, b, k=1024)
    assert isinstance(gm, fx.GraphModule)
    return gm


def flat(value: Any) -> list[torch.Tensor]:
    return [v for v in torch.utils._pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


# --- refusals ---


@pytest.mark.parametrize("model", (None, 3, F.relu, torch.zeros(1), nn.Conv2d))
def test_not_a_module(model: Any) -> None:
    with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
        zendnn_cffi.optimize(model)


class Doubling(nn.Linear):
    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args) * 2


def test_a_way_to_be_called_that_is_left_out_is_said() -> None:
    model, x = Doubling(3, 4).eval(), torch.randn(2, 3)
    with pytest.warns(UserWarning, match=r"leaves Doubling.__call__\(\) out.*replace_forward"):
        fast = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        assert torch.allclose(fast(x), model(x) / 2, atol=1e-5)
        expected = model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            replaced = zendnn_cffi.replace_forward(model, tune="off")
            assert torch.allclose(model(x), expected, atol=1e-5)
        assert replaced.modules[0].regions()


def test_training_mode_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"training mode.*model\.eval\(\)"):
        zendnn_cffi.optimize(small().train())


@pytest.mark.parametrize("dtype", (torch.float16, torch.int8, torch.float64, "bfloat16"))
def test_other_dtypes(dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype must be torch.float32, torch.bfloat16 or None"):
        zendnn_cffi.optimize(small(), dtype=dtype)


@pytest.mark.parametrize("tune", ("fast", None, True, ""))
def test_other_tune_modes(tune: Any) -> None:
    with pytest.raises(ValueError, match="tune must be one of 'auto', 'off', 'full'"):
        zendnn_cffi.optimize(small(), tune=tune)


@pytest.mark.parametrize("examples", (3, "text", {1, 2}, nn.Identity()))
def test_other_examples(examples: Any) -> None:
    with pytest.raises(TypeError, match="example_inputs must be a tensor, a sequence"):
        zendnn_cffi.optimize(small(), examples)


def test_the_result_stays_in_evaluation_mode() -> None:
    gm = zendnn_cffi.optimize(small())
    assert gm.eval() is gm and gm.train(False) is gm and not gm.training
    with pytest.raises(RuntimeError, match="train the original"):
        gm.train()


# --- what it takes ---


@pytest.mark.parametrize("examples", (None, X, (X,), [X], (noise(1, 3, 16, 16),)))
def test_examples(examples: Any) -> None:
    gm = same(small(), X, examples=examples)
    assert zendnn_cffi.explain(gm).offloaded_share == 1.0


def test_float32_is_as_none() -> None:
    model = small()
    assert torch.equal(same(model, X, dtype=torch.float32)(X), same(model, X)(X))


@pytest.mark.needs("bf16")
def test_bfloat16_inside_float32_outside() -> None:
    model = small()
    gm = zendnn_cffi.optimize(model, dtype=torch.bfloat16, tune="off")
    result = gm(X)
    assert result.dtype == torch.float32
    expected = copy.deepcopy(model).double()(X.double()).detach()
    assert_close(result, expected, dtype=torch.bfloat16, k=27)
    assert not torch.allclose(result, expected.float(), atol=1e-6), "it did compute in bf16"


def test_the_model_is_not_changed() -> None:
    model = small()
    before = {name: (value.clone(), value.data_ptr(), value._version) for name, value in model.state_dict().items()}
    hooks = [len(m._forward_hooks) for m in model.modules()]
    names = [name for name, _ in model.named_modules()]
    grads = [p.requires_grad for p in model.parameters()]
    x = X.clone()
    gm = zendnn_cffi.optimize(model, X, dtype=torch.bfloat16, tune="off")
    for _ in range(2):
        gm(x)
    assert torch.equal(x, X)
    for name, value in model.state_dict().items():
        kept, pointer, version = before[name]
        assert torch.equal(value, kept) and value.data_ptr() == pointer and value._version == version
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert [name for name, _ in model.named_modules()] == names
    assert [p.requires_grad for p in model.parameters()] == grads and not model.training
    assert type(model).__name__ == "_One" and list(gm.state_dict()) == list(model.state_dict())


def test_settings_of_pytorch_are_not_changed() -> None:
    def settings() -> tuple[Any, ...]:
        return (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
                torch.get_float32_matmul_precision(), torch.initial_seed(), torch.get_rng_state().sum().item(),
                torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled())  # fmt: skip

    model = small()
    before = settings()
    zendnn_cffi.optimize(model, tune="full")(X)
    assert settings() == before


# --- what it does not support runs as it is ---


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return F.relu(y) if y.sum() > 0 else torch.tanh(y)


class Looping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x.abs().max()) % 3 + 1):
            x = torch.tanh(x)
        return x


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor, *more: torch.Tensor, scale: float = 2.0, **rest: Any) -> dict[str, Any]:
        return {"y": self.conv(x) * scale, "n": len(more)}


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.calls = nn.Conv2d(3, 4, 1), 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.conv(x) + 0 * self.seen


class Convertible(nn.Module):
    """Uses numpy inside: nothing can trace that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)


@pytest.mark.parametrize("model", (Branching(), Looping(), Stateful(), Convertible(), nn.Identity(), nn.Sequential(),
                                   nn.Flatten(), nn.Dropout(),
                                   torch.jit.script(nn.ReLU())), ids=str)  # fmt: skip
@pytest.mark.parametrize("examples", (None, X[0]), ids=("no examples", "examples"))
def test_whatever_it_cannot_trace_runs_as_it_is(model: nn.Module, examples: Any) -> None:
    model.eval()
    same(copy.deepcopy(model) if isinstance(model, Stateful) else model, X, examples=None if examples is None else (X,))


def test_branches_follow_the_data() -> None:
    model = Branching().eval()
    gm = zendnn_cffi.optimize(model, X)
    for x in (X, X + 5, X - 5, X.abs()):
        torch.testing.assert_close(gm(x), model(x))


def test_keywords_and_dictionaries() -> None:
    model = Keywords().eval()
    gm = zendnn_cffi.optimize(model, X, tune="off")
    for args, kwargs in (((X,), {}), ((X, X), {"scale": 3.0}), ((), {"x": X}), ((X,), {"other": 1})):
        ours, theirs = gm(*args, **kwargs), model(*args, **kwargs)
        assert ours["n"] == theirs["n"]
        torch.testing.assert_close(ours["y"], theirs["y"])


def test_nested_results() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.conv(x)
            return {"a": [y, (F.relu(y), None)], "b": OrderedDict(c=y + 1, d=3)}

    gm = zendnn_cffi.optimize(Nested().eval(), tune="off")
    result = gm(X)
    assert set(result) == {"a", "b"} and result["a"][1][1] is None and result["b"]["d"] == 3
    assert isinstance(result["b"], dict)


def test_wrong_inputs_raise_eagers_errors() -> None:
    gm = zendnn_cffi.optimize(small(), tune="off")
    for bad in ((), (X, X), ("text",), (None,), (X[:, :2],)):
        with pytest.raises((TypeError, RuntimeError)):
            gm(*bad)
    gm(X)


def test_twice_is_once() -> None:
    """What was optimized can be given again."""
    model = small()
    once = zendnn_cffi.optimize(model, tune="off")
    twice = zendnn_cffi.optimize(once, tune="off")
    assert_close(twice(X), model(X).detach(), k=27)


def test_inside_another_model() -> None:
    model = small()
    outer = nn.Sequential(zendnn_cffi.optimize(model, tune="off"), nn.Flatten())
    assert_close(outer(X), model(X).detach().flatten(1), k=27)


def test_two_models_that_share_a_module() -> None:
    shared = nn.Conv2d(3, 4, 3)
    first, second = net(lambda m, x: F.relu(m[0](x)), shared), net(lambda m, x: m[0](x) * 2, shared)
    a, b = (zendnn_cffi.optimize(m, tune="off") for m in (first, second))
    assert_close(a(X), first(X).detach(), k=27)
    assert_close(b(X), second(X).detach(), k=27)


def test_without_an_engine(run_python: Any) -> None:
    """On a machine without the library: plain PyTorch, one warning, and the reason in explain()."""
    code = """
import warnings, torch, zendnn_cffi
model = torch.nn.Conv2d(3, 4, 3).eval()
x = torch.randn(1, 3, 8, 8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    gm = zendnn_cffi.optimize(model)
    zendnn_cffi.optimize(model)
    assert torch.equal(gm(x), model(x))
assert len([w for w in caught if "plain PyTorch" in str(w.message)]) == 1, [str(w.message) for w in caught]
assert "nowhere" in str(zendnn_cffi.explain(gm)), str(zendnn_cffi.explain(gm))
"""
    done: subprocess.CompletedProcess[str] = run_python(code, env={"ZENDNN_CFFI_LIBRARY": "/nowhere/libamdZenDNN.so"})
    assert done.returncode == 0


def test_a_model_made_under_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    x = noise(2, 8)
    for examples in ((), ((x,),)):
        fast: Any = zendnn_cffi.optimize(model, *examples, tune="off")
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x))
        assert [node.became for node in zendnn_cffi.explain(fast).nodes] == ["inner_product"]


class TimeLimit(Exception):
    """As a signal handler raises when a request takes too long."""


@pytest.mark.parametrize("where", ("symbolic", "example", "export", "first call"))
@pytest.mark.parametrize("kind", (TimeLimit, RuntimeError, KeyboardInterrupt, SystemExit))
def test_errors_of_a_signal_handler_come_through(
    where: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were taken for what tracing fails on, and the work went on."""

    def late(*args: Any, **kwargs: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)

    def stop(number: int, frame: Any) -> None:
        raise kind("too late")

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        if where == "symbolic" or (where == "example" and not isinstance(x, fx.Proxy)):
            late()
        y: torch.Tensor = m[0](x) if len(x) > 100 else m[1](x)
        return y

    if where in ("export", "first call"):
        monkeypatch.setattr(torch.export, "export", late)
    model = net(forward, nn.Linear(8, 8), nn.Linear(8, 8))
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(kind, match="too late"):
            gm = zendnn_cffi.optimize(model, None if where == "first call" else torch.ones(2, 8), tune="off")
            gm(torch.ones(2, 8))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_errors_of_a_models_own_class_are_no_signal_s() -> None:
    """Also where who calls handles one of a signal handler's."""

    def stop(number: int, frame: Any) -> None:
        raise TimeLimit

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, fx.Proxy):
            raise ValueError
        y: torch.Tensor = m[0](x)
        return y

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        signal.raise_signal(signal.SIGUSR1)
    except TimeLimit:
        same(net(forward, nn.Linear(8, 8)), torch.ones(2, 8))
    finally:
        signal.signal(signal.SIGUSR1, before)
