"""What counts as a difference from eager PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.outcome import Outcome, Rules, difference, outcome

ONE = torch.ones(3)
NAN, INF = torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.inf])


def differs(ours: Any, eager: Any, exact: Any = None, rules: Rules = Rules()) -> str:  # noqa: B008
    return difference(Outcome(ours), Outcome(eager), lambda: Outcome(eager if exact is None else exact), rules)


@pytest.mark.parametrize(
    ("ours", "eager", "says"),
    (
        (ONE + 1e-3, ONE, "error 0.001"),
        (ONE.bfloat16() * 1.1, ONE.bfloat16(), "error"),
        (ONE, ONE.double(), "dtype"),
        (ONE, ONE[None], "shape"),
        (ONE.long() + 1, ONE.long(), "3 of 3 integers"),
        (NAN, INF, "nan where eager has inf"),
        (ONE[:2], NAN, "1.0 where eager has nan"),
        (INF, ONE[:2], "inf where eager has 1.0"),
        ((ONE,), (ONE, ONE), "structure"),
        ([ONE, ONE], (ONE, ONE), "structure"),
        (1.0, ONE, "float, eager's a tensor"),
        (ONE, 1.0, "Tensor, eager's float"),
        (2, 3, "2, eager's 3"),
        (ONE.to_sparse(), ONE, "layout"),
        (torch.ones(2, 3).t(), torch.ones(3, 2), "strides (1, 3), eager's (2, 1)"),
    ),
)
def test_differences(ours: Any, eager: Any, says: str) -> None:
    assert says in differs(ours, eager)


@pytest.mark.parametrize(
    ("ours", "eager"),
    (
        (ONE * (1 + 1e-7), ONE),
        (NAN, NAN.clone()),
        (ONE.to_sparse(), ONE.to_sparse()),
        (((2,), ONE), (torch.Size([2]), ONE)),
        (float("nan"), float("nan")),
    ),
)
def test_no_differences(ours: Any, eager: Any) -> None:
    assert differs(ours, eager) == ""


def test_float64_is_the_arbiter() -> None:
    """As far from eager as eager is from the truth, on the other side, is right; further is not."""
    assert differs(ONE - 1e-3, ONE + 1e-3, exact=ONE.double()) == ""
    assert "eager's own 0.001" in differs(ONE - 3e-3, ONE + 1e-3, exact=ONE.double())


def test_rules() -> None:
    assert differs(ONE, ONE + 1, rules=Rules(values=False)) == ""
    assert "shape" in differs(ONE, ONE[None], rules=Rules(values=False))
    loose = Rules(strides=False)
    assert differs(NAN, INF, rules=loose) == ""
    assert differs(torch.ones(2, 3).t(), torch.ones(3, 2), rules=loose) == ""
    assert "1.0 where eager has inf" in differs(ONE[:2], INF, rules=loose)
    assert "nan where eager has 1.0" in differs(NAN, ONE[:2], rules=loose)


def test_what_a_call_writes_to_is_compared() -> None:
    class Writes(nn.Module):
        def __init__(self, step: float) -> None:
            super().__init__()
            self.step = step
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += self.step
            return x.add_(0 if self.step == 1 else self.step).clone().fill_(1)

    eager, more = (outcome(model, model, (torch.ones(2),), {}) for model in (Writes(1), Writes(2)))
    assert difference(more, eager, lambda: eager, Rules()).startswith("args")
    more.args = eager.args
    assert difference(more, eager, lambda: eager, Rules()).startswith("state")


def test_results_that_share_memory_with_arguments() -> None:
    model = nn.Identity()
    eager = outcome(lambda x, y: (y.t(), x + 1), model, (ONE, torch.ones(2, 2)), {})
    assert eager.shared == [(1,), ()]
    copies = outcome(lambda x, y: (y.clone().t(), x + 1), model, (ONE, torch.ones(2, 2)), {})
    assert "share memory with arguments [(), ()], eager's with [(1,), ()]" in difference(
        copies, eager, Outcome, Rules()
    )


def test_errors() -> None:
    failed = Outcome(error=ValueError("no\nmore"))
    assert difference(failed, failed, Outcome, Rules()) == ""
    assert difference(failed, Outcome(ONE), Outcome, Rules()) == "raised ValueError: no"
    assert difference(Outcome(ONE), failed, Outcome, Rules()) == "eager raised ValueError: no"


def test_random_numbers_are_those_of_one_state() -> None:
    model = nn.Dropout(0.5).train()
    first, second = (outcome(model, model, (torch.ones(50),), {}) for _ in range(2))
    assert difference(first, second, lambda: second, Rules()) == ""
