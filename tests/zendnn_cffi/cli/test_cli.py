"""`python -m zendnn_cffi`: each command once, and each error in one line."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zendnn_cffi
from zendnn_cffi.cli import bench, contenders, models
from zendnn_cffi.cli.errors import CommandError
from zendnn_cffi.cli.main import main, parser

optimize_module = importlib.import_module("zendnn_cffi.api.optimize")
SOURCE = """
import torch
from torch import nn

def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 17, 3), nn.ReLU(), nn.Flatten(), nn.Linear(17 * 49, 5)), torch.randn(2, 3, 9, 9)

def number():
    return 3

pair = network()
model = pair[0][0]
three = 3
"""
BROKEN = "import torch\n\nnetwork = torch.no_such_function()\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_network_of_a_test.py").write_text(SOURCE)
    (tmp_path / "broken_module_of_a_test.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_network_of_a_test:network"


def test_show_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show"]) == 0
    text = capsys.readouterr().out
    assert main(["show", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"zendnn", "cpu kind", "threads", "verified", "shipped times"} <= facts.keys()
    assert all(name in text for name in facts)


def test_check_finds_everything_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--seconds", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [name, "ok"] for name in ("library", "ABI", "kernels", "models", "peaks")
    ]


def test_check_ends_where_there_is_no_library(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zendnn_cffi", "check"]
    done = subprocess.run(
        command, env=os.environ | {"ZENDNN_CFFI_LIBRARY": str(tmp_path / "none.so")}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 1 and "none.so" in done.stdout and "FAILED" in done.stdout


def test_a_model_without_inputs_has_the_batch_that_was_asked_for(own: str) -> None:
    found = models.find(own.replace(":network", ":model"), 3)
    assert found.batch is None and found.args[0].shape == (3, 3, 224, 224)
    assert models.find(own, 3).batch == 2  # the function's own


def test_explain_with_times(own: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # as measured, plain PyTorch may be faster for so small a network
    monkeypatch.setattr(optimize_module, "optimize", functools.partial(optimize_module.optimize, tune="off"))
    assert main(["explain", own, "--profile"]) == 0
    out = capsys.readouterr().out
    assert "convolution" in out and "of a call's time in the engine" in out and "GFLOP/s" in out


@pytest.mark.parametrize("mode", ["latency", "throughput", "realtime"])
def test_bench_beside_eager(own: str, mode: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, drawn = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--mode", mode, "--beside", "eager", "--seconds", "0.2", "--batches", "4", "8", "--instances", "1"]
    assert main(["bench", own, *arguments, "--json", str(written), "--png", str(drawn)]) == 0
    rows = json.loads(written.read_text())["rows"]
    assert [row["contender"] for row in rows] == ["zendnn_cffi", "eager"]
    for row in rows:
        assert row["batch"] == 2  # the function's own
        assert row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"] and row["per_second"] > 0 and row["error"] < 1e-4
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert mode in capsys.readouterr().out


def test_a_contender_that_fails_has_its_reason_in_the_table(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", own, "--beside", "onnxruntime", "--dtype", "bfloat16", "--seconds", "0.1"]) == 0
    assert "no bfloat16" in capsys.readouterr().out


def test_exported_programs(own: str, tmp_path: Path) -> None:
    found = models.find(own)
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(found.model, found.args), path)
    again = models.find(str(path))
    assert torch.allclose(again.model(*again.args), found.model(*found.args))
    assert main(["explain", str(path)]) == 0


def test_models_are_as_good_as_functions_that_make_them(own: str) -> None:
    module, _, _ = own.partition(":")
    pair, alone = models.find(f"{module}:pair"), models.find(f"{module}:model")
    assert pair.args[0].shape == (2, 3, 9, 9) and len(pair.model) == 4
    assert isinstance(alone.model, torch.nn.Conv2d) and alone.args[0].shape == (1, 3, 224, 224)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out.strip() == zendnn_cffi.__version__


@pytest.mark.parametrize("name", ["squeezenet1_1", "timm:resnet10t", "hf:distilbert"])
def test_names_of_libraries(name: str) -> None:
    found = models.find(name, 3)
    assert not found.model.training
    assert all(each.shape[0] == 3 for each in (*found.args, *found.kwargs.values()))
    assert contenders.tensors(found.model(*found.args, **found.kwargs))[0].shape[0] == 3
    assert ("channels_last" in contenders.installed(found)) == (name != "hf:distilbert")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("resnet51", "near are resnet"),
        ("timm:resnet51", "timm has no model 'resnet51', near are"),
        ("", "names no model"),
        (":two", "names no model"),
        ("./own_network_of_a_test.py:network", "write it as import does, such as folder.file:network"),
        (".own_network_of_a_test:network", "is no module's name"),
        ("nowhere.pt2", "torch.export.save writes such files"),
        ("no_such_module_here:f", "no module 'no_such_module_here'"),
        ("own_network_of_a_test:nothing", "has no function 'nothing'"),
        ("broken_module_of_a_test:network", "AttributeError: module 'torch' has no attribute 'no_such_function'"),
        ("own_network_of_a_test:number", "must return a model"),
        ("own_network_of_a_test:three", "must return a model"),
        ("{folder}/garbage.pt2", "holds no exported program"),
        ("{folder}/ours.safetensors", "is a file for zendnn_cffi.load"),
    ],
)
@pytest.mark.usefixtures("own")
def test_errors_are_one_line(name: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for file in ("garbage.pt2", "ours.safetensors"):
        (tmp_path / file).write_bytes(b"abc")
    name = name.format(folder=tmp_path)
    assert main(["explain", name]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
    with pytest.raises(AttributeError if name.startswith("broken") else CommandError):
        main(["--traceback", "explain", name])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--beside", "nobody"], "no contender 'nobody'"),
        (["--cores", "4096"], "as many cores"),
        (["--instances", "4096"], "as many cores"),
        (["--json", "/no/such/folder/out.json"], "no folder"),
        (["--json", "."], "is a folder"),
    ],
)
def test_bench_refuses_at_once(own: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", own, *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--seconds", "nan"], ["--batch", "0"], ["--cores", "x"]])
def test_numbers_that_mean_nothing(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["bench", "resnet18", *arguments])


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([[1.0, 2.0]], [[1.0, 4.0]], 0.5),
        ([[1.0, 2.0], [3.0]], [[1.0, 2.0]], 0.0),  # and a cache
        ([[0.0], [1.0]], [[0.0], [2.0]], 0.5),
        ([], [], 0.0),
        ([[1.0, 2.0], [NAN]], [[1.0, 2.0], [3.0]], NAN),
        ([[NAN], [1.0]], [[1.0], [1.0]], NAN),
        ([[INF]], [[1.0]], INF),
        ([[1.0, 2.0]], [[1.0, 2.0], [3.0]], NAN),  # a result is missing
        ([[1.0]], [[1.0, 2.0]], NAN),
    ],
)
def test_differences(found: list[list[float]], expected: list[list[float]], error: float) -> None:
    """No answer at all must not seem right."""
    tensors = [
        [torch.tensor(numbers, dtype=torch.float32, device="cpu") for numbers in each] for each in (found, expected)
    ]
    assert contenders.difference(*tensors) == pytest.approx(error, nan_ok=True)


def test_what_is_not_a_number_is_null_in_files(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"mode": "latency", "contender": "zendnn_cffi", "batch": 2, "per_second": 5.0, "error": NAN}
    row |= {f"p{percent}_ms": 1.0 for percent in (50, 90, 99)}
    monkeypatch.setattr(bench, "latency", lambda *_: [row])
    written = tmp_path / "out.json"
    assert main(["bench", own, "--beside", "zendnn_cffi", "--json", str(written)]) == 0
    assert "NaN" not in written.read_text() and json.loads(written.read_text())["rows"][0]["error"] is None
    assert " nan " in capsys.readouterr().out


def test_a_contender_named_twice_runs_once(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(bench, "latency", lambda _, names, __: asked.append(names) or [])
    assert main(["bench", own, "--beside", "eager", "zendnn_cffi", "eager"]) == 0
    assert asked == [["zendnn_cffi", "eager"]]


def test_percentiles() -> None:
    times = [number * 1_000_000 for number in range(100, 0, -1)]
    assert [bench.percentile_ms(times, percent) for percent in (50, 90, 99)] == [50.0, 90.0, 99.0]
    assert bench.percentile_ms([7_000_000], 99) == 7.0


def test_names_of_torchvision_and_timm_work_in_a_new_process() -> None:
    for model in ("squeezenet1_1", "timm:test_resnet"):
        command = [sys.executable, "-m", "zendnn_cffi", "explain", model]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "convolution" in done.stdout
