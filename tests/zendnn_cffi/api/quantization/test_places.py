"""Each row of the report names its place: the module, its weight where there are several, and which call it is."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from tests.support.lowering import noise


class Several(nn.Module):
    """Products of one module, two of them with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(noise(24, 32)), nn.Parameter(noise(32, 24))
        self.bias, self.window = nn.Parameter(noise(32)), nn.Parameter(noise(32, 32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.bias, x, self.up).relu()
        y = F.conv1d(y.unsqueeze(-1), self.window).squeeze(-1)
        return torch.matmul(y, self.down).relu() @ self.up


class Nested(nn.Module):
    """Two of these, a layer that is called twice, and one that is called once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Several(), Several()
        self.twice, self.once = nn.Linear(32, 32), nn.Linear(32, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.once(self.twice(self.twice(self.first(x)).relu())))


def _places(model: nn.Module, inputs: torch.Tensor, **options: object) -> list[str]:
    torch.manual_seed(0)
    report = zendnn_cffi.quantize(model.eval(), [inputs], tune="off", compare=False, **options).report  # type: ignore[arg-type]
    places = [row.place for row in report.layers]
    assert all(f"\n{place} " in str(report) for place in places)
    return places


def test_products_of_one_module_are_told_apart() -> None:
    parts = ["up (call 1)", "window", "down", "up (call 2)"]
    assert _places(Several(), noise(5, 24)) == parts
    places = _places(Nested(), noise(5, 24), budget=10.0)
    shared = ["twice (call 1)", "twice (call 2)", "once"]
    assert places == [*(f"first.{part}" for part in parts), *shared, *(f"last.{part}" for part in parts)]


def test_projections_of_attention_have_their_names() -> None:
    layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True)
    places = _places(nn.Sequential(layer), noise(2, 5, 24), attention=False)
    assert places == ["0.self_attn.in_proj_weight", "0.self_attn.out_proj", "0.linear1", "0.linear2"]
