"""Rotary embedding of one token becomes a product with one matrix for all heads and layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.candidates import Argument, Operand, Result, Weights
from fx_passes.fuse.patterns import fuse_patterns
from fx_passes.fuse.projections import fuse_projections
from fx_passes.fuse.rotations import fuse_rotations
from fx_passes.lower.attention.attention import _one_rotation
from fx_passes.plan.materialise import materialise
from fx_passes.plan.prepack import prepack
from tests.support.graphs import count, traced
from tests.tolerance import assert_close
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.runtime.places import Slot
from zendnn_cffi.runtime.program import Program

DEPTH = 8


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = DEPTH // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


class Layers(nn.Module):
    """Queries of 4 heads and keys of 2, turned by the same angles, twice over; x [B, L, 16]."""

    def __init__(self, turn: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate) -> None:
        super().__init__()
        self.turn = turn
        self.q = nn.ModuleList(nn.Linear(16, 4 * DEPTH) for _ in range(2))
        self.k = nn.ModuleList(nn.Linear(16, 2 * DEPTH) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        shape = (x.shape[0], x.shape[1], -1, DEPTH)
        made = [linear(x).view(shape).transpose(1, 2) for pair in zip(self.q, self.k, strict=True) for linear in pair]
        return tuple(self.turn(heads, cos, sin) for heads in made)


class Apart(Layers):
    """The heads are read a second time, plainly."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        shape = (x.shape[0], x.shape[1], -1, DEPTH)
        q, k = (linear(x).view(shape).transpose(1, 2) for linear in (self.q[0], self.k[0]))
        return rotate(q, cos, sin) + q, rotate(k, cos, sin), q * k.sum()


class Shaped(Layers):
    """Each layer shapes the angles [B, L, D] for itself, as Transformers' do."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for q, k in zip(self.q, self.k, strict=True):
            own = cos.unsqueeze(1), sin.unsqueeze(1)
            heads = [linear(x).view(x.shape[0], x.shape[1], -1, DEPTH).transpose(1, 2) for linear in (q, k)]
            found += [self.turn(each, *own) for each in heads]
        return tuple(found)


class Exported(Layers):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        if x.shape[0] > 99:  # a condition: torch.export follows it, symbolic tracing does not
            x = x * 1
        return super().forward(x, cos, sin)


def angles(batch: int = 1, rows: int = 1) -> tuple[Tensor, Tensor]:
    turn = torch.rand(batch, 1, rows, DEPTH // 2, generator=torch.Generator().manual_seed(0)) * 6
    turn = torch.cat((turn, turn), -1)
    return turn.cos(), turn.sin()


def fused(model: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    return fuse_rotations(fuse_projections(fuse_patterns(traced(model, *inputs))))


@pytest.mark.parametrize("turn", (rotate, rotate_neighbours))
@pytest.mark.parametrize("batch", (1, 3))
def test_neighbours_are_turned_together(batch: int, turn: Any) -> None:
    model = Layers(turn).eval()
    for inputs in ((torch.randn(batch, 1, 16), *angles()), (torch.randn(batch, 1, 16), *angles(batch))):
        gm = fused(model, *inputs)
        assert (count(gm)["rotary"], count(gm)["rotation"], count(gm)["matmul"]) == (0, 1, 2)
        for actual, expected in zip(gm(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(actual, expected)
        again = str(gm.graph)
        assert str(fuse_rotations(gm).graph) == again


def test_heads_that_are_read_elsewhere_are_turned_by_themselves() -> None:
    model, inputs = Apart().eval(), (torch.randn(2, 1, 16), *angles())
    gm = fused(model, *inputs)
    assert (count(gm)["rotary"], count(gm)["rotation"], count(gm)["matmul"]) == (0, 1, 2)
    for actual, expected in zip(gm(*inputs), model(*inputs), strict=True):
        torch.testing.assert_close(actual, expected)


def test_layers_that_shape_the_angles_for_themselves_share_one_matrix() -> None:
    model, x = Shaped().eval(), torch.randn(1, 1, 16)
    cos, sin = (angle.squeeze(1) for angle in angles())
    gm = fused(model, x, cos, sin)
    assert (count(gm)["rotary"], count(gm)["rotation"]) == (0, 1)
    for ours, theirs in zip(gm(x, cos, sin), model(x, cos, sin), strict=True):
        assert_close(ours, theirs, k=16)


def test_layers_that_slice_the_angles_for_themselves_share_one_matrix() -> None:
    class Sliced(Layers):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            shape = (x.shape[0], x.shape[1], -1, DEPTH)
            heads = [layer(x).view(shape).transpose(1, 2) for layer in (*self.q, *self.k)]
            return tuple(self.turn(each, cos[:, None, :], sin[:, None, :]) for each in heads)

    model, x = Sliced().eval(), torch.randn(1, 1, 16)
    cos, sin = (angle.squeeze(1) for angle in angles())
    gm = fused(model, x, cos, sin)
    assert (count(gm)["rotary"], count(gm)["rotation"]) == (0, 1)
    for ours, theirs in zip(gm(x, cos, sin), model(x, cos, sin), strict=True):
        assert_close(ours, theirs, k=16)


@pytest.mark.parametrize("neighbours", (False, True))
def test_angles_that_are_written_to_have_a_matrix_before_and_one_after(neighbours: bool) -> None:
    class Written(Layers):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
            shape = (x.shape[0], x.shape[1], -1, DEPTH)
            layers = (self.q[0], self.k[0]) if neighbours else (self.q[0], self.q[1])
            first, second = (layer(x).view(shape).transpose(1, 2) for layer in layers)
            first = self.turn(first, cos, sin)
            sin.mul_(0.5)
            return first, self.turn(second, cos, sin), self.turn(self.k[1](x).view(shape).transpose(1, 2), cos, sin)

    model, (x, cos, sin) = Written().eval(), (torch.randn(2, 1, 16), *angles())
    gm = fused(model, x, cos, sin.clone())
    assert (count(gm)["rotary"], count(gm)["rotation"]) == (0, 2)
    for ours, theirs in zip(gm(x, cos, sin.clone()), model(x, cos, sin.clone()), strict=True):
        assert_close(ours, theirs, k=16)


@pytest.mark.parametrize("rows", (2, 5))
def test_several_positions_stay(rows: int) -> None:
    inputs = torch.randn(1, rows, 16), *angles(1, rows)
    gm = fused(Layers().eval(), *inputs)
    assert (count(gm)["rotary"], count(gm)["rotation"]) == (4, 0)


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("turn", (rotate, rotate_neighbours))
@pytest.mark.parametrize("batch", (1, 3))
def test_offloaded(batch: int, turn: Any, dtype: torch.dtype | None) -> None:
    model, inputs = Exported(turn).eval(), (torch.randn(batch, 1, 16), *angles())
    with torch.no_grad():
        gm = zendnn_cffi.optimize(model, inputs, dtype=dtype, tune="off")
        for actual, expected in zip(gm(*inputs), model(*inputs), strict=True):
            assert_close(actual, expected, dtype=dtype or torch.float32, k=32)
    (region,) = gm.regions().values()
    (lowered,) = region.lowered.values()
    products = [call for call in lowered.program.calls if call.kind == "matmul" and "matmul" in call.name]
    assert len(products) == 2 and not any(call.implementation == "torch" for call in products)
    turns = [call.implementation for call in lowered.program.calls if call.name == "rotation"]
    assert len(turns) == 2 and "torch" not in turns  # one position: the matrix by two primitives


@pytest.mark.parametrize(
    "dtype", (torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.needs("bf16"))), ids=str
)
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("size", (2, 6, 64))
def test_the_matrix_has_the_numbers_of_the_angles(size: int, interleaved: bool, dtype: torch.dtype) -> None:
    """Not one is rounded; what is not finite comes through."""
    calls = _one_rotation(size, dtype, interleaved)
    assert calls is not None
    cos, sin = torch.randn(size).to(dtype), torch.randn(size).to(dtype)
    for special in (0.5, -0.0, torch.inf, torch.nan):
        cos[0] = sin[1] = special
        buffers = [cos, sin, torch.empty(size, size, dtype=dtype)]

        def place(argument: Argument, buffers: list[Tensor] = buffers) -> tuple[Slot, MemoryDesc]:
            if isinstance(argument, Weights):
                buffers.append(prepack(argument))
                return Slot("constant", len(buffers) - 1), argument.desc
            assert isinstance(argument, Operand | Result) and argument.desc is not None
            return Slot("constant", argument.index if isinstance(argument, Operand) else 2), argument.desc

        made = [materialise(template, "rotation", None, 2, place) for template in calls]
        Program(made, (), buffers)([])
        expected = ops.rotation(cos, sin, interleaved)
        torch.testing.assert_close(buffers[2], expected, rtol=0, atol=0, equal_nan=True)


class Both(nn.Module):
    """Heads turned by halves and by neighbours, of the same angles."""

    def __init__(self) -> None:
        super().__init__()
        self.halves, self.neighbours = Exported(rotate), Exported(rotate_neighbours)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return (*self.halves(x, cos, sin), *self.neighbours(x, cos, sin))


def test_matrices_of_both_kinds_are_saved(tmp_path: Path) -> None:
    model, inputs = Both().eval(), (torch.randn(1, 1, 16), *angles())
    gm: Any = zendnn_cffi.optimize(model, inputs, tune="off")
    with torch.no_grad():
        expected = gm(*inputs)
        zendnn_cffi.save(gm, tmp_path / "matrices.safetensors")
        loaded: Any = zendnn_cffi.load(tmp_path / "matrices.safetensors")
        for ours, theirs, e in zip(loaded(*inputs), model(*inputs), expected, strict=True):
            assert torch.equal(ours, e)
            assert_close(ours, theirs, k=32)
    for module in (gm, loaded):
        lowered = [found for region in module.regions().values() for found in region.lowered.values() if found]
        calls = [call for found in lowered for call in found.program.calls if call.name.startswith("rotation")]
        assert len(calls) == 4 and not any(call.implementation == "torch" for call in calls)


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("turn", (rotate, rotate_neighbours))
def test_several_positions_offloaded(turn: Any, dtype: torch.dtype | None) -> None:
    model, inputs = Exported(turn).eval(), (torch.randn(2, 5, 16), *angles(1, 5))
    with torch.no_grad():
        gm = zendnn_cffi.optimize(model, inputs, dtype=dtype, tune="off")
        for actual, expected in zip(gm(*inputs), model(*inputs), strict=True):
            assert_close(actual, expected, dtype=dtype or torch.float32, k=32)
    assert [node.became for node in zendnn_cffi.explain(gm).nodes].count("rotary") == 4
    assert len(gm.regions()) == 1
