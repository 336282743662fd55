"""Quantized values: dequantize and quantize are views of integers, and products of integers have scales as attributes.

    q (u8) -> dequantize -> convolution -> relu -> quantize -> q (u8)

The value between two of these nodes may lie in memory as integers (Quantized). Then dequantize and quantize are views,
and the convolution reads and writes integers. Where a reader wants float32, layout assignment reorders.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.candidates import Candidate, Operation, Weights
from fx_passes.candidates.conversions import zero_point_arguments, zero_point_masks
from fx_passes.candidates.layouts import (
    RANGES,
    Layout,
    Numerics,
    Quantized,
    has_vnni,
    layout,
    row_major,
    spatial_tags,
    strided,
)
from fx_passes.candidates.specs import RegionValues
from fx_passes.graph.graph import is_call
from fx_passes.lower.context import LoweringContext, NotLowered, constant_name
from fx_passes.lower.post_ops import BinaryPostOp, Chain, EltwisePostOp, PostOp, build_chain
from fx_passes.ops.quantized import plain_axis
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_WEIGHTS, Attr
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.values import dataclass

_WITHIN = 64  # two products of 255 and this fit into 16 bits
_SMALLEST = torch.finfo(torch.float32).tiny  # its inverse is finite in float32
_VIEWS = ops.having(view=True)
_SCALED = frozenset({"relu", "clip", "linear"})  # f with c * f(x; p) = f(c * x; p'), c > 0


def lower_dequantize(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.dequantize of one scale: the integers themselves, as what they stand for."""
    numerics = numerics_of(node, context.values)
    if numerics is None:
        raise NotLowered("its scale is not one constant for all 8-bit integers")
    src = node.args[0]
    operation = Operation(node, node.name, "view", (src,), context.values.specs[node])
    for desc in integer_layouts_of(src, numerics.dtype, context):
        operation.candidates.append(Candidate("view", (desc,), Quantized(desc, numerics), ()))
    return operation


def lower_quantize(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.quantize of one scale: what was kept as such integers before, itself."""
    numerics = quantizes_to(node, context.values)
    if numerics is None:
        raise NotLowered("its scale is not one constant, or it does not use all 8-bit integers")
    src = node.args[0]
    context.dtype(context.tensor(src, "src"))
    operation = Operation(node, node.name, "view", (src,), context.values.specs[node])
    for desc in integer_layouts_of(src, numerics.dtype, context):
        operation.candidates.append(Candidate("view", (Quantized(desc, numerics),), desc, ()))
    return operation


def integer_layouts_of(src: fx.Node, dtype: torch.dtype, context: LoweringContext) -> list[MemoryDesc]:
    """The layouts that kernels take, and those without gaps that src is left in."""
    shape = context.values.specs[src].shape
    found = dict.fromkeys(integer_layouts(shape, dtype))
    for steps in context.plain_strides(src):
        if _is_dense(shape, steps):
            found[strided(shape or (1,), dtype, steps or (1,))] = None
    return list(found)


def _is_dense(shape: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    """Whether there are no gaps between numbers, in whatever order dimensions lie."""
    size = 1
    for step, n in sorted((step, n) for step, n in zip(steps, shape, strict=True) if n > 1):
        if step != size:
            return False
        size *= n
    return True


def integer_layouts(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[MemoryDesc, ...]:
    """The layouts of integers that kernels take: channels last, and row by row."""
    plain = row_major(shape or (1,), dtype)
    return (*(layout(shape, dtype, tag) for tag in spatial_tags(len(shape))[:1]), plain)


def numerics_of(node: object, values: RegionValues) -> Numerics | None:
    """The integers that node's value is exactly some of, whoever computes it; None where that is not known."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node not in values.specs:
        return None
    if node.target is ops.dequantize:
        _, scale, zero_point, axis, _ = node.args
        src = values.specs.get(node.args[0])
        if src is None:
            return None
        zero_point = 0 if zero_point is None else zero_point
        return _numerics(
            src.dtype, scale, zero_point, plain_axis(axis, src.shape), values, bits_of(node.args[0], values)
        )
    if node.target is ops.concat:
        found = {numerics_of(piece, values) for piece in node.args[0]}
        return found.pop() if len(found) == 1 else None
    if is_call(node, operator.getitem):
        pieces = node.args[0]
        return numerics_of(pieces.args[0], values) if is_call(pieces, *ops.PIECES) else None
    takes_maxima = node.target in (ops.pool, ops.adaptive_pool) and node.args[1] == "max"
    keeps_numbers = takes_maxima or node.target is ops.roll or node.target in _VIEWS
    return numerics_of(node.args[0], values) if keeps_numbers else None


def quantizes_to(node: fx.Node, values: RegionValues) -> Numerics | None:
    """The integers that an ops.quantize makes, where primitives can."""
    _, scale, zero_point, axis, low, high, dtype = node.args
    if not node.kwargs.get("is_within") and (values.concrete(low), values.concrete(high)) != RANGES.get(dtype):
        return None
    src = values.specs.get(node.args[0])
    if src is None:
        return None
    return _numerics(dtype, scale, zero_point, plain_axis(axis, src.shape), values, bits_of(node, values))


def bits_of(node: object, values: RegionValues) -> int:
    """How many bits of its integers a value uses: 7 where none of uint8's is above 127, as far as the graph says."""
    if is_call(node, ops.quantize):
        _, _, _, _, low, high, dtype = node.args
        low, high = values.concrete(low), values.concrete(high)
        return 7 if dtype == torch.uint8 and type(low) is type(high) is int and 0 <= low <= high <= 127 else 8
    return bits_of(node.args[0], values) if is_call(node, *_VIEWS) else 8


def wanted_of(node: fx.Node, values: RegionValues) -> Numerics | None:
    """The integers that every reader of node quantizes it to: then nobody misses what rounding loses."""
    if not node.users or not all(is_call(user, ops.quantize) for user in node.users):
        return None
    found = {quantizes_to(user, values) for user in node.users}
    return found.pop() if len(found) == 1 else None


def _numerics(dtype: Any, scale: Any, zero_point: Any, axis: Any, values: RegionValues, bits: int) -> Numerics | None:
    scale, zero_point = _number(values.concrete(scale)), _number(values.concrete(zero_point))
    if axis is not None or dtype not in RANGES or scale is None or zero_point is None:
        return None
    low, high = RANGES[dtype]
    if not _SMALLEST <= scale < math.inf or zero_point != int(zero_point) or not low <= zero_point <= high:
        return None
    return Numerics(dtype, scale, int(zero_point), bits)


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True)
class Factors:
    """The integers that a convolution or linear layer multiplies.

    src     how the first operand is kept
    weight  int8 [O, ...]
    key     names it among packed weights
    weights_bits  7: none is beyond -64 and 64, and that matters here (used_bits)
    scales  float64 [O], of src times the weights of each output
    bias    float64 [O] or None, in real numbers
    weight_zero_point  of a second operand that is no constant
    """

    src: Numerics
    weight: torch.Tensor
    key: str
    scales: torch.Tensor
    bias: torch.Tensor | None
    bias_key: str
    weights_bits: int = 8
    weight_zero_point: int = 0


def factors_of(node: fx.Node, context: LoweringContext) -> Factors | None:
    """What node, a convolution or linear layer, multiplies in integers; None where not both factors are integers.

    Weights have a scale for all, or one for each output, and no zero point.
    """
    values = context.values
    src, weight = numerics_of(node.args[0], values), node.args[1]
    if src is None or not is_call(weight, ops.dequantize) or weight not in values.constants:
        return None
    kept, scale, zero_point, axis, _ = (values.concrete(argument) for argument in weight.args)
    if not isinstance(kept, torch.Tensor) or kept.dtype != torch.int8:
        return None
    if plain_axis(axis, tuple(kept.shape)) not in (None, 0):
        return None
    if zero_point is not None and bool(torch.as_tensor(zero_point).any()):
        return None
    outputs = kept.shape[0]
    scales = src.scale * torch.as_tensor(scale, dtype=torch.float64).reshape(-1).expand(outputs)
    if not bool((scales.isfinite() & (scales > 0)).all()):
        return None
    bias = values.arguments(node)["bias"]
    if bias is not None and not isinstance(bias, torch.Tensor):
        return None
    key = str(weight.args[0])
    wide = None if bias is None else bias.detach().double()
    return Factors(src, kept.detach(), key, scales, wide, constant_name(node, "bias"), used_bits(kept, src.dtype))


def used_bits(weight: torch.Tensor, src: torch.dtype) -> int:
    """How many bits of int8 weights are used, where kernels are exact of 7 alone: they have no VNNI, and src is uint8.

    Of int8 such kernels halve the weights, and round them.
    """
    if src != torch.uint8 or has_vnni() or not weight.numel():
        return 8
    low, high = (int(number) for number in weight.aminmax())
    return 7 if low >= -_WITHIN and high <= _WITHIN else 8


@dataclass(frozen=True)
class Integers:
    """How one product of integers is told to the library: its attributes, and what it reads beside its operands.

    chain  post-ops, what they and zero points read, and whose memory the result takes over
    dst    the layout of the result
    """

    attr: Attr
    bias: Weights | None
    chain: Chain
    dst: Layout


def told(
    factors: Factors,
    entries: Sequence[PostOp],
    operands: Sequence[fx.Node],
    dst: MemoryDesc,
    wanted: Numerics | None,
    real: MemoryDesc,
    context: LoweringContext,
    *,
    sum_node: fx.Node | None = None,
    view: tuple[int, ...] | None = None,
    channel_axis: int = -1,
) -> Integers | None:
    """Return how to compute post_ops(product + bias) of integers into dst; None where no attributes say it.

    dst     where the result lies, integers where wanted says which
    real    the same layout in the dtype of values that are no integers
    view, channel_axis  see build_chain
    """
    residual = numerics_of(sum_node, context.values) if sum_node is not None and wanted is not None else None
    if residual is None and wanted is not None or (residual is not None and residual.dtype != dst.dtype):
        sum_node = residual = None
    units = _Units.of(entries, sum_node, wanted)
    if units is None:
        return None
    chain = build_chain(
        units.entries,
        operands,
        real,
        _dtype(real),
        sum_node=sum_node,
        sum_scale=1.0 if residual is None else residual.scale * units.factor,
        sum_layout=None if residual is None else Quantized(dst, residual),
        last_scale=units.last_scale,
        view=view,
        channel_axis=channel_axis,
    )
    shift = 0.0
    if residual is not None and residual.zero_point:
        if not isinstance(entries[0], BinaryPostOp) or entries[0].node is not sum_node:
            return None  # the bias stands before all post-ops
        shift = -residual.scale * residual.zero_point
    zero_points = {
        ARG_SRC: factors.src.zero_point,
        ARG_WEIGHTS: factors.weight_zero_point,
        ARG_DST: 0 if wanted is None else wanted.zero_point,
    }
    scales = factors.scales * units.factor
    attr = Attr(
        chain.post_ops,
        output_scales=scales.float().tolist(),
        output_scales_mask=2 if len(scales) > 1 else 0,
        zero_points=zero_point_masks(zero_points),
    )
    chain.args |= zero_point_arguments(zero_points)
    result = dst if wanted is None else Quantized(dst, wanted)
    return Integers(attr, _bias_in_steps(factors, shift), chain, result)


def _bias_in_steps(factors: Factors, shift: float) -> Weights | None:
    """The bias as kernels add it, to sums of products of integers."""
    if factors.bias is None and not shift:
        return None
    outputs = len(factors.scales)
    real = (0.0 if factors.bias is None else factors.bias) + torch.full(
        (outputs,), shift, dtype=torch.float64, device="cpu"
    )
    steps = (real / factors.scales).float()
    key = f"{factors.bias_key} of {factors.key} from {factors.src} {shift!r}"
    return Weights(key, steps, row_major((outputs,), torch.float32), is_streamed=False)


@dataclass(frozen=True)
class _Units:
    """In which units post-ops compute: in steps of the result where they are alike in all, else in real numbers.

    factor      units in a real number
    last_scale  what the last post-op multiplies by
    """

    entries: Sequence[PostOp]
    factor: float
    last_scale: float = field(default=1.0)

    @classmethod
    def of(cls, entries: Sequence[PostOp], sum_node: fx.Node | None, wanted: Numerics | None) -> _Units | None:
        """None where a factor would need a second eltwise of one kind."""
        steps = 1.0 if wanted is None else 1.0 / wanted.scale
        if all(_scales(entry, sum_node) for entry in entries):
            return cls([_in_units(entry, steps) for entry in entries], steps)
        if isinstance(entries[-1], EltwisePostOp):
            return cls(entries, 1.0, steps)
        if any(isinstance(entry, EltwisePostOp) and entry.kind == "linear" for entry in entries):
            return None
        return cls([*entries, EltwisePostOp("linear", steps, 0.0)], 1.0)


def _scales(entry: PostOp, sum_node: fx.Node | None) -> bool:
    if isinstance(entry, EltwisePostOp):
        return entry.kind in _SCALED
    return entry.node is sum_node


def _in_units(entry: PostOp, factor: float) -> PostOp:
    if not isinstance(entry, EltwisePostOp):
        return entry
    match entry.kind:
        case "clip":
            return EltwisePostOp("clip", entry.alpha * factor, entry.beta * factor)
        case "linear":
            return EltwisePostOp("linear", entry.alpha, entry.beta * factor)
    return entry


def _dtype(desc: MemoryDesc) -> torch.dtype:
    assert desc.dtype is not None
    return desc.dtype
