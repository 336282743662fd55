"""What PyTorch tells on the way of itself: of no use to who called us.

torch.export writes graphs and advice about a model that it cannot follow. Such a model stays PyTorch's, as a whole or
in parts, and `explain` says why. Copies of exported graphs warn of a class that PyTorch deprecates and uses itself.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

_LOGS = (
    "torch.fx.experimental.symbolic_shapes",
    "torch._subclasses.fake_tensor",
    "torch.utils._pytree",
    "torch.export",
    "torch.export._trace",
    "torch._dynamo.variables.ctx_manager",
)


class _OfOthers:
    """A stream that leaves out what one thread writes.

    thread  None: it leaves out nothing, where another thread made it sys.stderr again
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.thread: int | None = threading.get_ident()

    def write(self, text: str) -> Any:
        return len(text) if threading.get_ident() == self.thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def kept_quiet() -> Iterator[None]:
    """Let torch.export, or torchao as it is imported, write nothing to stderr and log no warnings in this thread.

    TORCH_LOGS has torch.export's logged.
    """
    thread = threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logs = [log for log in map(logging.getLogger, _LOGS) if not log.isEnabledFor(logging.INFO)]
    for log in logs:
        log.addFilter(is_of_others)
    stream: Any = _OfOthers(sys.stderr)
    try:
        with contextlib.redirect_stderr(stream):
            yield
    finally:
        stream.thread = None
        for log in logs:
            log.removeFilter(is_of_others)


@contextlib.contextmanager
def structures_copied() -> Iterator[None]:
    """Copy, or unpickle, what may hold structures of containers (pytree's) without PyTorch's warning of LeafSpec."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        yield
