"""A linear layer of one row by PyTorch's batched product: it reads float32 weights at the speed of memory.

One row needs each weight once, so memory sets the time: a decoding step, a classifier's last layer at batch 1. The
library's kernels reach three quarters of the machine's bandwidth there, whatever the layout of the weights. MKL's
batched product, which PyTorch calls, reaches all of it: the weights as b matrices [N / b, K], the row as b times one
column. Measured like every other candidate, beside them and inside the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fx_passes.candidates.candidates import Argument, Candidate, Operand, Result, TorchTemplate, Weights
from fx_passes.candidates.layouts import row_major, strided
from fx_passes.lower.post_ops import BinaryPostOp, Chain, EltwisePostOp, PostOp
from fx_passes.lower.torch_into import BINARY_INTO, eltwise_into
from zendnn_cffi.primitives.memory import MemoryDesc

NAME = "torch:bmm"
_PIECES_PER_THREAD = 4

# Reads what post-ops add from an iterator, changes the row in place.
Step = Callable[[Tensor, Any], Any]


def matrix_vector_candidates(
    weight: Weights,
    bias: Weights | None,
    post_ops: Sequence[PostOp],
    chain: Chain,
    srcs: tuple[MemoryDesc, ...],
    dst: MemoryDesc,
) -> list[Candidate]:
    """Return the candidate for a float32 row [1, K] with weights [N, K]; none where PyTorch lacks a post-op.

    bias   seen as [N]
    chain  the same post-ops as primitives take them: their operands as [1, N], or one number
    """
    n, k = weight.desc.dims
    pieces = equal_pieces(n)
    steps = _steps(post_ops, chain)
    if steps is None or pieces is None or (chain.overwrites is not None and not _adds_first(post_ops, chain)):
        return []
    column, matrices, result = by_pieces(weight, pieces)
    args: list[Argument] = [column, matrices]
    added: list[Argument] = [] if chain.overwrites is None else [Result(result)]  # what lies where the result goes
    if bias is not None:
        added.append(Weights(bias.key, bias.plain, result))
    args += added + [_seen(argument, result) for argument in chain.args.values()] + [Result(result)]
    compute = batched_product(len(added), steps)
    text = f"bmm of {pieces} {'with bias ' if bias is not None else ''}{' '.join(chain.text)}"
    key = f"{torch.__version__} {text} {_post_ops_key(post_ops)}"
    template = TorchTemplate(compute, "", True, key, tuple(args), flops=2 * n * k)
    return [Candidate(NAME, srcs, dst, (template,), overwrites=chain.overwrites)]


def by_pieces(weight: Weights, pieces: int) -> tuple[Operand, Weights, MemoryDesc]:
    """The row as a column for each of the matrices, the matrices, and the layout of their products."""
    n, k = weight.desc.dims
    column = Operand(0, strided((pieces, k, 1), torch.float32, (0, 1, k)))
    matrices = replace(weight, desc=row_major((pieces, n // pieces, k), torch.float32))
    return column, matrices, row_major((pieces, n // pieces, 1), torch.float32)


def _post_ops_key(post_ops: Sequence[PostOp]) -> str:
    """A text equal for equal post-ops, whatever the nodes they read."""
    entries = [
        (p.kind, p.alpha, p.beta) if isinstance(p, EltwisePostOp) else (p.kind, p.own_shape, p.constant is None)
        for p in post_ops
    ]
    return str(entries)


def _seen(argument: Argument, result: MemoryDesc) -> Argument:
    """An operand of a post-op, seen by pieces as the result is."""
    assert isinstance(argument, Operand | Weights) and argument.desc is not None
    return replace(argument, desc=result if math.prod(argument.desc.dims) > 1 else row_major((1, 1, 1), torch.float32))


def equal_pieces(rows: int) -> int | None:
    """How many matrices the weights become: enough for every thread, the same number for each; None: not divisible."""
    threads = torch.get_num_threads()
    most = _PIECES_PER_THREAD * threads
    divisors = [pieces for pieces in range(2, most + 1) if rows % pieces == 0]
    even = [pieces for pieces in divisors if pieces % threads == 0]
    return max(even or divisors, default=None)


def batched_product(added: int, steps: Sequence[Step]) -> Callable[..., None]:
    """function(column, weights, *what is added to the product, *operands of post-ops, result), all by pieces."""

    def compute(column: Tensor, weight: Tensor, *rest: Tensor) -> None:
        row, others = rest[-1], iter(rest)
        if added:
            torch.baddbmm(next(others), weight, column, out=row)
        else:
            torch.bmm(weight, column, out=row)
        if added > 1:
            row.add_(next(others))
        for step in steps:
            step(row, others)

    return compute


def _adds_first(post_ops: Sequence[PostOp], chain: Chain) -> bool:
    return bool(chain.text) and chain.text[0] == "sum" and isinstance(post_ops[0], BinaryPostOp)


def _steps(post_ops: Sequence[PostOp], chain: Chain) -> list[Step] | None:
    """What follows the product; None where PyTorch has no function for one of them."""
    steps: list[Step] = []
    for entry, text in zip(post_ops, chain.text, strict=True):
        if text == "sum":
            continue
        step = _eltwise(entry) if isinstance(entry, EltwisePostOp) else _binary(entry)
        if step is None:
            return None
        steps.append(step)
    return steps


def _eltwise(entry: EltwisePostOp) -> Step | None:
    function = eltwise_into(entry.kind, entry.alpha, entry.beta)
    return None if function is None else lambda row, others: function(row, out=row)


def _binary(entry: BinaryPostOp) -> Step | None:
    function = BINARY_INTO.get(entry.kind)
    return None if function is None else lambda row, others: function(row, next(others), out=row)
