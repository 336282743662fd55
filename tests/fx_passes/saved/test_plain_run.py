"""Loaded modules as plain PyTorch: parameters are read as they are in each call."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import zendnn_cffi
from tests.support.lowering import net, noise


def loaded_from(model: nn.Module, x: Tensor, path: Path) -> Any:
    fast = zendnn_cffi.optimize(model, tune="off")
    fast(x)
    zendnn_cffi.save(fast, path)
    return zendnn_cffi.load(path)


def normalized() -> nn.Module:
    """A batch normalization that is folded into the weights before it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    model[1].running_mean.uniform_(-1, 1)
    return model


def test_weights_that_are_written_before_each_call(tmp_path: Path) -> None:
    """Such calls are plain PyTorch. Folded weights of the first of them were those of all."""
    model, x = normalized(), noise(1, 3, 9, 9)
    loaded = loaded_from(model, x, tmp_path / "m")
    for _ in range(4):
        with torch.no_grad():
            for m in (model, loaded):
                m.get_parameter("0.weight").mul_(1.5)
            torch.testing.assert_close(loaded(x), model(x), atol=1e-4, rtol=1e-5)


def test_a_buffer_that_callers_write_to(tmp_path: Path) -> None:
    """Its sum with a bias is folded."""

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("scale", noise(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x) * self.scale, self.scale

    model, x = Held().eval(), noise(4, 8)
    loaded = loaded_from(copy.deepcopy(model), x, tmp_path / "m")
    for _ in range(4):
        with torch.no_grad():
            (result, scale), (expected, of_eager) = loaded(x), model(x)
            torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-5)
            scale.add_(1.0)
            of_eager.add_(1.0)


def test_gradients_reach_parameters_that_are_folded(tmp_path: Path) -> None:
    model, x = normalized(), noise(1, 3, 9, 9)
    loaded = loaded_from(model, x, tmp_path / "m")
    for m in (model, loaded, loaded):
        m.zero_grad()
        m(x.clone().requires_grad_()).square().sum().backward()
    for (name, theirs), (_, ours) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert ours.grad is not None, name
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-3, rtol=1e-4)


def test_results_are_in_containers_that_can_be_changed(tmp_path: Path) -> None:
    model = net(lambda m, x: {"all": [m[0](x), m[0](x).relu()]}, nn.Linear(8, 8))
    x = noise(4, 8)
    loaded = loaded_from(model, x, tmp_path / "m")
    found = loaded(x.clone().requires_grad_())
    assert (type(found), type(found["all"])) == (dict, list)


CALLS: dict[str, Any] = {
    "a method of a parameter": lambda m, x: m[0](x) @ m[0].weight.t(),
    "fft": lambda m, x: m[0](torch.fft.irfft(torch.fft.rfft(m[0](x)))),
    "linalg": lambda m, x: m[0](x) / torch.linalg.norm(x),
    "fields of results": lambda m, x: m[0](torch.sort(m[0](x)).values),
}


@pytest.mark.parametrize("case", CALLS)
def test_functions_of_pytorchs_rooms_are_in_files(case: str, tmp_path: Path) -> None:
    model, x = net(CALLS[case], nn.Linear(8, 8)), noise(4, 8)
    assert torch.equal(loaded_from(model, x, tmp_path / "m")(x), zendnn_cffi.optimize(model, tune="off")(x))


def test_an_exported_program_that_checks_numbers_of_a_call(tmp_path: Path) -> None:
    model = net(lambda m, x: m[0](x)[x[:, 0] > 0], nn.Linear(8, 8))
    x = noise(6, 8)
    fast = zendnn_cffi.optimize(torch.export.export(model, (x,)), tune="off")
    expected = fast(x)
    zendnn_cffi.save(fast, tmp_path / "m")
    assert torch.equal(zendnn_cffi.load(tmp_path / "m")(x), expected)


def test_keys_that_a_file_would_change_are_refused(tmp_path: Path) -> None:
    """JSON has no tuples: keys became lists, which no dictionary takes."""
    fast, x = zendnn_cffi.optimize(net(lambda m, x: {x.shape: m[0](x)}, nn.Linear(8, 8)), tune="off"), noise(4, 8)
    fast(x)
    with pytest.raises(ValueError, match="keys of dictionaries"):
        zendnn_cffi.save(fast, tmp_path / "m")


def test_inputs_that_share_memory_with_one_that_is_written(tmp_path: Path) -> None:
    """The graph may read and write in another order than the model's forward."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            before = self.layer(y)
            x.mul_(2)
            result: Tensor = before + y
            return result

    model, both = Writing().eval(), noise(5, 8)
    fast = zendnn_cffi.optimize(model, tune="off")
    fast(noise(4, 8), both[1:])
    zendnn_cffi.save(fast, tmp_path / "m")
    loaded = zendnn_cffi.load(tmp_path / "m")
    x, y = both[:4].clone(), both[1:].clone()
    torch.testing.assert_close(loaded(x, y), model(both[:4].clone(), y), atol=1e-5, rtol=1e-5)
    assert torch.equal(x, both[:4] * 2)
    with pytest.raises(ValueError, match="share memory"):
        loaded(both[:4], both[1:])


@pytest.mark.parametrize("example", (False, True))
def test_inputs_that_share_memory_and_are_read_alone(example: bool, tmp_path: Path) -> None:
    """A region writes to nothing that it is given, so such calls run as others do."""

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer(x) + y, y

    model, x = Reading().eval(), noise(4, 8)
    fast = zendnn_cffi.optimize(model, (x, x.clone()) if example else None, tune="off")
    expected, _ = fast(x, x)
    zendnn_cffi.save(fast, tmp_path / "m")
    loaded: Any = zendnn_cffi.load(tmp_path / "m")
    assert loaded.written_inputs is None
    result, same = loaded(x, x)
    assert torch.equal(result, expected) and same is x


def test_parameters_are_ordinary_where_inference_mode_loads_them(tmp_path: Path) -> None:
    """Tensors of inference mode count no writes, and take no part in gradients."""
    model, x = normalized(), noise(1, 3, 9, 9)
    loaded_from(model, x, tmp_path / "m")
    with torch.inference_mode():
        loaded = zendnn_cffi.load(tmp_path / "m")
        torch.testing.assert_close(loaded(x), model(x), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        for m in (model, loaded):
            m.get_parameter("0.weight").mul_(2.0)
        for _ in range(3):
            torch.testing.assert_close(loaded(x), model(x), atol=1e-5, rtol=1e-5)
    loaded(x.clone().requires_grad_()).sum().backward()
    assert loaded.get_parameter("0.weight").grad is not None


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    model.register_forward_hook(lambda module, args, result: result * 2)
    return model


def hooked_before() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


HOOKED = {
    "after forward": hooked,
    "before forward": hooked_before,
    "computing weights": lambda: nn.utils.weight_norm(nn.Linear(8, 8)).eval(),  # type: ignore[no-untyped-call]
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", HOOKED)
def test_hooks_of_the_whole_are_refused(case: str, tmp_path: Path) -> None:
    """Those of layers keep these out of the graph, so that a file refuses the layers."""
    fast = zendnn_cffi.optimize(HOOKED[case](), tune="off")
    fast(noise(4, 8))
    with pytest.raises(ValueError, match="hooks"):
        zendnn_cffi.save(fast, tmp_path / "m")


def test_hooks_and_layers_that_no_file_could_follow(tmp_path: Path) -> None:
    """The graph calls no layers: it left hooks out, and named a parameter alone where one was gone."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), noise(4, 8)
    loaded = loaded_from(model, x, tmp_path / "m")
    handle = loaded.get_submodule("2").register_forward_hook(lambda module, args, result: result * 2)
    for _ in range(2):
        with pytest.raises(ValueError, match="2 has a hook"):
            loaded(x)
    handle.remove()
    for change in (parametrizations.weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)):
        changed = copy.deepcopy(loaded)
        change(changed.get_submodule("0"))
        with pytest.raises(ValueError, match="0 has a hook or a parametrization"):
            changed(x)
    torch.testing.assert_close(loaded(x), model(x), atol=1e-5, rtol=1e-5)
    loaded.get_submodule("2").bias = None
    with pytest.raises(ValueError, match=r"2\.bias.* is gone"):
        loaded(x)
    loaded.get_submodule("2").bias = nn.Parameter(model.get_parameter("2.bias").detach() + 1)
    for _ in range(3):
        torch.testing.assert_close(loaded(x), model(x) + 1, atol=1e-5, rtol=1e-5)


def test_dtypes_of_a_loaded_module_may_change(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), noise(4, 8)
    loaded = loaded_from(model, x, tmp_path / "m")
    for _ in range(3):
        torch.testing.assert_close(loaded.double()(x.double()), model.double()(x.double()))


class Made(nn.Module):
    """Its forward makes tensors, or reads a buffer in their place."""

    def __init__(self, makes: bool) -> None:
        super().__init__()
        self.fc, self.makes = nn.Linear(8, 8), makes
        self.register_buffer("ones", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * (torch.ones(8) if self.makes else self.ones)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float64), ids=str)
@pytest.mark.parametrize("makes", (True, False))
def test_converted_modules_refuse_calls_where_made_tensors_would_promote(
    makes: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, x = Made(makes).eval(), noise(4, 8)
    fast: Any = zendnn_cffi.optimize(copy.deepcopy(model), tune="off")
    fast(x)
    zendnn_cffi.save(fast, tmp_path / "model.safetensors")
    loaded: Any = zendnn_cffi.load(tmp_path / "model.safetensors")
    torch.testing.assert_close(loaded(x), model(x), atol=1e-5, rtol=1e-5)
    loaded, model, x = loaded.to(dtype), model.to(dtype), x.to(dtype)
    for _ in range(3):
        if makes and dtype == torch.bfloat16:
            assert model(x).dtype == torch.float32
            with pytest.raises(ValueError, match=r"makes tensors of torch\.float32: change the original"):
                loaded(x)
        else:
            torch.testing.assert_close(loaded(x), model(x), atol=2e-2, rtol=2e-2)


class Branches(nn.Module):
    """A forward that torch.export traces, as it asks for sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x)) if x.shape[1] == 16 else x


@pytest.mark.parametrize("given", ["program", "example"])
def test_inputs_of_exported_graphs_may_ask_for_gradients(given: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x, found = Branches().eval(), noise(4, 16), []
    source: Any = torch.export.export(model, (x,)) if given == "program" else model
    fast = zendnn_cffi.optimize(source, None if given == "program" else (x,), tune="off")
    fast(x)
    zendnn_cffi.save(fast, tmp_path / "m")
    loaded = zendnn_cffi.load(tmp_path / "m")
    for module in (loaded, model):
        asking = x.clone().requires_grad_()
        module(asking).square().sum().backward()
        found.append([asking.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(*found)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="was traced without autocast"):
        loaded(x)
    torch.testing.assert_close(loaded(x), model(x).detach())


class Named(Branches):
    def forward(self, x: torch.Tensor, shift: Any = None, *, scale: float = 1.0) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x) * scale
        return y if shift is None else y + shift


@pytest.mark.parametrize("is_exported", [True, False])
def test_calls_that_forward_does_not_take_raise_as_there(is_exported: bool, tmp_path: Path) -> None:
    """Also where a graph takes the same arguments: one given twice, one by position that has to be named."""
    torch.manual_seed(0)
    model, x = (Named() if is_exported else nn.Linear(16, 8)).eval(), noise(4, 16)
    fast: Any = zendnn_cffi.optimize(model, (x,) if is_exported else None, tune="off")
    fast(x)
    zendnn_cffi.save(fast, tmp_path / "m")
    name = "x" if is_exported else "input"
    wrong: list[Any] = [((), {}), ((x,), {name: x}), ((x, None, 1.0), {}), ((x,), {"other": x}), ((x, x), {name: x})]
    for module in (model, fast, zendnn_cffi.load(tmp_path / "m")):
        for args, kwargs in wrong:
            with pytest.raises(TypeError):
                module(*args, **kwargs)
        torch.testing.assert_close(module(**{name: x}), model(x))
