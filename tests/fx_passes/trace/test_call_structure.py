"""Graphs of torch.export take and return what the model does, with no pytree in their code where that is plain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import zendnn_cffi
from tests.support.exported import needs_export
from tests.support.lowering import noise
from tests.tolerance import assert_close


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Record:
    first: Tensor
    second: Tensor


pytree.register_dataclass(Record, serialized_type_name="tests.Record")

PLAIN = {
    "tensor": lambda y: y,
    "tuple of one": lambda y: (y,),
    "tuple": lambda y: (y, y + 1.0),
    "list": lambda y: [y, y + 1.0],
    "dict": lambda y: {"b": y, "a": y + 1.0},
    "nested": lambda y: (y, {"x": [y + 1.0, (y + 2.0,)]}),
    "with constants": lambda y: (None, y, 3, "text"),
}
OWN_CLASSES = {"named tuple": lambda y: Pair(y, y + 1.0), "dataclass": lambda y: Record(y, y + 1.0)}


class Model(nn.Module):
    def __init__(self, arrange: Any) -> None:
        super().__init__()
        self.linear, self.arrange = nn.Linear(8, 8), arrange

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Any:
        assert needs_export(x)  # symbolic tracing ends here
        y = self.linear(x) * scale
        return self.arrange(y if shift is None else y + shift)


@pytest.mark.parametrize("name", [*PLAIN, *OWN_CLASSES])
def test_results_keep_their_structure(name: str) -> None:
    model = Model({**PLAIN, **OWN_CLASSES}[name]).eval()
    x, scale = noise(3, 8), noise(8)
    gm = zendnn_cffi.optimize(model, (x, scale), tune="off")
    assert ("pytree" in gm.code) == (name in OWN_CLASSES)
    with torch.no_grad():
        for rows in (3, 5):
            given = noise(rows, 8), scale
            actual, expected = gm(*given), model(*given)
            assert type(actual) is type(expected)
            leaves, spec = pytree.tree_flatten(actual)
            wanted, wanted_spec = pytree.tree_flatten(expected)
            assert spec == wanted_spec
            for a, b in zip(leaves, wanted, strict=True):
                if isinstance(b, Tensor):
                    assert_close(a, b, k=8)
                else:
                    assert a == b


@pytest.mark.parametrize("by_name", (False, True))
def test_arguments_by_position_and_by_name(by_name: bool) -> None:
    model, x, scale, shift = Model(PLAIN["dict"]).eval(), noise(3, 8), noise(8), noise(8)
    example: Any = {"shift": shift, "x": x, "scale": scale} if by_name else (x, scale, shift)
    gm: Any = zendnn_cffi.optimize(model, example, tune="off")
    assert "pytree" not in gm.code
    with torch.no_grad():
        expected = model(x, scale, shift)["a"]
        assert_close(gm(x, scale, shift)["a"], expected, k=8)
        assert_close(gm(x=x, shift=shift, scale=scale)["a"], expected, k=8)
        assert_close(gm(x, shift=shift, scale=scale)["a"], expected, k=8)
    (region,) = gm.regions().values()
    assert all(region.lowered.values())


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair: Any, others: Any = None) -> Any:
        first, second = pair if isinstance(pair, tuple | list) else (pair.first, pair.second)
        assert needs_export(first)
        y = self.linear(first + second)
        return y if others is None else {"y": y + others["a"][0], "others": [others["b"]]}


@pytest.mark.parametrize("kind", (tuple, list, Pair, Record))
def test_containers_among_the_arguments(kind: Any) -> None:
    """Python's own are taken apart by their places, others by pytree."""
    model, parts = Sum().eval(), (noise(2, 8), noise(2, 8))
    pair = kind(parts) if kind in (tuple, list) else kind(*parts)
    gm: Any = zendnn_cffi.optimize(model, (pair,), tune="off")
    assert ("pytree" in gm.code) == (kind in (Pair, Record))
    with torch.no_grad():
        assert_close(gm(pair), model(pair), k=8)
        assert_close(gm(pair=pair), model(pair), k=8)
    assert len(gm.regions()) == 1 and not gm.call_kinds.reasons.counted


def test_dictionaries_among_the_arguments() -> None:
    model, pair = Sum().eval(), (noise(2, 8), noise(2, 8))
    others = {"a": [noise(2, 8)], "b": noise(3)}
    gm: Any = zendnn_cffi.optimize(model, {"pair": pair, "others": others}, tune="off")
    assert "pytree" not in gm.code and len(gm.regions()) == 1
    with torch.no_grad():
        for given in (others, {"b": others["b"], "a": others["a"]}):
            result, expected = gm(pair, others=given), model(pair, others=given)
            assert_close(result["y"], expected["y"], k=8)
            assert list(result) == list(expected) and torch.equal(result["others"][0], others["b"])
