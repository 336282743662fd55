"""Matrix products by AOCL-BLIS (LPGEMM) with constant weights: what one computes, and how its weights are packed.

Source: the aocl_gemm addon of AOCL-BLIS 5.1, declared in cdef/aocl_gemm.h. Its functions return nothing, and keep
nothing between calls. Between unreadable pages, for 1 to 7 rows and odd N and K, they read and wrote no byte beyond
their operands. They take as many threads as the OpenMP team of the caller.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from zendnn_cffi.engine.library import load
from zendnn_cffi.values import dataclass

MAX_POST_OPS = 8
THREADS_VARIABLE = "BLIS_NUM_THREADS"  # read once by the library; where it is set, torch.set_num_threads counts no more
STORAGE = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3, torch.int32: 5}
"""AOCL_PARAMS_STORAGE_TYPES"""
ELTWISE, BIAS, SCALE, MATRIX_ADD, MATRIX_MUL = 2, 3, 4, 5, 6
"""AOCL_POST_OP_TYPE"""
KINDS = {ELTWISE: "eltwise", BIAS: "bias", SCALE: "sum", MATRIX_ADD: "matrix_add", MATRIX_MUL: "matrix_mul"}
"""The field of aocl_post_op that describes each."""
ALGORITHMS = {"relu": 0, "prelu": 1, "gelu_tanh": 2, "gelu_erf": 3, "clip": 4, "swish": 5, "tanh": 6, "logistic": 7}
"""AOCL_ELT_ALGO_TYPE"""

_FUNCTIONS = {
    (torch.float32, torch.float32): "f32f32f32of32",
    (torch.bfloat16, torch.float32): "bf16bf16f32of32",
    (torch.bfloat16, torch.bfloat16): "bf16bf16f32obf16",
}
_REORDERS = {torch.float32: "f32f32f32of32", torch.bfloat16: "bf16bf16f32of32"}
_POINTERS = {torch.float32: "float *", torch.bfloat16: "uint16_t *"}
_BY_ADDRESS = (
    "void (*)(char, char, char, dim_t, dim_t, dim_t, float, uintptr_t, dim_t, char,"
    " uintptr_t, dim_t, char, float, uintptr_t, dim_t, aocl_post_op *)"
)
_ISA = {torch.float32: "cpu_isa_avx2", torch.bfloat16: "cpu_isa_avx512_core_bf16"}


@dataclass(frozen=True)
class GemmPostOp:
    """One post-op: an eltwise by its name in ALGORITHMS, "bias", "matrix_add", "matrix_mul" or "scale".

    numbers  alpha and beta of an eltwise; factor and addend of a scale
    operand  dtype of what is read at run time: [N] of a bias, [M, N] of a matrix; None where there is none
    """

    kind: str
    numbers: tuple[float, ...] = ()
    operand: torch.dtype | None = None


@dataclass(frozen=True)
class PackedLayout:
    """Weights [N, K] as the kernels read them. Stands for a MemoryDesc: no primitive reads this layout."""

    dims: tuple[int, int]
    dtype: torch.dtype
    outer_strides: None = None
    strides: None = None
    format: str = "aocl"

    @property
    def key(self) -> bytes:
        """Equal for equal layouts."""
        return repr(self).encode()

    @property
    def size_bytes(self) -> int:
        return _packed_bytes(self.dims, self.dtype)

    used_bytes = size_bytes

    def pack(self, plain: torch.Tensor, target: torch.Tensor) -> None:
        """Write plain [N, K], dense and of this dtype, into target, size_bytes on a cache line's boundary."""
        n, k = self.dims
        assert plain.shape == self.dims and plain.dtype == self.dtype and plain.is_contiguous()
        blis, ffi = _blis()
        target.zero_()  # the padding of the last columns is multiplied, too
        source, packed = (ffi.cast(_POINTERS[self.dtype], t.data_ptr()) for t in (plain, target))
        getattr(blis, f"aocl_reorder_{_REORDERS[self.dtype]}")(b"r", b"t", b"B", source, packed, k, n, k)


@dataclass(frozen=True)
class Gemm:
    """post_ops(src @ weights.T): src [M, K] and weights [N, K] of one dtype, result [M, N], rows dense.

    sizes   M, K and N
    """

    sizes: tuple[int, int, int]
    dtype: torch.dtype
    result: torch.dtype
    post_ops: tuple[GemmPostOp, ...] = ()

    @property
    def weights(self) -> PackedLayout:
        """How the weights are to be packed."""
        _, k, n = self.sizes
        return PackedLayout((n, k), self.dtype)

    def function(self) -> Callable[..., None]:
        """The C function, which takes addresses as integers: a pointer made for each call takes as long as a check."""
        blis, ffi = _blis()
        found: Callable[..., None] = ffi.cast(
            _BY_ADDRESS, getattr(blis, f"aocl_gemm_{_FUNCTIONS[self.dtype, self.result]}")
        )
        return found

    def arguments(self, src: int, weights: int, dst: int, post_ops: Any) -> tuple[Any, ...]:
        """The arguments of that function: addresses, and what bind_post_ops returned first."""
        m, k, n = self.sizes
        # order, transpositions; M, N, K; alpha; A, its row stride and form; B likewise; beta; C and its row stride
        return b"r", b"n", b"n", m, n, k, 1.0, src, k, b"n", weights, n, b"r", 0.0, dst, n, post_ops

    def bind_post_ops(self, operands: Sequence[int]) -> tuple[Any, list[Any]]:
        """The C struct of the post-ops, NULL where there is none, and what must live as long as that.

        operands  addresses of what post-ops read, in their order
        """
        ffi = _blis()[1]
        if not self.post_ops:
            return ffi.NULL, []
        addresses = iter(operands)
        sequence: list[int] = []
        rows: dict[str, list[dict[str, Any]]] = {field: [] for field in KINDS.values()}
        alive: list[Any] = []

        def number(value: float) -> Any:
            alive.append(ffi.new("float *", value))
            return ffi.cast("void *", alive[-1])

        for post_op in self.post_ops:
            address = None if post_op.operand is None else ffi.cast("void *", next(addresses))
            kind, row = self._row(post_op, address, number)
            sequence.append(kind)
            rows[KINDS[kind]].append(row)
        struct = ffi.new("aocl_post_op *")
        alive += [struct, ffi.new("AOCL_POST_OP_TYPE[]", sequence)]
        struct.seq_vector, struct.seq_length, struct.num_eltwise = alive[-1], len(sequence), len(rows["eltwise"])
        for field, entries in rows.items():
            if entries:
                alive.append(ffi.new(f"aocl_post_op_{field}[]", entries))
                setattr(struct, field, alive[-1])
        return struct, alive

    def _row(self, post_op: GemmPostOp, address: Any, number: Callable[[float], Any]) -> tuple[int, dict[str, Any]]:
        """The kind of a post-op and its C struct's fields."""
        match post_op:
            case GemmPostOp("bias", _, torch.dtype() as dtype):
                return BIAS, {"bias": address, "stor_type": STORAGE[dtype]}
            case GemmPostOp("matrix_add" | "matrix_mul" as kind, _, torch.dtype() as dtype):
                row = {"matrix": address, "scale_factor": number(1.0), "scale_factor_len": 1}
                row |= {"ldm": self.sizes[2], "stor_type": STORAGE[dtype]}
                return MATRIX_ADD if kind == "matrix_add" else MATRIX_MUL, row
            case GemmPostOp("scale", (factor, addend)):
                row = {"scale_factor": number(factor), "scale_factor_len": 1, "sf_stor_type": 0}
                return SCALE, row | {"zero_point": number(addend), "zero_point_len": 1, "zp_stor_type": 0}
            case GemmPostOp(kind, (alpha, beta)):
                return ELTWISE, {"algo": {"alpha": number(alpha), "beta": number(beta), "algo_type": ALGORITHMS[kind]}}
        raise ValueError(f"no such post-op: {post_op}")


def is_offered(dtype: torch.dtype, result: torch.dtype) -> bool:
    """Whether the library in use has these products, the CPU their instructions, and PyTorch sets their threads."""
    if THREADS_VARIABLE in os.environ or (dtype, result) not in _FUNCTIONS:
        return False
    library, reorder = load(), _REORDERS[dtype]
    names = f"gemm_{_FUNCTIONS[dtype, result]}", f"reorder_{reorder}", f"get_reorder_buf_size_{reorder}"
    if not all(hasattr(library.blis_lib, f"aocl_{name}") for name in names):
        return False  # asked first: a library without them may lack names of instruction sets, too
    return library.runs(_ISA[dtype])


@lru_cache(maxsize=4096)
def _packed_bytes(dims: tuple[int, int], dtype: torch.dtype) -> int:
    blis, _ = _blis()
    n, k = dims
    return int(getattr(blis, f"aocl_get_reorder_buf_size_{_REORDERS[dtype]}")(b"r", b"t", b"B", k, n))


def _blis() -> tuple[Any, Any]:
    library = load()
    return library.blis_lib, library.blis_ffi
