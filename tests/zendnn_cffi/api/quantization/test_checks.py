"""Models and arguments that quantize() refuses before it does any work."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zendnn_cffi
from tests.support.lowering import net, noise
from zendnn_cffi.api.quantization_report import sqnr_db

BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dtype": ({"dtype": torch.float16}, ValueError, "dtype must be torch.float32, torch.bfloat16 or None"),
    "tune": ({"tune": "always"}, ValueError, "tune must be one of 'auto', 'off', 'full', got 'always'"),
    "dynamic": ({"dynamic": 1}, TypeError, "dynamic must be True or False, got 1"),
    "smooth": ({"smooth": "no"}, TypeError, "smooth must be True or False"),
    "attention": ({"attention": None}, TypeError, "attention must be True or False"),
    "compare": ({"compare": None}, TypeError, "compare must be True or False"),
    "correct_bias": ({"correct_bias": 0}, TypeError, "correct_bias must be True or False"),
    "budget": ({"budget": "30"}, TypeError, "budget must be a number or None, got str"),
    "accuracy alone": ({"accuracy": len}, ValueError, "accuracy and max_drop go together"),
    "example_inputs": ({"example_inputs": 3}, TypeError, "example_inputs must be one of tensors, .* got int"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_arguments_are_checked_before_any_work(case: str) -> None:
    """Some were refused by optimize(), after hours of calibration."""
    options, error, message = BAD_OPTIONS[case]

    def calibration() -> Iterator[torch.Tensor]:
        raise AssertionError("calibration inputs were asked for")
        yield

    with pytest.raises(error, match=message):
        zendnn_cffi.quantize(nn.Linear(3, 3).eval(), calibration(), **options)


def with_number(module: nn.Module, name: str, number: float) -> nn.Module:
    module.get_parameter(name).data.view(-1)[1] = number
    return module


def replaced() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3)).eval()
    zendnn_cffi.replace_forward(model)
    return model


def partly_training() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    model[1].train()
    return model


def with_nan_statistics() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()
    model.get_buffer("1.running_var")[0] = math.nan
    return model


BAD_MODELS: dict[str, tuple[Any, str]] = {
    "a NaN": (
        lambda: with_number(nn.Sequential(nn.ReLU(), nn.Linear(3, 3)).eval(), "1.weight", math.nan),
        "1.weight holds NaN",
    ),
    "a NaN in a bias": (lambda: with_number(nn.Linear(3, 3).eval(), "bias", math.nan), "bias holds NaN"),
    "a NaN in statistics": (with_nan_statistics, "1.running_var holds NaN"),
    "an infinity": (lambda: with_number(nn.Linear(3, 3).eval(), "weight", math.inf), "weight holds infinity"),
    "of no memory": (
        lambda: nn.Sequential(nn.Linear(3, 3, device="meta")).eval(),
        "0.weight is on meta: load its weights",
    ),
    "optimized": (lambda: zendnn_cffi.optimize(nn.Linear(3, 3).eval()), "model is what optimize.* the original model"),
    "optimized in part": (
        lambda: nn.Sequential(zendnn_cffi.optimize(nn.Linear(3, 3).eval())).eval(),
        "its submodule 0 is what optimize",
    ),
    "replaced": (replaced, r"replaced by replace_forward\(\): call its undo\(\)"),
    "training in part": (partly_training, r"1 \(BatchNorm1d\) is in training mode, though the model is not"),
    "of float64": (lambda: nn.ConvTranspose2d(3, 3, 1).double().eval(), "weight is torch.float64: call model.float"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_models_are_checked_before_any_work(case: str) -> None:
    make, message = BAD_MODELS[case]
    with pytest.raises(ValueError, match=message):
        zendnn_cffi.quantize(make(), [torch.ones(1, 3)])


def test_what_changes_nothing_in_training_mode_is_no_fault() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.0)).eval()
    model[1].train()
    model[2].train()
    assert zendnn_cffi.quantize(model, [noise(2, 8)], tune="off", compare=False).report.sqnr_db > 25


@pytest.mark.parametrize(
    "calibration, error, message",
    (
        ([torch.ones(1, 3, device="meta")], ValueError, "calibration input 1 is on meta"),
        ([torch.ones(1, 3), torch.ones(1, 3).to_sparse()], ValueError, "calibration input 2 is a sparse tensor"),
        ([torch.ones(1, 3).numpy()], TypeError, r"calibration input 1 .* got ndarray: torch.from_numpy\(\)"),
        ([{0: torch.ones(1, 3)}], TypeError, "its keys must be names of arguments, got 0"),
        ([torch.ones(0, 3)], ValueError, "calibration is empty, or all its tensors are"),
        (iter(()), ValueError, "calibration is empty, .* used up"),
    ),
)
def test_calibration_inputs_that_tell_nothing(calibration: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zendnn_cffi.quantize(nn.Linear(3, 3).eval(), calibration)


def test_empty_inputs_are_passed_over() -> None:
    """A first one would be the example for torch.export, which took an empty batch for fixed."""
    calibration = (noise(rows, 8, seed=rows) for rows in (0, 4, 0, 2))
    model = nn.Linear(8, 8).eval()
    assert zendnn_cffi.quantize(model, calibration, tune="off", compare=False).report.sqnr_db > 25


@pytest.mark.parametrize(
    "given, error, message",
    (
        (None, TypeError, "accuracy must return a number, got NoneType"),
        (torch.ones(2), TypeError, r"accuracy must return a number, got float32\[2\]"),
        ("0.9", TypeError, "accuracy must return a number, got str"),
        (b"0.9", TypeError, "accuracy must return a number, got bytes"),
        (np.str_("0.9"), TypeError, "accuracy must return a number, got str_"),
        pytest.param(10**400, TypeError, "accuracy must return a number, got int", id="beyond float64"),
        (math.nan, ValueError, "accuracy of the float model must be a finite number, got nan"),
    ),
)
def test_accuracies_that_are_no_numbers(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zendnn_cffi.quantize(nn.Linear(3, 3).eval(), [torch.ones(1, 3)], accuracy=lambda module: given, max_drop=1.0)


def test_an_accuracy_that_is_no_number_later() -> None:
    found = iter((1.0, "0.9"))
    with pytest.raises(TypeError, match="accuracy must return a number, got str"):
        zendnn_cffi.quantize(
            nn.Linear(3, 3).eval(), [torch.ones(1, 3)], accuracy=lambda module: next(found), max_drop=1.0, tune="off"
        )


class TimeLimit(Exception):
    """As a signal handler raises when a request takes too long."""


@pytest.mark.parametrize("where", ("model", "one sample", "export", "calibration"))
def test_errors_of_a_signal_handler_come_through(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were what the model fails on, or what torch.export refuses, and the work went on."""

    def late(*args: Any, **kwargs: Any) -> Any:
        raise TimeLimit

    class Late(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling() and (where == "model" or len(x) == 1):
                late()
            return super().forward(x)

    model, inputs = nn.Linear(3, 3).eval(), [torch.ones(2, 3)]
    match where:
        case "export":
            monkeypatch.setattr(torch.export, "export", late)
        case "calibration":
            monkeypatch.setattr(pytest.importorskip("torchao").quantization.pt2e.HistogramObserver, "forward", late)
        case "one sample":
            model = Late(3, 3).eval()
        case "model":
            model, inputs = Late(3, 3).eval(), [torch.ones(2, 4)]
    with pytest.raises(TimeLimit):
        zendnn_cffi.quantize(model, inputs, tune="off", compare=False)


def test_why_export_fails_is_told() -> None:
    """As of Nyströmformer, where only an export adds a mask. The error's first line does not say why."""

    def forward(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return m[0](x) + (torch.zeros(5, 1) if torch.compiler.is_compiling() else 0.0)

    message = r"cannot follow .*The size of tensor a .* must match .*\)\. Quantize those of its submodules"
    with pytest.raises(ValueError, match=message):
        zendnn_cffi.quantize(net(forward, nn.Linear(3, 3)), [torch.ones(2, 3)], tune="off", compare=False)


def _counts(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    m.calls = getattr(m, "calls", 0) + 1
    return m[0](x) * m.calls


def _branches(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return m[0](x) if x.sum() > 0 else m[0](-x)


@pytest.mark.parametrize("forward", (_counts, _branches), ids=("counts", "branches"))
def test_what_export_does_not_support_is_named(forward: Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]) -> None:
    """Where the graph of what the model's code did once is not the model."""
    lock = threading.Lock()

    def locked(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        with lock:
            return forward(m, x)

    model = net(locked, nn.Linear(3, 3))
    message = r"cannot follow .*: Unsupported context manager: .*`lock` context manager\. Quantize those"
    with pytest.raises(ValueError, match=message):
        zendnn_cffi.quantize(model, [torch.ones(2, 3)], tune="off", compare=False)
    assert type(model(torch.ones(2, 3))) is torch.Tensor


def test_a_model_that_computes_nan() -> None:
    model = net(lambda m, x: m[1](torch.log(m[0](x))), nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="calibration input 1 fails .* the model computes NaN or infinity of it"):
        zendnn_cffi.quantize(model, [noise(4, 8)])


def test_nothing_is_logged_of_a_call_that_the_model_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export logged "always_classified is unsupported" for each attempt."""
    heard = logging.Handler()
    records: list[logging.LogRecord] = []
    monkeypatch.setattr(heard, "emit", records.append)
    log = logging.getLogger("torch.export._trace")
    log.addHandler(heard)
    try:
        with pytest.raises(ValueError, match="Linear itself fails on the first calibration input"):
            zendnn_cffi.quantize(nn.Linear(3, 3).eval(), [torch.ones(1, 4)])
    finally:
        log.removeHandler(heard)
    assert not records


@dataclass
class Result:
    """What a model returns."""

    values: torch.Tensor
    number: int


class Holder:
    """The same, of a class that torch.export cannot be told of."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values


RESULTS: dict[str, tuple[Any, str]] = {
    "a dataclass": (
        lambda m, x: {"a": Result(m[0](x), 3)},
        r"returns a Result, unknown .* torch.export.register_dataclass\(Result\) first",
    ),
    "another object": (lambda m, x: [Holder(m[0](x))], "returns a Holder, .* return its tensors in a tuple"),
}


@pytest.mark.parametrize("case", RESULTS)
def test_results_that_torch_export_does_not_know(case: str) -> None:
    """The error was an assertion of TorchDynamo's about a variable."""
    fn, message = RESULTS[case]
    with pytest.raises(ValueError, match=message):
        zendnn_cffi.quantize(net(fn, nn.Linear(3, 3)), [torch.ones(2, 3)])


def test_decoders_that_return_a_cache_unasked() -> None:
    """The error said to return the cache's tensors in a tuple, which nobody can tell a model of Transformers."""
    config = SimpleNamespace(use_cache=True)
    model = net(lambda m, x: (m[0](x), Holder(x)) if config.use_cache else m[0](x), nn.Linear(8, 8))
    model.config = config
    with pytest.raises(ValueError, match=r"a Holder, .* model.config.use_cache = False leaves it out; or return its"):
        zendnn_cffi.quantize(model, [noise(4, 8)], tune="off", compare=False)
    config.use_cache = False
    assert len(zendnn_cffi.quantize(model, [noise(4, 8)], tune="off", compare=False).report.layers) == 1


def test_detectors_are_quantized_by_parts() -> None:
    """How many boxes there are depends on their scores."""

    def detect(m: Any, x: torch.Tensor) -> torch.Tensor:
        scores = m[0](x)
        kept: torch.Tensor = scores[scores.amax(1) > 0]
        return kept.sum(0) if len(kept) > 2 else kept[:, 0]

    model, x = net(detect, nn.Linear(8, 8)), noise(6, 8)
    with pytest.raises(ValueError, match=r"cannot follow .*data-dependent.* quantize the submodules before that"):
        zendnn_cffi.quantize(model, [x], tune="off", compare=False)
    expected = model(x)
    model.m[0] = zendnn_cffi.quantize(model.m[0], [x], tune="off", compare=False).module
    with torch.no_grad():
        assert sqnr_db(expected, model(x)) > 20


def test_a_cache_is_noticed_before_anything_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.export looked for a way for half a minute. A T5's decoder has a configuration of its own."""

    def export(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("it exports")

    def forward(m: Any, x: torch.Tensor) -> Any:
        m[0].calls.add_(1)
        return (m[0](x), Holder(x)) if m[0].config.use_cache else m[0](x)

    model = net(forward, nn.Linear(8, 8))
    layer: Any = model.get_submodule("m.0")
    layer.register_buffer("calls", torch.zeros(1))
    model.config, layer.config = SimpleNamespace(use_cache=True), SimpleNamespace(use_cache=True)
    monkeypatch.setattr(torch.export, "export", export)
    both = r"Holder, .*: model.config.use_cache = model.m.0.config.use_cache = False leaves it out"
    with pytest.raises(ValueError, match=both):
        zendnn_cffi.quantize(model, [noise(4, 8)])
    model.config.use_cache = False
    with pytest.raises(ValueError, match=r"Holder, .*: model.m.0.config.use_cache = False leaves"):
        zendnn_cffi.quantize(model, [noise(4, 8)])
    assert layer.calls.item() == 0


def test_dataclasses_that_it_was_told_of() -> None:
    @dataclass
    class Known:
        values: torch.Tensor
        number: int

    torch.export.register_dataclass(Known)
    model = net(lambda m, x: Known(m[0](x), 3), nn.Linear(8, 8))
    x = noise(4, 8)
    fast, report, _ = zendnn_cffi.quantize(model, [x], budget=20.0, tune="off", compare=False)
    with torch.no_grad():
        found: Any = fast(x)
    assert (type(found), found.number, len(report.layers)) == (Known, 3, 1) and math.isfinite(report.sqnr_db)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("make", (torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(2, 3))))
def test_torchscript_is_refused(make: Any) -> None:
    with pytest.raises(TypeError, match="model is TorchScript .* the model that it was made of"):
        zendnn_cffi.quantize(make(nn.Linear(3, 3).eval()), [torch.ones(2, 3)])


@pytest.mark.parametrize("limits", ({}, {"budget": 30.0}))
def test_a_model_without_layers_says_so(limits: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """With a budget, the report said that nothing else keeps to it."""
    model, x = nn.Embedding(10, 4).eval(), torch.arange(6)
    fast, report, _ = zendnn_cffi.quantize(model, [x], tune="off", compare=False, **limits)
    assert "Embedding stays float: no layer of it can be quantized" in caplog.text
    assert "nothing else" not in caplog.text + str(report)
    assert not limits or "no layer is quantized: the model has none that can be" in str(report)
    assert torch.equal(fast(x), model(x))
