"""Models that are no graph: their submodules are quantized, each in its place."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from tests.support.lowering import noise
from zendnn_cffi.api.quantization_report import sqnr_db

INTEGERS = (torch.int8, torch.uint8)


def backbone(bias: bool = True) -> nn.Module:
    layers = nn.Conv2d(3, 16, 3, padding=1, bias=bias), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers)


class Head(nn.Module):
    """Scores and boxes of all places; a mask takes places out."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.scores, self.boxes = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 2, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.shared(x if mask is None else x * mask).relu()
        return self.scores(x), self.boxes(x)


class Detector(nn.Module):
    """Gives the boxes of which the scores are highest: how many depends on the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = backbone(), Head()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def features(self, pictures: list[Tensor]) -> Tensor:
        found: Tensor = self.backbone(torch.stack(pictures))
        return found

    def forward(self, pictures: list[Tensor], mask: Tensor | None = None) -> list[dict[str, Tensor]]:
        self.calls += 1
        scores, boxes = self.head(self.features(pictures)) if mask is None else self.head(self.features(pictures), mask)
        return [self.chosen(*each) for each in zip(scores, boxes, strict=True)]

    def chosen(self, scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        best = scores.amax(0)
        kept = best > best.mean()
        return {"scores": best[kept], "boxes": boxes[:, kept] if kept.sum() > 2 else boxes[:, kept] * 0}


class Scoring(Detector):
    """As many numbers for each picture."""

    def chosen(self, scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        return {"scores": scores, "boxes": boxes if scores.amax() > scores.amin() else boxes * 0}


def pictures(count: int, *, sizes: int = 3) -> list[tuple[list[Tensor]]]:
    return [([noise(3, 10 + number % sizes, 12, seed=number)],) for number in range(count)]


def quantized(model: nn.Module, calibration: Any, **options: Any) -> Any:
    return zendnn_cffi.quantize(model, calibration, **{"tune": "off", "compare": False, **options})


def in_integers(module: Any) -> dict[str, int]:
    """How many layers compute in integers in the region of each submodule that has one, for the last kind of input."""
    found = {}
    for path, region in module.regions().items():
        *_, lowered = region.lowered.values()
        found[path.rpartition(".")[0]] = sum(call.dtype in INTEGERS for call in lowered.program.calls)
    return found


def computed(module: Any, given: Any) -> Any:
    with torch.no_grad():
        return module(*given)


@pytest.fixture
def model() -> Scoring:
    torch.manual_seed(0)
    return Scoring().eval()


def test_each_submodule_computes_in_integers(model: Scoring) -> None:
    given = pictures(5)
    found = quantized(model, given)
    expected = computed(model, given[1])
    assert 20 < sqnr_db(expected, computed(found.module, given[1])) < 60
    assert sqnr_db(computed(found.converted, given[1]), computed(found.module, given[1])) > 30
    assert in_integers(found.module) == {"backbone": 2, "head": 3}
    assert found.report.submodules == ("backbone", "head")
    rows = {row.place: (row.kind, row.computes_in) for row in found.report.layers}
    layers = ("backbone.0", "backbone.2", "head.shared", "head.scores", "head.boxes")
    assert rows == dict.fromkeys(layers, ("conv2d", "int8"))
    assert "quantized one by one: backbone, head" in str(found.report)


def test_boxes_are_as_many_as_the_picture_has() -> None:
    torch.manual_seed(0)
    model, given = Detector().eval(), pictures(4)
    found = quantized(model, given)
    for each in given:
        (expected,), (actual,) = computed(model, each), computed(found.module, each)
        count = len(expected["scores"])
        assert expected.keys() == actual.keys() and abs(len(actual["scores"]) - count) <= 0.1 * count > 1
        torch.testing.assert_close(actual["scores"].mean(), expected["scores"].mean(), rtol=0.05, atol=0)
    assert all(in_integers(found.module).values()) and 20 < found.report.sqnr_db < 60


def test_all_inputs_are_observed_and_the_model_stays(model: Scoring) -> None:
    """A generator gives each input once, in the same memory; the last of 70 has the largest numbers."""
    given = noise(3, 10, 12)

    def inputs() -> Iterator[tuple[list[Tensor]]]:
        for number in range(70):
            given.copy_(noise(3, 10, 12, seed=number)).mul_(10 if number == 69 else 1)
            yield ([given],)

    state = {name: value.clone() for name, value in model.state_dict().items()}
    modules, calls = dict(model.named_modules()), model.calls
    found = quantized(model, inputs())
    large = ([noise(3, 10, 12, seed=69) * 10],)
    assert sqnr_db(computed(model, large), computed(found.module, large)) > 20
    model.calls -= 1
    assert model.calls is calls and dict(model.named_modules()) == modules
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)


def test_what_is_called_otherwise_stays_float(model: Scoring, caplog: pytest.LogCaptureFixture) -> None:
    """A graph is for one kind of call: the second input has a mask."""
    given: list[Any] = [*pictures(1), (*pictures(1)[0], torch.ones(10, 12))]
    with caplog.at_level(logging.WARNING, "zendnn_cffi.quantize"):
        found = quantized(model, given)
    assert found.report.submodules == ("backbone",)
    assert "Scoring.head stays float" in caplog.text
    for each in given:
        assert 20 < sqnr_db(computed(model, each), computed(found.module, each)) < 60
    assert in_integers(found.module)["backbone"] == 2


def test_what_has_hooks_stays_float(model: Scoring) -> None:
    seen: list[Any] = []
    model.head.register_forward_hook(lambda *_: seen.append(1))
    found = quantized(model, pictures(2))
    assert found.report.submodules == ("backbone",)
    seen.clear()
    computed(found.module, pictures(1)[0])
    assert seen == [1]


class Asking(Scoring):
    """Reads what its submodule keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.factor = 3.0

    def features(self, pictures: list[Tensor]) -> Tensor:
        return super().features(pictures) * self.backbone.factor


class Reading(Scoring):
    """Reads weights in its submodule, which its graph has no more."""

    def features(self, pictures: list[Tensor]) -> Tensor:
        layer: Any = self.backbone[2]  # type: ignore[index]
        return super().features(pictures) * layer.weight.mean()


def test_attributes_that_the_model_reads() -> None:
    torch.manual_seed(0)
    model, given = Asking().eval(), pictures(2)
    found = quantized(model, given)
    assert found.report.submodules == ("backbone", "head")
    assert 20 < sqnr_db(computed(model, given[0]), computed(found.module, given[0])) < 60


def test_no_submodule_that_the_model_can_do_without() -> None:
    with pytest.raises(ValueError, match="torch.export cannot follow Reading"):
        quantized(Reading().eval(), pictures(2))


def test_an_input_that_is_no_call(model: Scoring) -> None:
    with pytest.raises(ValueError, match="Scoring itself fails on calibration input 2: RuntimeError"):
        quantized(model, [*pictures(1), ([noise(4, 10, 12)],)])


@pytest.mark.parametrize("budget", (25.0, 200.0))
def test_a_budget_is_for_each_submodule(model: Scoring, budget: float) -> None:
    """No integers reach 200 dB."""
    given = pictures(3)
    found = quantized(model, given, budget=budget)
    report, least = found.report, min(budget, 100)
    assert report.budget_db == budget and report.verified_db > least
    assert sqnr_db(computed(model, given[0]), computed(found.module, given[0])) > least
    assert (report.chosen == 0) == (not any(in_integers(found.module).values())) == (budget == 200.0)


@pytest.mark.parametrize("max_drop", (0.0, 1.0))
def test_accuracy_is_the_whole_model_s(model: Scoring, max_drop: float) -> None:
    given = pictures(3)
    expected = [computed(model, each) for each in given]

    def accuracy(module: Any) -> float:
        assert not module.eval().training and next(module.parameters()).dtype is torch.float32
        noises = [sqnr_db(e, computed(module, each)) for e, each in zip(expected, given, strict=True)]
        return min(noises) / 50 if min(noises) < 100 else 2.0

    found = quantized(model, given, accuracy=accuracy, max_drop=2.0 if max_drop else 0.0)
    of_float, of_result = found.report.accuracies
    assert of_float == 2.0 and of_float - of_result <= 2 * max_drop
    computed(found.module, given[0])
    assert (found.report.chosen == 0) == (max_drop == 0.0) == (not any(in_integers(found.module).values()))


def test_the_whole_keeps_to_the_accuracy(model: Scoring, caplog: pytest.LogCaptureFixture) -> None:
    """Its submodules did, one after another, and the result does not: it is the float model."""
    given, seen = pictures(2), list[Any]()

    def accuracy(module: Any) -> float:
        seen.append(module)
        return 0.0 if hasattr(module, "optimized_submodules") else 1.0

    with caplog.at_level(logging.WARNING, "zendnn_cffi.quantize"):
        found = quantized(model, given, accuracy=accuracy, max_drop=0.5)
    assert len(seen) > 3 and "the whole does not keep to the limits" in caplog.text
    assert sqnr_db(computed(model, given[0]), computed(found.module, given[0])) > 100
    assert found.report.chosen == 0 and {row.computes_in for row in found.report.layers} == {"float"}
    assert not any(in_integers(found.module).values())


class Words(nn.Module):
    """Layers, of which the first that is sure ends the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + x
            if x.mean() > 100:
                return x
        return x


def test_linear_layers_in_a_list_dynamically() -> None:
    torch.manual_seed(0)
    model, given = Words().eval(), [noise(2, 7, 32, seed=number) for number in range(3)]
    found = quantized(model, given, dynamic=True)
    assert found.report.submodules == ("layers.0", "layers.1")
    assert len(found.report.layers) == 4
    assert 25 < sqnr_db(model(given[0]), computed(found.module, given[:1])) < 60


@pytest.mark.parametrize("compare", (False, True))
def test_it_is_timed_and_saved(model: Scoring, compare: bool, tmp_path: Path) -> None:
    given = pictures(2, sizes=1)
    found = quantized(model, given, compare=compare)
    assert (found.report.float_ms is not None) == compare
    expected = computed(found.module, given[0])
    with pytest.raises(ValueError, match="as a whole: .* save its submodules backbone, head one by one"):
        zendnn_cffi.save(found.module, tmp_path / "whole.zd")
    model.backbone = model.head = nn.Identity()  # type: ignore[assignment]
    for path in found.report.submodules:
        zendnn_cffi.save(found.module.get_submodule(path), tmp_path / f"{path}.zd")
        model.set_submodule(path, zendnn_cffi.load(tmp_path / f"{path}.zd"))
    assert sqnr_db(expected, computed(model, given[0])) > 100


def test_detectors_as_torchvision_writes_them_are_not_exported(model: Scoring, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export follows these for a minute before it finds that it cannot."""
    exported: list[nn.Module] = []
    own = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda m, *args, **kw: exported.append(m) or own(m, *args, **kw))
    model.postprocess_detections = model.chosen  # type: ignore[assignment]
    assert quantized(model, pictures(2)).report.submodules == ("backbone", "head")
    assert {type(each) for each in exported} == {nn.Sequential, Head}
