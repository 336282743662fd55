"""The sweep of `make hugging-face`: what it says of a model, right and wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.hugging_face import sweep
from tests.support.hugging_face import MEDIUM, SMALL, models
from zendnn_cffi import backend


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    backend.register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "MEDIUM", SMALL)


def test_a_line_for_each_way(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    sweep.check("vit", rounds=1, dtype=torch.float32)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["vit", "torch.compile", "ok"], ["vit", "optimize", "ok"]]


def test_bf16_is_compared_with_float64(
    small: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What eager's own error is, ours may be; less, it may not."""
    sweep.main(["vit", "--rounds", "1", "--dtype", "bf16"])
    assert capsys.readouterr().out.count(" ok ") == 2
    monkeypatch.setattr(sweep, "_BEYOND_EAGER", 0.0)
    assert sweep.main(["vit", "--rounds", "1", "--dtype", "bf16"]) == 1
    assert capsys.readouterr().out.count("WRONG") == 2


def test_wrong_answers_end_with_status_1(
    small: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "TOLERANCE", -1.0)
    assert sweep.main(["vit", "--rounds", "1"]) == 1
    assert capsys.readouterr().out.count("WRONG") == 2


def test_answers_without_times(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main(["vit", "--rounds", "0"]) == 0
    said = capsys.readouterr().out
    assert said.count(" ok ") == 2 and "ms:" not in said and "1 of 1 right, both ways" in said


def test_models_of_both_sizes_are_alike() -> None:
    assert {name: row.name for name, row in models(MEDIUM).items()} == {n: row.name for n, row in models().items()}
