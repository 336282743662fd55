"""Scales and zero points that each call chooses: reductions, then arithmetic on a number for each row, in primitives.

    highest = max(0, max(x))    lowest = min(0, min(x))    poison = 0 * sum(x)
    scale   = max((highest - lowest) / steps, eps) + poison
    inverse = 1 / scale
    zero    = clip(low - round(lowest / scale), low, high)

Reductions leave out what is not a number, and a sum does not. So poison is 0, or not a number where x is not finite.
PyTorch takes some twenty calls for the same, and their code is in no cache after kernels: 50 us for 32 rows of 384.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, TypeVar

import torch
from torch import fx

from fx_passes.candidates.candidates import (
    Argument,
    Candidate,
    Operand,
    Operation,
    PrimitiveTemplate,
    Result,
    Temporary,
    Weights,
    primitive_template,
)
from fx_passes.candidates.layouts import row_major
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.primitives import first_optimized
from fx_passes.ops.quantized import ASYMMETRIC
from zendnn_cffi.errors import ZenDNNError
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_SRC_1, PostOps, arg_post_op
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc
from zendnn_cffi.values import dataclass

F32 = torch.float32
_LARGEST = torch.finfo(F32).max
_KINDS = "max", "min", "sum"  # of reductions: what a first stage makes of rows are temporaries 0, 1, 2
_HIGHEST, _LOWEST, _POISON, _APART = range(3, 7)

Step = tuple[Any, ...]  # kind, alpha, beta of an eltwise; kind, what else it reads of a binary; "sum", scale
_NEGATIVE: Step = ("clip", -_LARGEST, 0.0)
_Made = TypeVar("_Made", bound=Temporary | Result)


def seen(argument: Argument) -> MemoryDesc:
    """How a primitive sees its argument."""
    assert argument.desc is not None
    return argument.desc


@dataclass
class Primitives:
    """Primitives that run one after another, each the first optimized implementation of its kind.

    kind       what profiles call all of them
    templates  None once the library has none for one of them
    """

    kind: str = "choose_scale"
    templates: list[PrimitiveTemplate] | None = field(default_factory=list)

    def binary(self, kind: str, a: Argument, b: Argument, dst: Argument, *steps: Step) -> None:
        """Append dst = steps(kind(a, b))."""
        args, post_ops = with_post_ops({ARG_SRC: a, ARG_SRC_1: b, ARG_DST: dst}, steps)
        descs = seen(a), seen(b), seen(dst)
        self.add(first_optimized(args, self.kind, descriptors.binary, kind, *descs, post_ops=post_ops))

    def eltwise(self, step: Step, src: Argument, dst: Argument) -> None:
        """Append dst = step(src)."""
        kind, alpha, beta = step
        args: dict[int, Argument] = {ARG_SRC: src, ARG_DST: dst}
        self.add(first_optimized(args, self.kind, descriptors.eltwise, kind, seen(src), alpha, beta))

    def reduction(self, kind: str, src: Argument, dst: Argument, *steps: Step) -> None:
        """Append dst = steps(kind(src)) along the dimensions that dst has not."""
        args, post_ops = with_post_ops({ARG_SRC: src, ARG_DST: dst}, steps)
        descs = seen(src), seen(dst)
        self.add(first_optimized(args, self.kind, descriptors.reduction, kind, *descs, post_ops=post_ops))

    def reorder(self, src: Argument, dst: Argument) -> None:
        """Append dst = src, rounded to its dtype."""
        self.add(reordering(src, dst, self.kind))

    def add(self, template: PrimitiveTemplate | None) -> None:
        if template is None or self.templates is None:
            self.templates = None
        else:
            self.templates.append(template)


def with_post_ops(args: dict[int, Argument], steps: Sequence[Step]) -> tuple[dict[int, Argument], PostOps]:
    """args with what steps read, and the steps as post-ops."""
    args, post_ops = dict(args), PostOps()
    for position, (kind, *rest) in enumerate(steps):
        if kind == "sum":
            post_ops = post_ops.sum(*rest)
        elif isinstance(rest[0], float):
            post_ops = post_ops.eltwise(kind, *rest)
        else:
            args[arg_post_op(position)] = rest[0]
            post_ops = post_ops.binary(kind, seen(rest[0]))
    return args, post_ops


@dataclass(frozen=True)
class Range:
    """How scales are made of the smallest and the largest number.

    how        "largest", "symmetric", "asymmetric", "nearest": see ops.choose_row_scales
    low, high  the smallest and the largest integer
    eps        the smallest scale
    middle     the zero point where there is one for all
    rounded    what scales of symmetric ranges are rounded to
    """

    how: str
    low: int
    high: int
    eps: float
    middle: int = 0
    rounded: torch.dtype = F32


def choose(calls: Primitives, how: Range, shape: tuple[int, int], dtype: torch.dtype, *, by_rows: bool) -> None:
    """Append how scale, inverse scale and zero point are chosen of operand 0, [M, K], one after another in the result.

    by_rows  a scale for each row, in place of one for all; symmetric ones have no zero points then
    """
    line = row_major((1, shape[0] if by_rows else 1), F32)
    scale, inverse, zero_point = (Result(line, which * line.size_bytes) for which in range(3))
    reduced = _Reduced.of(calls, shape, dtype, by_rows=by_rows)
    poison = reduced.by("sum", Temporary(_POISON, line), ("linear", 0.0, 0.0))
    if how.how in ASYMMETRIC:
        lowest = reduced.by("min", Temporary(_LOWEST, line), _NEGATIVE)
        highest = reduced.by("max", Temporary(_HIGHEST, line), ("clip", 0.0, _LARGEST))
        calls.binary("sub", highest, lowest, scale, *_width(how), ("add", poison))
        calls.eltwise(("pow", 1.0, -1.0), scale, inverse)
        _zero_point(calls, how, (highest, lowest), scale, zero_point)
        return
    lowest = reduced.by("min", Temporary(_LOWEST, line), _NEGATIVE, ("linear", -1.0, 0.0))
    made = scale if how.rounded == F32 else Temporary(_HIGHEST, row_major(line.dims, how.rounded))
    reduced.by("max", made, ("max", reduced.as_made(lowest)), *_width(how), ("add", reduced.as_made(poison)))
    if made is not scale:
        calls.reorder(made, scale)
    calls.eltwise(("pow", 1.0, -1.0), scale, inverse)
    if not by_rows:
        calls.eltwise(("clip", float(how.middle), float(how.middle)), scale, zero_point)


@dataclass(frozen=True)
class _Reduced:
    """Reductions to a number for each row of operand 0, or to one for all.

    sources  what each kind of reduction reads: the operand, or what a first stage made of each row
    dims     of what it makes, which others see as [1, count]
    """

    calls: Primitives
    sources: dict[str, Argument]
    dims: tuple[int, int]

    @classmethod
    def of(cls, calls: Primitives, shape: tuple[int, int], dtype: torch.dtype, *, by_rows: bool) -> _Reduced:
        """By rows, or of a single one, at once; else each row is reduced first."""
        m, rows = shape[0], row_major(shape, dtype)
        if by_rows or m == 1:
            return cls(calls, dict.fromkeys(_KINDS, Operand(0, rows)), (m, 1))
        sources: dict[str, Argument] = {}
        for index, kind in enumerate(_KINDS):
            calls.reduction(kind, Operand(0, rows), Temporary(index, row_major((m, 1), F32)))
            sources[kind] = Temporary(index, row_major((1, m), F32))
        return cls(calls, sources, (1, 1))

    def by(self, kind: str, dst: _Made, *steps: Step) -> _Made:
        """Append dst = steps(kind(rows)), and return dst."""
        self.calls.reduction(kind, self.sources[kind], self.as_made(dst), *steps)
        return dst

    def as_made(self, number: _Made) -> _Made:
        """What others see as [1, count] as reductions see it."""
        return replace(number, desc=row_major(self.dims, seen(number).dtype))


def _width(how: Range) -> tuple[Step, Step]:
    """From a range to the width of a step, each operation rounded as PyTorch's; "largest" bounds what is divided."""
    bound: Step = ("clip", how.eps, _LARGEST)
    if how.how == "largest":
        return bound, ("div", number(float(how.high)))
    return ("div", number((how.high - how.low) / (1 if how.how in ASYMMETRIC else 2))), bound


def _zero_point(
    calls: Primitives, how: Range, extremes: tuple[Argument, Argument], scale: Argument, zero_point: Argument
) -> None:
    (highest, lowest), low, high = extremes, float(how.low), float(how.high)
    bound: Step = ("clip", low, high)
    if how.how == "asymmetric":
        calls.binary("div", lowest, scale, zero_point, ("round", 0.0, 0.0), ("linear", -1.0, low), bound)
        return
    line = seen(zero_point)
    by_lowest, by_highest, apart = Temporary(_LOWEST, line), Temporary(_HIGHEST, line), Temporary(_APART, line)
    calls.binary("div", lowest, scale, by_lowest, ("linear", -1.0, low))
    calls.binary("div", highest, scale, by_highest, ("linear", -1.0, high))
    calls.binary("sub", by_lowest, by_highest, apart)
    # by the lowest where low + lowest / scale + high + highest / scale > 0
    is_lower: Step = ("lt", number(2 * (low + high)))
    rest: tuple[Step, ...] = (("mul", apart), ("add", by_highest), bound, ("round", 0.0, 0.0))
    calls.binary("add", by_lowest, by_highest, zero_point, is_lower, *rest)


def number(value: float) -> Weights:
    """A number that a post-op reads."""
    plain = torch.tensor([[value]], dtype=F32, device="cpu")
    return Weights(f"number {value!r}", plain, row_major((1, 1), F32), is_streamed=False)


def zero_point_bits(calls: Primitives) -> None:
    """Append the zero point of all values as an int32 to a result of scale, inverse and zero point."""
    one, size = row_major((1, 1), F32), row_major((1, 1), F32).size_bytes
    calls.reorder(Result(one, 2 * size), Result(row_major((1, 1), torch.int32), 3 * size))


def reordering(src: Argument, dst: Argument, kind: str) -> PrimitiveTemplate | None:
    """A reorder from src to dst; None where the library has none."""
    try:
        pd = PrimitiveDesc.reorder(seen(src), seen(dst))
    except ZenDNNError:
        return None
    return primitive_template(pd, {ARG_SRC: src, ARG_DST: dst}, kind)


def choice(node: fx.Node, context: LoweringContext, calls: Primitives, src: MemoryDesc, dst: MemoryDesc) -> Operation:
    """The operation of node, which runs calls. Raises NotLowered where the library has not all of them."""
    if calls.templates is None:
        raise NotLowered("the library has no primitives that choose its scales")
    candidate = Candidate(calls.templates[0].pd.implementation, (src,), dst, tuple(calls.templates))
    return Operation(node, node.name, "choose_scale", (node.args[0],), context.values.specs[node], [candidate])


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor of one dimension or more as a matrix of its rows."""
    return math.prod(shape[:-1]), shape[-1]
