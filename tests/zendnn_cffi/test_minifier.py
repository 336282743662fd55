"""TorchDynamo's minifier finds the operation behind a wrong answer of the backend, as docs/debugging.md tells."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.backends import registry
from torch._dynamo.exc import BackendCompilerFailed

from zendnn_cffi.backend import zendnn_backend

NAME = "zendnn_with_a_wrong_gelu"


def wrong_backend(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """Ours, with a fault: it takes GELU for ReLU."""
    for node in gm.graph.nodes:
        if node.target in (F.gelu, torch._C._nn.gelu):
            node.target, node.args, node.kwargs = F.relu, node.args[:1], {}
    gm.recompile()
    return zendnn_backend(gm, inputs, options={"tune": "off"})


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x)) + 1
        return self.second(F.gelu(y)) * 2


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(registry._COMPILER_FNS, NAME, wrong_backend)
    monkeypatch.setitem(registry._BACKENDS, NAME, None)
    return NAME


def test_the_minifier_leaves_the_wrong_operation(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.chdir(tmp_path)
    settings = {"repro_after": "dynamo", "repro_level": 4, "debug_dir_root": str(tmp_path)}
    model = Network().eval().requires_grad_(False)
    with torch._dynamo.config.patch(settings):
        with pytest.raises(BackendCompilerFailed, match="Bad accuracy"):
            torch.compile(model, backend=wrong)(torch.randn(4, 8))
        (launcher,) = tmp_path.rglob("minifier_launcher.py")
        monkeypatch.setattr(sys, "argv", [str(launcher)])
        exec(compile(launcher.read_text(), str(launcher), "exec"), {"__name__": "__main__"})
    (repro,) = tmp_path.rglob("repro.py")
    forward = repro.read_text().partition("def forward")[2].partition("mod = ")[0]
    assert "gelu" in forward
    assert not any(name in forward for name in ("linear", "tanh", "mul"))
    torch._dynamo.reset()
