"""Whether a function goes on after an exception, by its bytecode."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import record_function

import zendnn_cffi
from fx_passes.trace.instructions import catches_exceptions


@contextlib.contextmanager
def ignoring() -> Iterator[None]:
    with contextlib.suppress(ValueError):
        yield


def excepts(x: Any) -> Any:
    try:
        return int(x)
    except ValueError:
        return 0


def excepts_all(x: Any) -> Any:
    try:
        x = int(x)
    except:  # noqa: E722
        x = 0
    return x


def names_the_exception(x: Any) -> Any:
    try:
        return int(x)
    except (ValueError, TypeError) as error:
        return str(error)


def returns_at_last(x: Any) -> Any:
    try:
        x = int(x)
    finally:
        return x  # noqa: B012


def suppresses(x: Any) -> Any:
    with contextlib.suppress(ValueError):
        return int(x)
    return 0


def of_the_users(x: Any) -> Any:
    with ignoring():
        return int(x)
    return 0


def among_others(x: Any) -> Any:
    with torch.no_grad(), contextlib.suppress(ValueError), nullcontext():
        return int(x)
    return 0


def given(x: Any) -> Any:
    with x.context:
        return int(x)
    return 0


def excepts_inside(x: Any) -> Any:
    with torch.no_grad():
        try:
            return int(x)
        except ValueError:
            return 0


def plain(x: Any) -> Any:
    return int(x)


def cleans_up(x: Any) -> Any:
    try:
        return int(x)
    finally:
        print(x)


def raises_another(x: Any) -> Any:
    try:
        return int(x)
    except ValueError as error:
        raise TypeError(x) from error


def under_autocast(x: Any) -> Any:
    with torch.autocast(device_type=x.device.type, enabled=False):
        return int(x)


def under_several(x: Any) -> Any:
    with torch.no_grad(), record_function("a"):
        x = x + 1
    with nullcontext() as found, torch.set_grad_enabled(found):
        return int(x)


CATCH = (excepts, excepts_all, names_the_exception, returns_at_last, suppresses, of_the_users, among_others, given,
         excepts_inside)  # fmt: skip
PASS_ON = (plain, cleans_up, raises_another, under_autocast, under_several)


@pytest.mark.parametrize("function", (*CATCH, *PASS_ON), ids=lambda function: function.__name__)
def test_which_functions_go_on(function: Callable[[Any], Any]) -> None:
    assert catches_exceptions(function) == (function in CATCH)  # type: ignore[arg-type]


def test_functions_are_not_kept() -> None:
    """What they refer to, a model say, would stay with them."""

    def made() -> weakref.ref[Any]:
        def function(x: Any) -> Any:
            with torch.no_grad():
                return x

        assert not catches_exceptions(function)
        return weakref.ref(function)

    assert made()() is None


class Normalizing(nn.Module):
    """A division that autocast is kept from, as in timm's EfficientViT."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.device.type != "meta":
            with torch.autocast(device_type=y.device.type, enabled=False):
                y = y / (y.abs().sum(1, keepdim=True) + 1e-5)
        result: Tensor = self.second(y)
        return result


def test_a_forward_that_keeps_autocast_off_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fx_passes.trace.root._trace_by_export", lambda *args: pytest.fail("it was exported"))
    model, x = Normalizing().eval(), torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        fast: Any = zendnn_cffi.optimize(model, (x,), tune="off")
        assert len(fast.regions()) == 1
        torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert fast(x).dtype == model(x).dtype == torch.bfloat16
