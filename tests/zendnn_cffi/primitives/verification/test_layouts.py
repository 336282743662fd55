"""Reading and writing descriptors' bytes by PyTorch, against the library's reorders."""

from __future__ import annotations

import pytest
import torch

from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC
from zendnn_cffi.primitives.memory import Memory, MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive, PrimitiveDesc
from zendnn_cffi.primitives.verification import layouts
from zendnn_cffi.primitives.verification.cases import gapped

TAGS = [
    ((3, 17), "ab"), ((3, 17), "ba"), ((2, 17, 3, 5), "acdb"), ((2, 17, 3, 5), "aBcd16b"), ((2, 17, 3), "aBc8b"),
    ((33, 17, 3, 3), "Acdb16a"), ((33, 17, 3, 3), "ABcd16b16a"), ((33, 18, 3, 3), "ABcd8b16a2b"),
    ((33, 17, 1, 1), "ABcd4b16a4b"), ((2, 17, 3, 2, 2), "acdeb"), ((2, 17, 18, 3, 3), "aBCde16c16b"),
]  # fmt: skip


@pytest.mark.parametrize(("dims", "tag"), TAGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_writes_what_a_reorder_writes(dims: tuple[int, ...], tag: str, dtype: torch.dtype) -> None:
    plain, desc = MemoryDesc(dims, dtype), MemoryDesc(dims, dtype, tag)
    source = torch.randint(-9, 10, dims).to(dtype)
    theirs, ours = (torch.full((desc.size_bytes,), 7, dtype=torch.uint8) for _ in range(2))
    Primitive(PrimitiveDesc.reorder(plain, desc)).execute(
        {ARG_SRC: Memory(plain, source), ARG_DST: Memory(desc, theirs)}
    )
    layouts.write(source, ours, desc)
    assert torch.equal(ours, theirs)
    assert torch.equal(layouts.read(ours, desc), source)


def test_gaps_and_offsets() -> None:
    desc = gapped((2, 5, 3), torch.float32)
    buffer = torch.full((desc.size_bytes,), 9, dtype=torch.uint8)
    source = torch.randn(2, 5, 3)
    layouts.write(source, buffer, desc)
    assert torch.equal(layouts.read(buffer, desc), source)
    gaps = layouts.gaps(desc)
    assert gaps is not None and int(gaps.sum()) == desc.size_bytes - source.numel() * 4 > 0
    assert bool((buffer[gaps] == 9).all())
    assert layouts.gaps(MemoryDesc((2, 17, 3, 3), torch.float32, "aBcd16b")) is None  # padding is written
    part = MemoryDesc((4, 6), torch.float32).submemory((2, 3), (1, 2))
    whole = torch.zeros(part.size_bytes, dtype=torch.uint8)
    layouts.write(torch.ones(2, 3), whole, part)
    assert int((whole.view(torch.float32) == 1).sum()) == 6 and whole.view(torch.float32)[8] == 1


def test_packed_layouts_are_not_readable() -> None:
    assert not layouts.is_readable(MemoryDesc((4, 4), torch.float32, "any"))
    assert not layouts.is_readable(MemoryDesc((4, 4), torch.int4))
    assert layouts.is_readable(MemoryDesc((4, 4), torch.float32))


@pytest.mark.parametrize(
    ("dims", "strides", "shared"),
    [((3, 4), (4, 1), False), ((3, 4), (0, 1), True), ((3, 4), (1, 3), False), ((1, 4), (0, 1), False),
     ((2, 1, 16), (17, 34, 1), False), ((2, 3, 4), (4, 8, 1), False), ((2, 3, 4), (0, 4, 1), True)],
)  # fmt: skip
def test_elements_that_share_memory_are_not_readable(
    dims: tuple[int, ...], strides: tuple[int, ...], shared: bool
) -> None:
    desc = MemoryDesc(dims, torch.float32, strides=strides)
    assert layouts.overlaps(desc) is shared
    assert layouts.is_readable(desc) is not shared


@pytest.mark.parametrize(("dims", "tag"), TAGS)
def test_blocks_share_nothing(dims: tuple[int, ...], tag: str) -> None:
    assert not layouts.overlaps(MemoryDesc(dims, torch.float32, tag))
