"""Documents whose parts do not fit each other are refused when they are loaded, not by a call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from fx_passes.saved.errors import FileError
from tests.fx_passes.saved.test_container import _rewritten
from tests.support.lowering import noise


class Scaled(nn.Module):
    """An argument that the graph is fixed to, a layer of PyTorch's, and numbers that depend on sizes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shuffle, self.norm = nn.Conv2d(4, 8, 3), nn.PixelShuffle(2), nn.LayerNorm(12)
        self.register_buffer("shift", torch.ones(2, 1, 1))

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
        y: torch.Tensor = self.norm(self.shuffle(torch.relu(self.conv(x)))) * scale
        return y + self.shift, x - 1.0


@pytest.fixture(scope="module", params=("traced", "exported"))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model, x = Scaled().eval(), noise(2, 4, 8, 8)
    path = tmp_path_factory.mktemp("saved") / "m"
    with torch.no_grad():
        fast = zendnn_cffi.optimize(model, None if request.param == "traced" else (x,), tune="off")
        expected = fast(x)
        zendnn_cffi.save(fast, path)
        assert all(map(torch.equal, zendnn_cffi.load(path)(x), expected))
    return path


def _part(document: dict[str, Any]) -> dict[str, Any]:
    return next(part for part in document["parts"].values() if part["constants"])


def _row(document: dict[str, Any], op: str) -> list[Any]:
    return next(row for row in document["graph"]["nodes"] if row[0] == op)


def _call(document: dict[str, Any], function: str) -> list[Any]:
    graphs = (document["graph"], *(part["graph"] for part in document["parts"].values()))
    return next(row for graph in graphs for row in graph["nodes"] if row[2] == function)


def _post_op(document: dict[str, Any]) -> list[Any]:
    _, *named = _call(document, "zen.convolution")[4]
    [[_, post_op, *_]] = [value for key, value in named if key == "post_ops"]
    assert isinstance(post_op, list)
    return post_op


def _signature(document: dict[str, Any]) -> dict[str, Any]:
    return next(row for rows in document["programs"].values() for row in rows)


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a constant that a part does not have": lambda d: _part(d)["constants"].clear(),
    "a constant of no tensor": lambda d: _part(d)["constants"].append("conv.nothing"),
    "a constant that is a module": lambda d: _part(d)["constants"].append("conv"),
    "a part that is called with too much": lambda d: _row(d, "call_module")[3].append(_row(d, "call_module")[3][1]),
    "a part that is called with nothing": lambda d: _row(d, "call_module").__setitem__(3, ["tuple"]),
    "options of another kind": lambda d: _part(d)["options"].update(tune="often"),
    "time that is no number": lambda d: _part(d)["options"].update(tune_seconds="1"),
    "a kind of candidates that is none": lambda d: _part(d)["options"].update(without=["tuple", 3]),
    "an argument that forward has not": lambda d: d["arguments"]["specialized"].update(nothing=1),
    "a size that is none": lambda d: _signature(d)["inputs"][0][0].__setitem__(0, -1),
    "a size that is text": lambda d: _signature(d)["inputs"][0][0].__setitem__(0, "2"),
    "fewer strides than sizes": lambda d: _signature(d)["inputs"][0][2].pop(),
    "no input": lambda d: _signature(d)["inputs"].clear(),
    "a function of no kind": lambda d: _call(d, "zen.binary")[3].__setitem__(3, "plus"),
    "a post-op of no kind": lambda d: _post_op(d).__setitem__(2, "relu7"),
    "no thread": lambda d: _signature(d).update(threads=0),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_does_not_fit_is_refused(lie: str, saved: Path, tmp_path: Path) -> None:
    _rewritten(saved, LIES[lie], tmp_path / "lie")
    with pytest.raises(FileError):
        zendnn_cffi.load(tmp_path / "lie")


def test_an_argument_of_another_name_is_refused(saved: Path, tmp_path: Path) -> None:
    """Of exported graphs, whose inputs have names of their own, one too much."""

    def change(document: dict[str, Any]) -> None:
        nodes = document["graph"]["nodes"]
        if document["graph"]["structure"] is None:
            _row(document, "placeholder")[1:3] = ["nothing"] * 2
            _row(document, "call_module")[3] = ["tuple", ["node", "nothing"]]
        else:
            nodes.insert(1, ["placeholder", "nothing", "nothing", ["tuple"], ["dict"], ""])

    _rewritten(saved, change, tmp_path / "lie")
    with pytest.raises(FileError):
        zendnn_cffi.load(tmp_path / "lie")
