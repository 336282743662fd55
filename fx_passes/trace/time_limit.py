"""A limit on the CPU time that a block takes: each call of PyTorch's functions in it looks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from torch.overrides import TorchFunctionMode


class TooLong(BaseException):
    """The limit is over. No Exception: what models catch and go on after must not be this."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TooLong at the first call of PyTorch's functions after so many seconds of this thread's CPU time."""
    with _Limit(time.thread_time() + seconds):
        yield


class _Limit(TorchFunctionMode):
    def __init__(self, end: float) -> None:
        super().__init__()
        self._end = end

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if time.thread_time() > self._end:
            raise TooLong
        return func(*args, **(kwargs or {}))
