"""What was chosen comes back as it was; what would reach beyond its memory is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.candidates.candidates import Weights, arguments_of
from fx_passes.plan.prepack import WeightStore, layout_digest
from fx_passes.region.keep import lowered_to_keep
from fx_passes.region.lowered import LoweredRegion
from fx_passes.saved.errors import FileError
from fx_passes.saved.layouts import Layouts
from fx_passes.saved.programs import Context, decode_program, encode_program, packed_weights
from fx_passes.search.measure import fingerprint
from tests.support.lowering import net, noise


def _pieces(m: Any, x: Any) -> Any:
    return torch.cat([m[0](x), m[1](x)], 1)


def _gate(m: Any, x: Any) -> Any:
    return m[1](x * torch.sigmoid(m[0](x.mean((2, 3), True))))


def _running(m: Any, x: Any) -> Any:
    return torch.cumsum(m[0](x), 1).float() + m[1](x)


NETS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "convolution": (lambda: net(lambda m, x: F.relu(m[0](x) + x), nn.Conv2d(16, 16, 3, padding=1)), (2, 16, 9, 9)),
    "two images": (lambda: net(lambda m, x: m[1](m[0](x)), nn.Conv2d(16, 32, 1), nn.Conv2d(32, 8, 3)), (2, 16, 9, 9)),
    "pieces": (lambda: net(_pieces, nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)), (1, 16, 8, 8)),
    "pieces of several images": (lambda: net(_pieces, nn.Conv2d(16, 10, 1), nn.Conv2d(16, 16, 1)), (3, 16, 8, 8)),
    "gate": (lambda: net(_gate, nn.Conv2d(16, 16, 1), nn.Conv2d(16, 24, 1)), (1, 16, 8, 8)),
    "linear": (lambda: net(lambda m, x: F.gelu(m[0](x)), nn.Linear(64, 48)), (5, 64)),
    "views": (lambda: net(lambda m, x: m[0](x).flatten(1)[:, 2:7], nn.Conv2d(16, 16, 1)), (2, 16, 4, 4)),
    "plain PyTorch inside": (lambda: net(_running, nn.Linear(16, 16), nn.Linear(16, 16)), (4, 16)),
}


def lowered(name: str) -> tuple[Any, torch.Tensor, LoweredRegion]:
    make, shape = NETS[name]
    fast, x = zendnn_cffi.optimize(make(), tune="off"), noise(*shape)
    fast(x)
    region: Any = next(iter(fast.regions().values()))
    kept = lowered_to_keep(region)[0]
    assert kept.lowered is not None
    return region, x, kept.lowered


def context(region: Any, found: LoweredRegion) -> Context:
    store = WeightStore()
    assert found.lowering is not None
    store.give(
        {(w.key, layout_digest(w.desc), w.transposed): region.weights.get(w) for w in packed_weights(found.lowering)}
    )
    return Context(region.constants, store, region.options)


@pytest.mark.parametrize("name", NETS)
def test_programs_come_back(name: str) -> None:
    region, x, found = lowered(name)
    layouts = Layouts()
    data = json.loads(json.dumps(encode_program(found, layouts)))
    again = decode_program(data, found.inputs, context(region, found), Layouts(layouts.written), keep=True)
    assert found.lowering is not None and again.lowering is not None
    for mine, theirs in zip(found.lowering.choice, again.lowering.choice, strict=True):
        assert fingerprint(mine) == fingerprint(theirs) and (mine.srcs, mine.dst) == (theirs.srcs, theirs.dst)
        assert (mine.overwrites, mine.slices_bytes) == (theirs.overwrites, theirs.slices_bytes)
    assert again.nodes == found.nodes and again.program.arena_bytes == found.program.arena_bytes
    inputs = [x][: len(found.inputs)]
    for a, b in zip(found.program(inputs), again.program(inputs), strict=True):
        assert torch.equal(a, b)


def test_what_has_no_form_is_found_by_its_rule() -> None:
    """Pieces of several images are written into parts of the whole, in layouts that have no name."""
    region, x, found = lowered("pieces of several images")
    layouts = Layouts()
    data = encode_program(found, layouts)
    assert ["rule" in row for row in data["operations"]] == [False, False, True]
    again = decode_program(data, found.inputs, context(region, found), layouts)
    assert torch.equal(again.program([x])[0], found.program([x])[0])
    data["operations"][2]["rule"] = "another"
    with pytest.raises(FileError, match="what was chosen is not offered any longer"):
        decode_program(data, found.inputs, context(region, found), layouts)


def _call(row: dict[str, Any]) -> list[Any]:
    return row["calls"][0]  # type: ignore[no-any-return]


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an operand that is not there": lambda row: _call(row)[2][0].__setitem__(1, ["operand", 7, None, 0]),
    "beyond its operand": lambda row: _call(row)[2][0].__setitem__(1, ["operand", 0, None, 64]),
    "before its operand": lambda row: _call(row)[2][0].__setitem__(1, ["operand", 0, None, -64]),
    "beyond its result": lambda row: _call(row)[2][0].__setitem__(1, ["result", None, 1 << 40]),
    "no such argument": lambda row: _call(row)[2][0].__setitem__(0, 77),
    "an argument is missing": lambda row: _call(row)[2].pop(0),
    "another operand's layout": lambda row: row["srcs"].reverse() or row["srcs"].append(0),
    "written over nothing": lambda row: row.update(overwrites=5),
    "a call of no kind": lambda row: _call(row).__setitem__(0, "system"),
    "pieces": lambda row: row.update(slices_bytes=[1 << 40]),
    "a view beyond": lambda row: row.update(calls=[], offset_bytes=1 << 40),
    "a view before": lambda row: row.update(calls=[], offset_bytes=-4),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_reaches_beyond_its_memory_is_refused(lie: str) -> None:
    region, _, found = lowered("convolution")
    layouts = Layouts()
    data = json.loads(json.dumps(encode_program(found, layouts)))
    row = next(row for row in data["operations"] if row.get("calls"))
    LIES[lie](row)
    with pytest.raises(FileError):
        decode_program(data, found.inputs, context(region, found), layouts)


def test_weights_of_another_size_are_packed_again(tmp_path: Path) -> None:
    """Bytes that are too few are not taken for weights; without the plain ones, there is no program."""
    region, _, found = lowered("convolution")
    layouts, given = Layouts(), context(region, found)
    data = encode_program(found, layouts)
    assert found.lowering is not None
    short = {
        (w.key, layout_digest(w.desc), w.transposed): torch.zeros(1, dtype=torch.uint8)
        for w in packed_weights(found.lowering)
    }
    given.weights.give(short)
    with pytest.raises(RuntimeError):
        decode_program(data, found.inputs, given, layouts)
    weights = [a for c in found.lowering.choice for t in c.calls for a in arguments_of(t) if isinstance(a, Weights)]
    assert len(weights) == len(short) == 2
