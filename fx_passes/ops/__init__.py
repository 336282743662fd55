"""The vocabulary: the one spelling of every operation that the passes know.

Each op is an ordinary Python function with a plain-torch body of exactly eager's meaning, so a graph in this vocabulary
runs anywhere (also on fake tensors), passes are tested without the native library, and a node that no primitive takes
still computes what the model says. Ops accept whatever eager accepted: shapes and dtypes are settled at lowering.

`post_ops` is a tuple applied in order to the result, each entry one of
    ("eltwise", kind, alpha, beta)      see ELTWISE
    ("binary", kind, other)             kind(result, other); other broadcastable to the result, see BINARY
    ("binary", kind, other, True)       kind(other, result): equal numbers, in other's strides
    ("prelu", weight)

There is a file per family; each operation declares its traits there (`fx_passes.ops.registry`).
"""

# ruff: noqa: F401  (every name is what other folders read here)
from __future__ import annotations

from fx_passes.ops import registry
from fx_passes.ops.attention import additive_mask, attention, cached_attention, grow, rotary, rotation, write_at
from fx_passes.ops.constants import (
    add_channels,
    fold_bn_bias,
    fold_bn_deconv_weight,
    fold_bn_weight,
    fold_pre_bn_bias,
    fold_pre_bn_weight,
    no_bias,
    scale_channels,
)
from fx_passes.ops.movement import (
    PIECES,
    chunk,
    concat,
    contiguous,
    expand,
    flatten,
    index,
    narrow,
    pad,
    permute,
    reshape,
    reshape_as,
    roll,
    split,
    split_at,
    transpose,
    unflatten,
    unsqueeze,
)
from fx_passes.ops.pointwise import BINARY, ELTWISE, PERIODIC, PostOps, apply_post_ops, binary, eltwise, prelu
from fx_passes.ops.products import linear, matmul
from fx_passes.ops.quantized import (
    choose_row_scales,
    choose_scale,
    dequantize,
    dequantize_rows_by,
    dynamic_linear,
    int4_linear,
    quantize,
    quantize_by,
    quantize_rows_by,
    rounded_rows,
    row_scaled_linear,
)
from fx_passes.ops.recurrent import GATES, holding, recurrent, recurrent_cell, recurrent_layer
from fx_passes.ops.registry import TRAITS, Traits, having
from fx_passes.ops.rows import REDUCTIONS, batch_norm, group_norm, l2_normalize, layer_norm, reduce, rms_norm, softmax
from fx_passes.ops.sampling import weighted_samples
from fx_passes.ops.scans import selective_scan, selective_scan_and_state
from fx_passes.ops.sizes import rank, size
from fx_passes.ops.tables import (
    concat_bags,
    embedding,
    embedding_bag,
    embedding_bags,
    offset_bags,
    pick,
    quantized_embedding,
    take_rows,
)
from fx_passes.ops.windows import adaptive_pool, convolution, deconvolution, pool, resample

COMPUTE = having(kind=registry.COMPUTE)
MOVEMENT = having(kind=registry.MOVEMENT)
SHAPE = having(kind=registry.SHAPE)
CONSTANT = having(kind=registry.CONSTANT)
WITH_POST_OPS = having(post_ops=True)
SEVERAL = having(several=True)
WRITING = having(writes=True)
ROW_MAJOR = having(row_major=True)
VOCABULARY = frozenset(TRAITS)
