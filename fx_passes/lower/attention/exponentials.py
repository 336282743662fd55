"""Attention without a softmax: exponentials of the scores as they come, divided by their sums at the end.

    shares = exp(scale * query @ key^T (+ mask))      matmul; nothing is subtracted first
    sums   = shares @ ones                            matmul, f32
    result = shares @ value / sums                    matmul, binary

A softmax subtracts each row's maximum so that no exponential overflows; that takes f32 scores in memory and two passes
over them. Most scores are small enough without. Whether they were, the sums tell, those of all attentions of a
program at its end: a guard, which fails where one is too large or too small (or no number).

A mask of keys alone [B, 1, 1, S], added, is a weight of each key: exp(s + m) = exp(s) * exp(m). Values are multiplied
by it, and it stands in place of the ones. Causal attention in blocks of rows leaves out most of what comes later.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fx_passes.candidates.candidates import (
    EXPONENTIALS,
    Argument,
    Arguments,
    Candidate,
    Guard,
    Operand,
    PrimitiveTemplate,
    Result,
    Temporary,
    TorchTemplate,
    Weights,
)
from fx_passes.candidates.layouts import row_major, strided
from fx_passes.lower.attention.steps import Heads, implementations, later_keys, transposed
from fx_passes.lower.primitives import first_optimized
from fx_passes.lower.products.step import product
from zendnn_cffi.primitives import allocation, descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_SRC_1, ARG_WEIGHTS, PostOps, arg_post_op
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.values import dataclass

# Sums of exponentials between these are those of rows whose largest score is between -58 and 58 or so (trained models
# have 46), and are so far from where f32 and bf16 end that products with values below 1e12 are none too large.
_LEAST, _MOST = 2.0**-84, 2.0**84
_MOST_BLOCKS, _FEWEST_ROWS = 4, 64  # of causal attention
_SLICE_BYTES = 4 << 20  # f32 scores of samples whose shares stay in second-level caches
_SHARES, _SUMS, _KEPT, _VALUES = range(4)  # temporaries


def in_exponentials(heads: Heads) -> Iterator[Candidate]:
    """The candidates that have kernels: all at once, samples in slices that fit caches, causal in blocks of rows."""
    if heads.mask is not None and not heads.of_keys:
        return
    b, _, length, _ = heads.scores.dims
    bytes_each = heads.scores.size_bytes // b
    fitting = max((n for n in range(1, b + 1) if b % n == 0 and n * bytes_each <= _SLICE_BYTES), default=1)
    ways = dict.fromkeys(((b, length), (fitting, length)))
    if heads.is_causal:
        ways |= dict.fromkeys((b, -(-length // n)) for n in (2, _MOST_BLOCKS) if length >= n * _FEWEST_ROWS)
    for samples, rows in ways:
        candidate = _Exponentials(heads, samples, rows).candidate()
        if candidate is not None:
            yield candidate


@dataclass(frozen=True)
class _Block:
    """Some samples' rows, and the keys that they see."""

    sample: int
    samples: int
    row: int
    rows: int
    keys: int


class _Exponentials:
    """The parts of one candidate that goes block by block."""

    def __init__(self, heads: Heads, samples: int, rows: int) -> None:
        self.heads, self.samples, self.rows = heads, samples, rows
        self.b, self.h, self.length, self.size = heads.scores.dims
        self.d, self.dtype = heads.query.dims[3], heads.dtype

    def candidate(self) -> Candidate | None:
        heads = self.heads
        products: list[PrimitiveTemplate] = []
        for block in self._blocks():
            made = (self._exponentials(block), self._sums(block), self._product(block))
            found = [template for template in made if template is not None]
            if len(found) < len(made):
                return None
            products += found
        division = self._division()
        if division is None:
            return None
        weighing = [] if heads.mask is None else [self._weighing()]
        calls: tuple[PrimitiveTemplate | TorchTemplate, ...] = (*weighing, *products, division)
        name, guard = f"{implementations(products)}, no softmax", Guard(EXPONENTIALS, _SUMS, in_range)
        return Candidate(name, heads.srcs, heads.result, calls, guard=guard)

    def _blocks(self) -> Iterator[_Block]:
        for sample in range(0, self.b, self.samples):
            for row in range(0, self.length, self.rows):
                rows = min(self.rows, self.length - row)
                keys = min(row + rows, self.size) if self.heads.is_causal else self.size
                yield _Block(sample, self.samples, row, rows, keys)

    def _shares(self, block: _Block) -> MemoryDesc:
        return row_major((block.samples, self.h, block.rows, block.keys), self.dtype)

    def _flops(self, block: _Block) -> int:
        return 2 * block.samples * self.h * block.rows * block.keys * self.d

    def _exponentials(self, block: _Block) -> PrimitiveTemplate | None:
        shares = self._shares(block)
        query, query_bytes = _part(self.heads.query, block.sample, block.samples, block.row, block.rows)
        key, key_bytes = _part(self.heads.key, block.sample, block.samples, 0, block.keys)
        seen = transposed(key)
        post_ops = PostOps().eltwise("linear", self.heads.factor)
        extra: dict[int, Argument] = {}
        if self.heads.is_causal:
            later = later_keys(block.samples, block.rows, block.keys, block.row)
            post_ops = post_ops.binary("add", later.desc)
            extra = {arg_post_op(1, ARG_SRC_1): later}
        post_ops = post_ops.eltwise("exp")
        attr, zero_points = self.heads.zero_points(post_ops)
        args: Arguments = {
            ARG_SRC: Operand(0, query, query_bytes),
            ARG_WEIGHTS: Operand(1, seen, key_bytes),
            ARG_DST: Temporary(_SHARES, shares),
            **extra,
            **zero_points,
        }
        return product(query, seen, shares, post_ops, args, self._flops(block), attr=attr)

    def _sums(self, block: _Block) -> PrimitiveTemplate | None:
        shares = self._shares(block)
        sums, sums_bytes = _part(self._sums_desc, block.sample, block.samples, block.row, block.rows)
        if self.heads.mask is None:
            desc = row_major((block.samples, self.h, block.keys, 1), self.dtype)
            ones: Argument = Weights(
                f"{block.keys} ones", allocation.filled((1, 1, 1, 1), 1, torch.float32).expand(desc.dims), desc
            )
        else:
            desc, kept_bytes = _part(self._kept_desc, block.sample, block.samples, 0, block.keys)
            ones = Temporary(_KEPT, desc, kept_bytes)
        args: Arguments = {
            ARG_SRC: Temporary(_SHARES, shares),
            ARG_WEIGHTS: ones,
            ARG_DST: Temporary(_SUMS, sums, sums_bytes),
        }
        # With one column a plain gemm is four times faster than blocked kernels.
        return product(shares, desc, sums, PostOps(), args, 0, first="gemm:")

    def _product(self, block: _Block) -> PrimitiveTemplate | None:
        shares = self._shares(block)
        result, result_bytes = _part(self.heads.result, block.sample, block.samples, block.row, block.rows)
        value, value_bytes = _part(self._values_desc, block.sample, block.samples, 0, block.keys)
        values: Argument = Operand(2, value, value_bytes)
        if self.heads.mask is not None:
            values = Temporary(_VALUES, value, value_bytes)
        args: Arguments = {
            ARG_SRC: Temporary(_SHARES, shares),
            ARG_WEIGHTS: values,
            ARG_DST: Result(result, result_bytes),
        }
        return product(shares, value, result, PostOps(), args, self._flops(block))

    @property
    def _sums_desc(self) -> MemoryDesc:
        """[B, H, L, 1], in the order in which the result's rows lie."""
        b, h, length = self.b, self.h, self.length
        return strided((b, h, length, 1), torch.float32, (length * h, 1, h, 1))

    @property
    def _kept_desc(self) -> MemoryDesc:
        return row_major((self.b, self.h, self.size, 1), self.dtype)

    @property
    def _values_desc(self) -> MemoryDesc:
        """Of the values that the last product reads."""
        if self.heads.mask is None:
            return self.heads.value
        b, h, s, d = self.b, self.h, self.size, self.d
        return strided((b, h, s, d), self.dtype, (s * h * d, d, h * d, 1))

    def _weighing(self) -> TorchTemplate:
        key = f"{torch.__version__} weigh keys {self.heads.mask.dims}"
        args = (Operand(3), Operand(2), Temporary(_KEPT, self._kept_desc), Temporary(_VALUES, self._values_desc))
        return TorchTemplate(_weigh, "", True, key, args=args, assists=True)

    def _division(self) -> PrimitiveTemplate | None:
        """The result, seen as one row for each sum, divided by them."""
        rows = self.b * self.length * self.h
        result, sums = row_major((rows, self.d), self.dtype), row_major((rows, 1), torch.float32)
        args: Arguments = {ARG_SRC: Result(result), ARG_SRC_1: Temporary(_SUMS, sums), ARG_DST: Result(result)}
        return first_optimized(args, "binary", descriptors.binary, "div", result, sums, result, flops=0)


def in_range(sums: Tensor) -> bool:
    """Whether each row's sum is a number in range."""
    low, high = torch.aminmax(sums)  # nan where there is one
    return low.item() >= _LEAST and high.item() <= _MOST


def _weigh(mask: Tensor, value: Tensor, kept: Tensor, out: Tensor) -> None:
    """mask [B, 1, 1, S], added to scores; kept [B, H, S, 1] and out [B, H, S, D]: values times the keys' weights."""
    weights = mask.exp().to(value.dtype).transpose(2, 3)
    kept.copy_(weights.expand(kept.shape))
    torch.mul(value, weights, out=out)


def _part(desc: MemoryDesc, sample: int, samples: int, row: int, rows: int) -> tuple[MemoryDesc, int]:
    """Some samples and rows (dimension 2) of [B, H, L, *] as they lie, and where in its memory they begin."""
    steps = desc.strides
    assert steps is not None and desc.dtype is not None
    offset_bytes = (sample * steps[0] + row * steps[2]) * desc.dtype.itemsize
    dims = (samples, desc.dims[1], rows, desc.dims[3])
    # Kernels ask for the stride of a dense tensor where there is nothing to step over, too.
    between = steps[0] if samples > 1 else max(dims[1] * steps[1], rows * steps[2])
    return strided(dims, desc.dtype, (between, *steps[1:])), offset_bytes
