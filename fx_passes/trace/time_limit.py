"""Limits on how long a forward is followed, by time and by calls: each call of PyTorch's functions in it looks."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Functions that a forward may call: torch.export follows 400 a second. The 126 layers of Llama 3.1 405B call 10000,
# the patches of TimesFM 2.5, one after the other, 28000. Submodules are exported alone then.
MOST_CALLS = 12_000


class TooLong(BaseException):
    """The limit is over. No Exception: what models catch and go on after must not be this."""


class TooMany(BaseException):
    """A forward calls more functions than a graph is worth. No Exception, either."""


class Limit(TorchFunctionMode):
    """In its block, raise TooLong where sizes became long terms, once so much of this thread's CPU time is over.

    seconds  from here on
    longest  symbols and operations that the free sizes of a tensor may have, on average over tensors that have some: a
             model of many operations takes its time, one of long terms may take minutes for few; below 0: none are too
             short
    """

    def __init__(self, seconds: float, longest: float = -1.0) -> None:
        super().__init__()
        self._end, self._longest = time.thread_time() + seconds, longest
        self._tensors, self._terms = 1, 0
        self._lengths: dict[Any, int] = {}

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.thread_time()

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._terms > self._longest * self._tensors and self.left < 0:
            raise TooLong
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and (terms := sum(map(self._length_of, result.shape))):
            self._tensors += 1  # constants, of which a forward may cut a thousand from a table, would hide long terms
            self._terms += terms
        return result

    def _length_of(self, size: Any) -> int:
        return self._length(size.node.expr) if isinstance(size, torch.SymInt) else 0

    def _length(self, term: Any) -> int:
        if term not in self._lengths:
            self._lengths[term] = 1 + sum(map(self._length, term.args))
        return self._lengths[term]


class MostCalls(TorchFunctionMode):
    """In its block, raise TooMany after so many calls of PyTorch's functions; reading attributes is no call."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._calls, self._most = 0, most

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._calls += getattr(func, "__name__", "") != "__get__"
        if self._calls > self._most:
            raise TooMany(f"its forward calls more than {self._most} functions of PyTorch, as loops over data do")
        return func(*args, **(kwargs or {}))
