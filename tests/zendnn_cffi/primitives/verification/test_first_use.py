"""What nothing is known of is checked before it is first used; what is wrong is passed over, and remembered."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zendnn_cffi
from tests.tolerance import assert_close
from tests.zendnn_cffi.primitives.verification import support
from tests.zendnn_cffi.primitives.verification.support import F32, inner_product, misbehave, named, row_added
from zendnn_cffi import descriptors
from zendnn_cffi import functional as zf
from zendnn_cffi.errors import UnsupportedError
from zendnn_cffi.primitives import known_problems
from zendnn_cffi.primitives.attributes import Attr, PostOps
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc
from zendnn_cffi.primitives.verification import check, first_use, records
from zendnn_cffi.primitives.verification.unchecked import is_unchecked


@pytest.fixture(autouse=True)
def unknown_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No results in the package, none in the cache folder."""
    monkeypatch.setattr(records, "VERIFIED", tmp_path / "none")
    monkeypatch.setenv("ZENDNN_CFFI_CACHE", str(tmp_path))
    caches = (records.verified, records.checked, records._others)
    for cache in caches:
        cache.cache_clear()
    zf.CACHE.clear()
    yield
    zf.CACHE.clear()
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The implementations that were checked, in order."""
    done: list[str] = []

    def counted(pd: PrimitiveDesc, *args: Any) -> check.Verdict:
        done.append(pd.implementation)
        return check.check(pd, *args)

    monkeypatch.setattr(first_use, "_check", counted)
    return done


def first_of(op: descriptors.OpDesc, attr: Attr | None = None) -> str:
    with first_use.unchecked():
        return PrimitiveDesc(op, attr).implementation


def test_functional_passes_over_a_wrong_implementation(monkeypatch: pytest.MonkeyPatch, checks: list[str]) -> None:
    x, w = torch.randn(5, 16), torch.randn(32, 16)
    wrong = first_of(inner_product())
    misbehave(monkeypatch, wrong, support.one_number)
    for _ in range(2):
        assert_close(zf.inner_product(x, w), torch.nn.functional.linear(x.double(), w.double()), k=16)
    assert checks.count(wrong) == 1


def test_handle_objects_pass_over_it_and_say_why(
    monkeypatch: pytest.MonkeyPatch, checks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    wrong = first_of(inner_product())
    misbehave(monkeypatch, wrong, support.one_number)
    with caplog.at_level(logging.INFO, "zendnn_cffi"):
        pd = PrimitiveDesc(inner_product())
    assert pd.implementation != wrong and pd.problem is None
    assert f"inner_product {wrong}" in caplog.text and "gives wrong numbers" in caplog.text
    everything = {other.implementation: other.problem for other in pd.implementations(everything=True)}
    assert "gives wrong numbers" in (everything[wrong] or "")
    assert wrong not in {other.implementation for other in pd.implementations()}
    assert checks.count(wrong) == 1


def test_where_none_is_right_the_error_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with first_use.unchecked():
        names = {pd.implementation for pd in PrimitiveDesc(inner_product()).implementations()}
    for name in names:
        misbehave(monkeypatch, name, support.behind)
    with pytest.raises(UnsupportedError, match="writes beyond its operands") as raised:
        PrimitiveDesc(inner_product())
    assert all(name in str(raised.value) for name in names)


def test_a_wrong_reorder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, blocks = MemoryDesc((2, 16, 3, 3), F32), MemoryDesc((2, 16, 3, 3), F32, "nChw16c")
    with first_use.unchecked():
        name = PrimitiveDesc.reorder(plain, blocks).implementation
    misbehave(monkeypatch, name, support.one_number)
    with pytest.raises(UnsupportedError, match="gives wrong numbers"):
        PrimitiveDesc.reorder(plain, blocks)


def test_verdicts_are_kept_on_disk(monkeypatch: pytest.MonkeyPatch, checks: list[str]) -> None:
    wrong = first_of(inner_product())
    with monkeypatch.context() as patch:
        misbehave(patch, wrong, support.one_number)
        chosen = PrimitiveDesc(inner_product()).implementation
    records.checked.cache_clear()  # as in another process
    assert PrimitiveDesc(inner_product()).implementation == chosen != wrong
    assert sorted(checks) == sorted([wrong, chosen])


def test_one_check_serves_a_kind_and_its_sizes(checks: list[str]) -> None:
    for n in (32, 48, 64):
        PrimitiveDesc(inner_product(n=n))
    assert len(checks) == 1
    PrimitiveDesc(inner_product(n=33))  # another rest
    PrimitiveDesc(inner_product(), Attr(PostOps().eltwise("relu")))
    assert len(checks) == 3


def test_what_is_recorded_is_not_checked(monkeypatch: pytest.MonkeyPatch, checks: list[str]) -> None:
    with first_use.unchecked():
        kinds = [first_use.kind_of(pd) for pd in PrimitiveDesc(inner_product()).implementations()]
    wrong, right = kinds[0], kinds[1]
    known = {wrong: "gives wrong numbers", right: ""}
    monkeypatch.setattr(records, "found", known.get)
    assert first_use.kind_of(PrimitiveDesc(inner_product())) == right and not checks


def test_a_row_that_is_read_as_a_matrix(monkeypatch: pytest.MonkeyPatch, checks: list[str]) -> None:
    """inner_product on Zen 5, made up here: right by the rule, and by the check where there is no rule."""
    x, w, row = torch.randn(5, 16), torch.randn(32, 16), torch.randn(1, 32)
    expected = torch.nn.functional.linear(x.double(), w.double()) + row.double()
    post_ops = [("binary", "add", row)]
    assert "beyond its end" in (named("zendnn", inner_product(), row_added()).known_problem or "")
    misbehave(monkeypatch, "zendnn", support.one_number, lambda pd: len(pd.attr.post_ops) > 0)
    assert_close(zf.inner_product(x, w, post_ops=post_ops), expected, k=16)
    assert "zendnn" not in checks
    monkeypatch.setattr(known_problems, "_misread", lambda entry, dst: False)
    zf.CACHE.clear()
    assert_close(zf.inner_product(x, w, post_ops=post_ops), expected, k=16)
    assert "zendnn" in checks


def test_optimize_does_not_pay_twice(monkeypatch: pytest.MonkeyPatch, checks: list[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(576, 9))
    x = torch.randn(2, 3, 8, 8)
    fast = zendnn_cffi.optimize(model.eval(), x)
    assert_close(fast(x), model.double()(x.double()), k=576)
    assert not checks


def test_what_is_too_large_or_has_no_reference_is_used(
    monkeypatch: pytest.MonkeyPatch, checks: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first_use, "LIMIT_BYTES", 100)
    with caplog.at_level(logging.INFO, "zendnn_cffi"):
        assert PrimitiveDesc(inner_product()).implementation == first_of(inner_product())
    assert "too large to be checked" in caplog.text and not checks


def test_unchecked_ends_with_its_block() -> None:
    with pytest.raises(KeyError), first_use.unchecked():
        raise KeyError
    assert not is_unchecked()


@pytest.mark.parametrize("mode", [torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode()])
def test_a_check_within_modes(mode: Any, checks: list[str]) -> None:
    with mode:
        chosen = PrimitiveDesc(inner_product()).implementation
    assert checks == [chosen]
