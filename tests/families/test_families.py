"""A sample of the family table, and what its program says of wrong answers; all rows are in `make models`."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from tests.families import sweep
from tests.families.check import COMPILE, EAGER, ENTRIES, OPTIMIZE, Different, Outcome, Verdict, check, difference
from tests.families.page import page
from tests.families.rows import Row, table

ROWS = table()

# Row -> operations on the engine by optimize() and torch.compile, of those that compute.
SAMPLE = {
    "cross-mha": ((9, 9), (9, 9)),
    "padded-encoder": ((40, 42), (44, 50)),
    "lstm-states": ((14, 14), (14, 14)),
    "keywords": ((9, 9), (9, 9)),
    "nerf": ((16, 59), (28, 57)),
    "two-tower": ((12, 14), (12, 14)),
}


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("name", SAMPLE)
def test_right_and_offloaded(name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # which attention is taken depends on it
    try:
        verdict = check(ROWS[name], inductor=False)
    finally:
        torch.set_num_threads(threads)
    assert verdict.is_right
    assert [(o.offloaded, o.nodes) for o in verdict.entries.values()] == [*SAMPLE[name]]


def test_every_row_has_a_name_of_its_own_and_makes_its_inputs_anew() -> None:
    assert len(ROWS) == len({row.what for row in ROWS.values()}) >= 50
    families = [row.family for row in ROWS.values()]
    assert families == sorted(families, key=families.index)
    args, kwargs = ROWS["mha"].call()
    again, named = ROWS["mha"].call()
    assert not args and not again
    assert difference(named["query"], kwargs["query"]) == 0.0 and named["query"] is not kwargs["query"]


X = torch.tensor([1.0, -2.0])
ALIKE: dict[str, tuple[Any, Any, float]] = {
    "tensors": (X, X + torch.tensor([0.0, -0.5]), 0.2),
    "nested": ({"a": [X, (X,)]}, {"a": [X, (X,)]}, 0.0),
    "infinities": (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.inf]), 0.0),
    "integers": (torch.tensor([1]), torch.tensor([1]), 0.0),
    "nothing": ((), (), 0.0),
}
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "containers": ({"a": X}, OrderedDict(a=X)),
    "keys": ({"a": X}, {"b": X}),
    "lengths": ([X], [X, X]),
    "dtypes": (X, X.double()),
    "shapes": (X, X[None]),
    "integers": (torch.tensor([1]), torch.tensor([2])),
    "infinities": (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf])),
    "numbers": ([1], [2]),
    "gradients": (X.clone().requires_grad_(), X),
}


@pytest.mark.parametrize("case", ALIKE)
def test_results_that_are_alike(case: str) -> None:
    actual, expected, error = ALIKE[case]
    assert difference(actual, expected) == error


@pytest.mark.parametrize("case", DIFFERENT)
def test_results_that_are_not(case: str) -> None:
    with pytest.raises(Different):
        difference(*DIFFERENT[case])


def _row(build: Callable[[], nn.Module] = lambda: nn.Linear(8, 8), **changes: Any) -> Row:
    return replace(Row("products", "small", "a linear", build, lambda: (torch.randn(4, 8),)), **changes)


def test_a_wrong_answer_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    other, own = nn.Linear(8, 8).eval(), zendnn_cffi.optimize
    monkeypatch.setattr(zendnn_cffi, "optimize", lambda model, inputs, **options: own(other, inputs, **options))
    verdict = check(_row(), inductor=False)
    assert verdict.entries[OPTIMIZE].fault.startswith("wrong: error") and not verdict.is_right
    assert not verdict.entries[COMPILE].fault


def test_an_error_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no\nand more")

    monkeypatch.setattr(zendnn_cffi, "optimize", refuse)
    assert check(_row(), inductor=False).entries[OPTIMIZE].fault == "raised ValueError: no"


def test_times_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.families.check.ROUNDS", 3)
    verdict = check(_row(), timed=True, inductor=False)
    assert [*verdict.medians] == [EAGER, *ENTRIES]
    assert all(len(rounds) == 3 and min(rounds) > 0 for rounds in verdict.medians.values())
    assert all(0 < outcome.share <= 1 for outcome in verdict.entries.values() if outcome.share is not None)


def _found(name: str, **changes: Any) -> Verdict:
    entries = {entry: Outcome(offloaded=3, nodes=4, regions=1, share=0.5) for entry in ENTRIES}
    entries[COMPILE] = replace(entries[COMPILE], **changes)
    return Verdict(name, entries, {EAGER: [2.0] * 3, OPTIMIZE: [1.0] * 3, COMPILE: [4.0] * 3}, sources="abc")


def test_the_page_says_what_was_found() -> None:
    wrong = _found("mha", fault="wrong: error 1e+00")
    found: dict[str, dict[str, Verdict | None]] = {
        "answers": {"mha": wrong, "lstm": None},
        "times": {"mha": _found("mha")},
    }
    text = page(found)
    line = next(line for line in text.splitlines() if "nn.MultiheadAttention" in line)
    assert "| **no** | 3 of 4 | 50% | 1 | 2.00 | 1.00 (**2.00**) | 4.00 (**0.50**) |" in line
    assert "- mha, torch.compile, answers: wrong: error 1e+00" in text
    assert "- mha, torch.compile: 2.00 of eager's time (2.00 to 2.00)" in text
    assert ROWS["lstm"].what not in text


def test_a_process_that_ends_is_a_fault_and_what_is_done_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "table", lambda: {"small": _row()})
    monkeypatch.setattr(sweep, "_run", lambda *_: os._exit(3))
    assert sweep.main(["--part", "answers", "--out", str(tmp_path)]) == 1
    assert "STATUS 3" in capsys.readouterr().out
    kept = json.loads((tmp_path / "answers" / "small.json").read_text())
    assert kept["entries"][OPTIMIZE]["fault"].startswith("the process ended")
    sweep.main(["--part", "answers", "--out", str(tmp_path)])
    assert "[ 1/1]" not in capsys.readouterr().out
