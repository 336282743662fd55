"""Depthwise 1x1 convolutions, which multiply each channel by one number: the fastest streaming kernels there are.

Their weights may be a constant (batch normalization, normalization.py, to_integers.py) or a value of the network:
the gate of a squeeze-and-excitation block, one number for each sample and channel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fx_passes.candidates.candidates import Argument, Candidate, Operand, Result, primitive_template
from fx_passes.candidates.layouts import channels_of_a_block, layout, spatial_tags
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.primitives import implementations
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_WEIGHTS, Attr, PostOps
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc

_MOST_CALLS = 32  # one for each sample where channels are last
_UNIT: dict[str, Any] = {"strides": (1, 1), "dilation": (1, 1), "padding_l": (0, 0), "padding_r": (0, 0)}


def channel_products(desc: MemoryDesc, bias: MemoryDesc | None, post_ops: PostOps) -> Iterator[PrimitiveDesc]:
    """Depthwise implementations of [N, C, H, W] times [C], in the layout desc; their weights are [C, 1, 1, 1, 1]."""
    assert desc.dtype is not None
    found = implementations(
        descriptors.convolution, *_products(desc, desc.dtype, bias, desc), **_UNIT, post_ops=post_ops
    )
    return (pd for pd in found if "_dw" in pd.implementation)


def channel_products_of_integers(
    src: MemoryDesc, bias: MemoryDesc, dst: MemoryDesc, scales: Sequence[float], post_ops: PostOps
) -> list[PrimitiveDesc]:
    """The same from integers to integers: weights int8, results times scales[c]. Their names do not say depthwise."""
    attr = Attr(post_ops, output_scales=scales, output_scales_mask=2)
    found = implementations(descriptors.convolution, *_products(src, torch.int8, bias, dst), **_UNIT, attr=attr)
    return [pd for pd in found if "gemm" not in pd.implementation]


def _products(
    src: MemoryDesc, dtype: torch.dtype, bias: MemoryDesc | None, dst: MemoryDesc
) -> tuple[MemoryDesc, MemoryDesc, MemoryDesc | None, MemoryDesc]:
    return src, MemoryDesc((src.dims[1], 1, 1, 1, 1), dtype, "any"), bias, dst


def gated(spec: TensorSpec, dtype: torch.dtype, operands: tuple[fx.Node, fx.Node]) -> Iterator[Candidate]:
    """Candidates for value [N, C, H, W] times gate [N, C, 1, 1], both computed at run time.

    The gate in blocks of channels is what kernels take as weights. In such blocks N x C is one row, so one call
    computes all samples; channels-last samples need a call each.
    """
    n, c, h, w = spec.shape
    if operands[0] is operands[1]:
        return
    block, tag = channels_of_a_block(), spatial_tags(4)[1]
    padded = -(-c // block) * block
    gate = layout((n, c, 1, 1), dtype, tag)
    blocks = layout(spec.shape, dtype, tag), layout((1, n * padded, h, w), dtype, tag), 1
    last = layout(spec.shape, dtype, "nhwc"), layout((1, c, h, w), dtype, "nhwc"), n
    for desc, seen, count in (blocks, last):
        if count > _MOST_CALLS:
            continue
        for pd in channel_products(seen, None, PostOps()):
            weights = pd.weights_desc
            assert weights is not None
            if not is_row(weights) or weights.size_bytes * count != gate.size_bytes:
                continue
            calls = []
            for sample in range(count):
                args: dict[int, Argument] = {
                    ARG_SRC: Operand(0, seen, sample * seen.size_bytes),
                    ARG_WEIGHTS: Operand(1, weights, sample * weights.size_bytes),
                    ARG_DST: Result(seen, sample * seen.size_bytes),
                }
                calls.append(primitive_template(pd, args, "convolution"))
            yield Candidate(pd.implementation, (desc, gate), desc, tuple(calls), may_overwrite=0)


def is_row(weights: MemoryDesc) -> bool:
    """Whether the weights of one channel after the other lie side by side."""
    blocks, outer = weights.inner_blocks, weights.outer_strides
    return outer is not None and len(blocks) == 1 and blocks[0] == (0, outer[0]) and not weights.offset0
