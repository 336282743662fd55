"""Vocabulary post-ops -> what a primitive takes as attributes and extra arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import torch
from torch import fx

from fx_passes.candidates.candidates import Argument, Operand, Weights
from fx_passes.candidates.layouts import Layout, row_major, strided
from fx_passes.candidates.specs import RegionValues, TensorSpec
from zendnn_cffi.primitives.attributes import ARG_SRC_1, ELTWISE, PostOps, arg_post_op
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.values import dataclass

# x -> kind(x, number) as alpha * x + beta
_LINEAR = {
    "add": lambda c: (1.0, c),
    "sub": lambda c: (1.0, -c),
    "mul": lambda c: (c, 0.0),
    "div": lambda c: (1.0 / c, 0.0) if c else None,
}
_FLOAT32 = torch.finfo(torch.float32)
_ROUNDS_AWAY = 2.0**16  # of a number beside one so many times as large, seven binary digits are left
MAX_POST_OPS = 31  # the library takes 32, and refuses the argument of a binary one in the last place at execution
FUSABLE_BINARY = frozenset({"add", "sub", "mul", "div", "max", "min"})


@dataclass(frozen=True)
class EltwisePostOp:
    """x -> kind(x; alpha, beta)."""

    kind: str
    alpha: float
    beta: float


@dataclass(frozen=True)
class BinaryPostOp:
    """x -> kind(x, other); other is a run-time node or a constant.

    own_shape  other's shape
    shape      the same with leading ones, as many as the result has dimensions
    full       whether own_shape is the result's
    """

    kind: str
    node: fx.Node
    constant: torch.Tensor | None
    own_shape: tuple[int, ...]
    shape: tuple[int, ...]
    full: bool


PostOp = EltwisePostOp | BinaryPostOp


def as_linear(kind: str, number: float) -> EltwisePostOp | None:
    """kind(x, number) as one eltwise, None where it is none."""
    pair = _LINEAR[kind](float(number)) if kind in _LINEAR else None
    if pair is None or (kind == "div" and math.isfinite(number) and not _is_ordinary(pair[0])):
        return None
    return EltwisePostOp("linear", *pair)


def _is_ordinary(number: float) -> bool:
    """Whether a factor is 0, or a float32 number with all its digits."""
    return not number or _FLOAT32.tiny <= abs(number) <= _FLOAT32.max


def _one_linear(first: EltwisePostOp, then: EltwisePostOp) -> EltwisePostOp | None:
    """Two linear functions as one; None where what lies between is not in range, or is rounded for a purpose.

    (x + 2 ** 23) - 2 ** 23 is x rounded to an integer.
    """
    alpha, shift = first.alpha * then.alpha, first.beta * then.alpha
    beta = shift + then.beta
    vanishes = not alpha and first.alpha and then.alpha
    if vanishes or not _is_ordinary(alpha) or not math.isfinite(beta):
        return None
    if abs(shift) > _ROUNDS_AWAY * max(abs(alpha), abs(beta)):
        return None
    return EltwisePostOp("linear", alpha, beta)


# Kinds whose kernels are off by up to 1e-5 in absolute terms: a logarithm near 1 and the softplus of numbers far below
# 0 lose all digits, and their sign. PyTorch computes them.
COARSE = frozenset(("log", "soft_relu"))
# What differs from the library's for integers alone.
_OF_FLOATS = {"hardtanh": "clip", "clamp_min": "relu"}
_WORDS = re.compile(rf"\b({'|'.join(_OF_FLOATS)})\b")


def as_of_floats(text: str) -> str:
    """A text that describes work, with the library's name for each kind: results are remembered by such texts."""
    return _WORDS.sub(lambda found: _OF_FLOATS[found[0]], text)


def translate_eltwise(kind: str, alpha: object, beta: object) -> tuple[EltwisePostOp, ...] | None:
    """Return the library's spelling of a vocabulary eltwise: one or two of its own; None where it has none."""
    if kind == "hardsigmoid":
        return EltwisePostOp("linear", 1 / 6, 0.5), EltwisePostOp("clip", 0.0, 1.0)
    if kind == "rsqrt":
        return (EltwisePostOp("pow", 1.0, -0.5),)
    kind = _OF_FLOATS.get(kind, kind)
    if kind in COARSE or kind not in ELTWISE or not isinstance(alpha, int | float) or not isinstance(beta, int | float):
        return None
    return (EltwisePostOp(kind, float(alpha), float(beta)),)


def translate(entry: tuple[Any, ...], base: TensorSpec, values: RegionValues) -> tuple[PostOp, ...] | None:
    """Return one vocabulary post-op on a result like `base`; None where no primitive can absorb it there."""
    if entry[0] == "eltwise":
        return translate_eltwise(entry[1], *(values.concrete(x) for x in entry[2:]))
    if entry[0] != "binary":
        return None
    kind, other = entry[1], entry[2]
    number = values.concrete(other)
    if isinstance(number, int | float) and not isinstance(number, bool):
        linear = as_linear(kind, number)
        return None if linear is None else (linear,)
    constant = number if isinstance(number, torch.Tensor) else None
    spec = TensorSpec.of(constant) if constant is not None else values.specs.get(other)
    if spec is None or not isinstance(other, fx.Node) or kind not in FUSABLE_BINARY or spec.dtype != base.dtype:
        return None
    if spec.ndim > base.ndim:
        return None
    shape = (1,) * (base.ndim - spec.ndim) + spec.shape
    if any(n not in (1, m) for n, m in zip(shape, base.shape, strict=True)):
        return None
    return (BinaryPostOp(kind, other, constant, spec.shape, shape, full=spec.shape == base.shape),)


def append_post_ops(chain: Sequence[PostOp], more: Sequence[PostOp]) -> list[PostOp] | None:
    """Return chain with more after it, neighbouring linear ones made one; None where the library would be wrong.

    Its kernels keep one set of parameters per eltwise kind: of two with different ones, both get the same.
    """
    joined = list(chain)
    for p in more:
        last = joined[-1] if joined else None
        if isinstance(p, EltwisePostOp) and isinstance(last, EltwisePostOp) and p.kind == last.kind == "linear":
            if (one := _one_linear(last, p)) is None:
                return None
            joined[-1] = one
        else:
            joined.append(p)
    if len(joined) > MAX_POST_OPS:
        return None
    distinct = {p for p in joined if isinstance(p, EltwisePostOp)}
    return joined if len(distinct) == len({p.kind for p in distinct}) else None


@dataclass
class Chain:
    """Post-ops for one candidate: the attribute, the arguments it adds, and the layouts wanted of the new operands."""

    post_ops: PostOps = field(default_factory=PostOps)
    args: dict[int, Argument] = field(default_factory=dict)
    srcs: list[Layout] = field(default_factory=list)
    overwrites: int | None = None
    text: list[str] = field(default_factory=list)


def build_chain(
    entries: Sequence[PostOp],
    operands: Sequence[fx.Node],
    dst: MemoryDesc,
    dtype: torch.dtype,
    *,
    sum_node: fx.Node | None = None,
    sum_scale: float = 1.0,
    sum_layout: Layout | None = None,
    last_scale: float = 1.0,
    view: tuple[int, ...] | None = None,
    channel_axis: int = -1,
    begin: PostOps | None = None,
) -> Chain:
    """Return the chain for a result in layout dst.

    operands  the operation's operands; those of binary post-ops come last, in order
    sum_node  node whose memory the result takes over (its addition becomes a sum post-op)
    sum_scale, sum_layout  what that is multiplied by, and where it lies (None: as the result)
    last_scale  what the last post-op, an eltwise, multiplies its result by
    view      the primitive's own shape [M, N] of the result where it is not the node's: all dimensions but one made one
    channel_axis  that one, in the node's shape
    begin     post-ops in front of these; their arguments are the caller's
    """
    chain = Chain() if begin is None else Chain(begin)
    first = len(chain.post_ops)
    index = len(operands) - sum(isinstance(e, BinaryPostOp) and e.constant is None for e in entries)
    for position, entry in enumerate(entries):
        if isinstance(entry, EltwisePostOp):
            scale = last_scale if position == len(entries) - 1 else 1.0
            chain.post_ops = chain.post_ops.eltwise(entry.kind, entry.alpha, entry.beta, scale)
            chain.text.append(entry.kind)
            continue
        layout = dst if entry.full else row_major(entry.shape, dtype)
        seen = layout if view is None else _seen_flat(layout, view, entry, channel_axis)
        chain.text.append("sum" if entry.node is sum_node else f"binary_{entry.kind}")
        if entry.node is sum_node:
            chain.post_ops, chain.overwrites = chain.post_ops.sum(sum_scale), index
        else:
            chain.post_ops = chain.post_ops.binary(entry.kind, seen)
            chain.args[arg_post_op(first + position, ARG_SRC_1)] = (
                Operand(index, seen) if entry.constant is None else Weights(entry.node.name, entry.constant, seen)
            )
        if entry.constant is None:
            whole = dst if entry.node is not sum_node or sum_layout is None else sum_layout
            chain.srcs.append(whole if entry.full else row_major(entry.own_shape or (1,), dtype))
            index += 1
    return chain


def _seen_flat(layout: MemoryDesc, view: tuple[int, ...], entry: BinaryPostOp, channel_axis: int) -> MemoryDesc:
    """The layout as a primitive on [M, N] sees it: full operands whole, others as one row."""
    shape = view if entry.full else (1, entry.shape[channel_axis])
    return row_major(shape, dtype_of(layout))


def dtype_of(desc: MemoryDesc) -> torch.dtype:
    """The dtype of a descriptor that has one."""
    assert desc.dtype is not None
    return desc.dtype


def fit_view(entries: Sequence[PostOp], channel_axis: int = -1) -> bool:
    """Whether all can be seen on [M, N], all dimensions but one made one: in full, or along that one alone."""
    return all(_fits_view(entry, channel_axis) for entry in entries)


def _fits_view(entry: PostOp, channel_axis: int) -> bool:
    if isinstance(entry, EltwisePostOp):
        return True
    others = [n for axis, n in enumerate(entry.shape) if axis != channel_axis % len(entry.shape)]
    if all(n == 1 for n in others):
        return True
    return entry.full and (entry.constant is None or channel_axis % len(entry.shape) == len(entry.shape) - 1)


def plain_strides(tensor: torch.Tensor) -> MemoryDesc:
    """The descriptor of a constant as it lies in memory."""
    return strided(tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))
