"""Status codes become exceptions that name what was tried."""

from __future__ import annotations

import pickle

import pytest

from zendnn_cffi import errors
from zendnn_cffi.engine.abi import IncompatibleError
from zendnn_cffi.engine.library import declarations

STATUSES = declarations("_zendnn").ffi.typeof("zendnn_status_t").relements


def test_names_are_the_declared_ones() -> None:
    declared = {value: name.removeprefix("zendnn_") for name, value in STATUSES.items()}
    assert dict(enumerate(errors.STATUS_NAMES)) == declared


def test_success_passes() -> None:
    errors.check(0, "anything")


@pytest.mark.parametrize("status", range(1, 7))
def test_status_is_named_and_kept(status: int) -> None:
    with pytest.raises(errors.ZenDNNError) as caught:
        errors.check(status, "creating the matmul primitive descriptor")
    name = errors.STATUS_NAMES[status]
    assert str(caught.value) == f"creating the matmul primitive descriptor: {name} ({status})"
    assert caught.value.status == status
    assert isinstance(caught.value, errors.UnsupportedError) == (name == "unimplemented")


def test_what_was_tried_is_written_out_where_it_failed_alone() -> None:
    class Operation:
        shown = 0

        def __str__(self) -> str:
            Operation.shown += 1
            return "matmul {1}"

    errors.check(0, "describing {}", Operation())
    assert not Operation.shown
    with pytest.raises(errors.UnsupportedError, match=r"^describing matmul \{1\}: unimplemented"):
        errors.check(errors.UNIMPLEMENTED, "describing {}", Operation())
    with pytest.raises(errors.UnsupportedError, match=r"^sizes \{1\}: unimplemented"):
        errors.check(errors.UNIMPLEMENTED, "sizes {1}")


@pytest.mark.parametrize("status", [-1, 7, 1000])
def test_unknown_status_is_an_error_too(status: int) -> None:
    with pytest.raises(errors.ZenDNNError, match=rf"unknown \({status}\)"):
        errors.check(status, "x")


@pytest.mark.parametrize(
    "kind",
    [errors.ZenDNNError, errors.UnsupportedError, errors.LibraryError, errors.MissingFunctionError, IncompatibleError],
)
def test_errors_pickle_and_share_one_base(kind: type[errors.ZenDNNError]) -> None:
    again = pickle.loads(pickle.dumps(kind("message", 3)))
    assert (type(again), str(again), again.status) == (kind, "message", 3)
    assert issubclass(kind, errors.ZenDNNError)
