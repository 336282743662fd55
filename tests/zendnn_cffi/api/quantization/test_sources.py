"""Models that were exported before, with notes on where nodes come from or without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from tests.support.lowering import noise
from zendnn_cffi.api.quantization_report import sqnr_db


class Net(nn.Module):
    """Layers with activations as modules and functions, a normalization, a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.body = nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.body(x) + x)
        return self.down(self.act(self.up(x.mean((2, 3)))))


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.parametrize("given", ("program", "module"))
def test_exported_models_become_what_their_originals_do(given: str, strict: bool, model: Net) -> None:
    """Their flag says training, and eval() raises. Without strict=True, F.relu and sums were not found."""
    x = noise(2, 3, 9, 9)
    program = torch.export.export(model, (x,), strict=strict, dynamic_shapes=({0: torch.export.Dim("n")},))
    exported: Any = program if given == "program" else program.module()
    before = {name: value.clone() for name, value in program.state_dict.items()}
    module, report, converted = zendnn_cffi.quantize(exported, [x], tune="off", compare=False)
    expected = zendnn_cffi.quantize(model, [x], tune="off", compare=False)
    assert [(r.module, r.kind, r.computes_in) for r in report.layers] == [
        (r.module, r.kind, r.computes_in) for r in expected.report.layers
    ]
    observed = [sum("quantize_per" in str(node.target) for node in c.graph.nodes) for c in (converted, expected[2])]
    assert observed[0] == observed[1]
    with torch.no_grad():
        for batch in (2, 5):
            y = noise(batch, 3, 9, 9, seed=1)
            assert sqnr_db(model(y), module(y)) > 25
    assert all(torch.equal(value, before[name]) for name, value in program.state_dict.items())


def test_limits_are_kept_for_an_exported_model(model: Net) -> None:
    x = noise(2, 3, 9, 9)
    exported: Any = torch.export.export(model, (x,)).module()
    found = zendnn_cffi.quantize(
        *(exported, [x]), budget=20.0, accuracy=lambda module: 1.0, max_drop=0.0, tune="off", compare=False
    )
    assert found.report.verified_db is not None and found.report.verified_db > 20


@pytest.mark.parametrize("layer", (nn.BatchNorm1d(8), nn.Dropout(0.5)))
def test_what_was_exported_in_training_mode_is_refused(layer: nn.Module) -> None:
    program = torch.export.export(nn.Sequential(nn.Linear(8, 8), layer).train(), (noise(2, 8),))
    with pytest.raises(ValueError, match=r"exported in training mode .*: call eval\(\) before torch.export"):
        zendnn_cffi.quantize(program, [noise(2, 8)])


def test_what_is_quantized_already_is_refused(model: Net) -> None:
    x = noise(2, 3, 9, 9)
    converted = zendnn_cffi.quantize(model, [x], tune="off", compare=False).converted
    with pytest.raises(ValueError, match=r"model is quantized already .* give it to optimize\(\)"):
        zendnn_cffi.quantize(converted, [x])
