"""Weighted samples of feature maps: PyTorch's kernel for bags on rows that lie in place, or grid_sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fx_passes.candidates.candidates import (
    Argument,
    Candidate,
    Operand,
    Operation,
    Result,
    Temporary,
    TorchTemplate,
)
from fx_passes.candidates.layouts import Layout, row_major, strided
from fx_passes.candidates.shapes.spec import TensorSpec
from fx_passes.lower.context import LoweringContext, NotLowered, eager_layout
from zendnn_cffi.runtime.weighted_samples import MOST_ROWS, Level, WeightedSamples, samples_by_pytorch


def lower_weighted_samples(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.weighted_samples; it computes in float32, whatever the region's dtype is."""
    arguments, spec = context.values.arguments(node), context.values.specs[node]
    maps, grids, weights = arguments["maps"], arguments["grids"], arguments["weights"]
    operands = (*maps, *grids, weights)
    specs = [context.tensor(operand, "an operand") for operand in operands]
    if len(set(operands)) < len(operands):
        raise NotLowered("one tensor is several operands")
    if any(each.dtype != torch.float32 for each in specs):
        raise NotLowered("samples of another dtype than float32")
    levels, align_corners = len(maps), bool(arguments["align_corners"])
    points = [grid.shape[2] for grid in specs[levels:-1]]
    if specs[-1].shape != (spec.shape[0], 1, spec.shape[2], sum(points)):
        raise NotLowered(f"weights of {specs[-1].shape}, not one for each sample")

    def as_written(*tensors: Tensor) -> Tensor:
        return samples_by_pytorch(tensors[:levels], tensors[levels:-1], tensors[-1], align_corners)

    rest = [_as_it_lies(each) for each in specs[levels:]]
    described = f"{torch.__version__} weighted samples {[each.shape for each in specs]} {align_corners}"
    dst = row_major(spec.shape, torch.float32)
    eager = tuple(map(eager_layout, specs))
    plain = TorchTemplate(as_written, "", key=f"{described} {[each.strides for each in specs]}")
    operation = Operation(node, node.name, "weighted_samples", operands, spec, flops=8 * spec.numel * sum(points))
    if all(min(each.shape[2:]) > 1 and _rows(each) <= MOST_ROWS for each in specs[:levels]):
        in_rows = [_in_rows(each) for each in specs[:levels]]
        operation.candidates.append(_bags(spec, in_rows, points, rest, align_corners, described))
    operation.candidates.append(Candidate("torch:grid_sample", eager, dst, (plain,)))
    return operation


def _bags(
    spec: TensorSpec, maps: Sequence[Layout], points: Sequence[int], rest: Sequence[Layout], corners: bool, about: str
) -> Candidate:
    """By rows where they lie; the sums of a query lie side by side then."""
    samples, width, queries = spec.shape
    levels = []
    for layout, count in zip(maps, points, strict=True):
        steps = layout.strides
        assert steps is not None
        of_rows = (steps[0] // width, steps[2] // width, steps[3] // width)
        levels.append(Level(layout.dims[2], layout.dims[3], count, of_rows))
    function = WeightedSamples(levels, (samples, width, queries), corners)
    scratch = Temporary(0, row_major((function.scratch_numbers,), torch.float32))
    srcs = (*maps, *rest)
    args: tuple[Argument, ...] = (*map(Operand, range(len(srcs))), scratch, Result())
    strides = [layout.strides for layout in srcs]
    call = TorchTemplate(function, "", into=True, key=f"{about} bags {strides}", args=args)
    return Candidate("torch:bags", srcs, strided(spec.shape, torch.float32, (queries * width, 1, width)), (call,))


def _in_rows(level: TensorSpec) -> Layout:
    """[N, D, h, w] with D numbers side by side: as it lies, where it lies so."""
    _, width, height, across = level.shape
    step = level.strides
    if step[1] == 1 and all(each and each % width == 0 for each in (step[0], *step[2:])):
        return strided(level.shape, torch.float32, step)
    return strided(level.shape, torch.float32, (height * across * width, 1, across * width, width))


def _rows(level: TensorSpec) -> int:
    """Rows of D numbers from the first to the last, at most."""
    return sum(abs(step) * (size - 1) for step, size in zip(level.strides, level.shape, strict=True)) + 1


def _as_it_lies(operand: TensorSpec) -> Layout:
    return row_major(operand.shape, torch.float32) if 0 in operand.strides else eager_layout(operand)
