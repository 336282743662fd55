"""Of a model that is no graph, the submodules that are graphs are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fx_passes.trace.submodules import find_submodules
from tests.support.detector import Detector


def found(model: nn.Module, example: Any = None, refused: tuple[str, ...] = ()) -> dict[str, Any]:
    """Path -> the example that a submodule is traced with."""
    paths = {id(module): path for path, module in model.named_modules()}
    calls: Any = None if example is None else ((example,), {})
    return find_submodules(model, calls, lambda m, call: None if paths[id(m)] in refused else (call or ()))


def test_the_outermost_ones_with_what_they_are_called_with() -> None:
    images = [torch.randn(3, 8, 9)]
    model = Detector().eval()
    calls = found(model, images)
    assert [*calls] == ["backbone", "head"]
    ((features,), named) = calls["head"]
    assert not named and [f.shape for f in features] == [(1, 4, 6, 7), (1, 4, 4, 5)]


def test_those_within_one_that_is_no_graph() -> None:
    assert [*found(Detector().eval(), [torch.randn(3, 8, 9)], ("head",))] == ["backbone", "head.towers.0"]


@pytest.mark.parametrize("example", (None, [torch.randn(3, 8, 9)]))
def test_heads_of_single_boxes_and_what_is_not_called_are_left_out(example: Any) -> None:
    calls = found(Detector().eval(), example, ("head",))
    assert not any(path.startswith("boxes") for path in calls)
    assert ("spare" in calls) is (example is None)


def test_a_model_that_refuses_its_example_has_none() -> None:
    assert not found(Detector().eval(), 3)


def test_what_was_called_before_an_error_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torchvision's own operators do not load."""

    def missing(*_: Any) -> None:
        raise RuntimeError("no such operator")

    model = Detector().eval()
    monkeypatch.setattr(type(model.boxes), "postprocess_detections", missing)
    assert [*found(model, [torch.randn(3, 8, 9)])] == ["backbone", "head"]


class Counting(nn.Module):
    """Counts its calls, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.inner = 0, nn.Sequential(nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x + torch.rand(2))


def test_the_call_that_finds_them_leaves_no_trace() -> None:
    model, state = Counting().eval(), torch.get_rng_state()
    assert [*found(model, torch.ones(1, 2))] == ["inner"]
    assert model.calls == 0 and torch.equal(state, torch.get_rng_state())
    assert not model.inner._forward_pre_hooks
