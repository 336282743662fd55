"""A module and its skeleton are one to their users: what is put, replaced, removed or read on either."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from fx_passes.graph.skeleton_module import SkeletonModule
from fx_passes.trace.skeleton import skeleton


class Net(nn.Module):
    """Every kind of attribute that forward may read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2))
        self.factor, self.parts, self.kept = 2.0, [self.first], torch.ones(2)


@pytest.fixture
def pair() -> tuple[Any, nn.Module]:
    """A module, and its skeleton, as after it was handed out."""
    root = skeleton(Net().eval())
    module: Any = SkeletonModule(root)
    module.add_module("region", nn.Identity())
    object.__setattr__(module, "_own", {"region": module.region})
    object.__setattr__(module, "_is_open", False)
    return module, root


def test_attributes_are_the_skeletons(pair: tuple[Any, nn.Module]) -> None:
    module, root = pair
    module.factor = 3.0
    assert root.factor == 3.0 and "factor" not in module.__dict__
    del module.factor
    assert not hasattr(module, "factor") and not hasattr(root, "factor")
    module.own = 1
    assert "own" in module.__dict__ and not hasattr(root, "own"), "what forward never read is this module's"


READS: dict[str, Callable[[Any], Any]] = {
    "layer": lambda m: m.first,
    "parameter": lambda m: m.scale,
    "buffer": lambda m: m.shift,
    "list": lambda m: m.parts,
    "tensor": lambda m: m.kept,
    "root": lambda m: m.root,
    "modules": lambda m: list(m.modules()),
    "dictionary": lambda m: m._parameters,
    "a layer set": lambda m: setattr(m, "first", nn.Linear(2, 2)),
    "a list set": lambda m: setattr(m, "parts", []),
    "removed": lambda m: delattr(m, "kept"),
}


@pytest.mark.parametrize("name", READS)
def test_who_may_hold_a_part_opens_it(pair: tuple[Any, nn.Module], name: str) -> None:
    assert not pair[0].is_open
    READS[name](pair[0])
    assert pair[0].is_open


@pytest.mark.parametrize("name", ["factor", "training", "children_by_name", "is_open"])
def test_a_number_opens_nothing(pair: tuple[Any, nn.Module], name: str) -> None:
    getattr(pair[0], name)
    assert not pair[0].is_open


def test_the_skeleton_takes_what_was_put_or_removed(pair: tuple[Any, nn.Module]) -> None:
    module, root = pair
    module.second = layer = nn.Linear(2, 3)
    del module.first
    module._parameters = {"scale": nn.Parameter(torch.zeros(2))}
    del module.region  # its own part, without which its graph does not run
    module._adopt()
    assert root.second is layer and "first" not in root._modules
    assert root._parameters is module._parameters
    assert [*module._modules] == ["second", "region"] and "region" not in root._modules


def test_an_attribute_that_becomes_a_parameter_or_a_tensor(pair: tuple[Any, nn.Module]) -> None:
    module, root = pair
    module.kept = weight = nn.Parameter(torch.ones(2))
    assert "kept" not in root.__dict__ and root._parameters["kept"] is weight
    del module.shift
    module.shift = value = torch.ones(2)
    assert root.__dict__["shift"] is value and module.shift is value


def test_one_order(pair: tuple[Any, nn.Module]) -> None:
    module, root = pair
    first = module._modules.pop("first")
    module._modules["first"] = first
    module._adopt()
    assert [*root._modules] == ["second", "first"]


def test_a_part_of_a_tree_takes_over_what_the_tree_has(pair: tuple[Any, nn.Module]) -> None:
    module, root = pair
    object.__setattr__(module, "_follows_tree", True)
    root.first = layer = nn.Linear(2, 4)
    root._buffers = {"shift": torch.ones(2)}
    assert module.children_by_name is root._modules
    module._adopt()
    assert module.first is layer and module._buffers is root._buffers and "region" in module._modules


# --- parts of the model that are called as something of the module's ---


class Named(nn.Module):
    """A network with one part of the given name and kind."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.name, self.kind = nn.Linear(4, 4), name, kind
        if kind in ("layer", "layer with a hook"):
            self.add_module(name, nn.Linear(4, 4))
        elif kind == "parameter":
            self.register_parameter(name, nn.Parameter(torch.rand(4)))
        elif kind in ("buffer", "buffer that is written to"):
            self.register_buffer(name, torch.rand(4))
        else:
            setattr(self, name, torch.rand(4) if kind == "tensor" else 3.0)
        if kind == "layer with a hook":
            getattr(self, name).register_forward_hook(lambda module, args, result: result * 2)

    def forward(self, x: torch.Tensor) -> Any:
        part = getattr(self, self.name)
        if isinstance(part, nn.Module):
            return part(self.linear(x).relu())
        if self.kind == "buffer that is written to":
            part.add_(1)
        return self.linear(x).relu() * part, part


NAMES = ("root", "graph", "code", "meta", "leaves", "regions", "is_open", "part", "_call", "_lock", "_source", "_tree",
         "_own", "_graph", "_lineno_map")  # fmt: skip
KINDS = ("layer", "layer with a hook", "parameter", "buffer", "buffer that is written to", "tensor", "number")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_parts_of_any_name(name: str, kind: str) -> None:
    model, x = Named(name, kind).eval(), torch.randn(3, 4)
    oracle = copy.deepcopy(model)
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    assert [*fast.state_dict()] == [*oracle.state_dict()]
    assert not fast.leaves or kind == "layer with a hook"
    assert zendnn_cffi.explain(fast).nodes and fast.regions()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), oracle(x))
        again = copy.deepcopy(fast)
        oracle.linear.weight.mul_(2)
        again.load_state_dict(oracle.state_dict())
        for _ in range(3):
            torch.testing.assert_close(again(x), oracle(x))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(again(x), oracle(x))


@pytest.mark.parametrize("kind", ["layer", "parameter", "buffer", "tensor"])
@pytest.mark.parametrize("name", ["root", "graph", "_tree"])
def test_parts_of_any_name_in_files(name: str, kind: str, tmp_path: Path) -> None:
    model, x = Named(name, kind).eval(), torch.randn(3, 4)
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        fast(x)
        zendnn_cffi.save(fast, tmp_path / "model.pt2")
        loaded: Any = zendnn_cffi.load(tmp_path / "model.pt2")
        torch.testing.assert_close(loaded(x), model(x))
    assert loaded.regions()


def test_a_part_of_its_own_is_found_wherever_it_was_put() -> None:
    gm = zendnn_cffi.optimize(nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval())
    x = torch.randn(2, 3)
    region = gm.zen_region_0
    for put in (
        lambda part: setattr(gm, "zen_region_0", part),
        lambda part: gm.add_module("zen_region_0", part),
        lambda part: gm._modules.update(zen_region_0=part),
    ):
        put(nn.Identity())
        assert gm.zen_region_0 is gm.get_submodule("zen_region_0") is not region
        assert torch.equal(gm.run_graph(x), x)
        put(region)
        assert gm.zen_region_0 is region
    gm.recompile()
    assert not gm.has_clashing_names() and gm.zen_region_0 is region
    del gm.zen_region_0
    assert not hasattr(gm, "zen_region_0")
