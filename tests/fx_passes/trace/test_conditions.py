"""What torch.export's check lets through passes as data, and nothing else does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fx_passes.trace.conditions import Conditions, conditions_of


def same_sum(*args: Any) -> None:
    torch._assert(args[0].size()[1] == 3, "")
    torch._assert((1 + args[0].size()[0]) == (args[1].size()[0] - 1) + 2, "")


def either(*args: Any) -> None:
    torch._assert(args[0].size()[0] == 1 or args[1].shape[0] == args[0].size(0), "")
    torch._assert(not (args[0].size()[1] % 2 == 0), "")  # noqa: SIM201  (truth of a part)


def bounds(*args: Any) -> None:
    torch._assert(2 <= args[0].size()[0] and args[0].size()[0] // 2 * 3 < 12, "")  # noqa: SIM300
    torch._assert(args[2] is None, "")


def tensors(*sizes: tuple[int, ...]) -> list[Any]:
    return [torch.empty(size, device="meta") for size in sizes]


def passes(check: Callable[..., Any], values: list[Any]) -> bool:
    try:
        check(*values)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("check", (same_sum, either, bounds))
def test_what_passes_as_data_passes_the_check(check: Callable[..., Any]) -> None:
    """The data may be stricter where the check chooses: each way that was taken once is known."""
    grid = [[(n, k), (m,), None] for n, k, m in itertools.product(range(1, 9), (2, 3, 5), range(1, 9))]
    good = [sizes for sizes in grid if passes(check, [*tensors(*sizes[:2]), None])]
    known = conditions_of(check, [None, None, None], good)
    assert known is not None and 0 < len(good) < len(grid)
    for sizes in grid:
        assert passes(known, [*tensors(*sizes[:2]), None]) == (sizes in good)
    first = conditions_of(check, [None, None, None], good[:1])
    assert first is not None
    let_through = [sizes for sizes in grid if passes(first, [*tensors(*sizes[:2]), None])]
    assert good[0] in let_through and all(sizes in good for sizes in let_through) and len(let_through) > 1
    again = Conditions(known.rows, 3)
    assert again.rows == known.rows


def test_other_inputs_and_fewer_dimensions_do_not_pass() -> None:
    known = conditions_of(same_sum, [None, None], [[(4, 3), (4,)]])
    assert known is not None and passes(known, tensors((6, 3), (6,)))
    for values in (tensors((6,), (6,)), tensors((6, 3), ()), [None, None], tensors((6, 4), (6,))):
        assert not passes(known, values)


@pytest.mark.parametrize(
    "check",
    (
        lambda x: torch._assert(x.stride()[0] == 1, ""),
        lambda x: torch._assert(int(x.size()[0]) == 4, ""),
        lambda x: torch._assert(x.size()[0] * 0.5 == 2, ""),
        lambda x: torch._assert({4: True}.get(x.size()[0], False), ""),
        lambda x: torch._assert(x.size()[0] == 5, ""),
    ),
)
def test_what_asks_for_more_than_sizes_is_not_data(check: Callable[..., Any]) -> None:
    assert conditions_of(check, [None], [[(4,)]]) is None


def test_without_a_call_that_passed_nothing_is_known() -> None:
    assert conditions_of(same_sum, [None, None], []) is None


@pytest.mark.parametrize(
    "rows",
    (
        [[(["size", 2, 0], True)]],  # of an input that there is not
        [[(["size", -1, 0], True)]],
        [[(["size", 0, "0"], True)]],
        [[(["pow", 2, 2], True)]],
        [[(["__import__", 2, 2], True)]],
        [[(["eq", 2], True)]],
        [[(["eq", 2, 1 << 70], True)]],
        [[(2.0, True)]],
        [[(["eq", 2, 2], 1)]],
        [[("eq", True)]],
        [[(2, True, 3)]],
    ),
)
def test_rows_that_say_nothing_are_refused(rows: list[Any]) -> None:
    with pytest.raises(ValueError):
        Conditions(rows, 2)


def test_rows_within_rows_without_end_are_refused() -> None:
    row: Any = 1
    for _ in range(2000):
        row = ["add", row, 1]
    with pytest.raises(ValueError, match="no condition"):
        Conditions([[(row, True)]], 1)


def test_a_division_by_nothing_does_not_pass() -> None:
    assert not passes(Conditions([[(["eq", ["mod", 4, ["size", 0, 0]], 0], True)]], 1), tensors((0,)))
