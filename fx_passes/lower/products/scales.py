"""Scales and zero points that each call chooses: reductions, then arithmetic on a number for each row, in primitives.

    highest = max(0, max(x))    lowest = min(0, min(x))    poison = 0 * sum(x)
    scale   = max((highest - lowest) / steps, eps) + poison
    inverse = 1 / scale
    zero    = clip(low - round(lowest / scale), low, high)

Reductions leave out what is not a number, and a sum does not. So poison is 0, or not a number where x is not finite.
PyTorch takes some twenty calls for the same, and their code is in no cache after kernels: 50 us for 32 rows of 384.
But its own reductions are five times as fast where there are many rows: 35 and 190 us for 2048 rows of 384. There are
two ways, and in one of them PyTorch reduces. What is not a number stays in its results: poison is made of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
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
    Template,
    Temporary,
    TorchTemplate,
    Weights,
    primitive_template,
)
from fx_passes.candidates.layouts import row_major
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.primitives import first_optimized
from fx_passes.lower.products.row_blocks import MANY_ROWS
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

Calls = list[PrimitiveTemplate | TorchTemplate]
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
    by_torch   whether PyTorch reduces
    templates  None once the library has none for one of them
    """

    kind: str = "choose_scale"
    by_torch: bool = False
    templates: Calls | None = field(default_factory=list)

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

    def reduction_of_torch(self, kind: str, src: Argument, dst: Argument) -> None:
        """Append dst = kind(src) by PyTorch along the dimensions of a matrix that dst has not."""
        dims = tuple(dim for dim in (0, 1) if seen(dst).dims[dim] == 1 != seen(src).dims[dim]) or (1,)
        compute = _Reduction(kind, dims, seen(src).dtype == F32)
        key = f"{torch.__version__} {kind} of dimensions {dims}"
        self.add(TorchTemplate(compute, "", True, key, (src, dst), assists=True, kind=self.kind))

    def add(self, template: PrimitiveTemplate | TorchTemplate | None) -> None:
        if template is None or self.templates is None:
            self.templates = None
        else:
            self.templates.append(template)


def first_implementation(calls: Iterable[Template]) -> str:
    """Of the first primitive among calls."""
    return next(call.pd.implementation for call in calls if isinstance(call, PrimitiveTemplate))


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
class _Reduction:
    """torch.amax or torch.amin of a matrix, as float32.

    kind      "max" or "min"
    is_float  whether the matrix is float32: results have its dtype
    """

    kind: str
    dims: tuple[int, ...]
    is_float: bool

    def __call__(self, src: torch.Tensor, out: torch.Tensor) -> None:
        reduce = torch.amax if self.kind == "max" else torch.amin
        if self.is_float:
            reduce(src, self.dims, True, out=out)
        else:
            out.copy_(reduce(src, self.dims, True))


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
    poison = reduced.poison(Temporary(_POISON, line))
    if how.how in ASYMMETRIC:
        lowest = reduced.by("min", Temporary(_LOWEST, line), _NEGATIVE)
        highest = reduced.by("max", Temporary(_HIGHEST, line), ("clip", 0.0, _LARGEST))
        calls.binary("sub", highest, lowest, scale, *_width(how), ("add", poison))
        calls.eltwise(("pow", 1.0, -1.0), scale, inverse)
        _zero_point(calls, how, (highest, lowest), scale, zero_point)
        return
    lowest = reduced.by("min", Temporary(_LOWEST, line), _NEGATIVE, ("linear", -1.0, 0.0))
    half = Temporary(_HIGHEST, row_major(line.dims, how.rounded))
    rounds = how.rounded != F32 and not calls.by_torch  # reductions write such numbers, and binary primitives do not
    made = half if rounds else scale
    reduced.by("max", made, ("max", reduced.as_made(lowest)), *_width(how), ("add", reduced.as_made(poison)))
    if how.rounded != F32:
        if not rounds:
            calls.reorder(scale, half)
        calls.reorder(half, scale)
    calls.eltwise(("pow", 1.0, -1.0), scale, inverse)
    if not by_rows:
        calls.eltwise(("clip", float(how.middle), float(how.middle)), scale, zero_point)


@dataclass(frozen=True)
class _Reduced:
    """Reductions to a number for each row of operand 0, or to one for all.

    sources  what each kind of reduction reads: the operand, or what a first stage made of it
    dims     how it sees what it makes, which others see as [1, count]
    """

    calls: Primitives
    sources: dict[str, Argument]
    dims: tuple[int, int]

    @classmethod
    def of(cls, calls: Primitives, shape: tuple[int, int], dtype: torch.dtype, *, by_rows: bool) -> _Reduced:
        """Primitives reduce rows, or a single one, at once, and all rows in two stages. PyTorch is the first stage."""
        rows, m = Operand(0, row_major(shape, dtype)), shape[0]
        count = m if by_rows else 1
        if not calls.by_torch and count == m:
            return cls(calls, dict.fromkeys(_KINDS, rows), (m, 1))
        sources: dict[str, Argument] = {}
        made = count if calls.by_torch else m
        for index, kind in enumerate(_KINDS[:2] if calls.by_torch else _KINDS):
            reduce = calls.reduction_of_torch if calls.by_torch else calls.reduction
            reduce(kind, rows, Temporary(index, row_major((made, 1), F32)))
            sources[kind] = Temporary(index, row_major((1, made), F32))
        return cls(calls, sources, (1, count))

    def by(self, kind: str, dst: _Made, *steps: Step) -> _Made:
        """Append dst = steps(kind(rows)), and return dst."""
        source, made = self.sources[kind], self.as_made(dst)
        if self.calls.by_torch:
            self.calls.binary("add", source, number(0.0), made, *steps)
        else:
            self.calls.reduction(kind, source, made, *steps)
        return dst

    def poison(self, dst: Temporary) -> Temporary:
        """Append dst = 0, or not a number where rows are not finite, and return dst."""
        if not self.calls.by_torch:
            return self.by("sum", dst, ("linear", 0.0, 0.0))
        made = self.as_made(dst)
        self.calls.binary("mul", self.sources["max"], number(0.0), made)
        self.calls.binary("mul", self.sources["min"], number(0.0), made, ("sum", 1.0))
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


def choice(
    node: fx.Node, context: LoweringContext, src: MemoryDesc, dst: MemoryDesc, append: Callable[[Primitives], None]
) -> Operation:
    """The operation of node, which runs what append appends. Raises NotLowered where the library has not all of it."""
    operation = Operation(node, node.name, "choose_scale", (node.args[0],), context.values.specs[node])
    for by_torch in ways_of(math.prod(src.dims[:-1])):
        calls = Primitives(by_torch=by_torch)
        append(calls)
        if calls.templates is not None:
            name = "torch, then primitives" if by_torch else first_implementation(calls.templates)
            operation.candidates.append(Candidate(name, (src,), dst, tuple(calls.templates)))
    if not operation.candidates:
        raise NotLowered("the library has no primitives that choose its scales")
    return operation


def ways_of(rows: int) -> tuple[bool, ...]:
    """Who may reduce so many rows: primitives (False), PyTorch (True)."""
    return (False,) if rows < MANY_ROWS else (False, True)


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor of one dimension or more as a matrix of its rows."""
    return math.prod(shape[:-1]), shape[-1]
