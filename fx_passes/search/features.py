"""What the time of a primitive is learned from: which kernel it is, and the sizes that it works on, as logarithms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from fx_passes.candidates.candidates import PrimitiveTemplate
from zendnn_cffi.primitives.attributes import PostOps
from zendnn_cffi.primitives.memory import MemoryDesc

_BLOCK = 16  # float32 numbers of an AVX-512 register
_WINDOWS = frozenset({"convolution", "deconvolution"})
_PRODUCTS = frozenset({"inner_product", "matmul"})
_CHEAP = frozenset({"relu", "linear", "clip", "clip_v2", "abs", "square", "bounded_relu"})  # the rest computes a series
_KEPT = 512  # descriptors whose names stay made, 4 KB each: each input size has some of its own
_SERIES = 360.0  # products that take as long as one of them: gelu in a transformer's linear layers, Zen 4


class Facts(NamedTuple):
    """One primitive as an estimate sees it; numbers are binary logarithms, or counts.

    kernel      its kind, its implementation, the layouts and types that it reads and writes
    work        factors of its work: where one doubles, the time doubles, roughly
    others      what else changes the share of the peak that it reaches
    size_bytes  of what it reads and writes
    """

    kernel: str
    work: tuple[float, ...]
    others: tuple[float, ...]
    size_bytes: int


def facts_of(template: PrimitiveTemplate) -> Facts | None:
    """The facts of one primitive; None where nothing is said of its kind here, or a size is 0."""
    pd = template.pd
    descs: Mapping[str, Any] = {"src": pd.src_desc, "dst": pd.dst_desc} if pd.op is None else pd.op.descs
    params = {} if pd.op is None else pd.op.params
    src = descs.get("src") or descs.get("data") or descs.get("src_0")
    dst = descs.get("dst") or src
    if src is None or dst is None or 0 in src.dims or 0 in dst.dims:
        return None
    kernel = f"{template.kind} {pd.implementation} {_format(src)} {_format(dst)}"
    read = descs.get("weights")
    size_bytes = src.size_bytes + dst.size_bytes + (0 if read is None else math.prod(read.dims) * read.dtype.itemsize)
    if template.kind in _WINDOWS:
        sort, work, others = _window(src, dst, descs["weights"], params)
        terms = work[0] + work[3]
    elif template.kind in _PRODUCTS:
        sort, work, others = _product(src, dst)
        terms = work[1]
    else:
        sort, work, others = _movement(src, descs, params)
        terms = 0.0
    return Facts(kernel + sort, work, (*others, *_absorbed(pd.attr.post_ops, terms)), size_bytes)


_Sizes = tuple[str, tuple[float, ...], tuple[float, ...]]


def _window(src: MemoryDesc, dst: MemoryDesc, weights: MemoryDesc, params: Mapping[str, Any]) -> _Sizes:
    groups = weights.dims[0] if len(weights.dims) > len(src.dims) else 1
    inputs, outputs = src.dims[1] // groups, dst.dims[1] // groups
    sort = "" if groups == 1 else " depthwise" if inputs == outputs == 1 else " grouped"
    pixels, window = dst.dims[0] * math.prod(dst.dims[2:]), math.prod(weights.dims[2 - len(src.dims) :])
    strided = float(any(step > 1 for step in params["strides"]))
    work = _log(inputs), _log(dst.dims[1]), _log(pixels), _log(window)
    return sort, work, (strided, _padding(inputs), _padding(outputs), _log(dst.dims[-1]))


def _product(src: MemoryDesc, dst: MemoryDesc) -> _Sizes:
    inner = src.dims[-1] if src.ndim == dst.ndim else math.prod(src.dims[1:])
    columns = dst.dims[-1]
    work = _log(dst.dims[-2]), _log(inner), _log(columns), _log(math.prod(dst.dims[:-2]))
    return "", work, (_padding(inner), _padding(columns))


def _movement(src: MemoryDesc, descs: Mapping[str, Any], params: Mapping[str, Any]) -> _Sizes:
    described = [desc for desc in descs.values() if isinstance(desc, MemoryDesc)]
    moved, inner = sum(desc.size_bytes for desc in described), src.dims[1] if src.ndim > 1 else 1
    algorithm = str(params.get("algorithm", params.get("kind", "")))
    window = _log(math.prod(params.get("kernel", ())))
    return f" {algorithm}".rstrip(), (_log(moved),), (window, _log(inner), float(len(described)))


def _absorbed(post_ops: PostOps, terms: float) -> tuple[float, float, float]:
    """Post-ops by what they cost beside a sum of 2**terms products: little, a series for each number, an operand."""
    if not post_ops.entries:
        return 0.0, 0.0, 0.0
    eltwise = [entry[1] for entry in post_ops if entry[0] == "eltwise"]
    cheap = sum(kind in _CHEAP for kind in eltwise)
    series = math.log2(1.0 + _SERIES * (len(eltwise) - cheap) / 2.0**terms)
    return float(cheap), series, float(len(post_ops) - len(eltwise))


@lru_cache(maxsize=_KEPT)
def _format(desc: MemoryDesc) -> str:
    return f"{desc.format} {str(desc.dtype).removeprefix('torch.')}"


def _padding(count: int) -> float:
    """How much more whole vectors are than a count of channels."""
    return math.log2(-(-count // _BLOCK) * _BLOCK / count)


def _log(count: int) -> float:
    return math.log2(count) if count > 1 else 0.0
