"""Operands to check a primitive with: dense noise, in the domain of what the primitive computes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from zendnn_cffi.primitives.attributes import (
    ARG_ATTR_OUTPUT_SCALES,
    ARG_ATTR_POST_OP_DW,
    ARG_ATTR_SCALES,
    ARG_ATTR_WOQ_SCALES,
    ARG_ATTR_ZERO_POINTS,
    ARG_DST,
    ARG_SCRATCHPAD,
    ARG_SRC_1,
    ARG_SRC_2,
    ARG_VARIANCE,
    ARG_WEIGHTS,
    ARG_WEIGHTS_ITER,
    ARG_WEIGHTS_PROJECTION,
    COMPARISONS,
    arg_post_op,
)
from zendnn_cffi.primitives.memory import MemoryDesc

if TYPE_CHECKING:
    from zendnn_cffi.primitives.primitive import PrimitiveDesc

_POSITIVE = ("log", "sqrt", "pow")
_PLAIN = ARG_ATTR_SCALES - 1  # the bits of an argument without those of an attribute
_PERIOD = 65521  # of large operands: noise of this length, repeated, is quick to make


def argument_descs(pd: PrimitiveDesc) -> dict[int, MemoryDesc]:
    """Return the layout of every argument, those that attributes add included, the scratchpad not."""
    descs = {arg: desc for arg, desc in pd.expected_args.items() if arg != ARG_SCRATCHPAD}
    dst, attr = descs[ARG_DST], pd.attr
    for index, entry in enumerate(attr.post_ops):
        if entry[0] == "prelu":
            descs[arg_post_op(index, ARG_WEIGHTS)] = _per_dimension(entry[1], dst, torch.float32)
    for arg, (mask, dtype, *_) in attr.runtime_args.items():
        owner = {ARG_ATTR_OUTPUT_SCALES: ARG_DST, ARG_ATTR_WOQ_SCALES: ARG_WEIGHTS}.get(arg, arg & _PLAIN)
        descs[arg] = _per_dimension(mask, descs[owner], dtype)
    return descs


def _per_dimension(mask: int, desc: MemoryDesc, dtype: torch.dtype) -> MemoryDesc:
    return MemoryDesc((math.prod(size for i, size in enumerate(desc.dims) if mask >> i & 1),), dtype)


def operands(pd: PrimitiveDesc, descs: dict[int, MemoryDesc], seed: int = 0) -> dict[int, torch.Tensor]:
    """Return a tensor for every argument, in the descriptor's dims and dtype; the same for the same primitive."""
    generator = torch.Generator("cpu").manual_seed(seed)
    made = {arg: _operand(pd, arg, desc, generator) for arg, desc in descs.items() if desc.dtype is not None}
    if pd.op is not None and pd.op.kind == "embedding_bag":
        made |= _bags(descs, generator)
    return made


def _operand(pd: PrimitiveDesc, arg: int, desc: MemoryDesc, generator: torch.Generator) -> torch.Tensor:
    assert desc.dtype is not None
    count = math.prod(desc.dims)
    if desc.dtype.is_floating_point:
        noise = torch.randn(min(count, _PERIOD), generator=generator, dtype=torch.float32, device="cpu")
    else:
        low, high = {torch.uint8: (0, 16), torch.int32: (-20, 21)}.get(desc.dtype, (-8, 9))
        noise = torch.randint(low, high, (min(count, _PERIOD),), generator=generator, device="cpu")
    noise = noise.repeat(-(-count // max(len(noise), 1)))[:count].reshape(desc.dims)
    return _in_domain(pd, arg, noise, desc).to(desc.dtype)


def _in_domain(pd: PrimitiveDesc, arg: int, noise: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    """Return noise that keeps results of ordinary size, away from poles."""
    op = pd.op
    assert op is not None
    if not noise.is_floating_point():
        return noise.clamp(0, 5) if arg & ARG_ATTR_ZERO_POINTS else noise
    kinds = {entry[1] for entry in pd.attr.post_ops if entry[0] in ("eltwise", "binary")} | {op.params.get("kind")}
    if arg == ARG_WEIGHTS and op.kind in ("convolution", "deconvolution", "inner_product", "matmul"):
        fan_in = desc.dims[-2] if op.kind == "matmul" else math.prod(desc.dims[1:])
        noise = noise / math.sqrt(fan_in)
    elif op.kind == "rnn" and arg in (ARG_WEIGHTS, ARG_WEIGHTS_ITER, ARG_WEIGHTS_PROJECTION):
        noise = noise / math.sqrt(desc.dims[2])
    elif arg == (ARG_ATTR_POST_OP_DW | ARG_WEIGHTS):
        noise = noise / 3
    if op.kind == "reduction" and op.params["kind"] == "mul":
        return noise.sign() * (1 + noise / 16)
    if arg == ARG_VARIANCE or arg & ARG_ATTR_SCALES or arg in (ARG_ATTR_OUTPUT_SCALES, ARG_ATTR_WOQ_SCALES):
        return noise.abs() * 0.5 + 0.25
    if kinds & COMPARISONS:
        return (noise * 2).round() / 2  # equal values are met
    if kinds & {"div"} and arg not in (ARG_DST, ARG_WEIGHTS):
        return torch.where(noise < 0, noise - 0.5, noise + 0.5)
    return noise.abs() + 0.05 if kinds & set(_POSITIVE) else noise


def _bags(descs: dict[int, MemoryDesc], generator: torch.Generator) -> dict[int, torch.Tensor]:
    """Return indices of rows, and offsets of bags of which none is empty."""
    (rows, _), (count,), (bags,) = descs[1].dims, descs[ARG_SRC_1].dims, descs[ARG_SRC_2].dims
    indices = torch.randint(0, rows, (count,), generator=generator, device="cpu")
    starts = torch.randperm(max(count - 1, 0), generator=generator, device="cpu")[: bags - 1] + 1
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), starts.sort().values])
    if len(offsets) < bags:  # more bags than indices: some must be empty
        raise NotImplementedError(f"{bags} bags of {count} indices")
    return {ARG_SRC_1: indices.to(torch.int32), ARG_SRC_2: offsets.to(torch.int32)}
