"""Status code -> exception: every way the binding can fail, under one base class."""

from __future__ import annotations

import functools
import signal
import sys
import traceback
from types import CodeType, FunctionType, MethodType
from typing import Any

# zendnn_status_t by value; test_errors.py compares with the declarations.
STATUS_NAMES = (
    "success",
    "out_of_memory",
    "invalid_arguments",
    "unimplemented",
    "iterator_ends",
    "runtime_error",
    "not_required",
)
SUCCESS, UNIMPLEMENTED = 0, 3


class ZenDNNError(Exception):
    """The library refused a call, or would have. `status` is its code, None where no call was made."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.status))


class UnsupportedError(ZenDNNError):
    """No implementation takes these dtypes, shapes or layouts: settle it beforehand, or fall back."""


class LibraryError(ZenDNNError):
    """The engine library is absent, unsuitable or incomplete; the message says what to do."""


class MissingFunctionError(LibraryError, AttributeError):
    """A declared function that this library does not export: `hasattr` on `lib` and `blis` is False."""


class NoDataError(ValueError):
    """A tensor whose storage was freed or shrunk: PyTorch itself would read memory that is not there."""


def status_name(status: int) -> str:
    """Return "unimplemented" for 3, "unknown" for a code outside the enumeration."""
    return STATUS_NAMES[status] if 0 <= status < len(STATUS_NAMES) else "unknown"


def check(status: int, doing: str, *about: object) -> None:
    """Raise if `status` is not success. `doing` says what was tried: "creating the matmul primitive descriptor".

    about    what `doing` has {} for: written out where it failed alone, as descriptions of descriptors take long
    Raises   UnsupportedError for unimplemented, ZenDNNError for everything else; `.status` holds the code.
    """
    if status == SUCCESS:
        return
    kind = UnsupportedError if status == UNIMPLEMENTED else ZenDNNError
    doing = doing.format(*about) if about else doing
    raise kind(f"{doing}: {status_name(status)} ({status})", status)


_NOT_THEIRS = frozenset(("torch", "fx_passes", "zendnn_cffi", "numpy", *sys.stdlib_module_names)) - {"__main__"}


def is_theirs(module: str) -> bool:
    """Whether code of this module is neither ours nor PyTorch's, numpy's or Python's."""
    return module.partition(".")[0] not in _NOT_THEIRS


def interrupts(error: BaseException) -> bool:
    """Whether who calls wants to have an error that came up in work of ours: theirs, from a signal handler or a hook.

    Request timeouts are made so: Celery's SoftTimeLimitExceeded, RQ's JobTimeoutException, TimeoutError.
    """
    return isinstance(error, TimeoutError) or is_theirs(type(error).__module__) or is_of_signal_handler(error)


def is_of_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler raised an error, or what it was raised from. A model's own code may raise any other."""
    handlers = {code for number in signal.valid_signals() if (code := _code_of(signal.getsignal(number))) is not None}
    each: BaseException | None = error
    while handlers and each is not None:
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(each.__traceback__)):
            return True
        each = each.__cause__  # __context__ may be one that the caller handles now
    return False


def _code_of(handler: Any) -> CodeType | None:
    """The code of what handles a signal; None where that is not Python's: SIG_DFL, or the handler of SIGINT."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if callable(handler) and not isinstance(handler, FunctionType | MethodType):
        handler = type(handler).__call__  # an object's
    function = handler.__func__ if isinstance(handler, MethodType) else handler
    return function.__code__ if isinstance(function, FunctionType) else None
