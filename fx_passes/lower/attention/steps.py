"""Attention as two matrix products with a softmax between them, on scores that lie in the arena.

    scores = scale * query @ key^T (+ mask)           matmul, f32 whatever the operands' dtype
    scores = softmax(scores)                          softmax, or PyTorch's where a mask may leave rows without anything
    result = scores @ value                           matmul, written as [B, L, H, D]

Faster than one flash kernel while the scores fit the caches, which they do for the lengths that encoders see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fx_passes.candidates.candidates import (
    Argument,
    Arguments,
    Candidate,
    Operand,
    PrimitiveTemplate,
    Result,
    Temporary,
    TorchTemplate,
    Weights,
    primitive_template,
)
from fx_passes.candidates.conversions import zero_point_arguments, zero_point_masks
from fx_passes.candidates.layouts import Layout, Numerics, Quantized, row_major, strided
from fx_passes.lower.primitives import optimized_implementations
from fx_passes.lower.products.step import product
from zendnn_cffi.primitives import allocation, descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_SRC_1, ARG_WEIGHTS, Attr, PostOps, arg_post_op
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.values import dataclass

_MAX_SCORES_BYTES = 32 << 20  # beyond a third-level cache a flash kernel, which keeps no scores, is the better one


@dataclass(frozen=True)
class Heads:
    """The operands of one attention as they lie: query [B, H, L, D], key and value [B, H, S, D]; mask maybe.

    mask    layout of a run-time mask, operand 3, broadcast to [B, H, L, S]; boolean (True: take part) or added
    live    whether the mask is added, f32, and leaves something of each row
    result  layout of the result [B, H, L, D]
    kept    how query and key are kept as integers, where they are; their zero points are not both other than 0
    """

    query: MemoryDesc
    key: MemoryDesc
    value: MemoryDesc
    mask: Any
    result: MemoryDesc
    scale: float
    is_causal: bool
    live: bool = False
    kept: tuple[Numerics, Numerics] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of what is no integers."""
        assert self.value.dtype is not None
        return self.value.dtype

    @property
    def srcs(self) -> tuple[Any, ...]:
        """The layouts of query, key, value and mask."""
        query_and_key: tuple[Layout, ...] = (self.query, self.key)
        if self.kept is not None:
            query_and_key = Quantized(self.query, self.kept[0]), Quantized(self.key, self.kept[1])
        return (*query_and_key, self.value, *(() if self.mask is None else (self.mask,)))

    @property
    def factor(self) -> float:
        """What a product of query and key, as they are kept, is multiplied by."""
        return self.scale if self.kept is None else self.scale * self.kept[0].scale * self.kept[1].scale

    def zero_points(self, post_ops: PostOps) -> tuple[Attr | None, Arguments]:
        """All attributes of such a product of integers, and what it reads for them; nothing of others."""
        if self.kept is None:
            return None, {}
        found = {ARG_SRC: self.kept[0].zero_point, ARG_WEIGHTS: self.kept[1].zero_point}
        return Attr(post_ops, zero_points=zero_point_masks(found)), dict(zero_point_arguments(found))

    @property
    def scores(self) -> MemoryDesc:
        b, h, length, _ = self.query.dims
        return row_major((b, h, length, self.key.dims[2]), torch.float32)

    @property
    def of_keys(self) -> bool:
        """Whether the mask is added and says of each key, for all queries alike, whether it takes part."""
        return self.live and self.mask.dims == (self.query.dims[0], 1, 1, self.key.dims[2])

    @property
    def is_in_caches(self) -> bool:
        """Whether heads are not shared, and scores fit the caches."""
        b, h, _, d = self.query.dims
        same = all((*desc.dims[:2], desc.dims[3]) == (b, h, d) for desc in (self.key, self.value))
        return same and self.scores.size_bytes <= _MAX_SCORES_BYTES

    @property
    def products_flops(self) -> int:
        """Of each of the two products."""
        b, h, length, s = self.scores.dims
        return 2 * b * h * length * s * self.query.dims[3]


def in_steps(heads: Heads) -> list[Candidate]:
    """Return the candidates, one for each optimized softmax; none where a step has no optimized implementation."""
    if not heads.is_in_caches:
        return []
    scores = Temporary(0, heads.scores)
    shares = scores if heads.dtype == torch.float32 else Temporary(1, row_major(heads.scores.dims, heads.dtype))
    first, last = _first_product(heads, scores), _last_product(heads, shares)
    if first is None or last is None:
        return []
    by_torch = heads.mask is not None and not heads.live
    middles = [_masked_softmax(heads, scores, shares)] if by_torch else _softmaxes(scores, shares)
    return [
        Candidate(implementations((first, middle, last)), heads.srcs, heads.result, (first, middle, last))
        for middle in middles
    ]


def _first_product(heads: Heads, scores: Temporary) -> PrimitiveTemplate | None:
    key = transposed(heads.key)
    post_ops = PostOps().eltwise("linear", heads.factor)
    extra: dict[int, Argument] = {}
    if heads.is_causal:
        later = later_keys(heads.scores.dims[0], *heads.scores.dims[2:])
        post_ops = post_ops.binary("add", later.desc)
        extra = {arg_post_op(1, ARG_SRC_1): later}
    elif heads.live:
        post_ops = post_ops.binary("add", heads.mask)
        extra = {arg_post_op(1, ARG_SRC_1): Operand(3)}
    attr, zero_points = heads.zero_points(post_ops)
    operands: Arguments = {ARG_SRC: Operand(0, heads.query), ARG_WEIGHTS: Operand(1, key), ARG_DST: scores}
    args: Arguments = {**operands, **extra, **zero_points}
    return product(heads.query, key, scores.desc, post_ops, args, heads.products_flops, attr=attr)


def _last_product(heads: Heads, shares: Temporary) -> PrimitiveTemplate | None:
    args: dict[int, Argument] = {ARG_SRC: shares, ARG_WEIGHTS: Operand(2), ARG_DST: Result()}
    return product(shares.desc, heads.value, heads.result, PostOps(), args, heads.products_flops)


def transposed(desc: MemoryDesc) -> MemoryDesc:
    """[B, H, S, D] seen as [B, H, D, S]."""
    (b, h, s, d), steps = desc.dims, desc.strides
    assert steps is not None and desc.dtype is not None
    return strided((b, h, d, s), desc.dtype, (steps[0], steps[1], steps[3], steps[2]))


def later_keys(samples: int, rows: int, keys: int, first_row: int = 0) -> Weights:
    """What takes later keys from scores of `rows` queries from first_row on, added: [samples, 1, rows, keys], f32.

    One for all samples would be broadcast, which the optimized kernels refuse.
    """
    later = allocation.filled((rows, keys), -torch.inf, torch.float32).triu_(first_row + 1).expand(samples, 1, -1, -1)
    return Weights(f"later than {first_row}", later, row_major((samples, 1, rows, keys), torch.float32))


def _softmaxes(scores: Temporary, shares: Temporary) -> list[PrimitiveTemplate]:
    found = optimized_implementations(
        descriptors.softmax, scores.desc, 3, dst=None if shares is scores else shares.desc
    )
    return [primitive_template(pd, {ARG_SRC: scores, ARG_DST: shares}, "softmax", 0) for pd in found]


def _masked_softmax(heads: Heads, scores: Temporary, shares: Temporary) -> TorchTemplate:
    key = f"{torch.__version__} masked softmax {heads.mask.dims} {heads.mask.strides} {heads.mask.dtype}"
    if shares is scores:
        return TorchTemplate(_softmax_in_place, "", True, key, args=(Operand(3), scores))
    return TorchTemplate(_softmax_into, "", True, key, args=(scores, Operand(3), shares))


def _softmax_into(scores: Tensor, mask: Tensor, out: Tensor) -> None:
    _softmax_in_place(mask, scores)
    out.copy_(scores)


def _softmax_in_place(mask: Tensor, scores: Tensor) -> None:
    """Softmax of scores with the mask applied; rows that it leaves nothing of are zero, as in PyTorch's attention."""
    if mask.dtype == torch.bool:
        scores.masked_fill_(mask.logical_not(), -torch.inf)
        live = mask.any(-1, keepdim=True)
    else:
        scores.add_(mask)
        live = mask.amax(-1, keepdim=True) > -torch.inf
    torch.softmax(scores, -1, out=scores)
    if not bool(live.all()):
        scores.masked_fill_(live.logical_not(), 0.0)


def implementations(templates: Sequence[PrimitiveTemplate | TorchTemplate]) -> str:
    """The distinct names of what computes each step."""
    names = [t.pd.implementation if isinstance(t, PrimitiveTemplate) else "torch" for t in templates]
    return " + ".join(dict.fromkeys(names))
