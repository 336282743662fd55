"""The ways to a graph of one module tree: which goes first, what comes after it fails, what stays whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from fx_passes.trace import root
from fx_passes.trace.root import keep_whole
from fx_passes.trace.traced import WHOLE
from tests.support.graphs import check, check_equal, count, image, model_of, outside


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that were gone, one after another."""
    gone: list[str] = []
    for name in ("_trace_by_export", "trace_symbolically"):
        own = getattr(root, name)

        def noted(*args: Any, name: str = name, own: Any = own, **kwargs: Any) -> Any:
            gone.append("export" if "export" in name else "symbols")
            return own(*args, **kwargs)

        monkeypatch.setattr(root, name, noted)
    return gone


class Counts(nn.Module):
    """Torch.fx cannot follow it, torch.export can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(len(x.shape)):
            x = self.linear(x)
        return x


WAYS: dict[str, tuple[Any, bool, list[str]]] = {
    "layers": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), True, ["symbols"]),
    "layers, no example": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), False, ["symbols"]),
    "composite": (lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True), True, ["export"]),
    "composite, no example": (lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True), False, ["symbols"]),
    "asks for ranks": (Counts, True, ["symbols", "export"]),
}


@pytest.mark.parametrize("case", WAYS)
def test_the_order_of_the_ways(case: str, ways: list[str]) -> None:
    make, has_example, expected = WAYS[case]
    model, x = make().eval(), torch.randn(2, 3, 8)
    fast = zendnn_cffi.optimize(model, (x,) if has_example else None, tune="off")
    assert ways == expected
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert len(fast.regions()) == 1


def test_reasons_of_both_ways_are_told(ways: list[str]) -> None:
    model, x = Branches().eval(), image()
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    assert ways == ["symbols", "export"]
    reason = fast.leaves[WHOLE]
    assert "torch.export: " in reason and "; symbolically: " in reason


@pytest.mark.parametrize(
    ("leaves", "path", "kept"),
    [
        ({}, "a.b", ["a.b"]),
        ({"a.b": ""}, "a.b", ["a"]),
        ({"a": ""}, "a", [""]),
        ({"a.b": ""}, "c", ["a.b", "c"]),
        ({"a.b": "", "a.c": ""}, "a", ["a"]),
    ],
    ids=str,
)
def test_what_fails_again_is_kept_whole_with_what_is_around_it(
    leaves: dict[str, str], path: str, kept: list[str]
) -> None:
    assert [*keep_whole(leaves, {path: "because"})] == kept


class Branches(nn.Module):
    """Control flow on values, which no graph can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum() > 0 else self.inner(-x)


def test_a_submodule_that_cannot_be_traced_stays_whole() -> None:
    model = model_of(lambda m, x: m.c(m.b(m.c(x))).relu(), b=Branches(), c=nn.Conv2d(3, 3, 1))
    gm = check(model, image())
    check_equal(model, gm, -image())
    assert outside(gm) == {"b": 1} and count(gm)["convolution"] == 2
    assert "control flow" in gm.leaves["b"]


def test_a_model_that_cannot_be_traced_runs_as_it_is() -> None:
    def forward(m: Any, x: torch.Tensor, *more: Any, scale: int = 1, **named: Any) -> Any:
        y = m.c(x) if x.sum() > 0 else x
        return {"y": y * scale, "more": more, "named": named}

    model = model_of(forward, c=nn.Conv2d(3, 3, 1))
    gm = check(model, image())
    assert WHOLE in gm.leaves
    check_equal(model, gm, image(), 3, "z", scale=2, other=1)
    check_equal(model, copy.deepcopy(gm), -image())


class Detector(nn.Module):
    """As torchvision's: how many boxes there are depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 4, 3)

    def forward(self, images: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.postprocess_detections(self.backbone(image[None])) for image in images]

    def postprocess_detections(self, scores: torch.Tensor) -> torch.Tensor:
        return scores[scores > 0.1]


def test_a_detector_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("torch.export would follow it for minutes")

    monkeypatch.setattr("fx_passes.trace.root.export", refuse)
    model, images = Detector().eval(), [torch.randn(3, 8, 9), torch.randn(3, 9, 8)]
    fast = zendnn_cffi.optimize(model, (images,))
    assert "a detector" in fast.leaves[""]
    for ours, eager in zip(fast(images), model(images), strict=True):
        torch.testing.assert_close(ours, eager)
