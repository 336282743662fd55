"""The table of first answers, and one contender for real."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from benchmarks import at_once, cold_start, peers


def test_the_table_has_medians_of_every_part() -> None:
    runs = [dict.fromkeys((*cold_start.PARTS, "cpu"), n) for n in (1.0, 2.0, 9.0)]
    lines = cold_start.table({("ours", "cold"): runs, ("eager", "cold"): runs, ("openvino", "cold"): []}).splitlines()
    assert lines[2] == "| ours | cold | 2.00 | 2.00 | 2.00 | 4.00 | 2.00 | 2000.0 | 2000.0 |"
    assert lines[3].startswith("| eager | none |") and len(lines) == 4


def test_peers_that_are_not_installed_are_skipped_with_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "VENVS", tmp_path)
    assert cold_start.contenders(with_peers=True) == ["eager", "ours", "ours_loaded", "inductor"]
    skipped = capsys.readouterr().err
    assert "onnxruntime: skipped" in skipped and "openvino: skipped" in skipped


def test_a_contender_that_fails_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, case: cold_start.Case, caches: Path) -> dict[str, float]:
        if name == "inductor":
            raise RuntimeError("no compiler")
        return dict.fromkeys((*cold_start.PARTS, "cpu"), float(caches.name == "ours"))

    monkeypatch.setattr(cold_start, "in_process", run)
    found = cold_start.rows_of(cold_start.Case("resnet18", 1), ["eager", "ours", "inductor"], repeats=2)
    assert {key: len(runs) for key, runs in found.items() if runs} == {
        ("eager", "cold"): 2, ("ours", "cold"): 2, ("ours", "warm"): 2,
    }  # fmt: skip
    assert [run["make"] for run in found["ours", "warm"]] == [1.0, 1.0]  # in the folder that the first run filled
    assert "inductor: skipped: no compiler" in capsys.readouterr().err


MEMBER = """
import json, sys
print("words of a contender")
for value in ("ready", {"answer": 2.0, "cpu": 3.0}, {"pss": 4000000}):
    print("@" + json.dumps(value), flush=True)
    assert sys.stdin.readline() == "\\n"
"""


def test_processes_of_a_group_begin_together_and_are_asked_one_step_after_the_other() -> None:
    group = at_once.run([sys.executable, "-c", MEMBER], os.environ, 3)
    assert group == at_once.Group((2.0, 2.0, 2.0), (3.0, 3.0, 3.0), (4000000, 4000000, 4000000))


def test_a_process_that_fails_gives_its_last_words() -> None:
    with pytest.raises(RuntimeError, match="ValueError: no such thing"):
        at_once.run([sys.executable, "-c", "raise ValueError('no such thing')"], os.environ, 2)


def test_the_table_of_processes_at_once_has_the_last_answer_and_the_sum_of_memory() -> None:
    one, four = at_once.Group((1.0,), (1.5,), (200_000_000,)), at_once.Group((1.0, 4.0), (2.0, 4.0), (50_000_000,) * 2)
    rows = {
        "ours": at_once.Rows([four], [one], [four], [one], [four]),
        "onnxruntime": at_once.Rows(alone=[one], warm=[four]),
    }
    lines = at_once.table(rows | {"failed": at_once.Rows()}, 2).splitlines()
    assert lines[2:] == [
        "| ours | 4.00 | 1.00 | 4.00 | 3.00 | 1.00 | 4.00 | 3.00 | 200 | 100 |",
        "| onnxruntime | - | 1.00 | - | - | - | 4.00 | 3.00 | 200 | 100 |",
    ]


def test_several_at_once_share_a_folder_that_one_fills_where_they_keep_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    began: list[tuple[str, bool, int]] = []

    def run(name: str, case: cold_start.Case, caches: Path, count: int) -> at_once.Group:
        began.append((name, caches.name == name, count))
        if name == "openvino":
            raise RuntimeError("no model")
        return at_once.Group((1.0,) * count, (1.0,) * count, (1,) * count)

    monkeypatch.setattr(cold_start, "at_once_in", run)
    found = cold_start.rows_together(cold_start.Case("resnet18", 1), ["ours", "openvino", "onnxruntime"], 1, 4)
    assert list(found) == ["ours", "onnxruntime"]
    assert len(found["ours"].first) == 1 and not found["onnxruntime"].first
    assert began == [
        ("ours", False, 4), ("ours", False, 1), ("ours", True, 1), ("ours", True, 1), ("ours", True, 4),
        ("openvino", False, 4),
        ("onnxruntime", True, 1), ("onnxruntime", True, 1), ("onnxruntime", True, 4),
    ]  # fmt: skip


def test_memory_of_a_process_is_more_than_nothing() -> None:
    assert at_once.pss_bytes() > 1 << 20


def test_our_modules_have_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zendnn_cffi", "fx_passes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("number = 1\n")
    found = importlib.machinery.PathFinder.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found(name, [str(tmp_path)]))
    cold_start.compile_ours()
    for name in ("zendnn_cffi", "fx_passes"):
        assert Path(importlib.util.cache_from_source(str(tmp_path / name / "__init__.py"))).exists()
