"""The table of texts: sides that take turns, answers compared, backends that raise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks import generation
from benchmarks.generation import Side, compare, llama, rows


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    torch.compiler.reset()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        yield


def prompt(texts: int = 1, length: int = 6) -> torch.Tensor:
    return torch.randint(0, 64, (texts, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("weights", ["float32", "bf16", "int8", "int4"])
def test_answers_are_eagers(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_UNCOUNTED", 0)
    eager, ours = compare(llama(1, 256, 64), weights, ("eager", "zendnn"), prompt(), 2, 2)
    assert ours.error < 0.1 and eager.error != eager.error
    for side in (eager, ours):
        assert len(side.prompts_ms) == len(side.steps_ms) == 2 and min(side.prompts_ms) > 0


def test_a_backend_that_raises_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(generation, "_UNCOUNTED", 0)
    found = compare(llama(1, 64, 64), "float32", ("eager", "no such backend"), prompt(2), 1, 1)
    assert [side.backend for side in found] == ["eager"]
    assert "float32, no such backend: InvalidBackend" in capsys.readouterr().out


def test_the_table() -> None:
    sides = [
        Side("eager", lambda *_: None, [10.0, 12.0, 14.0], [4.0, 4.0, 4.0]),
        Side("zendnn", lambda *_: None, [5.0, 6.0, 7.0], [2.0, 2.0, 1.0], 1e-6),
    ]
    assert rows("bf16", sides) == [
        ["bf16", "eager", "12.0", "4.0", ""],
        ["bf16", "zendnn", "6.0 (2.00, 2.00 to 2.00)", "2.0 (2.00, 2.00 to 4.00)", "1e-06"],
    ]
    (alone,) = rows("bf16", sides[1:])
    assert alone[2:4] == ["6.0", "2.0"]


def test_logits_that_are_no_numbers_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second token, too."""
    monkeypatch.setattr(generation, "_UNCOUNTED", 0)
    monkeypatch.setattr(generation, "_difference", lambda ours, _: next(errors))
    errors = iter((1e-6, float("nan")))
    _, ours = compare(llama(1, 64, 64), "float32", ("eager", "zendnn"), prompt(), 1, 1)
    assert ours.error != ours.error
