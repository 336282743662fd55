"""Weights and layers that are changed after optimize(): each call computes with those that are there."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import stateless

import zendnn_cffi
from tests.support.changes import (
    IN_PLACE,
    WAYS,
    Way,
    added,
    both,
    exchanged_memory,
    hook,
    hook_on_the_root,
    loaded,
    net,
    new_layer,
    new_parameter,
    no_bias,
    own_attribute,
    pruned,
    tied,
)  # fmt: skip
from tests.support.graphs import model_of
from tests.support.lowering import noise
from tests.tolerance import assert_close

X = noise(2, 3, 6, 6)


def check(fast: Any, oracle: nn.Module, x: torch.Tensor = X) -> None:
    with torch.no_grad():
        assert_close(fast(x), oracle(x), k=128)


def lowered(fast: Any) -> int:
    """How many programs there are."""
    return sum(len([p for p in region.lowered.values() if p]) for region in fast.regions().values())


BEFORE = (added, exchanged_memory, new_parameter, new_layer, no_bias, hook, pruned, tied, loaded, own_attribute)


@pytest.mark.parametrize(
    ("way", "is_first"),
    [*((way, False) for way in WAYS), *((way, True) for way in BEFORE)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_every_way(way: Way, is_first: bool) -> None:
    """Changed after the first call, or before: the calls that follow are right, and run in regions again."""
    oracle = net()
    fast: Any = zendnn_cffi.optimize(copy.deepcopy(oracle), tune="off")
    if not is_first:
        check(fast, oracle)
    both(way, 1, fast, oracle)
    for _ in range(3):
        check(fast, oracle)
    assert lowered(fast)


class Bank(nn.Module):
    """A layer with a length, which is 0: Python takes it for false."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def __len__(self) -> int:
        return 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x))


def another_weight(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(torch.eye(8) * 3)


def a_hook(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda module, args, result: result * 3)


@pytest.mark.parametrize("change", (another_weight, a_hook))
def test_below_a_layer_that_says_it_is_empty(change: Callable[[nn.Module], None]) -> None:
    model, x = nn.Sequential(Bank(), nn.Linear(8, 8)).eval(), noise(3, 8)
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    check(fast, model, x)
    for each in (fast, model):
        change(each.get_submodule("0.layer"))
    for _ in range(3):
        check(fast, model, x)
    assert lowered(fast)


@pytest.mark.parametrize("examples", ((), ((noise(3, 8),),)), ids=("first call", "example"))
def test_a_part_that_torch_compile_made(examples: tuple[Any, ...]) -> None:
    """It has no training flag of its own, and its length is that of what it holds: a linear layer has none."""
    inner = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout()), backend="eager")
    model, x = nn.Sequential(inner, nn.ReLU(), nn.Linear(8, 8)).eval(), noise(3, 8)
    single = nn.Sequential(torch.compile(nn.Linear(8, 8), backend="eager"), nn.ReLU()).eval()
    check(zendnn_cffi.optimize(single, *examples, tune="off"), single, x)
    fast: Any = zendnn_cffi.optimize(model, *examples, tune="off")
    check(fast, model, x)
    with torch.no_grad():
        model.get_parameter("0._orig_mod.0.weight").mul_(2)
    for _ in range(2):
        check(fast, model, x)
    assert lowered(fast)


@pytest.mark.parametrize("way", IN_PLACE, ids=lambda way: way.__name__)
def test_what_is_written_to_the_original_is_noticed(way: Way) -> None:
    model = net()
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    check(fast, model)
    both(way, 1, model)
    for _ in range(3):
        check(fast, model)
    assert lowered(fast)


@pytest.mark.parametrize("again", (copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))))
@pytest.mark.parametrize("way", (hook, hook_on_the_root, new_layer, no_bias, added))
def test_copies_are_of_the_module_as_it_is(again: Any, way: Way) -> None:
    oracle = net()
    fast: Any = zendnn_cffi.optimize(copy.deepcopy(oracle), tune="off")
    both(way, 1, fast, oracle)
    copied = again(fast)
    for _ in range(2):
        check(copied, oracle)


def scaled(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach() * 1.5 for name, value in module.named_parameters()}


@pytest.mark.parametrize("call", (torch.func.functional_call, stateless.functional_call))
@pytest.mark.parametrize("is_first", (True, False))
@pytest.mark.filterwarnings("ignore:.*functional_call:FutureWarning")
def test_functional_call_computes_with_what_it_is_given(call: Any, is_first: bool) -> None:
    model = net()
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    if not is_first:
        check(fast, model)
    for _ in range(3):
        assert_close(call(fast, scaled(model), (X,)), call(model, scaled(model), (X,)), k=128)
    assert lowered(fast) == (not is_first), "nothing is packed of what is given to one call"
    check(fast, model)
    assert lowered(fast) == 1


def test_gradients_of_what_functional_call_is_given() -> None:
    model = net()
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    check(fast, model)

    def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
        def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
            result: torch.Tensor = torch.func.functional_call(module, parameters, (X,)).square().sum()
            return result

        found: dict[str, torch.Tensor] = torch.func.grad(loss)(scaled(model))
        given = {name: value.requires_grad_() for name, value in scaled(model).items()}
        loss(given).backward()
        assert all(torch.allclose(found[name], value.grad, rtol=1e-3) for name, value in given.items())
        return found

    ours, theirs = gradients(fast), gradients(model)
    for name, value in theirs.items():
        assert_close(ours[name], value, k=2048)


def test_vmap_over_functional_call() -> None:
    model = net()
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    many = {name: torch.stack([value, value * 2]) for name, value in scaled(model).items()}

    def each(module: nn.Module) -> torch.Tensor:
        result: torch.Tensor = torch.func.vmap(lambda p: torch.func.functional_call(module, p, (X,)))(many)
        return result.detach()

    assert_close(each(fast), each(model), k=128)
    check(fast, model)


def test_weights_that_change_with_each_call_are_not_packed() -> None:
    model = net()
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    check(fast, model)
    programs = [*next(iter(fast.regions().values())).lowered.values()]
    for seed in range(3):
        both(added, seed, model)
        check(fast, model)
        assert "layers were changed" in str(zendnn_cffi.explain(fast))
    assert [*next(iter(fast.regions().values())).lowered.values()] == programs
    check(fast, model)
    assert [*next(iter(fast.regions().values())).lowered.values()] != programs
    assert "were changed" not in str(zendnn_cffi.explain(fast))


def test_a_released_module_refuses_changes() -> None:
    model = net()
    fast: Any = zendnn_cffi.optimize(copy.deepcopy(model), tune="off", release_weights=True)
    check(fast, model)
    check(fast, model)
    with pytest.raises(RuntimeError, match="release_weights"):
        torch.func.functional_call(fast, scaled(model), (X,))
    check(fast, model)
    fast.fc = nn.Linear(8, 5)
    with pytest.raises(RuntimeError, match="release_weights"):
        fast(X)


def test_forward_called_by_itself() -> None:
    """As wrappers call it, past nn.Module's own __call__."""
    model = net()
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    assert_close(fast.forward(X), model(X).detach(), k=128)
    both(added, 1, model)
    assert_close(fast.forward(X), model(X).detach(), k=128)


def test_hooks_of_all_modules() -> None:
    model = net()
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    check(fast, model)
    handle = register_module_forward_hook(
        lambda module, args, result: result / 2 if type(module) is nn.Linear else None
    )
    try:
        for _ in range(3):
            check(fast, model)
    finally:
        handle.remove()
    check(fast, model)


class Parts(nn.Module):
    """Parts of every kind that one can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.same = [self.conv]
        self.factor, self.name = 2.0, "parts"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.conv(x)).relu() * self.scale


def parts() -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    return zendnn_cffi.optimize(Parts().eval(), tune="off"), torch.randn(2, 3, 9, 9)


def test_calls_and_questions_open_nothing() -> None:
    gm, x = parts()
    gm(x)
    str(zendnn_cffi.explain(gm)), gm.regions(), gm.factor, gm.name, gm.invalidate(), gm.leaves, gm.eval()
    gm(x)
    assert not gm.is_open


ROADS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda gm: gm.conv,
    "submodule": lambda gm: gm.get_submodule("conv"),
    "modules": lambda gm: next(m for m in gm.modules() if isinstance(m, nn.Conv2d)),
    "children": lambda gm: next(m for m in gm.children() if isinstance(m, nn.Conv2d)),
    "dict": lambda gm: gm._modules["conv"],
    "root": lambda gm: gm.root.conv,
    "list": lambda gm: gm.same[0],
    "getattr": lambda gm: gm.__getattr__("conv"),
    "shallow copy": lambda gm: copy.copy(gm).conv,
    "deep copy": lambda gm: copy.deepcopy(gm).conv,
}


@pytest.mark.parametrize("road", ROADS)
def test_parts_that_somebody_holds_are_watched(road: str) -> None:
    gm, x = parts()
    gm(x)
    conv = ROADS[road](gm)
    gm(x)
    with torch.no_grad():
        conv.weight.data = conv.weight.data * 3  # no version counter tells
    expected = Parts.forward(gm.root, x) if road != "deep copy" else gm(x)
    for _ in range(3):
        assert_close(gm(x), expected)
    assert gm.is_open or road == "deep copy"


def test_parameters_and_buffers_that_somebody_holds_are_watched() -> None:
    for road in (
        lambda gm: gm.scale,
        lambda gm: dict(gm.named_parameters())["scale"],
        lambda gm: gm._parameters["scale"],
        lambda gm: gm.get_parameter("scale"),
    ):
        gm, x = parts()
        before = gm(x)
        road(gm).data = torch.full((8, 1, 1), 2.0)
        for _ in range(3):
            assert_close(gm(x), before * 2)


def test_a_layer_set_on_a_module_that_nobody_opened() -> None:
    gm, x = parts()
    gm(x)
    torch.manual_seed(0)
    oracle = Parts().eval()
    gm.conv = oracle.conv = nn.Conv2d(3, 8, 3, bias=False)
    expected = oracle(x)
    for _ in range(3):
        assert_close(gm(x), expected)
    gm, x = parts()
    before = gm(x)
    del gm.scale
    gm.register_parameter("scale", nn.Parameter(torch.full((8, 1, 1), 2.0)))
    for _ in range(3):
        assert_close(gm(x), before * 2)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_copy_is_as_open_as_what_it_was_made_from(is_open: bool) -> None:
    gm, x = parts()
    if is_open:
        held = {"fast": gm, "conv": gm.conv}
        copied = copy.deepcopy(held)
        assert copied["fast"].is_open
        before = copied["fast"](x)
        copied["conv"].weight.data = torch.zeros_like(copied["conv"].weight)
        assert not torch.equal(copied["fast"](x), before)
    assert copy.deepcopy(gm).is_open == is_open


@pytest.mark.parametrize("is_compiled", [False, True])
def test_memory_of_the_original_that_moves(is_compiled: bool) -> None:
    """share_memory() frees what programs read; version counters do not tell."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 1024), nn.ReLU()).eval()
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        way: Any = {"tune": "off"}  # another implementation rounds otherwise
        compiled = is_compiled and torch.compile(model, backend="zendnn", options=way)
        fast: Any = compiled or zendnn_cffi.optimize(model, **way)
        before = fast(x)
        model.share_memory()
        others = [torch.full((n,), 9.0) for n in (8, 1024, 3 * 8 * 9, 8 * 16 * 1024) * 20]
        for _ in range(3):
            assert torch.equal(fast(x), before)
        del others
    if not is_compiled:
        (part,) = fast.regions().values()
        (lowered_now,) = part.lowered.values()
        constants = {t.data_ptr() for t in lowered_now.program.constants}
        assert not fast.is_open and constants & {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("is_compiled", [False, True])
def test_statistics_that_a_call_in_training_mode_updates(is_compiled: bool) -> None:
    """The kernel that updates them leaves their version counters alone."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    with torch.no_grad():
        fast: Any = torch.compile(model, backend="zendnn") if is_compiled else zendnn_cffi.optimize(model, tune="off")
        for _ in range(2):
            check(fast, model)
        model.train()
        model(X * 3 + 1)
        model.eval()
        for _ in range(3):
            check(fast, model)


def test_statistics_that_a_call_of_the_result_updates() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    oracle = copy.deepcopy(model)
    fast = zendnn_cffi.optimize(model, tune="off")
    for mode in (False, True, False, False):
        for each in (fast, oracle):
            each.get_submodule("1").train(mode)
        check(fast, oracle)


class Held(nn.Module):
    """Tensors in attributes, alone and in containers, of which some are computed with while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.scale, self.several, self.named = torch.rand(6), [torch.rand(6), torch.rand(6)], {"a": torch.rand(6)}
        self.length, self.factor = torch.tensor(2), torch.tensor(1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * (self.scale * 2) + self.several[0] * self.several[1]
        return torch.relu(y + self.named["a"])[: int(self.length)] * self.factor.item()


HELD: dict[str, Callable[[Any], torch.Tensor]] = {
    "attribute": lambda m: m.scale,
    "list": lambda m: m.several[1],
    "dictionary": lambda m: m.named["a"],
    "size": lambda m: m.length,
    "number": lambda m: m.factor,
}


@pytest.mark.parametrize("is_exported", [False, True])
@pytest.mark.parametrize("which", HELD.values(), ids=HELD.keys())
def test_tensors_in_attributes_that_are_written_to(which: Callable[[Any], torch.Tensor], is_exported: bool) -> None:
    model: Any = Held().eval()
    if is_exported:
        model.register_module("more", nn.MultiheadAttention(6, 2))  # torch.export goes first then
    with torch.no_grad():
        fast = zendnn_cffi.optimize(model, (X,) if is_exported else None, tune="off")
        check(fast, model)
        which(model).sub_(1)
        for _ in range(3):
            check(fast, model)
        copied = copy.deepcopy(fast)
        which(fast).add_(1)  # the same memory
        for _ in range(3):
            check(fast, model)
            assert not torch.equal(copied(X), model(X))
    assert lowered(fast) == 1


def test_a_view_of_a_tensor_in_a_list_is_one_of_it() -> None:
    model = model_of(lambda m, x: (m.held[0][2:], m.a(x) + m.held[0]), a=nn.Linear(6, 6)).float()
    model.held = [torch.ones(6)]  # type: ignore[assignment]
    oracle = copy.deepcopy(model)
    fast = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        for _ in range(3):
            (mine, y), (theirs, expected) = fast(X), oracle(X)
            assert torch.equal(mine, theirs)
            assert_close(y, expected, k=6)
            mine.add_(1)
            theirs.add_(1)


@pytest.mark.parametrize("is_exported", [False, True])
def test_statistics_that_a_function_updates(is_exported: bool) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.batch_norm(m.a(x), m.mean, m.var, training=True)
        return y + F.batch_norm(m.b(x), m.mean, m.var)

    model = model_of(forward, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(3, 4, 3)).float()
    model.register_buffer("mean", torch.zeros(4))
    model.register_buffer("var", torch.ones(4))
    if is_exported:
        model.register_module("more", nn.MultiheadAttention(6, 2))
    oracle = copy.deepcopy(model)
    fast = zendnn_cffi.optimize(model, (X,) if is_exported else None, tune="off")
    for _ in range(3):
        check(fast, oracle)
    assert_close(fast.mean, oracle.mean, k=8)


class Shared(nn.Module):
    """A head that has the weight of a layer which is called as it is: it has a hook, or no graph."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 12)

        def forward(self, numbers: torch.Tensor) -> torch.Tensor:
            rows: torch.Tensor = self.table(numbers)
            return rows if numbers.sum() < 1000 else rows * 2

    def __init__(self, has_hook: bool) -> None:
        super().__init__()
        self.rows = Shared.Rows() if not has_hook else nn.ModuleDict({"table": nn.Embedding(9, 12)})
        self.l = nn.Linear(12, 12)
        if has_hook:
            self.rows.table.register_forward_hook(lambda module, args, result: result)
        self.has_hook = has_hook

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        rows = self.rows.table(numbers) if self.has_hook else self.rows(numbers)
        return F.linear(self.l(rows), self.rows.table.weight)


def _in_place(model: Any) -> None:
    model.rows.table.weight.mul_(2)


def _other_parameter(model: Any) -> None:
    model.rows.table.weight = nn.Parameter(model.rows.table.weight * 3)


def _other_layer(model: Any) -> None:
    before, model.rows.table = model.rows.table, nn.Embedding(9, 12)
    model.rows.table.weight.copy_(before.weight * 4)


@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.parametrize("change", [_in_place, _other_parameter, _other_layer])
def test_weights_of_a_layer_that_is_called_as_it_is(change: Callable[[Any], None], has_hook: bool) -> None:
    oracle, numbers = Shared(has_hook).eval(), torch.tensor([1, 5, 7])
    fast: Any = zendnn_cffi.optimize(copy.deepcopy(oracle), tune="off")
    for _ in range(2):
        check(fast, oracle, numbers)
    assert lowered(fast)
    with torch.no_grad():
        change(oracle)
        change(fast)
    for _ in range(3):
        check(fast, oracle, numbers)
