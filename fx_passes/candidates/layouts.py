"""The memory layouts that values of a region may take, and when two of them are the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from zendnn_cffi.engine.library import load
from zendnn_cffi.errors import ZenDNNError
from zendnn_cffi.primitives.memory import DATA_TYPES, MemoryDesc
from zendnn_cffi.values import dataclass

RANGES = {torch.uint8: (0, 255), torch.int8: (-128, 127)}  # of the dtypes that values may be kept in
_KEPT = 512  # descriptors that stay made, 2 KB each: a large network has some hundreds, each input size its own
# Per rank: channels last first (the layout most kernels are fastest in), then blocks of channels, then plain.
_TAGS = {
    block: {
        3: ("nwc", f"nCw{block}c", "ncw"),
        4: ("nhwc", f"nChw{block}c", "nchw"),
        5: ("ndhwc", f"nCdhw{block}c", "ncdhw"),
    }
    for block in (8, 16)
}


@lru_cache(maxsize=_KEPT)
def layout(shape: tuple[int, ...], dtype: torch.dtype, tag: str) -> MemoryDesc:
    """The memory descriptor of shape and dtype in the layout that tag names."""
    return MemoryDesc(shape, dtype, tag)


@dataclass(frozen=True)
class OpaqueDesc:
    """Stands for a MemoryDesc where the library has no such dtype (int64, float64): only torch calls touch the value.

    strides in elements, as MemoryDesc's. Two that differ never lie at the same bytes, and nothing reorders them.
    """

    dims: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]
    outer_strides: None = None
    offset0: int = 0

    @property
    def size_bytes(self) -> int:
        if 0 in self.dims:
            return 0
        return (sum((n - 1) * s for n, s in zip(self.dims, self.strides, strict=True)) + 1) * self.dtype.itemsize

    @property
    def format(self) -> str:
        return "strided"


@dataclass(frozen=True)
class GrowingDesc(OpaqueDesc):
    """Stands for the layout of a value whose shape is another one in each run: torch calls get whatever tensor it is.

    dims, strides  those of the run that the program was made for
    """


@dataclass(frozen=True)
class Numerics:
    """How numbers are kept as integers: value = scale * (kept - zero_point).

    dtype  torch.uint8 or torch.int8
    bits   7: none of uint8's integers is above 127; 8: any may be used
    """

    dtype: torch.dtype
    scale: float
    zero_point: int
    bits: int = 8

    @property
    def limits(self) -> tuple[int, int]:
        """The lowest integer and the highest."""
        if self.bits == 7:
            return 0, 127
        return RANGES[self.dtype]


@dataclass(frozen=True)
class Quantized:
    """The layout of a value that is kept as integers: where they lie, and what they stand for.

    Operations see the value, primitives desc alone. A conversion to or from it is a reorder.
    """

    desc: MemoryDesc
    numerics: Numerics

    @property
    def dims(self) -> tuple[int, ...]:
        return self.desc.dims

    @property
    def dtype(self) -> torch.dtype:
        return self.numerics.dtype

    @property
    def strides(self) -> tuple[int, ...] | None:
        return self.desc.strides

    @property
    def outer_strides(self) -> tuple[int, ...] | None:
        return self.desc.outer_strides

    @property
    def size_bytes(self) -> int:
        return self.desc.size_bytes

    @property
    def format(self) -> str:
        return self.desc.format

    def reshape(self, dims: Sequence[int]) -> Quantized:
        return Quantized(self.desc.reshape(dims), self.numerics)

    def __str__(self) -> str:
        zero = f" from {self.numerics.zero_point}" if self.numerics.zero_point else ""
        return f"{self.format} {str(self.dtype).removeprefix('torch.')}{zero}"


Layout = MemoryDesc | Quantized  # or OpaqueDesc, which only torch calls see


def in_memory(desc: Layout) -> MemoryDesc:
    """The layout as primitives see it."""
    return desc.desc if isinstance(desc, Quantized) else desc


def is_known_dtype(dtype: torch.dtype) -> bool:
    """Whether the library has this dtype at all."""
    return dtype in DATA_TYPES


def has_avx512() -> bool:
    """Whether the library's kernels may use AVX-512 here."""
    return load().runs("cpu_isa_avx512_core")


def has_vnni() -> bool:
    """Whether kernels add products of 8-bit integers at 32 bits here; others add two at 16 bits first."""
    return load().runs("cpu_isa_avx512_core_vnni")


def has_bf16_kernels() -> bool:
    """Whether primitives compute in bfloat16 here: the library's kernels for it need AVX-512.

    Without, values in bfloat16 are float32 inside of regions. PyTorch's kernels are slow there, too: a convolution of
    64 channels takes 58 times as long as in float32, a linear layer of 128 rows 5 times (Zen 3, two threads).
    """
    return has_avx512()


def computed_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values of a dtype have inside of regions: float32 for float16, for which nobody has fast kernels.

    PyTorch takes 30 times as long for a ResNet-18 in float16 as in float32 (two threads, without AVX512_FP16).
    """
    narrow = dtype == torch.float16 or (dtype == torch.bfloat16 and not has_bf16_kernels())
    return torch.float32 if narrow else dtype


@lru_cache(maxsize=_KEPT)
def strided(shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...]) -> MemoryDesc:
    """The memory descriptor of a plain tensor with these strides (elements)."""
    return MemoryDesc(shape, dtype, strides=strides)


@lru_cache(maxsize=_KEPT)
def is_describable(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the library takes these strides (elements): not where rows reach into each other, as every second row of
    an odd number does."""
    try:
        strided(shape or (1,), torch.float32, strides or (1,))
    except (ZenDNNError, ValueError):
        return False
    return True


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides (elements) of a dense row-major tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@lru_cache(maxsize=_KEPT)
def row_major(shape: tuple[int, ...], dtype: torch.dtype) -> MemoryDesc:
    """The dense row-major layout."""
    return MemoryDesc(shape, dtype, strides=contiguous_strides(shape))


def channels_of_a_block() -> int:
    """How many channels lie side by side in blocked layouts: float32 numbers of a register, 16 with AVX-512, else 8."""
    return 16 if has_avx512() else 8


def spatial_tags(ndim: int) -> tuple[str, ...]:
    """Layout tags for activations [N, C, *spatial] of rank ndim, the preferred one first, then blocks of channels."""
    return _TAGS[channels_of_a_block()].get(ndim, ())


def activation_layouts(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[MemoryDesc, ...]:
    """Every layout that kernels of activations are asked for; the dense row-major one alone for rank 1 and 2."""
    tags = spatial_tags(len(shape))
    if not tags:
        return (row_major(shape, dtype),)
    return tuple(layout(shape, dtype, tag) for tag in tags)


@lru_cache(maxsize=4 * _KEPT)
def same_bytes(a: Layout, b: Layout) -> bool:
    """Whether the same elements lie at the same addresses under both descriptors: no reorder is needed between them.

    Integers are the same elements where they stand for the same numbers.
    """
    if isinstance(a, Quantized) or isinstance(b, Quantized):
        if not (isinstance(a, Quantized) and isinstance(b, Quantized)) or a.numerics != b.numerics:
            return False
        return same_bytes(a.desc, b.desc)
    if a == b:
        return True
    if a.dims != b.dims or a.dtype != b.dtype or a.size_bytes != b.size_bytes:
        return False  # weights may have sums of theirs behind them
    return _canonical(a) == _canonical(b) is not None


def _canonical(desc: MemoryDesc) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    """Per dimension its (size, stride) factors, outer first, merged where contiguous; None where padded or opaque."""
    if desc.outer_strides is None or desc.offset0:
        return None
    factors: list[list[tuple[int, int]]] = [[] for _ in desc.dims]
    step = 1
    for axis, block in reversed(desc.inner_blocks):
        factors[axis].insert(0, (block, step))
        step *= block
    for axis, (size, stride) in enumerate(zip(desc.dims, desc.outer_strides, strict=True)):
        inner = 1
        for block, _ in factors[axis]:
            inner *= block
        if size % inner:
            return None
        factors[axis].insert(0, (size // inner, stride))
    return tuple(_merged([f for f in axis_factors if f[0] != 1]) for axis_factors in factors)


def _merged(factors: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbouring factors of one dimension joined where the outer one steps over exactly the inner one."""
    merged: list[tuple[int, int]] = []
    for size, stride in factors:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged)
