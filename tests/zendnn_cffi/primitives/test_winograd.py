"""Weights in Winograd's layouts: what the library's own reorder makes, in each of its layouts."""

from __future__ import annotations

import pytest
import torch

from tests.support.lowering import noise
from zendnn_cffi.primitives import descriptors, winograd
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC
from zendnn_cffi.primitives.memory import Memory, MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive, PrimitiveDesc

pytestmark = pytest.mark.needs("avx512")  # as the library's Winograd convolutions

# images, input and output channels, pixels. The library fits blocks to the CPU's caches.
SHAPES = [(1, 16, 48, 4), (1, 16, 16, 14), (1, 32, 48, 14), (16, 16, 16, 4), (2, 48, 128, 14), (1, 128, 128, 56)]


def layout(images: int, inputs: int, outputs: int, pixels: int) -> MemoryDesc:
    """Of the weights that the library's first implementation wants."""
    src, dst = (MemoryDesc((images, n, pixels, pixels), torch.float32, "nChw16c") for n in (inputs, outputs))
    weights = MemoryDesc((outputs, inputs, 3, 3), torch.float32, "any")
    return PrimitiveDesc(
        descriptors.convolution(src, weights, None, dst, padding_l=1, algorithm="winograd")
    ).weights_desc  # type: ignore[return-value]


def by_the_library(plain: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    have = MemoryDesc(tuple(plain.shape), torch.float32, "nchw")
    packed = torch.empty(desc.size_bytes, dtype=torch.uint8)
    Primitive(PrimitiveDesc.reorder(have, desc)).execute({ARG_SRC: Memory(have, plain), ARG_DST: Memory(desc, packed)})
    return packed.view(torch.float32)


def by_us(plain: torch.Tensor, desc: MemoryDesc) -> torch.Tensor:
    known = winograd.layout_of(desc)
    assert known is not None
    packed = torch.full((desc.size_bytes,), 255, dtype=torch.uint8)
    winograd.pack(plain, known, packed, torch.full((known.scratch_bytes,), 255, dtype=torch.uint8))
    return packed.view(torch.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_every_layout_holds_what_the_library_writes(shape: tuple[int, int, int, int]) -> None:
    desc, plain = layout(*shape), noise(shape[2], shape[1], 3, 3)
    expected, found = by_the_library(plain, desc), by_us(plain, desc)
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()  # nine terms, summed in another order


def test_layouts_of_all_kinds_are_among_them() -> None:
    """By chunks of channels, and not; of one block for each chunk, and of several."""
    known = [winograd.layout_of(layout(*shape)) for shape in SHAPES]
    kinds = {(each.by_chunk, each.outputs[1] > 1 or each.inputs[1] > 1) for each in known if each is not None}
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}


@pytest.mark.parametrize("way", ["channels last", "every other", "bf16"])
def test_plain_weights_lie_in_any_way(way: str) -> None:
    desc, plain = layout(1, 32, 48, 14), noise(48, 32, 3, 3)
    if way == "channels last":
        given = plain.to(memory_format=torch.channels_last)
    elif way == "every other":
        given = noise(48, 64, 3, 3)[:, ::2]
    else:
        given = plain.bfloat16()
    assert torch.equal(by_us(given, desc), by_us(given.float().contiguous(), desc))


def test_other_layouts_are_left_to_the_library() -> None:
    padded, plain = layout(1, 32, 20, 14), MemoryDesc((16, 16, 3, 3), torch.float32, "nchw")
    assert padded.format == "wino" and padded.size_bytes > 16 * 32 * 20 * 4
    for desc in (padded, plain, MemoryDesc((16, 16, 3, 3), torch.float32, "any")):
        assert winograd.layout_of(desc) is None


@pytest.mark.parametrize("setting", ["medium", "high", "mkldnn", "all"])
def test_products_that_may_be_rounded_are_none(setting: str) -> None:
    desc, backends = layout(1, 16, 48, 4), torch.backends
    owner = {"mkldnn": backends.mkldnn, "all": backends}.get(setting, backends.mkldnn.matmul)
    before = owner.fp32_precision
    with backends.__allow_nonbracketed_mutation():  # PyTorch's own test modules forbid it for the process
        try:
            if setting in ("medium", "high"):
                torch.set_float32_matmul_precision(setting)
            else:
                owner.fp32_precision = "bf16"
            assert winograd.layout_of(desc) is None
        finally:
            if setting in ("medium", "high"):
                torch.set_float32_matmul_precision("highest")
            owner.fp32_precision = before
    assert winograd.layout_of(desc) is not None
