"""The recommender notebook learns something, becomes one region, and ranks as it did before."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests.support.notebooks import execute, number_after, outputs_containing


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook after running all its cells."""
    return execute("recommender.ipynb", tmp_path_factory.mktemp("jupyter"))


def test_the_model_has_learned(executed: Any) -> None:
    assert number_after(outputs_containing(executed, "optimizer.step()"), "query is right:") > 80


def test_the_same_ranking(executed: Any) -> None:
    text = outputs_containing(executed, "rankings = ")
    assert number_after(text, "largest difference:") < 1e-3
    assert "same ten for all queries: True" in text
    kept = ast.literal_eval(text.split("bf16 keeps")[1].splitlines()[0].strip())
    assert len(kept) == 10 and min(kept) >= 5
    shown = ast.literal_eval(text.split("for a 3 show")[1].splitlines()[0].strip())
    assert shown.count(3) >= 8


def test_explain_shows_one_operation_for_all_tables(executed: Any) -> None:
    shown = outputs_containing(executed, "zendnn_cffi.explain(fast)")
    assert "<table" in shown
    assert shown.count("<td>embedding_bags</td>") == 1 and shown.count("<td>pick</td>") == 1


def test_times_and_the_error(executed: Any) -> None:
    times = outputs_containing(executed, "statistics.median(seconds)")
    assert [line.split("  ")[0] for line in times.splitlines()] == ["eager", "zendnn_cffi", "zendnn_cffi, bf16"]
    assert "Error:" in outputs_containing(executed, "except Exception as error")
