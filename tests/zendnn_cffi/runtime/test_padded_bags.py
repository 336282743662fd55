"""Bags with a padding index by the kernel for bags without one: F.embedding_bag's answers, errors and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zendnn_cffi.runtime import padded_bags
from zendnn_cffi.runtime.padded_bags import padded_bag

TABLE = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
BAGS = torch.randint(0, 50, (6, 7), generator=torch.Generator().manual_seed(2))
FLAT, OFFSETS = BAGS.reshape(-1), torch.tensor([0, 3, 3, 20, 41])


def expected(*args: Any) -> Tensor:
    names = ("input", "weight", "offsets", "mode", "per_sample_weights", "include_last_offset", "padding_idx")
    return F.embedding_bag(**dict(zip(names, args, strict=True)))


def check(*args: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(padded_bag(*args), expected(*args), atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.fixture
def by_pytorch(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Filled by what the other kernel did not compute."""
    calls: list[Any] = []
    own = padded_bags.bag_by_pytorch
    monkeypatch.setattr(padded_bags, "bag_by_pytorch", lambda *args: calls.append(args) or own(*args))
    return calls


@pytest.mark.parametrize("padding_idx", (3, 0, -1, 49))
@pytest.mark.parametrize("dtype", (torch.int64, torch.int32))
@pytest.mark.parametrize("weighted", (False, True))
def test_sums(by_pytorch: list[Any], padding_idx: int, dtype: torch.dtype, weighted: bool) -> None:
    bags = torch.where(BAGS % 3 == 0, padding_idx % 50, BAGS).to(dtype)
    bags[2] = padding_idx % 50  # nothing but padding
    shares = torch.rand(bags.shape) if weighted else None
    check(bags, TABLE, None, "sum", shares, False, padding_idx)
    flat = None if shares is None else shares.reshape(-1)
    check(bags.reshape(-1), TABLE, OFFSETS.to(dtype), "sum", flat, False, padding_idx)
    check(bags.reshape(-1), TABLE, torch.cat([OFFSETS, torch.tensor([42])]).to(dtype), "sum", flat, True, padding_idx)
    check(bags.t(), TABLE, None, "sum", None if shares is None else shares.t(), False, padding_idx)
    assert not by_pytorch


def test_means(by_pytorch: list[Any]) -> None:
    without = torch.where(BAGS == 0, 1, BAGS)
    check(without, TABLE, None, "mean", None, False, 0)
    check(without.reshape(-1), TABLE, OFFSETS, "mean", None, False, 0)
    assert not by_pytorch
    without[1, 2] = 0
    check(without, TABLE, None, "mean", None, False, 0)
    assert len(by_pytorch) == 1


@pytest.mark.parametrize("odd", (float("nan"), float("inf")))
def test_what_is_no_number_in_padding_counts_for_nothing(odd: float) -> None:
    table, bags, shares = TABLE.clone(), BAGS.clone(), torch.rand(BAGS.shape)
    bags[:, 0], shares[:, 0] = 5, odd
    check(bags, table, None, "sum", shares, False, 5)
    table[5, 1] = odd
    check(bags, table, None, "sum", None, False, 5)
    assert padded_bag(bags, table, None, "sum", None, False, 5).isfinite().all()


@pytest.mark.parametrize("case", ("max", "double", "empty", "meta"))
def test_others_are_pytorchs(case: str, by_pytorch: list[Any]) -> None:
    mode = "max" if case == "max" else "sum"
    table = TABLE.double() if case == "double" else TABLE
    bags = torch.empty(0, dtype=torch.int64) if case == "empty" else BAGS
    offsets = torch.zeros(2, dtype=torch.int64) if case == "empty" else None
    if case == "meta":
        assert padded_bag(BAGS.to("meta"), TABLE.to("meta"), None, "sum", None, False, 0).is_meta
    else:
        check(bags, table, offsets, mode, None, False, 0)
    assert by_pytorch


def test_gradients() -> None:
    table = TABLE.clone().requires_grad_()
    padded_bag(BAGS, table, None, "sum", None, False, 0).sum().backward()
    own, table.grad = table.grad, None
    expected(BAGS, table, None, "sum", None, False, 0).sum().backward()
    assert own is not None and table.grad is not None
    torch.testing.assert_close(own, table.grad)


def test_errors_are_pytorchs() -> None:
    with torch.no_grad():
        for bags in (BAGS + 50, BAGS - 60, BAGS.float()):
            with pytest.raises((IndexError, RuntimeError)) as theirs:
                expected(bags, TABLE, None, "sum", None, False, 0)
            with pytest.raises(theirs.type):
                padded_bag(bags, TABLE, None, "sum", None, False, 0)
        with pytest.raises(ValueError, match="per_sample_weights"):
            padded_bag(BAGS, TABLE, None, "sum", torch.rand(3), False, 0)
        for padding_idx in (50, -51):
            with pytest.raises((RuntimeError, IndexError, AssertionError)) as theirs:
                expected(BAGS, TABLE, None, "sum", None, False, padding_idx)
            with pytest.raises(theirs.type):
                padded_bag(BAGS, TABLE, None, "sum", None, False, padding_idx)
