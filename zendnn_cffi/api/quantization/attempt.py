"""A calibrated graph on its way to an optimized module: layers are chosen, compiled, checked and reported."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn

from zendnn_cffi.api.optimize import optimize
from zendnn_cffi.api.quantization.choose import Choice, Limits, Search
from zendnn_cffi.api.quantization.correct_bias import correct
from zendnn_cffi.api.quantization.fake_quantized import FakeQuantized
from zendnn_cffi.api.quantization.gains import layer_gains, weight_sizes
from zendnn_cffi.api.quantization.layers import add_to_biases, mixed
from zendnn_cffi.api.quantization.pt2e import Pt2e, weight_bits
from zendnn_cffi.api.quantization.rows import compared_ms, layer_rows
from zendnn_cffi.api.quantization_report import FrontierPoint, QuantizationReport, noise_db, sqnr_db

log = logging.getLogger("zendnn_cffi.quantize")

_SHRINK = 0.8  # of the noise, from one attempt to the next, where the accuracy is too low
_TIGHTER = 0.95  # the more, the more attempts were in vain
_MOST_ATTEMPTS = 6  # choices of layers that are compiled: kernels round otherwise than the graph


class Attempt:
    """A calibrated graph on its way to a quantized module: fast, converted."""

    fast: Any
    converted: fx.GraphModule

    def __init__(
        self,
        model: nn.Module,
        pt2e: Pt2e,
        fake: FakeQuantized,
        dtype: torch.dtype | None,
        tune: str,
    ) -> None:
        self._model, self._pt2e, self._dtype, self._tune = model, pt2e, dtype, tune
        self._fake, self._prepared, self._kept = fake, fake.prepared, fake.calls
        self._biases: dict[str, torch.Tensor] = {}
        self._choice: Choice | None = None
        self._plain: Any = None
        if not self._fake.layers:
            log.warning("%s stays float: no layer of it can be quantized", type(model).__name__)
        self._verified = math.nan, math.nan  # noise and accuracy of the last module that was checked

    def correct_biases(self) -> None:
        self._biases = correct(self._fake)

    def compile(self, layers: Collection[str] | None) -> None:
        """With just these layers quantized, None for all that can be."""
        if layers is None:
            add_to_biases(self._prepared, self._biases)
            self.converted = self._pt2e.convert(self._prepared)
        else:
            graph = mixed(self._prepared, layers, self._biases)
            self.converted = self._pt2e.convert(graph) if layers else graph
        self.fast = self._optimized(self.converted)

    def search(self, limits: Limits) -> None:
        """Compile the choice of layers that gains most within the limits."""
        names = self._fake.layers
        self._plain = self._optimized(mixed(self._prepared, (), {}))
        self.compile(names)
        nodes = {node.name for node in self._prepared.graph.nodes}
        sizes = weight_sizes(self._prepared, names)
        gains, times_ms = layer_gains(self._plain, self.fast, self._kept[0], sizes, nodes)
        search = Search(self._fake, gains, limits)
        layers = self._compiled_within(search, limits)
        if not layers:
            self.converted = mixed(self._prepared, (), {})
            if not self._keeps_to(limits, self._plain) and self._dtype is not None:
                self._dtype = None  # the lower precision alone is too much
                self._plain = self._optimized(self.converted)
                self._keeps_to(limits, self._plain)
            self.fast = self._plain
            if names:
                log.warning("no layer of %s is in int8: nothing else keeps to the limits", type(self._model).__name__)
        self._choice = Choice(tuple(layers), search.alone, gains, tuple(search.frontier(*times_ms)), limits)

    def _compiled_within(self, search: Search, limits: Limits) -> list[str]:
        """The layers of the last module compiled, none where no attempt kept to the limits: its kernels decide."""
        compiled = self._fake.layers
        layers = search.choose()
        for number in range(_MOST_ATTEMPTS):
            if not layers:
                break
            if layers != compiled:
                self.compile(layers)
                compiled = layers
            if self._keeps_to(limits, self.fast):
                return layers
            noise, _ = self._verified
            log.info("%d layers in int8 are outside of the limits: %.1f dB", len(layers), noise_db(noise))
            share = limits.noise / noise if noise > limits.noise else _SHRINK
            layers = search.smaller(layers, share * _TIGHTER**number)
        return []

    def _keeps_to(self, limits: Limits, module: Any) -> bool:
        noise, accuracy = self._fake.noise_of(module), math.nan
        if noise <= limits.noise and limits.accuracy is not None:
            self._fake.state.restore(module)
            accuracy = float(limits.accuracy(module))
        self._verified = noise, accuracy
        return noise <= limits.noise and limits.allows(accuracy)

    def report(self, compare: bool) -> QuantizationReport:
        name = type(self._model).__name__
        self._fake.state.restore(self.fast)
        result = self._called(self.fast)
        self._called(self.fast)
        float_ms = int8_ms = None
        if compare:
            plain = self._optimized(self._model) if self._plain is None else self._plain
            float_ms, int8_ms = compared_ms(plain, self.fast, self._kept[0])
            if int8_ms > float_ms:
                log.warning("%s is not faster in integers: %.3f ms against %.3f", name, int8_ms, float_ms)
        self._fake.switch(())  # the float model, its batch normalizations folded
        for module in (self._fake.module, self.converted):
            self._fake.state.restore(module)
        rows = tuple(layer_rows(self._fake.module, self.converted, self.fast, self._kept, self._choice))
        near = sqnr_db(self._called(self._model), result)
        report = QuantizationReport(name, rows, near, float_ms, int8_ms, bits=weight_bits(self.converted))
        return report if self._choice is None else self._with_choice(report, self._choice)

    def _with_choice(self, report: QuantizationReport, choice: Choice) -> QuantizationReport:
        limits, (noise, accuracy) = choice.limits, self._verified
        return dataclasses.replace(
            report,
            frontier=tuple(FrontierPoint(ms, noise_db(noise), count) for ms, noise, count in choice.frontier),
            chosen=len(choice.layers),
            budget_db=limits.budget_db,
            verified_db=noise_db(noise),
            accuracies=None if limits.accuracy is None else (limits.float_accuracy, accuracy),
        )

    def _called(self, module: Any) -> Any:
        args, kwargs = self._kept[0]
        return module(*args, **kwargs)

    def _optimized(self, module: nn.Module) -> Any:
        args, kwargs = self._kept[0]
        return optimize(module, kwargs if kwargs and not args else args, dtype=self._dtype, tune=self._tune)
