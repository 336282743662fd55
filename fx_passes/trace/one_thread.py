"""While one thread follows a forward: torch.fx replaces methods of nn.Module for all threads, and says that it traces.

    thread A: optimize(model)        thread B: compiled = torch.compile(other); compiled(x)
              forward is followed              TorchDynamo compiles before that or after it; calls run meanwhile

Without that B would follow A's methods, or A's would stay in nn.Module for good: each puts back what it found. And
PyTorch refuses to call what is compiled while torch.fx traces, in whatever thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from torch.fx import _symbolic_trace as fx_tracing

from zendnn_cffi.locks import adopt_lock, making

_FLAG = "_is_fx_tracing_flag"  # one for all threads before PyTorch 2.14


@contextlib.contextmanager
def following() -> Iterator[None]:
    """Let no other thread follow a forward meanwhile, neither by this package nor by TorchDynamo.

    TorchDynamo's lock comes before ours: it holds its own while it calls our backend. So nobody may come here within
    making() who did not within following().
    """
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    lock = getattr(dynamo, "compile_lock", None)
    with contextlib.nullcontext() if lock is None else adopt_lock(lock), making():
        yield


def say_who_traces() -> None:
    """Have torch.fx say to this thread alone that it traces. To be called while it does: it resets the flag itself."""
    if getattr(fx_tracing, _FLAG, None) is True:
        setattr(fx_tracing, _FLAG, _ThisThread())


class _ThisThread:
    """True in the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread
