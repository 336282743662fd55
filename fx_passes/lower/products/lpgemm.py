"""A linear layer by AOCL-BLIS, where ZenDNN's kernels are slow.

With AVX-512 they are at two and three rows: four rows take less time. AOCL-BLIS has kernels of its own for so few
rows, and these read weights at memory's speed. At one row, and from four rows on, ZenDNN is as fast or faster. There
nothing is offered, so nothing is measured; docs/architecture.md has the figures.
With AVX2 alone ZenDNN's products pack weights in each call, and AOCL-BLIS reads weights that were packed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from fx_passes.candidates.candidates import Argument, Candidate, GemmTemplate, Operand, Result, Weights
from fx_passes.candidates.layouts import has_avx512, row_major
from fx_passes.lower.post_ops import BinaryPostOp, EltwisePostOp, PostOp
from zendnn_cffi.primitives.attributes import ARG_SRC_1, arg_post_op
from zendnn_cffi.primitives.lpgemm import ALGORITHMS, MAX_POST_OPS, Gemm, GemmPostOp, is_offered
from zendnn_cffi.primitives.memory import MemoryDesc

NAME = "aocl:lpgemm"
_FEW_ROWS = (2, 3)
# A slope is said otherwise. With AVX2 the tanh of 0 is 6e-8, and small numbers are that far off.
_REFUSED = {"prelu", "tanh"}
_MATRICES = {"add": "matrix_add", "mul": "matrix_mul"}


def lpgemm_candidates(
    sizes: tuple[int, int, int],
    weight: Weights,
    bias: Weights | None,
    post_ops: Sequence[PostOp],
    args: dict[int, Argument],
    srcs: tuple[MemoryDesc, ...],
    dst: MemoryDesc,
) -> Iterator[Candidate]:
    """Yield the candidate for [M, K] with weights [N, K]; nothing where it lacks a post-op or never won.

    sizes   M, K and N
    weight, bias  the constants, in any layout
    args    the arguments of post-ops as primitives take them; no sum among them
    """
    m, k, n = sizes
    dtype, result = srcs[0].dtype, dst.dtype
    assert dtype is not None and result is not None
    if not is_offered(dtype, result) or not _may_pay(m, n):
        return
    chain: list[GemmPostOp] = []
    operands: list[Argument] = []
    if bias is not None:
        chain.append(GemmPostOp("bias", operand=torch.float32))
        operands.append(Weights(bias.key, bias.plain, row_major((n,), torch.float32)))
    for position, entry in enumerate(post_ops):
        argument = args.get(arg_post_op(position, ARG_SRC_1))
        found = _eltwise(entry, dtype) if isinstance(entry, EltwisePostOp) else _binary(entry, argument, (m, n))
        if found is None:
            return
        chain.append(found)
        operands += [] if argument is None else [argument]
    if len(chain) > MAX_POST_OPS:
        return
    gemm = Gemm(sizes, dtype, result, tuple(chain))
    layout: Any = gemm.weights  # stands for a MemoryDesc
    packed = replace(weight, desc=layout)
    src, written = Operand(0, row_major((m, k), dtype)), Result(row_major((m, n), result))
    yield Candidate(NAME, srcs, dst, (GemmTemplate(gemm, src, packed, written, tuple(operands)),))


def _may_pay(m: int, n: int) -> bool:
    """Whether a product of so many rows and columns may be faster than ZenDNN's."""
    if has_avx512():
        return m in _FEW_ROWS or n == 1
    return m > 1  # of one row, AVX2 kernels read beyond a matrix that is added


def _eltwise(entry: EltwisePostOp, dtype: torch.dtype) -> GemmPostOp | None:
    numbers = entry.alpha, entry.beta
    if entry.kind == "linear":
        # bfloat16 kernels misread the addend of a scale
        return None if dtype == torch.bfloat16 and entry.beta else GemmPostOp("scale", numbers)
    if entry.kind == "relu" and entry.alpha:
        # with a negative slope, positive numbers of some rows and columns are negated
        return None if entry.alpha < 0 else GemmPostOp("prelu", numbers)
    return GemmPostOp(entry.kind, numbers) if entry.kind in ALGORITHMS.keys() - _REFUSED else None


def _binary(entry: BinaryPostOp, argument: Argument | None, shape: tuple[int, int]) -> GemmPostOp | None:
    """A whole matrix added or multiplied, or a row added; one number for many, and a row of factors, are refused."""
    assert isinstance(argument, Operand | Weights) and argument.desc is not None
    dims, dtype = argument.desc.dims, argument.desc.dtype
    if dims == shape and entry.kind in _MATRICES:
        return GemmPostOp(_MATRICES[entry.kind], operand=dtype)
    if dims == (1, shape[1]) and entry.kind == "add":
        return GemmPostOp("bias", operand=dtype)
    return None
