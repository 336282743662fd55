"""The table of first answers, and one contender for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cold_start, peers


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
