"""gemm: AOCL-BLIS low precision matrix products (float32, bfloat16, int8) with post-ops and weights reordered once.

Source: the aocl_gemm addon of AOCL-BLIS 5.1. Its functions return nothing: what they would refuse (with a line on
stderr, leaving the result as it was) is refused here first. So are 8-bit products on a CPU without AVX512_VNNI, for
which it has no kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from zendnn_cffi.engine.host import cpu_flags
from zendnn_cffi.engine.library import load
from zendnn_cffi.errors import UnsupportedError
from zendnn_cffi.functional._arrays import INT8, as_input, as_output, dtype_names
from zendnn_cffi.functional._gemm_post_ops import GemmPostOps
from zendnn_cffi.functional._int32 import WIDEST, bound_of_sums, largest, saturated
from zendnn_cffi.functional._operation import operation
from zendnn_cffi.primitives import allocation, checks
from zendnn_cffi.primitives.labels import Label, profiler, shaped
from zendnn_cffi.runtime import huge_pages

# (src, result) -> function suffix; weights have src's type, int8 for both 8-bit sources
_FUNCTIONS = {
    (torch.float32, torch.float32): "f32f32f32of32",
    (torch.bfloat16, torch.float32): "bf16bf16f32of32",
    (torch.bfloat16, torch.bfloat16): "bf16bf16f32obf16",
    (torch.uint8, torch.int32): "u8s8s32os32",
    (torch.uint8, torch.float32): "u8s8s32of32",
    (torch.uint8, torch.bfloat16): "u8s8s32obf16",
    (torch.uint8, torch.int8): "u8s8s32os8",
    (torch.uint8, torch.uint8): "u8s8s32ou8",
    (torch.int8, torch.int32): "s8s8s32os32",
    (torch.int8, torch.float32): "s8s8s32of32",
    (torch.int8, torch.bfloat16): "s8s8s32obf16",
    (torch.int8, torch.int8): "s8s8s32os8",
    (torch.int8, torch.uint8): "s8s8s32ou8",
}
_REORDER = {
    torch.float32: "f32f32f32of32",
    torch.bfloat16: "bf16bf16f32of32",
    torch.uint8: "u8s8s32os32",
    torch.int8: "s8s8s32os32",
}
_DEFAULT_RESULT = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
}
_WEIGHTS = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.uint8: torch.int8,
    torch.int8: torch.int8,
}
_C_TYPES = {
    torch.float32: "float *",
    torch.bfloat16: "uint16_t *",
    torch.int8: "int8_t *",
    torch.uint8: "uint8_t *",
    torch.int32: "int32_t *",
}


class PackedWeights:
    """The right-hand side of ``gemm``, reordered once into the layout its kernels read; keeps no reference to the
    original.

    weights    [K, N] float32, bfloat16 or int8, any strides (for a torch Linear pass ``layer.weight.t()``: it is read
               as it lies)
    src_dtype  for int8 weights the type of the left-hand side, torch.uint8 (default) or torch.int8
    Raises     TypeError, ValueError for arguments that do not fit; UnsupportedError for int8 without AVX512_VNNI
    """

    __slots__ = ("_buffer", "address", "dtype", "k", "largest", "n", "size_bytes", "src_dtype")

    @operation
    def __init__(self, weights: Any, *, src_dtype: torch.dtype | None = None) -> None:
        w = as_input(weights, "weights", (torch.float32, torch.bfloat16, torch.int8))
        if w.dim() != 2 or w.numel() == 0:
            raise ValueError(f"weights must be [K, N] and not empty, got shape {list(w.shape)}")
        if src_dtype is None:
            src_dtype = torch.uint8 if w.dtype == torch.int8 else w.dtype
        if not isinstance(src_dtype, torch.dtype) or _WEIGHTS.get(src_dtype) != w.dtype:
            raise TypeError(
                f"src_dtype must be {dtype_names([s for s, d in _WEIGHTS.items() if d == w.dtype])} for "
                f"{dtype_names([w.dtype])} weights, got {src_dtype!r}"
            )
        _check_instructions(src_dtype)
        self.dtype, self.src_dtype = w.dtype, src_dtype
        self.k, self.n = int(w.shape[0]), int(w.shape[1])
        self.largest = largest(w) if w.dtype == torch.int8 else 0
        blis, ffi = _blis()
        w, transposed, leading = _leading(w)
        name = _REORDER[src_dtype]
        trans = b"t" if transposed else b"n"
        self.size_bytes = int(getattr(blis, f"aocl_get_reorder_buf_size_{name}")(b"r", trans, b"B", self.k, self.n))
        with torch.inference_mode(False):
            self._buffer = huge_pages.allocate(self.size_bytes).zero_()
        self.address = self._buffer.data_ptr()
        kind = _C_TYPES[w.dtype]
        getattr(blis, f"aocl_reorder_{name}")(
            b"r", trans, b"B", ffi.cast(kind, w.data_ptr()), ffi.cast(kind, self.address), self.k, self.n, leading
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "PackedWeights holds this machine's layout and is neither copied nor pickled: pack the weights again"
        )

    def __repr__(self) -> str:
        return f"PackedWeights({dtype_names([self.dtype])}[{self.k}, {self.n}], for {dtype_names([self.src_dtype])})"


@operation
def gemm(
    a: Any,
    b: Any,
    bias: Any = None,
    *,
    out_dtype: torch.dtype | None = None,
    alpha: float = 1,
    beta: float = 0,
    post_ops: Sequence[tuple[Any, ...]] = (),
    out: Any = None,
) -> Any:
    """Return post_ops(alpha * a @ b + beta * out + bias), computed by AOCL-BLIS.

    a          [M, K] float32, bfloat16, uint8 or int8; rows may be apart
    b          [K, N] of a's dtype (int8 for both 8-bit types), any strides, or PackedWeights
    bias       [N] float32, bfloat16 (float a) or int32 (8-bit a); in accumulator units, that is, before any ("scale",
               ...)
    out_dtype  float32 a: float32; bfloat16: bfloat16 (default) or float32; 8-bit: int32 (default), float32, bfloat16,
               int8, uint8
    alpha, beta  numbers, whole ones for 8-bit a; beta needs out (float32 results of float a, int32 ones of 8-bit a)
    post_ops   at most 8 (bias counts, and a zero point of a bfloat16 product), in order: ("eltwise", kind, alpha, beta)
               with relu, gelu_erf, gelu_tanh, tanh, logistic, swish, clip; ("binary", "add" or "mul", [M, N] tensor),
               ("bias", [N] tensor), ("scale", scales, zero_points): x * scale + zero_point, each a number or [N] values
    Returns    [M, N]; integer results are rounded to even and saturated. int32 results have passed through float32:
               they are exact up to 2**24
    Raises     TypeError, ValueError for arguments that do not fit, among them 8-bit products whose sums may pass the
               32 bits in which they are kept; UnsupportedError for 8-bit a on a CPU without AVX512_VNNI, and for a
               relu of negative slope
    """
    x = as_input(a, "a", tuple(_DEFAULT_RESULT))
    if x.dim() != 2:
        raise ValueError(f"a must be [M, K], got shape {list(x.shape)}")
    packed, w, n = _right_side(b, x)
    result_dtype = _result_dtype(x.dtype, out_dtype, out)
    m, k = int(x.shape[0]), int(x.shape[1])
    inputs = [("a", x)] + ([] if w is None else [("b", w)])
    chain = GemmPostOps(m, n, x.dtype, result_dtype)
    if bias is not None:
        chain.bias(bias, "bias")
    chain.extend(post_ops)
    scales = _alpha_beta(x.dtype, alpha, beta, out, result_dtype)
    result = allocation.empty((m, n), result_dtype) if out is None else as_output(out, "out", (m, n), result_dtype)
    for name, tensor in (*inputs, *chain.tensors) if out is not None and result.numel() else ():
        if tensor.numel() and checks.overlap(result, tensor):
            raise ValueError(f"out shares memory with {name}: pass a buffer of its own, or leave out out")
    _check_instructions(x.dtype)
    if result.numel():
        if k == 0:
            raise ValueError(f"a and b have K = 0, shapes {list(x.shape)} and [0, {n}]: there is nothing to multiply")
        if x.dtype in INT8:
            _multiply_integers(x, packed, w, result, chain, scales)
        else:
            _multiply(x, packed, w, result, chain, scales)
    if out is not None:
        if isinstance(out, torch.Tensor) and not out.is_inference():
            torch.autograd.graph.increment_version(out)
        return out
    speaks_numpy = (
        isinstance(a, np.ndarray) and isinstance(b, (np.ndarray, PackedWeights)) and result_dtype != torch.bfloat16
    )
    return result.numpy() if speaks_numpy else result


def _check_instructions(src: torch.dtype) -> None:
    """Raise where AOCL-BLIS has no kernels. It looks at the CPU itself, whatever ZENDNN_MAX_CPU_ISA says."""
    if src in INT8 and cpu_flags() and "avx512_vnni" not in cpu_flags():
        raise UnsupportedError(
            "AOCL-BLIS multiplies 8-bit integers with AVX512_VNNI, which this CPU has not (AMD's have it from Zen 4 "
            "on): pass float32 or bfloat16"
        )


def _right_side(b: Any, x: torch.Tensor) -> tuple[PackedWeights | None, torch.Tensor | None, int]:
    """Return (packed, plain, N), one of the first two."""
    if isinstance(b, PackedWeights):
        if b.src_dtype != x.dtype:
            raise TypeError(
                f"a is {dtype_names([x.dtype])}, b was packed for {dtype_names([b.src_dtype])}: pack the weights for "
                "a's type"
            )
        if b.k != x.shape[1]:
            raise ValueError(f"a has K = {x.shape[1]}, the packed weights {b.k}")
        return b, None, b.n
    w = as_input(b, "b", (_WEIGHTS[x.dtype],))
    if w.dim() != 2 or w.shape[0] != x.shape[1]:
        raise ValueError(f"b must be [K, N] with a's K = {x.shape[1]}, got shape {list(w.shape)}")
    return None, w, int(w.shape[1])


def _result_dtype(src: torch.dtype, asked: Any, out: Any) -> torch.dtype:
    if asked is None:
        asked = out.dtype if isinstance(out, torch.Tensor) else _DEFAULT_RESULT[src]
        if isinstance(out, np.ndarray):
            asked = next((d for s, d in _FUNCTIONS if s == src and dtype_names([d]) == out.dtype.name), asked)
    if not isinstance(asked, torch.dtype) or (src, asked) not in _FUNCTIONS:
        allowed = dtype_names([d for s, d in _FUNCTIONS if s == src])
        raise TypeError(f"out_dtype must be {allowed} for {dtype_names([src])} a, got {asked!r}")
    return asked


def _alpha_beta(
    src: torch.dtype, alpha: Any, beta: Any, out: Any, result: torch.dtype
) -> tuple[float, float] | tuple[int, int]:
    numbers = checks.as_float(alpha, "alpha"), checks.as_float(beta, "beta")
    if numbers[1] and out is None:
        raise ValueError("beta adds to what out holds: pass out, or leave beta 0")
    if numbers[1] and result != (torch.int32 if src in INT8 else torch.float32):
        raise ValueError(
            f"beta is for float32 results of float a and int32 results of 8-bit a, "
            f"got a {dtype_names([result])} result of {dtype_names([src])} a"
        )
    if src in INT8:
        if any(v != v // 1 or abs(v) >= 2**31 for v in numbers):
            raise ValueError(
                f"alpha and beta must be whole 32-bit numbers for 8-bit a, got {alpha!r} and {beta!r}: use a scale "
                "post-op"
            )
        return int(numbers[0]), int(numbers[1])
    return numbers


def _multiply_integers(
    x: torch.Tensor,
    packed: PackedWeights | None,
    w: torch.Tensor | None,
    result: torch.Tensor,
    chain: GemmPostOps,
    scales: tuple[float, float],
) -> None:
    """Multiply 8-bit operands; where post-ops may leave what 32-bit integers hold, by way of a float32 result."""
    if packed is None:
        assert w is not None
        packed = PackedWeights(w, src_dtype=x.dtype)  # plain 8-bit weights are taken untransposed only
    bound: float = bound_of_sums(x, packed.largest, int(scales[0]))
    if scales[1]:
        bound += abs(scales[1]) * largest(result)
        if bound >= WIDEST:
            raise ValueError(f"beta * out and the product may reach {bound:.0f}, beyond 32 bits: add out afterwards")
    if result.dtype in (*INT8, torch.int32) and chain.bound(bound) >= WIDEST:
        if scales[1]:
            raise ValueError("beta with post-ops that may pass 32 bits is not taken: add out afterwards")
        wide = allocation.empty(result.shape, torch.float32)
        _multiply(x, packed, None, wide, chain.for_result(torch.float32), scales)
        result.copy_(saturated(wide, result.dtype))
        return
    _multiply(x, packed, None, result, chain, scales)


def _multiply(
    x: torch.Tensor,
    packed: PackedWeights | None,
    w: torch.Tensor | None,
    result: torch.Tensor,
    chain: GemmPostOps,
    scales: tuple[float, float],
) -> None:
    blis, ffi = _blis()
    m, n, k = result.shape[0], result.shape[1], x.shape[1]
    x, lda = _rows(x)
    target, ldc = _rows(result)  # a copy where rows are not dense: written back below
    trans, memory_format = b"n", b"n"
    if packed is not None:
        address, ldb, memory_format = packed.address, n, b"r"
    else:
        assert w is not None
        w, transposed, ldb = _leading(w)
        trans, address = (b"t" if transposed else b"n"), w.data_ptr()
    types = _FUNCTIONS[(x.dtype, result.dtype)]
    function = getattr(blis, f"aocl_gemm_{types}")
    arguments = (
        b"r",
        b"n",
        trans,
        m,
        n,
        k,
        scales[0],
        ffi.cast(_C_TYPES[x.dtype], x.data_ptr()),
        lda,
        b"n",
        ffi.cast(_C_TYPES[_WEIGHTS[x.dtype]], address),
        ldb,
        memory_format,
        scales[1],
        ffi.cast(_C_TYPES[result.dtype], target.data_ptr()),
        ldc,
        chain.build(ffi),
    )
    if profiler._is_profiler_enabled:
        with Label(f"aocl::gemm {types}", (x, shaped((k, n), _WEIGHTS[x.dtype]))).event():
            function(*arguments)
    else:
        function(*arguments)
    if target is not result:
        result.copy_(target)


def _rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the matrix with dense rows (itself if it has them) and the elements between rows."""
    m, n = tensor.shape
    if (tensor.stride(1) != 1 and n > 1) or (m > 1 and tensor.stride(0) < n):
        tensor = tensor.contiguous()
    return tensor, tensor.stride(0) if m > 1 else n


def _leading(w: torch.Tensor) -> tuple[torch.Tensor, bool, int]:
    """Return (matrix, whether it lies transposed, elements between its rows or columns)."""
    k, n = w.shape
    if (w.stride(1) == 1 or n == 1) and (k == 1 or w.stride(0) >= n):
        return w, False, w.stride(0) if k > 1 else n
    if (w.stride(0) == 1 or k == 1) and (n == 1 or w.stride(1) >= k):
        return w, True, w.stride(1) if n > 1 else k
    return w.contiguous(), False, n


def _blis() -> tuple[Any, Any]:
    library = load()
    return library.blis_lib, library.blis_lib.ffi
