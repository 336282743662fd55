"""One primitive against its reference: what is right passes, whatever is wrong is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tests.zendnn_cffi.primitives.verification import support
from tests.zendnn_cffi.primitives.verification.support import F32, inner_product, misbehave, named, row_added
from zendnn_cffi import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, Attr, PostOps
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.verification.cases import gapped
from zendnn_cffi.primitives.verification.check import NotChecked, check
from zendnn_cffi.primitives.verification.places import Guarded

REF = "ref:any"


@pytest.mark.parametrize("take", [None, partial(Guarded, at_end=True), partial(Guarded, at_end=False)])
def test_a_right_implementation_is_right(take: Any) -> None:
    for attr in (Attr(), row_added(), Attr(PostOps().sum(0.5).eltwise("tanh"))):
        assert check(named(REF, inner_product(), attr), take).right


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (support.one_number, "wrong numbers"),
        (support.before, "writes beyond"),
        (support.behind, "writes beyond"),
        (support.an_operand, "an operand that it should read"),
    ],
)
def test_what_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., None], problem: str) -> None:
    misbehave(monkeypatch, REF, spoil)
    assert problem in check(named(REF, inner_product())).problem


def test_writes_between_the_elements_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    src, weights = MemoryDesc((5, 16), F32), MemoryDesc((8, 16), F32)
    op = descriptors.inner_product(src, weights, None, gapped((5, 8), F32))

    def between(args: Any) -> None:
        support.bytes_of(args[ARG_DST]).view(F32)[9] = 0

    assert check(named(REF, op)).right
    misbehave(monkeypatch, REF, between)
    assert "between the elements" in check(named(REF, op)).problem


def test_an_operand_read_beyond_its_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Zen 5: c of [1, N] is read as [M, N]. Borders of poison spoil the result."""
    op, attr = inner_product(), row_added()

    def wide(args: Any) -> None:
        row, result = args[32768 | 2], args[ARG_DST]
        inside = support.bytes_of(row)
        whole = torch.empty(0, dtype=torch.uint8).set_(inside.untyped_storage())
        start = inside.storage_offset()
        read = whole[start : start + 5 * 32 * 4].view(F32).view(5, 32)
        support.bytes_of(result).view(F32).view(5, 32).add_(read - read[:1])

    misbehave(monkeypatch, REF, wide)
    assert "wrong numbers" in check(named(REF, op, attr)).problem


def test_weights_kept_by_their_address_are_found() -> None:
    """matmul `zendnn` of weights whose layout it chose computes with those of the first run."""
    op = descriptors.matmul(
        MemoryDesc((33, 64), F32), MemoryDesc((64, 48), F32, "any"), None, MemoryDesc((33, 48), F32)
    )
    pd = named("zendnn", op)
    assert pd.known_problem is not None and "by their address" in pd.known_problem
    assert "wrong numbers" in check(pd).problem


def test_what_has_no_reference_is_not_checked() -> None:
    pd = named(
        "jit:avx512_core" if "avx512" in _isa() else "jit:avx2", descriptors.eltwise("abs", MemoryDesc((5,), F32))
    )
    assert pd.op is not None
    pd.op.kind = "lstm"
    with pytest.raises(NotChecked, match="no reference for lstm"):
        check(pd)


def _isa() -> str:
    from zendnn_cffi.primitives.verification.records import instruction_set

    return instruction_set()


def test_noise_is_the_same_each_time_and_leaves_the_generator_alone() -> None:
    state = torch.random.get_rng_state()
    with torch.random.fork_rng(), torch.device("meta"):
        assert check(named(REF, inner_product())).right
    assert torch.equal(state, torch.random.get_rng_state())
