"""explain(...).draw(): every node is in the picture, in the colour of where it runs."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import torch
from torch import nn

import zendnn_cffi
from fx_passes.report.picture import COLOURS

SPACE = "{http://www.w3.org/2000/svg}"


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(17, 33), nn.Linear(33, 17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cumsum(self.first(x), 1)
        return self.second(y) + x


def test_regions_are_boxes_and_colours_say_where(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(3, 17), tmp_path / "graph.svg"
    fast = zendnn_cffi.optimize(Network().eval(), tune="off")
    zendnn_cffi.explain(fast).draw(path)  # before the first call
    assert COLOURS["engine"] not in _colours(path)[len(COLOURS) :]
    fast(x)
    found = zendnn_cffi.explain(fast)
    drawn = found.draw(path)
    assert drawn._repr_svg_() == path.read_text(encoding="utf-8") == found.draw().svg  # what a notebook shows
    texts = [each.text or "" for each in ElementTree.parse(path).iter(f"{SPACE}text")]
    assert all(any(node.name[:30] == text for text in texts) for node in found.nodes)
    assert all(any(text.startswith(name) for text in texts) for name in fast.regions())
    colours = _colours(path)
    assert colours.count(COLOURS["engine"]) == 1 + sum(node.in_engine for node in found.nodes) > 2
    assert colours.count(COLOURS["PyTorch"]) == 2  # the legend, and cumsum
    assert any(text.endswith(" ms alone") for text in texts) and any(" us  " in text for text in texts)


def _colours(path: Path) -> list[str]:
    found = [each.get("fill") for each in ElementTree.parse(path).iter(f"{SPACE}rect")]
    return [colour for colour in found if colour in COLOURS.values()][1:]  # the background
