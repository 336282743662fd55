"""Let symbolic tracing record Python's max() and min() of numbers that come from sizes.

They compare, and a Proxy does not say which is larger. Networks that pad like TensorFlow write max(padding, 0).
"""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx


@contextlib.contextmanager
def extremes_recorded() -> Iterator[None]:
    """Record max() and min() of two or more arguments, one of them a Proxy; other calls are as before.

    Other threads' calls are, too: they have no Proxy.
    """
    thread, before = threading.get_ident(), (builtins.max, builtins.min)

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > 1 and not kwargs and threading.get_ident() == thread:
                for arg in args:
                    if isinstance(arg, fx.Proxy):
                        return arg.tracer.create_proxy("call_function", function, args, {})
            return function(*args, **kwargs)

        return call

    builtins.max, builtins.min = map(recording, before)
    try:
        yield
    finally:
        builtins.max, builtins.min = before
