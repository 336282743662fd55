"""The folders that show how a model was compiled: what is in them, for optimize() and for torch.compile."""

from __future__ import annotations

import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import zendnn_cffi
from fx_passes.pipeline import PASSES, PlainRegion, cutting_passes
from fx_passes.report.drawing import draw
from tests.support.lowering import net, noise
from zendnn_cffi import backend

X = noise(2, 3, 8, 8)
STAGES = [run_pass.__name__ for run_pass in (*PASSES, *cutting_passes(nn.Module(), PlainRegion))]


def model() -> nn.Module:
    def fn(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(m[1](m[0](x))).mean((2, 3))
        return torch.cumsum(m[2](y), 1)

    return net(fn, nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4))


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZENDNN_CFFI_DEBUG", "TORCH_COMPILE_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def complete(graph: Path, region: str = "zen_region_0") -> None:
    """Everything that the documentation names is there."""
    captured = (graph / "00_captured.txt").read_text()
    assert "conv" in captured or "m_0" in captured
    times = (graph / "times.txt").read_text().splitlines()
    assert [line.split()[2] for line in times[1 : 1 + len(STAGES)]] == STAGES
    changed = [line.split()[2] for line in times[1 : 1 + len(STAGES)] if "(unchanged)" not in line]
    written = sorted(file.stem for file in graph.glob("[0-9]*.txt"))
    assert [name.partition("_")[2] for name in written] == ["captured", *changed]
    assert {"normalize", "fold_batch_norm", "fuse_post_ops", "partition"} <= set(changed)
    assert "in regions, which the first call lowers" in (graph / "explain.txt").read_text()
    assert "post_ops: ((eltwise, relu" in (graph / region / "graph.txt").read_text()
    for drawn in (graph / "graph.svg", graph / region / "graph.svg"):
        assert len(xml.etree.ElementTree.parse(drawn).getroot()) > 4
    signature = graph / region / "signature_0"
    program = (signature / "program.txt").read_text()
    assert "float32[2, 3, 8, 8]" in program and "convolution" in program and "nhwc" in program and "dst " in program
    assert "of the time of the regions' operations in the engine" in (signature / "explain.txt").read_text()
    lowering = "\n".join(times[1 + len(STAGES) :])
    assert "signature_0: float32[2, 3, 8, 8]" in lowering
    assert "candidates" in lowering and "packing weights" in lowering


def test_optimize_writes_a_folder_per_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZENDNN_CFFI_DEBUG", str(tmp_path / "out"))
    original = model()
    gm = zendnn_cffi.optimize(original, tune="off")
    torch.testing.assert_close(gm(X), original(X), rtol=1e-4, atol=1e-4)
    gm(noise(1, 3, 8, 8))
    other = zendnn_cffi.optimize(model(), tune="off")
    other(X)
    first, second = sorted((tmp_path / "out").iterdir())
    complete(first)
    complete(second)
    assert "float32[1, 3, 8, 8]" in (first / "zen_region_0" / "signature_1" / "program.txt").read_text()


def test_measuring_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZENDNN_CFFI_DEBUG", str(tmp_path))
    zendnn_cffi.optimize(nn.Linear(8, 8).eval())(noise(4, 8))
    (times,) = tmp_path.glob("*/times.txt")
    text = times.read_text()
    assert (
        "measuring each alone" in text or "plain PyTorch runs" in next(tmp_path.glob("*/*/*/program.txt")).read_text()
    )


def test_torch_compile_writes_into_dynamos_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    backend.register()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)), torch.no_grad():
        compiled = torch.compile(model(), backend="zendnn", options={"tune": "off"})
        compiled(X)
        zendnn_cffi.optimize(nn.Linear(8, 8).eval(), tune="off")  # not captured by dynamo: not asked for
        (run,) = tmp_path.iterdir()
        assert str(run) == torch._dynamo.utils.get_debug_dir()
    (graph,) = (run / "zendnn_cffi").iterdir()
    complete(graph)
    torch._dynamo.reset()


def test_nothing_is_written_or_kept_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gm = zendnn_cffi.optimize(model(), tune="off")
    gm(X)
    assert not list(tmp_path.iterdir())
    assert all(region.on_lowered is None for region in gm.regions().values())


def test_what_pytorch_runs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZENDNN_CFFI_DEBUG", str(tmp_path))
    zendnn_cffi.optimize(nn.Linear(8, 8).eval(), tune="off")(noise(0, 8))
    (program,) = tmp_path.glob("*/zen_region_0/signature_0/program.txt")
    assert "plain PyTorch runs: an input is empty" in program.read_text()


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZENDNN_CFFI_DEBUG", str(tmp_path / "file"))
    original = model()
    gm = zendnn_cffi.optimize(original, tune="off")
    torch.testing.assert_close(gm(X), original(X), rtol=1e-4, atol=1e-4)
    assert "nothing more is written for this model" in caplog.text


def test_drawings_have_a_box_per_node_and_an_arrow_per_edge() -> None:
    graph = fx.symbolic_trace(lambda x: (x + x.relu(), x * 2)).graph
    drawn = xml.etree.ElementTree.fromstring(draw(graph))
    tags = [element.tag.rpartition("}")[2] for element in drawn]
    assert tags.count("rect") == len(graph.nodes) == 5
    assert tags.count("line") == 6  # x to relu, add and mul; relu to add; both results to the output
