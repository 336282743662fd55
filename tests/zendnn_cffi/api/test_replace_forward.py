"""replace_forward(): whoever holds the model gets the optimized one; everything else of it stays."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from tests.support.int8_tensors import CONFIGS, Block, quantized


class Classifier(nn.Module):
    """With arguments by name, a method of its own, and a mutable argument."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"labels": 5}
        self.first, self.second = nn.Linear(17, 33), nn.Linear(33, 5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, seen: Any = None) -> dict[str, torch.Tensor]:
        if seen is not None:
            seen.count += 1
        y = self.second(torch.relu(self.first(x)))
        return {"scores": y if mask is None else y * mask}

    def best(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)["scores"].argmax(-1)


class Counter:
    count = 0


@pytest.fixture
def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier().eval()


X = torch.randn(3, 17, generator=torch.Generator().manual_seed(1))


def test_whoever_holds_it_computes_in_the_engine(model: Classifier) -> None:
    expected, best = model(X)["scores"], model.best(X)
    keys = list(model.state_dict())
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    assert torch.allclose(model(X)["scores"], expected, atol=1e-5) and torch.equal(model.best(X), best)
    (fast,) = replaced.modules
    assert zendnn_cffi.explain(fast).offloaded_share == 1.0
    assert type(model) is Classifier and model.config == {"labels": 5} and list(model.state_dict()) == keys
    assert list(inspect.signature(model.forward).parameters) == ["x", "mask", "seen"]
    replaced.undo()
    replaced.undo()
    assert "forward" not in model.__dict__ and torch.equal(model(X)["scores"], expected)


@pytest.mark.parametrize("backend", ("eager", "zendnn"))
def test_inside_torch_compile(model: Classifier, backend: str) -> None:
    """TorchDynamo followed what looks for changes, and raised AssertionError."""
    expected = model(X)["scores"]
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend=backend)
    best = torch.compile(model.best, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            assert torch.allclose(compiled(X)["scores"], expected, atol=1e-5)
            assert torch.equal(best(X), expected.argmax(-1))
    assert len(replaced.modules) == 1


@pytest.mark.parametrize("is_late", (False, True))
def test_hooks_of_the_model_run_once(is_late: bool) -> None:
    """They ran around the model, and around the optimized module once more."""
    torch.manual_seed(0)
    model, calls = nn.Sequential(nn.Linear(17, 33), nn.ReLU()).eval(), []
    expected = 2 * model(X + 1)
    if is_late:
        zendnn_cffi.replace_forward(model, tune="off")
        model(X), model(X)
    model.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    model.register_forward_hook(lambda *_: calls.append(1))
    model.register_forward_hook(lambda _m, _args, result: 2 * result)
    if not is_late:
        zendnn_cffi.replace_forward(model, tune="off")
    for _ in range(3):
        assert torch.allclose(model(X), expected, atol=1e-5)
    assert len(calls) == 3


def test_what_others_put_around_it_stays(model: Classifier) -> None:
    """As accelerate's add_hook_to_module(): the third call found it gone."""
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    model(X)
    inner = model.forward
    model.__dict__["forward"] = around = lambda x: {"scores": 2 * inner(x)["scores"]}
    model.second = nn.Linear(33, 5)
    expected = 2 * Classifier.forward(model, X)["scores"]
    for _ in range(3):
        assert torch.allclose(model(X)["scores"], expected, atol=1e-5)
    assert model.__dict__["forward"] is around and len(replaced.modules) == 1


def test_a_hook_of_the_model_that_computes_its_weight() -> None:
    torch.manual_seed(0)
    model = nn.utils.weight_norm(nn.Linear(17, 33)).eval()
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    for _ in range(2):
        with torch.no_grad():
            model.weight_g.mul_(2)
            for _ in range(3):
                weight = torch._weight_norm(model.weight_v, model.weight_g)
                assert torch.allclose(model(X), X @ weight.T + model.bias, atol=1e-5)
    assert zendnn_cffi.explain(replaced.modules[0]).offloaded_share == 1.0


@pytest.mark.parametrize("is_called", (False, True))
def test_tracers_find_the_model(is_called: bool) -> None:
    """torch.jit.trace ended the process, and torch.export.export raised AttributeError."""
    model = nn.Sequential(nn.Linear(17, 33), nn.ReLU()).eval()
    expected = model(X)
    zendnn_cffi.replace_forward(model, tune="off")
    if is_called:
        model(X)
    with torch.no_grad():
        scripted, exported = torch.jit.trace(model, X), torch.export.export(model, (X,))
    assert torch.equal(scripted(X), expected) and torch.equal(exported.module()(X), expected)
    assert list(exported.state_dict) == list(dict(scripted.named_parameters())) == list(model.state_dict())


class Adapted(nn.Module):
    """With adapters that take turns, as PEFT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapters = nn.Linear(17, 33), nn.ModuleList(nn.Linear(17, 33) for _ in range(8))
        self.active = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        for i in self.active:
            y = y + self.adapters[i](x)
        return y

    def is_right(self) -> bool:
        return torch.allclose(self(X), Adapted.forward(self, X), atol=1e-5)


def test_a_state_that_the_model_is_in_again_is_not_optimized_again() -> None:
    model = Adapted().eval()
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    made: dict[tuple[int, ...], Any] = {}
    for active in 3 * [[0], [1], [], [2, 0]]:
        model.active = [*active]  # an equal list, as PEFT sets it
        assert model.is_right() and model.is_right()
        (fast,) = replaced.modules
        assert made.setdefault(tuple(active), fast) is fast
        assert model.is_right() and zendnn_cffi.explain(fast).offloaded_share == 1.0
    assert len({id(fast) for fast in made.values()}) == 4


def test_what_was_made_of_weights_before_a_conversion_is_freed() -> None:
    model = Adapted().eval()
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    assert model.is_right()
    (fast,) = map(weakref.ref, replaced.modules)
    model.double()
    for _ in range(3):
        model(X.double())
    gc.collect()
    assert fast() is None and len(replaced.modules) == 1


def test_weights_that_were_merged_in_the_meantime_are_packed_again() -> None:
    """PEFT merges adapters through .data, which PyTorch does not count."""
    model = Adapted().eval()
    zendnn_cffi.replace_forward(model, tune="off")
    for active in ([0], [], [0], []):
        model.active = active
        model.base.weight.data += 0.5
        assert all(model.is_right() for _ in range(3))


def test_numbers_written_through_data_are_noticed_after_their_version_was_raised() -> None:
    """As docs/first_lines.md says of PEFT's hotswap_adapter()."""
    model = Adapted().eval()
    zendnn_cffi.replace_forward(model, tune="off")
    for _ in range(2):
        assert model.is_right() and model.is_right()
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn(parameter.shape))
        torch.autograd.graph.increment_version(list(model.parameters()))
        assert model.is_right() and model.is_right() and model.is_right()


def test_a_model_that_is_changed_again_and_again_is_optimized_less_and_less() -> None:
    model, made = Adapted().eval(), list[Any]()
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    for i in range(24):
        model.active = [i % 8, i // 8]
        assert all(model.is_right() for _ in range(3))
        made += [fast for fast in replaced.modules if all(fast is not each for each in made)]
    assert len(made) < 12
    last = made[-1]
    assert all(model.is_right() for _ in range(65)) and replaced.modules[0] is not last


class Passing(Classifier):
    """As ultralytics' networks: anything more by position, and options by name."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return super().forward(x if x.shape[0] > 1 else x * 1, *args, **{k: v for k, v in kwargs.items() if v})


def test_arguments_by_position_and_by_name_at_once() -> None:
    model = Passing().eval()
    expected = model(X, seen=None)["scores"]
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(model(X, seen=None)["scores"], expected, atol=1e-5)
    (fast,) = replaced.modules
    assert zendnn_cffi.explain(fast).offloaded_share == 1.0  # 0 where its region waits for a first call


def test_each_kind_of_call_has_a_graph_and_sizes_make_none(model: Classifier) -> None:
    replaced = zendnn_cffi.replace_forward(model)
    mask = torch.rand(5)
    for call in ({"x": X}, {"x": X[:2]}, {"x": X, "mask": mask}, {"x": X[None]}):
        got = model(**call)["scores"]
        assert torch.allclose(got, Classifier.forward(model, **call)["scores"], atol=1e-5)
    assert torch.allclose(model(X, mask=mask)["scores"], Classifier.forward(model, X, mask)["scores"], atol=1e-5)
    assert len(replaced.modules) == 2 and not replaced.reasons, "without a mask, of any rank, and with one"
    assert all(region.lowered for module in replaced.modules for region in module.regions().values())


def test_calls_that_write_to_an_argument_stay_plain(model: Classifier) -> None:
    replaced, seen = zendnn_cffi.replace_forward(model), Counter()
    for _ in range(3):
        model(X, seen=seen)
    assert seen.count == 3 and not replaced.modules and replaced.reasons == ["an argument is a Counter"]


def test_training_and_gradients_stay_plain(model: Classifier) -> None:
    replaced = zendnn_cffi.replace_forward(model)
    model.train()
    model(X)["scores"].sum().backward()
    assert model.first.weight.grad is not None and not replaced.modules
    model.eval()
    leaf = X.clone().requires_grad_()
    model(leaf)["scores"].sum().backward()
    assert leaf.grad is not None and not replaced.modules and len(replaced.reasons) == 2


def test_new_weights_are_noticed(model: Classifier) -> None:
    zendnn_cffi.replace_forward(model)
    model(X)
    with torch.no_grad():
        model.second.bias.add_(3)
    for _ in range(3):
        assert torch.allclose(model(X)["scores"], Classifier.forward(model, X)["scores"], atol=1e-5)


class Tagged(Classifier):
    """Another graph for each word."""

    def forward(self, x: torch.Tensor, tag: str = "") -> dict[str, torch.Tensor]:  # type: ignore[override]
        return super().forward(x * len(tag) if tag else x)


def test_kinds_of_calls_are_bounded() -> None:
    model = Tagged().eval()
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    for _ in range(2):
        for tag in "abcdefghijk":
            assert torch.allclose(model(X, tag)["scores"], Tagged.forward(model, X, tag)["scores"], atol=1e-5)
    assert len(replaced.modules) == 8 and replaced.reasons == ["8 kinds of calls came before"]
    assert zendnn_cffi.explain(replaced.modules[7]).offloaded_share == 1.0


def test_packed_weights_are_kept_once_for_all_kinds() -> None:
    model = Classifier().eval()
    model.first, model.second = nn.Linear(17, 1024), nn.Linear(1024, 512)
    replaced, x = zendnn_cffi.replace_forward(model, tune="off"), torch.randn(64, 17)
    for _ in range(3):
        for mask in (None, torch.rand(512)):
            assert torch.allclose(model(x, mask)["scores"], Classifier.forward(model, x, mask)["scores"], atol=1e-5)
    assert len(replaced.modules) == 2
    each = [zendnn_cffi.explain(module).weights.packed_bytes for module in replaced.modules]
    assert max(each) < 1.1 * min(each) and min(each) > 512 * 1024 * 4


def test_three_calls_with_arguments_that_raise_spoil_nothing() -> None:
    model = Passing().eval()
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    for _ in range(4):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            model(torch.randn(3, 9))
    for _ in range(2):
        assert torch.allclose(model(X)["scores"], Passing.forward(model, X)["scores"], atol=1e-5)
    assert any(region.lowered for module in replaced.modules for region in module.regions().values())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_a_forward_of_their_own(model: Classifier, copied: Any) -> None:
    replaced = zendnn_cffi.replace_forward(model)
    expected = model(X)["scores"]
    other = copied(model)
    with torch.no_grad():
        other.second.bias.zero_()
    assert torch.allclose(other(X)["scores"], Classifier.forward(other, X)["scores"], atol=1e-5)
    assert other.forward.modules[0] is not replaced.modules[0] and other.forward.model is other
    assert torch.equal(model(X)["scores"], expected)


def test_arguments_that_the_model_refuses_raise_its_own_error_and_spoil_nothing(model: Classifier) -> None:
    expected = model(X)["scores"]
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.randn(3, 9))
    assert torch.allclose(model(X)["scores"], expected, atol=1e-5)
    assert len(replaced.modules) == 1 and zendnn_cffi.explain(replaced.modules[0]).offloaded_share == 1.0


def test_what_optimize_refuses_stays_plain(model: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        tries.append(args)
        raise RuntimeError("cannot be traced")

    expected = model(X)["scores"]
    replaced = zendnn_cffi.replace_forward(model)
    monkeypatch.setattr("zendnn_cffi.api.replace_forward.made", refuse)
    for _ in range(5):
        assert torch.equal(model(X)["scores"], expected)
    assert len(tries) == 3 and replaced.modules == []
    assert replaced.reasons == ["optimize() refused it: RuntimeError: cannot be traced"]


def test_refusals(model: Classifier) -> None:
    with pytest.raises(TypeError, match="release_weights"):
        zendnn_cffi.replace_forward(model, release_weights=True)
    with pytest.raises(TypeError, match="OptimizedModule|Classifier"):
        zendnn_cffi.replace_forward(zendnn_cffi.optimize(model))
    with pytest.raises(TypeError, match="function"):
        zendnn_cffi.replace_forward(lambda x: x)  # type: ignore[arg-type]
    zendnn_cffi.replace_forward(model)
    with pytest.raises(ValueError, match="undo"):
        zendnn_cffi.replace_forward(model)


class Stateful(nn.Module):
    """A forward that adds to a buffer, in place or by another tensor, or counts in an attribute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how, self.calls = nn.Linear(6, 4), how, 0
        self.register_buffer("n", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place":
            self.n += 1
        elif self.how == "by a method":
            self.n.add_(1)
        elif self.how == "another tensor":
            self.n = self.n + 1
        else:
            self.calls += 1
        return torch.relu(self.layer(x)) * self.n + self.calls


@pytest.mark.parametrize("how", ["in place", "by a method", "another tensor", "attribute"])
def test_state_is_the_models(how: str) -> None:
    """Whoever has the model reads its state, and resets it."""
    torch.manual_seed(0)
    model, x = Stateful(how).eval(), torch.randn(5, 6)
    plain = copy.deepcopy(model)
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    with torch.no_grad():
        for start in (1.0, 10.0):
            for each in (model, plain):
                each.n.fill_(start)
                each.calls = int(start)
            for _ in range(3):
                torch.testing.assert_close(model(x), plain(x))
                assert model.n == plain.n and model.calls == plain.calls
    assert not replaced.modules and any("its forward changes" in reason for reason in replaced.reasons)


@pytest.mark.parametrize("config", CONFIGS)
def test_layers_that_torchao_quantized(config: str) -> None:
    torch.manual_seed(0)
    model, x = quantized(Block(), config), torch.randn(4, 64)
    with torch.no_grad():
        expected = model(x)
        replaced = zendnn_cffi.replace_forward(model, tune="off")
        for _ in range(3):
            torch.testing.assert_close(model(x), expected, atol=1e-4, rtol=1e-4)
    assert [len(module.regions()) for module in replaced.modules] == [1]


def test_a_forward_that_others_replaced_is_theirs() -> None:
    model = Classifier().eval()
    model.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"not by zendnn_cffi.*optimize\(\)"):
        zendnn_cffi.replace_forward(model)


class Steering:
    """A hook that knows things, as monitoring and interpretability code has it."""

    def __init__(self) -> None:
        self.scale, self.calls = 1.0, 0

    def hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output * self.scale

    __call__ = hook


@pytest.mark.parametrize("way", ["replace_forward", "optimize"])
@pytest.mark.parametrize("as_method", [True, False])
def test_what_a_layers_hook_belongs_to_is_the_users_own(way: str, as_method: bool) -> None:
    model, steering, x = (
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(),
        Steering(),
        torch.randn(3, 8),
    )
    model[0].register_forward_hook(steering.hook if as_method else steering)
    fast: Any = model
    if way == "replace_forward":
        zendnn_cffi.replace_forward(model, tune="off")
    else:
        fast = zendnn_cffi.optimize(model, (x,), tune="off")
    for scale in (1.0, 5.0, -2.0):
        steering.scale = scale
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model[2](model[1](scale * (x @ model[0].weight.t() + model[0].bias))))
    assert steering.calls >= 3


class WithScript(nn.Module):
    """A layer of TorchScript behind one of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.script = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.script(self.first(x))
        return y


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is (deprecated|not supported)")
def test_a_layer_of_torchscript_stays_as_it_is() -> None:
    model, x = WithScript().eval(), torch.randn(4, 8)
    with torch.no_grad():
        expected = model(x)
        zendnn_cffi.replace_forward(model, tune="off")
        for _ in range(3):
            torch.testing.assert_close(model(x), expected)
        dict(model.script.named_parameters())["0.weight"].mul_(2)
        model.first.weight.mul_(2)
        ours = model(x), model(x)
        model.forward.undo()  # type: ignore[union-attr]
        for each in ours:
            torch.testing.assert_close(each, model(x))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_layers_get_their_shapes_by_the_first_call() -> None:
    model, x = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.randn(3, 8)
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    with torch.no_grad():
        first = model(x)
        assert model[0].weight.shape == (8, 8)
        for _ in range(3):
            torch.testing.assert_close(model(x), first)
    assert "inner_product" in [node.became for node in zendnn_cffi.explain(model).nodes]
    replaced.undo()
    torch.testing.assert_close(model(x), first)


class AsksForGradients(nn.Module):
    """A forward that means another computation where gradients are enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y * 3 if torch.is_grad_enabled() else y


@pytest.mark.parametrize("entry", ["optimize", "with an example", "replace_forward"])
def test_a_forward_finds_gradients_as_the_caller_has_them(entry: str) -> None:
    """The first call of each further kind, and the first one after weights changed, ran it without."""
    torch.manual_seed(0)
    model = AsksForGradients().eval()
    reference = copy.deepcopy(model)
    if entry == "replace_forward":
        zendnn_cffi.replace_forward(model, tune="off")
        fast: Any = model
    else:
        examples = (torch.randn(3, 8),) if entry == "with an example" else None
        fast = zendnn_cffi.optimize(model, examples, tune="off")

    def same(*batches: int) -> None:
        for batch in batches:
            x = torch.randn(batch, 8)
            torch.testing.assert_close(fast(x).detach(), reference(x).detach())

    with torch.no_grad():
        same(3, 3)
    same(3, 1, 1, 1, 5)
    for _ in range(2):
        with torch.no_grad():
            same(3, 3)
            for each in (model, reference):
                each.layer.weight.mul_(2)
        same(3, 3, 3)


@torch.no_grad()
def test_invalidate_after_writes_that_nobody_counts() -> None:
    model, x = Classifier().eval(), torch.randn(4, 17)
    replaced = zendnn_cffi.replace_forward(model, tune="off")
    replaced.invalidate()  # before any call, too
    for _ in range(2):
        before = model(x)["scores"]
    for parameter in model.parameters():
        parameter.data.mul_(2)
    replaced.invalidate()
    assert not replaced.modules
    for _ in range(2):
        torch.testing.assert_close(model(x)["scores"], type(model).forward(model, x)["scores"])
    assert replaced.modules and not torch.allclose(model(x)["scores"], before)
