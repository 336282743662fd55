"""Models that torch.export cannot follow: it printed graphs and advice."""

from __future__ import annotations

import logging
import sys
import threading

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace.quiet import kept_quiet


class Asking(nn.Module):
    """Asks for a number in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y) if y.sum() > 0 else y[y[:, 0] > 0]


@pytest.mark.parametrize("has_example", (True, False))
def test_nothing_is_printed_of_a_model_that_asks_for_numbers(
    has_example: bool, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Asking().eval(), torch.randn(3, 8)
    with torch.no_grad():
        fast = zendnn_cffi.optimize(model, (x,) if has_example else None, tune="off")
        torch.testing.assert_close(fast(x), model(x))
    assert capfd.readouterr().err == ""
    assert not [r for r in caplog.records if r.name.startswith("torch") and r.levelno >= logging.WARNING]


def test_other_threads_are_heard(capfd: pytest.CaptureFixture[str]) -> None:
    log, logged = logging.getLogger("torch._subclasses.fake_tensor"), list[str]()

    def tell() -> None:
        print("heard", file=sys.stderr)
        record = logging.LogRecord(log.name, logging.WARNING, __file__, 1, "logged", None, None)
        if log.filter(record):
            logged.append(record.getMessage())

    with kept_quiet():
        tell()
        other = threading.Thread(target=tell)
        other.start()
        other.join()
    tell()
    assert capfd.readouterr().err.count("heard") == 2
    assert len(logged) == 2


def test_nobody_stays_unheard_where_two_threads_leave_it_in_turns(capfd: pytest.CaptureFixture[str]) -> None:
    before, first, second = sys.stderr, kept_quiet(), kept_quiet()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    print("heard", file=sys.stderr)
    sys.stderr = before
    assert capfd.readouterr().err == "heard\n"
