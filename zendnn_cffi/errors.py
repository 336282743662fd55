"""Status code -> exception: every way the binding can fail, under one base class."""

from __future__ import annotations

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
