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
from zendnn_cffi.api.quantization.choose import Choice, Limits, Search, as_accuracy
from zendnn_cffi.api.quantization.correct_bias import correct
from zendnn_cffi.api.quantization.fake_quantized import FakeQuantized
from zendnn_cffi.api.quantization.faster import WORTH_IT, faster_in_integers, links_between
from zendnn_cffi.api.quantization.gains import LayerTimes, layer_times, weight_sizes
from zendnn_cffi.api.quantization.layers import add_to_biases, mixed
from zendnn_cffi.api.quantization.pt2e import Pt2e, weight_bits
from zendnn_cffi.api.quantization.rows import compared_ms, layer_rows
from zendnn_cffi.api.quantization_report import FrontierPoint, QuantizationReport, noise_db, sqnr_db

log = logging.getLogger("zendnn_cffi.quantize")

_SHRINK = 0.8  # of the noise, from one attempt to the next, where the accuracy is too low
_TIGHTER = 0.95  # the more, the more attempts were in vain
_NOT_FASTER = "it is not faster so on this CPU"
_MOST_ATTEMPTS = 6  # choices of layers that are compiled: kernels round otherwise than the graph


class Attempt:
    """A calibrated graph on its way to a quantized module: fast, converted."""

    fast: Any
    converted: fx.GraphModule
    _floats: fx.GraphModule  # the graph without observers, once layers are timed

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
        self._compared_ms: tuple[float, float] | None = None  # of the float model and the result
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

    def keep_fastest(self) -> None:
        """Compile all layers in integers, those alone that are faster so, or none: what takes the least time."""
        names = self._fake.layers
        times = self._timed()
        layers = self._faster(times)
        if layers != names:
            whole = self.fast, self.converted
            self._take(layers)
            whole_ms, part_ms = self._compared(whole[0], self.fast)
            log.info("%d of %d layers in int8: %.3f ms; all of them: %.3f", len(layers), len(names), part_ms, whole_ms)
            if part_ms > WORTH_IT * whole_ms:
                layers, (self.fast, self.converted) = names, whole
        if layers:
            self._compared_ms = float_ms, int8_ms = self._compared(self._plain, self.fast)
            log.info("%d layers in int8: %.3f ms; none: %.3f", len(layers), int8_ms, float_ms)
            if float_ms < WORTH_IT * int8_ms:
                layers, self._compared_ms = [], None
                self._take(layers)
        if not layers:
            log.warning("no layer of %s is in int8: %s", type(self._model).__name__, _NOT_FASTER)
        gains = {name: times.gain_ms(name) for name in names}
        self._choice = Choice(tuple(layers), {}, gains, (), Limits())

    def search(self, limits: Limits) -> None:
        """Compile the choice of layers that gains most within the limits."""
        names = self._fake.layers
        times = self._timed()
        gains = {name: max(times.gain_ms(name), 0.0) for name in names}
        candidates = self._faster(times)
        search = Search(self._fake, gains, limits, candidates)
        layers = self._compiled_within(search, limits)
        if not layers:
            if not self._keeps_to(limits, self._plain) and self._dtype is not None:
                self._dtype = None  # the lower precision alone is too much
                self._plain = self._optimized(self._floats)
                self._keeps_to(limits, self._plain)
            self._take(layers)
            if names:
                why = "nothing else keeps to the limits" if candidates else _NOT_FASTER
                log.warning("no layer of %s is in int8: %s", type(self._model).__name__, why)
        others_ms = math.fsum(times.gain_ms(name) for name in names if name not in candidates)
        frontier = tuple(search.frontier(times.float_ms, times.int8_ms + others_ms))
        self._choice = Choice(tuple(layers), search.alone, gains, frontier, limits)

    def _timed(self) -> LayerTimes:
        """Compile none and all of the layers in integers, and time each."""
        names = self._fake.layers
        self._floats = mixed(self._prepared, (), {})
        self._plain = self._optimized(self._floats)
        self.compile(names)
        nodes = {node.name for node in self._prepared.graph.nodes}
        sizes = weight_sizes(self._prepared, names)
        for module in (self._plain, self.fast):
            self._fake.state.restore(module)
        return layer_times(self._plain, self.fast, self._kept[0], sizes, nodes)

    def _faster(self, times: LayerTimes) -> list[str]:
        """The layers that integers make faster; all of them where implementations are not chosen by time either."""
        names = self._fake.layers
        if self._tune == "off":
            return names
        self._fake.switch(())
        self._fake.state.restore(self._fake.module)
        return faster_in_integers(names, times, links_between(self._fake.module, names, self._kept[0]))

    def _compared(self, one: Any, other: Any) -> tuple[float, float]:
        """Milliseconds of both, as compared_ms has them, once what a first call does is done."""
        for module in (one, other):
            self._fake.state.restore(module)
            self._called(module)
            self._called(module)
            self._fake.state.restore(module)
        return compared_ms(one, other, self._kept[0])

    def _take(self, layers: Collection[str]) -> None:
        """Compile these layers in integers, or take the float model."""
        if layers:
            self.compile(layers)
        else:
            self.converted, self.fast = self._floats, self._plain

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
            accuracy = as_accuracy(limits.accuracy(module))
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
            float_ms, int8_ms = self._compared_ms or compared_ms(plain, self.fast, self._kept[0])
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
        if limits == Limits():
            return dataclasses.replace(report, chosen=len(choice.layers))
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
