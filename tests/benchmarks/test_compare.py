"""The benchmark's arithmetic, its files, and two contenders for real on a small model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import case as case_module
from benchmarks import charts, compare, peers, prepare, workloads
from benchmarks.case import CALIBRATION_ROWS, DTYPES, QUANTIZED, Case
from benchmarks.contenders import CONTENDERS
from benchmarks.driver import Outcome, Protocol, Turn, _environment, _errors, run_case
from benchmarks.provisional import provisional, settle
from benchmarks.quantized import calibration_calls
from benchmarks.report import COLOURS, Result, load, overview, save, table

pytestmark = pytest.mark.slow


QUICK = Protocol(warmup=2, iterations=6, rounds=3, settle=1, seconds=5.0, min_iterations=6)


def outcome(name: str, *times_ms: float) -> Outcome:
    return Outcome(name, [int(time * 1e6) for time in times_ms], ready_s=1.0, peak_bytes=2**30, max_error=1e-6)


@pytest.fixture
def result() -> Result:
    outcomes = [
        outcome("ours", 2.0, 2.0, 9.0),
        outcome("eager", 8.0, 8.0, 8.0),
        outcome("openvino", 2.0, 3.0, 4.0),
        Outcome("onnxruntime", error="no bf16"),
    ]
    return Result(Case("resnet18", 1, "bf16"), outcomes)


def test_ratio_is_fastest_peer_over_ours(result: Result) -> None:
    peer = result.fastest_peer()
    assert peer is not None and peer.contender == "openvino"
    assert result.ratio() == pytest.approx(1.5)


def test_ratio_needs_both() -> None:
    assert Result(Case("resnet18", 1), [outcome("ours", 1.0)]).ratio() is None
    assert Result(Case("resnet18", 1), [outcome("eager", 1.0)]).ratio() is None


def test_table_names_every_contender_and_failure(result: Result) -> None:
    text = table(result)
    for row in result.outcomes:
        assert CONTENDERS[row.contender].title in text
    assert "no bf16" in text
    assert "fastest peer / ours: 1.50" in text
    assert "| resnet18 bf16 b1 | 2.00 | 8.00 | 3.00 | **1.50** |" in overview([result])


def test_results_survive_the_file(result: Result, tmp_path: Path) -> None:
    save([result], QUICK, tmp_path / "latest.json")
    assert repr(load(tmp_path / "latest.json")) == repr([result])  # repr: nan differs from itself


def test_charts_are_drawn(result: Result, tmp_path: Path) -> None:
    scaling = [Result(Case("resnet18", batch), [outcome("ours", 1.0 * batch)]) for batch in (1, 2, 4)]
    files = charts.draw([result, *scaling], tmp_path)
    assert {"speed-bf16-b1-t2.png", "scaling-resnet18-fp32.png"} <= {file.name for file in files}
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


@pytest.mark.parametrize(
    ("each_s", "turn"),
    [
        (0.001, Turn(settle=2, timed=20)),
        (0.1, Turn(settle=2, timed=10)),  # the cap: 10 s in 10 turns
        (0.6, Turn(settle=1, timed=2)),  # one call that is not counted fits a second
        (3.0, Turn(settle=0, timed=1)),  # at least four calls, a turn each
    ],
)
def test_turns_get_shorter_as_calls_get_longer(each_s: float, turn: Turn) -> None:
    protocol = Protocol(iterations=200, rounds=10, seconds=10.0, min_iterations=4, settle=2)
    assert Turn.of(each_s, protocol) == turn


def test_contenders_name_environments_that_can_be_made() -> None:
    assert {row.environment for row in CONTENDERS.values()} <= {peers.OURS, *peers.ENVIRONMENTS}


def test_standard_models_are_workloads() -> None:
    assert all(workloads.find(name).name == name for name in compare.STANDARD_MODELS)
    with pytest.raises(KeyError, match="resnet18"):
        workloads.find("resnet17")


def test_every_contender_has_a_colour_of_its_own() -> None:
    assert COLOURS.keys() == CONTENDERS.keys()
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_three_contenders_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved, answers checked, failures reported without stopping the others."""
    case = Case("squeezenet1_1", 2)
    monkeypatch.setattr(case_module, "CACHE", tmp_path)
    monkeypatch.setenv("ZENDNN_CFFI_BENCHMARK_CACHE", str(tmp_path))
    monkeypatch.setattr(peers, "VENVS", tmp_path)
    prepare.prepare(case, onnx=False)
    said: list[str] = []
    found = run_case(case, ["ours", "onednn", "eager_cl", "zentorch"], QUICK, said.append)
    ours, onednn, eager, missing = found
    for one in (ours, onednn, eager):
        assert len(one.times_ns) == 6, one.error
        assert 0 < one.max_error < 1e-4
    assert "features_0" in ours.notes["explain"] and "features_0" in onednn.notes["explain"]
    assert ours.peak_bytes >= ours.resident_bytes > 0
    assert "environment is missing" in missing.error
    assert "squeezenet" in said[0]


def test_quantized_and_float_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("squeezenet1_1", 1, "int8")
    monkeypatch.setattr(case_module, "CACHE", tmp_path)
    monkeypatch.setenv("ZENDNN_CFFI_BENCHMARK_CACHE", str(tmp_path))
    prepare.prepare(case, onnx=False)
    ours, missing, floats = run_case(case, ["ours", "eager", "ours_fp32"], QUICK, lambda text: None)
    assert missing.error == "no int8"
    assert len(ours.times_ns) == len(floats.times_ns) == 6, (ours.error, floats.error)
    assert 15 < ours.sqnr_db < 60 < 90 < floats.sqnr_db
    assert "int8" in ours.notes["report"] and "uint8" in ours.notes["explain"]
    found = Result(case, [ours, floats])
    assert f", {ours.sqnr_db:.1f} dB" in overview([found]) and f"{floats.sqnr_db:8.1f}" in table(found)


@pytest.mark.parametrize("batch", [1, 3, 16])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_nothing_is_calibrated_with_that_is_measured(
    batch: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("minilm-32", batch, dtype)
    monkeypatch.setattr(case_module, "CACHE", tmp_path)
    case.folder.mkdir(parents=True)
    arrays = prepare._calibration(workloads.find(case.workload), case)
    np.savez(case.calibration_file, *arrays)
    calls = calibration_calls(case)
    assert len(calls) >= 2 and len(calls) * batch >= CALIBRATION_ROWS
    inputs = [tensor.numpy() for tensor in workloads.find(case.workload).inputs(batch)]
    for call in calls:
        assert [array.shape for array in call] == [array.shape for array in inputs]
        assert not any((row == measured).all() for row in call[0] for measured in inputs[0])


def test_inputs_without_a_batch_are_refused() -> None:
    with pytest.raises(SystemExit, match="do not begin with the batch"):
        prepare._calibration(workloads.find("dlrm_offsets"), Case("dlrm_offsets", 2, "int8"))


def test_errors_are_those_of_all_outputs(tmp_path: Path) -> None:
    np.savez(tmp_path / "want.npz", np.array([3.0, 4.0]), np.array([10.0]))
    np.savez(tmp_path / "got.npz", np.array([3.0, 4.5]), np.array([11.0]))
    largest, sqnr_db = _errors(tmp_path / "got.npz", tmp_path / "want.npz")
    assert largest == 0.125
    assert sqnr_db == pytest.approx(20.0)  # 125 to 1.25
    assert _errors(tmp_path / "want.npz", tmp_path / "want.npz") == (0.0, float("inf"))


@pytest.mark.parametrize("name", CONTENDERS)
def test_contenders_say_which_cases_they_run(name: str) -> None:
    row = CONTENDERS[name]
    for dtype in (*DTYPES, *QUANTIZED):
        case = Case("resnet18", 1, dtype)
        if row.way(case) is None:
            with pytest.raises(ValueError, match=f"no {dtype}"):
                row.start_of(case)
    assert any(row.way(Case("resnet18", 1, dtype)) for dtype in (*DTYPES, *QUANTIZED))


def test_a_provisional_side_is_marked_and_not_compared(result: Result) -> None:
    (ours,) = [row for row in result.outcomes if row.contender == "ours"]
    ours.notes["provisional"] = 2
    assert result.ratio() is None
    assert "provisional" in next(line for line in table(result).splitlines() if "zendnn_cffi" in line)
    assert "| resnet18 bf16 b1 | 2.00 (provisional) | 8.00 | 3.00 | - |" in overview([result])


@pytest.mark.parametrize("cold", [True, False])
def test_contenders_have_caches_of_their_own(tmp_path: Path, cold: bool) -> None:
    protocol, case = Protocol(cold=cold), Case("resnet18", 1)
    found = [_environment(name, case, tmp_path / name, protocol) for name in ("ours", "ours_compile", "inductor")]
    for variable in ("ZENDNN_CFFI_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
        assert len({values[variable] for values in found}) == len(found)


@pytest.mark.parametrize("wrong", [0, 1])
def test_what_is_no_number_shows_wherever_it_is(tmp_path: Path, wrong: int) -> None:
    right = [np.ones(3), np.ones(2)]
    found = [array * np.nan if number == wrong else array for number, array in enumerate(right)]
    np.savez(tmp_path / "right.npz", *right)
    np.savez(tmp_path / "found.npz", *found)
    assert all(map(math.isnan, _errors(tmp_path / "found.npz", tmp_path / "right.npz")))


class Unsettled:
    """A region as the worker sees it."""

    is_provisional = True

    def improve(self, interrupted: Callable[[], bool]) -> bool:
        self.is_provisional = interrupted()
        return not self.is_provisional


def test_what_was_left_out_is_measured_before_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    regions = [Unsettled(), Unsettled()]
    monkeypatch.setattr("fx_passes.region.region.living_regions", lambda: regions)
    monkeypatch.setattr("fx_passes.region.later.later._waiting", set(regions))
    assert provisional() == 2
    settle()
    assert provisional() == 0
