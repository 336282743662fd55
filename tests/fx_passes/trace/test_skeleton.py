"""Copies of module trees: as copy.deepcopy makes them, on the same memory."""

import collections
import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

import zendnn_cffi
from fx_passes.trace.skeleton import skeleton


class Holder(nn.Module):
    """Attributes of all sorts, some of which several modules share."""

    def __init__(self, shared: list[Any], table: dict[str, Any]) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.tied = self.inner[0]
        self.register_buffer("steps", torch.arange(3), persistent=False)
        self.shared, self.table = shared, table
        self.nested = {"a": [1, {"b": torch.ones(2)}], "empty": []}
        self.me = [self]
        self.order = collections.OrderedDict(x=1)
        self.names = set()


class CopiesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        made = CopiesItself()
        made.copies = self.copies + 1
        return made


class LeavesOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = "not for copies"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}


class WithSlots(nn.Module):
    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        self.extra = [1, 2]


class Reduced(nn.Module):
    def __reduce__(self) -> Any:
        return Reduced, ()


def tree() -> nn.Module:
    shared, table = [], {}
    root = nn.ModuleList([Holder(shared, table), Holder(shared, table)])
    root.append(nn.ModuleDict({"own": CopiesItself(), "less": LeavesOut(), "slots": WithSlots(), "reduced": Reduced()}))
    root.register_forward_pre_hook(print)
    return root


def described(value: Any, seen: dict[int, int]) -> Any:
    """What there is in a value, and which objects in it are the same one."""
    if (
        isinstance(value, bool | int | float | str | type(None) | torch.dtype)
        or callable(value)
        and not isinstance(value, nn.Module)
    ):
        return value
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, torch.Tensor):
        return type(value), value.tolist(), value.requires_grad
    if isinstance(value, nn.Module):
        slots = getattr(value, "extra", None)
        return type(value), described(value.__dict__, seen), described(slots, seen)
    if isinstance(value, dict):
        return type(value), [(key, described(inner, seen)) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [described(inner, seen) for inner in value]
    return type(value), sorted(value)


@pytest.mark.parametrize("own_state", [False, True])
def test_a_copy_is_the_one_that_deepcopy_makes(own_state: bool) -> None:
    model = tree()
    assert described(skeleton(model, own_state=own_state), {}) == described(copy.deepcopy(model), {})


def test_nothing_but_numbers_is_shared_with_the_original() -> None:
    model = tree()
    copied: Any = skeleton(model)
    assert copied[0].shared is copied[1].shared and copied[0].shared is not model[0].shared
    assert copied[0].me[0] is copied[0] and copied[0].tied is copied[0].inner[0] is not model[0].tied
    for (name, original), (_, own) in zip(model.state_dict().items(), copied.state_dict().items(), strict=True):
        assert own is not original and own.data_ptr() == original.data_ptr(), name
    copied[0].inner.add_module("new", nn.ReLU())
    copied[0].inner.register_forward_hook(print)
    assert len(model[0].inner) == 2 and not model[0].inner._forward_hooks


def test_state_of_its_own_is_other_memory() -> None:
    model = tree()
    copied: Any = skeleton(model, own_state=True)
    assert copied[0].steps.data_ptr() != model[0].steps.data_ptr()
    assert copied[0].inner[0].weight.data_ptr() == model[0].inner[0].weight.data_ptr()


class Switching(nn.Sequential):
    """Copied by what makes a new one, which trains, as torchvision's feature extractors; train() exchanges more."""

    scale = 2.0

    def train(self, mode: bool = True) -> Any:
        self.scale = 3.0 if mode else 2.0
        return super().train(mode)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return Switching(*(copy.deepcopy(part, memo) for part in self)).train()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_a_copy_trains_as_the_original() -> None:
    """Calls of an optimized feature extractor were those of training, and wrote running statistics of the original."""
    model = Switching(Switching(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), nn.Dropout()).eval()
    model[1].train()
    x, before = torch.randn(2, 3, 8, 8), copy.deepcopy(model.state_dict())
    copied = skeleton(model)
    assert [m.training for m in copied.modules()] == [m.training for m in model.modules()]
    assert torch.equal(copied[0](x), model[0](x)) and copied.scale == model.scale
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_compiled_module_is_copied_without_what_was_compiled() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model._compiled_call_impl = print
    assert skeleton(model)._compiled_call_impl is None


def test_values_that_were_set_on_graphs() -> None:
    """As torchvision's feature extractors get out_channels. PT2E's graphs have methods that refuse eval()."""

    class Reading(nn.Module):
        def __init__(self, graph: nn.Module) -> None:
            super().__init__()
            self.graph = graph

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.graph(x) * self.graph.factor
            return y

    def refuse(*_: object) -> None:
        raise NotImplementedError

    graph = fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    graph.factor, graph.sizes, graph.eval = 3.0, [1, 2], refuse  # type: ignore[assignment]
    model, x = Reading(graph), torch.ones(2, 3)
    model.training = False
    copied: Any = skeleton(model)
    assert copied.graph.factor == 3.0 and copied.graph.sizes == [1, 2] and copied.graph.sizes is not graph.sizes
    assert copied.eval() is copied
    torch.testing.assert_close(zendnn_cffi.optimize(model, tune="off")(x), model(x))
