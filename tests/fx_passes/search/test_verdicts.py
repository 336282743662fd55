"""Verdicts are about work, not about the weights they were reached with: odd weights leave no trace on disk."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.search.measure import Bench
from fx_passes.search.tuner import database_for
from tests.support.lowering import net, noise
from tests.tolerance import assert_close
from zendnn_cffi import descriptors


def _negated(w: Tensor) -> Tensor:
    return torch.complex(torch.zeros_like(w), w).conj().imag


def _of_one_row(w: Tensor) -> Tensor:
    return w[:1].expand_as(w)


def _with_one(value: float) -> Callable[[Tensor], Tensor]:
    def change(w: Tensor) -> Tensor:
        w = w.clone()
        w.view(-1)[3] = value
        return w

    return change


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "negated when read": _negated,
    "of one row": _of_one_row,
    "zeros": torch.zeros_like,
    "not a number": _with_one(float("nan")),
    "infinite": _with_one(float("inf")),
    "huge": lambda w: w * 1e37,
    "tiny": lambda w: w * 1e-33,
    "constant": lambda w: torch.full_like(w, 0.1),
    "strided": lambda w: torch.stack((w, w), -1)[..., 0],
}

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(24, 40), (5, 24)),
    "convolution": (lambda: nn.Conv2d(16, 16, 3, padding=1), (1, 16, 9, 9)),
    "batch norm": (lambda: nn.BatchNorm2d(16), (2, 16, 7, 7)),
    "layer norm": (lambda: nn.LayerNorm(24), (5, 24)),
    "prelu": (lambda: nn.PReLU(16), (2, 16, 7, 7)),
}


def _model(layer: str, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A layer with changed weights between two element-wise operations."""
    model = net(lambda m, x: m[0](x + 1).tanh(), LAYERS[layer][0]())
    for name, parameter in list(model.m[0].named_parameters()):
        setattr(model.m[0], name, nn.Parameter(change(noise(*parameter.shape)), requires_grad=False))
    return model


def _became(gm: Any) -> dict[str, str]:
    return {node.source: node.became for node in zendnn_cffi.explain(gm).nodes}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("layer, mode", [("linear", "auto"), *((layer, "off") for layer in LAYERS)])
def test_odd_weights_do_not_cost_others_their_kernels(layer: str, odd: str, mode: str, fresh: Path) -> None:
    """The odd module computes what eager does; the next one, also in another process, runs as if it were the first."""
    x = noise(*LAYERS[layer][1], seed=7)
    strange, ordinary = _model(layer, ODD[odd]), _model(layer, torch.clone)
    with torch.no_grad():
        assert_close(zendnn_cffi.optimize(strange, tune=mode)(x), strange(x), k=144)
    database_for.cache_clear()  # as another process: what there is, is in the file
    gm = zendnn_cffi.optimize(ordinary, tune="off")
    with torch.no_grad():
        assert_close(gm(x), ordinary(x), k=144)
    assert not any("gave right numbers" in node.reason for node in zendnn_cffi.explain(gm).nodes)
    assert set(_became(gm).values()) != {"torch"}


def test_zeros_are_no_evidence(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution that computes something else is noticed with weights of zeros, too: others would run it."""
    right = descriptors.convolution

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **{**kwargs, "padding_l": (0, 2), "padding_r": (2, 0)})

    monkeypatch.setattr(descriptors, "convolution", wrong)
    x = noise(1, 16, 9, 9)
    for change in (torch.zeros_like, torch.clone):
        model = _model("convolution", change)
        gm = zendnn_cffi.optimize(model, tune="off")
        with torch.no_grad():
            assert_close(gm(x), model(x), k=144)
        assert "gave right numbers" in str(zendnn_cffi.explain(gm))


def test_that_all_are_wrong_is_not_kept(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, model = noise(5, 24), _model("linear", torch.clone)
    with monkeypatch.context() as patch:
        patch.setattr(Bench, "_error", lambda self, *args: 1.0)
        for mode in ("off", "full"):
            gm = zendnn_cffi.optimize(model, tune=mode)
            assert_close(gm(x), model(x).detach(), k=24)
            assert "linear" not in _became(gm).values()
    database_for.cache_clear()
    gm = zendnn_cffi.optimize(model, tune="off")
    gm(x)
    assert not any("gave right numbers" in node.reason for node in zendnn_cffi.explain(gm).nodes)


_PROCESS = """
import torch, zendnn_cffi
from torch import nn
model = nn.Sequential(nn.Linear(24, 40), nn.ReLU()).eval()
if {odd}:
    w = model[0].weight.detach()
    model[0].weight = nn.Parameter(torch.complex(torch.zeros_like(w), w).conj().imag, requires_grad=False)
fast = zendnn_cffi.optimize(model, tune="off")
x = torch.randn(5, 24)
assert torch.allclose(fast(x), model(x), atol=1e-5)
print([node.became for node in zendnn_cffi.explain(fast).nodes], "gave right numbers" in str(zendnn_cffi.explain(fast)))
"""


def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user met it: one with a parameter that is negated when it is read, then one with an ordinary layer."""
    monkeypatch.setenv("ZENDNN_CFFI_CACHE", str(tmp_path))
    for odd in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", _PROCESS.format(odd=odd)], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0 and done.stdout.rstrip().endswith("False"), done.stdout + done.stderr
