"""Operands that broadcast, written out along the last dimensions: the same numbers, dtypes and strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fx_passes import ops
from fx_passes.ops import broadcasting
from fx_passes.ops.broadcasting import in_long_runs


def check(a: Tensor, b: Tensor, kind: str = "sub") -> None:
    """Both ways round."""
    for one, other in ((a, b), (b, a)):
        found, expected = ops.binary(one, other, kind), ops.BINARY[kind](one, other)
        assert torch.equal(found, expected) and found.stride() == expected.stride() and found.dtype == expected.dtype


@pytest.mark.parametrize(
    ("full", "small", "written"),
    [
        ((1, 630, 8, 3, 4, 2), (1, 1, 1, 3, 1, 2), (1, 1, 8, 3, 4, 2)),
        ((1, 630, 8, 3, 4, 2), (3, 1, 2), (1, 1, 8, 3, 4, 2)),
        ((1, 630, 8, 3, 4, 2), (1, 630, 1, 3, 1, 2), (1, 630, 1, 3, 4, 2)),
        ((9000, 4, 3), (9000, 4, 1), None),  # three loops in four would be written
        ((64, 64, 64), (64, 1, 64), None),  # the inner loop is long
        ((64, 64, 64), (64, 1, 1), None),
        ((4, 4, 4), (4, 1, 4), None),  # few numbers
        ((9000, 4, 3), (1, 4, 1), (1, 4, 3)),
    ],
)
def test_which_operand_is_written_out_how_far(
    full: tuple[int, ...], small: tuple[int, ...], written: tuple[int, ...] | None
) -> None:
    a, b = torch.randn(full), torch.randn(small)
    first, second = in_long_runs(a, b)
    assert first is a and second.shape == (small if written is None else written)
    assert (second is b) == (written is None)
    assert in_long_runs(b, a)[1] is a
    check(a, b)


def test_what_is_not_looked_at() -> None:
    a, b = torch.randn(630, 8, 3, 4, 2), torch.randn(3, 1, 2)
    for strided in (a.transpose(0, 1), a[::2]):
        assert in_long_runs(strided, b)[1] is b
        check(strided, b)
    wide = torch.randn(1, 630, 8, 3, 4, 2)
    assert in_long_runs(wide, torch.randn(5, 1, 1, 1, 1, 1))[1].shape == (5, 1, 1, 1, 1, 1)  # neither has all numbers
    with torch._subclasses.FakeTensorMode() as mode:
        assert ops.binary(mode.from_tensor(a), mode.from_tensor(b), "add").shape == a.shape
    assert ops.binary(3, 2, "add") == 5
    sparse = torch.eye(160).to_sparse()
    assert torch.equal(ops.binary(sparse, torch.full((1, 1), 2.0), "mul").to_dense(), 2 * torch.eye(160))


def test_promotion_and_gradients_are_eagers() -> None:
    a, b = torch.randn(630, 8, 3, 4, 2), torch.rand(3, 1, 2, dtype=torch.float64)
    check(a, b)
    check(a.bfloat16(), b.float())
    check(a, torch.ones(3, 1, 2, dtype=torch.int64))
    weight = nn.Parameter(torch.ones(3, 1, 2))
    ops.binary(a, weight, "mul").sum().backward()
    torch.testing.assert_close(weight.grad, a.sum((0, 1, 3)).unsqueeze(1), rtol=1e-4, atol=1e-3)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from((1, 2, 3, 8, 17)), min_size=1, max_size=5),
    kept=st.lists(st.booleans(), min_size=5, max_size=5),
    kind=st.sampled_from(sorted(ops.BINARY)),
)
def test_any_shapes(sizes: list[int], kept: list[bool], kind: str) -> None:
    small = [size if keep else 1 for size, keep in zip(sizes, kept, strict=False)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(broadcasting, "_LEAST", 1)
        check(torch.randn(sizes), torch.randn(small) + 3.0, kind)
