"""Weights in Winograd's layouts, made by one matrix product.

The library's own reorder transforms 16 output channels of one input channel at a time, in three parallel loops each:
49,152 loops for 512 to 512 channels. A product has one, needs a quarter of the scratch memory, and takes an eighth
of the time.

Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2015), for G g G^T. The second table scales
the rows of F(4x4, 3x3) as the library's kernels undo it.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from zendnn_cffi.primitives.memory_desc import MemoryDesc

_G = {
    4: ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1)),
    6: (
        (1.13777777777778, 0, 0),
        (-0.688403361344538, -0.430252100840336, -0.26890756302521),
        (-0.688403361344538, 0.430252100840336, -0.26890756302521),
        (0.119514472455649, 0.179271708683473, 0.26890756302521),
        (0.119514472455649, -0.179271708683473, 0.26890756302521),
        (0, 0, 1),
    ),
}  # numbers a tile has along one axis -> what makes them of three
_AAOIO, _AAOBIOO, _OBAAIBOIIO = 2, 3, 4  # zendnn_wino_memory_format_t of float32
_TILE = {_AAOIO: 4, _AAOBIOO: 4, _OBAAIBOIIO: 6}  # the library's transform goes with the layout


class Layout(NamedTuple):
    """One of Winograd's layouts for weights: chunks of blocks of channels.

    alpha     numbers a tile has along one axis
    outputs   chunks, blocks of one, channels of a block
    inputs    the same
    by_chunk  whether a chunk of output channels holds its tiles, else a tile holds all chunks
    """

    alpha: int
    outputs: tuple[int, int, int]
    inputs: tuple[int, int, int]
    by_chunk: bool

    @property
    def scratch_bytes(self) -> int:
        """What pack() needs beside the weights."""
        return 9 * 4 * math.prod(self.outputs) * math.prod(self.inputs)


def layout_of(desc: MemoryDesc) -> Layout | None:
    """Return what pack() has to know of a layout; None for one that it does not write.

    None as well where users let PyTorch round products.
    """
    if not desc.is_winograd or desc.dtype != torch.float32 or not _are_products_exact():
        return None
    about = desc.ptr.format_desc.wino_desc
    kind, alpha, oc, ic = about.wino_format, about.alpha, about.oc, about.ic
    if _TILE.get(kind) != alpha or about.adj_scale != 1 or desc.dims != (oc, ic, 3, 3):  # else channels are padded
        return None
    in_outputs = about.oc_block, 1 if kind == _AAOIO else about.oc2_block
    in_inputs = about.ic_block, about.ic2_block if kind == _OBAAIBOIIO else 1
    chunks = [size // max(1, block * blocks) for size, (block, blocks) in ((oc, in_outputs), (ic, in_inputs))]
    outputs, inputs = (chunks[0], *in_outputs[::-1]), (chunks[1], *in_inputs[::-1])
    if math.prod(outputs) != oc or math.prod(inputs) != ic or alpha**2 * oc * ic * 4 != desc.size_bytes:
        return None
    return Layout(alpha, outputs, inputs, kind == _OBAAIBOIIO)


def pack(plain: torch.Tensor, layout: Layout, packed: torch.Tensor, scratch: torch.Tensor) -> None:
    """Write plain, transformed.

    plain    [O, I, 3, 3], any strides, float32 or converted to it
    packed   uint8, of the layout's size
    scratch  [layout.scratch_bytes] uint8
    """
    # chunk, block and place of the output channel; chunk, block and place of the input channel; row and column
    blocks = plain.unflatten(1, layout.inputs).unflatten(0, layout.outputs)
    taps, tiles = scratch.view(torch.float32), packed.view(torch.float32)
    transform, numbers = _transform(layout.alpha), layout.alpha**2
    if layout.by_chunk:
        ordered = blocks.permute(0, 6, 7, 3, 1, 4, 5, 2)
        taps.view(ordered.shape).copy_(ordered)
        chunks = layout.outputs[0]
        many = transform.expand(chunks, -1, -1)
        torch.bmm(many, taps.view(chunks, 9, -1), out=tiles.view(chunks, numbers, -1))
    else:
        ordered = blocks.permute(6, 7, 0, 3, 4, 5, 1, 2)
        taps.view(ordered.shape).copy_(ordered)
        torch.mm(transform, taps.view(9, -1), out=tiles.view(numbers, -1))


def _are_products_exact() -> bool:
    """Whether PyTorch computes products in float32: users may let it round them to bf16."""
    mkldnn = torch.backends.mkldnn
    backends = torch.backends, mkldnn, getattr(mkldnn, "matmul", None)
    return all(getattr(backend, "fp32_precision", "unknown") in ("none", "ieee") for backend in backends)


@lru_cache(maxsize=2)
def _transform(alpha: int) -> torch.Tensor:
    """[alpha * alpha, 9]: the transform of all taps at once."""
    one = torch.tensor(_G[alpha], dtype=torch.float64, device="cpu")
    return torch.kron(one, one).float()
