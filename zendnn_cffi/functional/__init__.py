"""Single operations of the library on torch tensors and numpy arrays.

    from zendnn_cffi import functional as zf
    y = zf.convolution(x, w, b, padding=1, post_ops=[("eltwise", "relu"), ("binary", "add", residual)])

Data is passed by pointer. Strided and channels_last tensors are taken as they lie wherever an implementation does;
otherwise they are copied into a layout one does. The result is a torch tensor, or a numpy array where every input was
one; ``out=`` receives it instead. Nothing is recorded for autograd: a tensor that requires grad is refused while grad
mode is on. Empty results need no computation.

post_ops, applied in order to the result:
    ("eltwise", kind[, alpha, beta, scale])     kinds: attributes.ELTWISE and "hardsigmoid"
    ("binary", kind, other)                     other broadcasts to the result, or is a number; kinds: attributes.BINARY
    ("prelu", weight)                           float32, one element or one per channel (dim 1); not for matmul and
                                                inner_product
    ("sum"[, scale])                            adds what out held, times scale

Primitives are kept per signature (shapes, strides, dtypes, parameters, thread count), the least recently used going
first.
"""

from __future__ import annotations

from zendnn_cffi.functional._kernel import CACHE
from zendnn_cffi.functional.conv import convolution, deconvolution
from zendnn_cffi.functional.copying import reorder
from zendnn_cffi.functional.elementwise import binary, eltwise, log_softmax, prelu, softmax
from zendnn_cffi.functional.gemm import PackedWeights, gemm
from zendnn_cffi.functional.linear import inner_product, matmul
from zendnn_cffi.functional.norm import batch_norm, layer_norm, lrn, shuffle
from zendnn_cffi.functional.spatial import pooling, reduction, resampling
from zendnn_cffi.functional.table import embedding_bag

__all__ = [
    "PackedWeights",
    "batch_norm",
    "binary",
    "cache_info",
    "clear_cache",
    "convolution",
    "deconvolution",
    "eltwise",
    "embedding_bag",
    "gemm",
    "inner_product",
    "layer_norm",
    "log_softmax",
    "lrn",
    "matmul",
    "pooling",
    "prelu",
    "reduction",
    "reorder",
    "resampling",
    "set_cache_capacity",
    "shuffle",
    "softmax",
]


def cache_info() -> dict[str, int]:
    """Return how many kernels are kept and how often one was found."""
    return {"size": len(CACHE), "capacity": CACHE.capacity, "hits": CACHE.hits, "misses": CACHE.misses}


def clear_cache() -> None:
    """Forget all prepared kernels."""
    CACHE.clear()


def set_cache_capacity(capacity: int) -> None:
    """Keep at most this many kernels, 0 for none."""
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 0:
        raise ValueError(f"capacity must be a non-negative integer, got {capacity!r}")
    CACHE.set_capacity(capacity)
