"""Memory that a file is mapped into."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch

from zendnn_cffi.runtime.madvise import madvise


def let_go(tensors: Iterable[torch.Tensor]) -> None:
    """Take tensors' pages out of this process: what is read again comes from the file, by the system's cache.

    tensors  mapped from a file, and not written to: writes are lost. Those side by side are one call.
    """
    if (give_advice := madvise()) is None:
        return
    spans: list[tuple[int, int]] = []
    for begin, size_bytes in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        if spans and begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], begin + size_bytes)
        else:
            spans.append((begin, begin + size_bytes))
    for begin, end in spans:
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            give_advice(first, last - first, mmap.MADV_DONTNEED)
