"""Memory that measuring uses again: fresh pages cost a fault each, and candidates come by the hundred."""

from __future__ import annotations

import torch

from zendnn_cffi.runtime import huge_pages

_SMALLEST_BYTES = 64 << 10  # below, PyTorch's own allocator is as quick
_KEPT_BYTES = 512 << 20


class Scratch:
    """Buffers taken and given back, by size class. What was in them is still there. Not thread-safe."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self._free_bytes = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return a uint8 tensor of at least size_bytes, aligned as programs' memory is; not initialised."""
        size_bytes = size_class(size_bytes)
        if free := self._free.get(size_bytes):
            self._free_bytes -= size_bytes
            return free.pop()
        return huge_pages.allocate(size_bytes)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Nothing uses the buffer any longer; what `take` did not return is let go."""
        size_bytes = buffer.numel()
        if size_bytes < _SMALLEST_BYTES or size_bytes != size_class(size_bytes):
            return
        if self._free_bytes + size_bytes <= _KEPT_BYTES:
            self._free.setdefault(size_bytes, []).append(buffer)
            self._free_bytes += size_bytes

    def clear(self) -> None:
        """Let go of what was given back."""
        self._free.clear()
        self._free_bytes = 0


def size_class(size_bytes: int) -> int:
    """The size, or the next of eight steps between powers of two: at most an eighth more."""
    if size_bytes < _SMALLEST_BYTES:
        return max(size_bytes, 1)
    step = 1 << (size_bytes.bit_length() - 4)
    return -(-size_bytes // step) * step
