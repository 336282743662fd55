"""Operation descriptors: one function per primitive, each returning a filled ``OpDesc``.

Every function takes MemoryDesc objects ("any" lets the primitive choose a layout), checks all shapes in Python and then
fills the public C struct. Raises TypeError and ValueError for arguments that do not fit, UnsupportedError and
ZenDNNError for what the library refuses. Source: zendnn.h and zendnn_types.h of ZenDNN 5.1, one group per primitive.
"""

from __future__ import annotations

from zendnn_cffi.primitives.descriptors.common import (
    ALGORITHMS,
    EMBEDDING_BAG,
    KINDS,
    LRN,
    MAKERS,
    NORM_GLOBAL_STATS,
    NORM_RELU,
    NORM_SCALE,
    NORM_SHIFT,
    POOLING,
    REDUCTION,
    RESAMPLING,
    OpDesc,
)
from zendnn_cffi.primitives.descriptors.normalization import batch_normalization, layer_normalization, lrn
from zendnn_cffi.primitives.descriptors.pointwise import binary, eltwise, prelu, shuffle, softmax
from zendnn_cffi.primitives.descriptors.products import convolution, deconvolution, inner_product, matmul
from zendnn_cffi.primitives.descriptors.recurrent import recurrent
from zendnn_cffi.primitives.descriptors.regions import embedding_bag, pooling, reduction, reduction_numbers, resampling

__all__ = [
    "ALGORITHMS",
    "EMBEDDING_BAG",
    "KINDS",
    "LRN",
    "MAKERS",
    "NORM_GLOBAL_STATS",
    "NORM_RELU",
    "NORM_SCALE",
    "NORM_SHIFT",
    "OpDesc",
    "POOLING",
    "REDUCTION",
    "RESAMPLING",
    "batch_normalization",
    "binary",
    "convolution",
    "deconvolution",
    "eltwise",
    "embedding_bag",
    "inner_product",
    "layer_normalization",
    "lrn",
    "matmul",
    "pooling",
    "prelu",
    "recurrent",
    "reduction",
    "reduction_numbers",
    "resampling",
    "shuffle",
    "softmax",
]
