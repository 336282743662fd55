"""Limits on how long a forward is followed, by time and by calls: each call of PyTorch's functions in it looks."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from fx_passes.trace.one_thread import say_who_traces
from zendnn_cffi.locks import new_lock

# Functions that a forward may call: torch.export follows 400 a second. The 126 layers of Llama 3.1 405B call 10000,
# the patches of TimesFM 2.5, one after the other, 28000. Submodules are exported alone then.
MOST_CALLS = 12_000
_DISPATCH = "__torch_dispatch__"


class TooLong(BaseException):
    """The limit is over. No Exception: what models catch and go on after must not be this."""


class TooMany(BaseException):
    """A forward calls more functions than a graph is worth. No Exception, either."""


class _TermsInTime:
    """What a limit counts: CPU time of this thread, and the length of the terms that free sizes became.

    seconds  from here on
    longest  symbols and operations that the free sizes of a tensor may have, on average over tensors that have some: a
             model of many operations takes its time, one of long terms may take minutes for few; below 0: none are too
             short
    shrinks  seconds beyond the first ones after which fewer are allowed, half as many after twice the time
    """

    def __init__(self, seconds: float, longest: float = -1.0, shrinks: float = math.inf) -> None:
        super().__init__()
        self._end, self._longest, self._shrinks = time.thread_time() + seconds, longest, shrinks
        self._tensors, self._terms = 1, 0
        self._lengths: dict[Any, int] = {}

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.thread_time()

    def check(self) -> None:
        """Raise TooLong where sizes are long terms and no time is left."""
        beyond = -self.left
        if beyond > 0 and self._terms > self._longest * self._tensors * min(1.0, self._shrinks / beyond):
            raise TooLong

    def count(self, result: Any) -> None:
        """Count the free sizes of a tensor."""
        if isinstance(result, torch.Tensor) and (terms := sum(map(self._length_of, result.shape))):
            self._tensors += 1  # constants, of which a forward may cut a thousand from a table, would hide long terms
            self._terms += terms

    def _length_of(self, size: Any) -> int:
        return self._length(size.node.expr) if isinstance(size, torch.SymInt) else 0

    def _length(self, term: Any) -> int:
        if term not in self._lengths:
            self._lengths[term] = 1 + sum(map(self._length, term.args))
        return self._lengths[term]


class Limit(_TermsInTime, TorchFunctionMode):
    """In its block, raise TooLong where sizes became long terms, once so much of this thread's CPU time is over."""

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.check()
        result = func(*args, **(kwargs or {}))
        self.count(result)
        return result


class DispatchLimit(_TermsInTime):
    """The same limit where Dynamo reads the forward, which would follow a function mode: fake tensors look at it."""

    _of: ClassVar[dict[int, list[_TermsInTime]]] = {}  # by thread, the inmost last
    _lock = new_lock()
    _own: ClassVar[Any] = None  # FakeTensorMode's dispatch, where it is not in its place

    def __enter__(self) -> DispatchLimit:
        with self._lock:
            if not self._of:
                DispatchLimit._own = getattr(FakeTensorMode, _DISPATCH)
                setattr(FakeTensorMode, _DISPATCH, _counting(DispatchLimit._own, self._of))
            self._of.setdefault(threading.get_ident(), []).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            mine = self._of[threading.get_ident()]
            mine.pop()
            if not mine:
                del self._of[threading.get_ident()]
            if not self._of:
                setattr(FakeTensorMode, _DISPATCH, DispatchLimit._own)


def _counting(own: Callable[..., Any], limits: Mapping[int, list[_TermsInTime]]) -> Callable[..., Any]:
    """Fake tensors' dispatch, which looks at the limits of its thread."""

    @functools.wraps(own)
    def dispatch(mode: Any, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = limits.get(threading.get_ident(), ())
        if mine:
            say_who_traces()  # no function of ours is around a forward that TorchDynamo reads
        for limit in mine:
            limit.check()
        result = own(mode, func, kinds, args, kwargs)
        for limit in mine:
            limit.count(result)
        return result

    return dispatch


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
