"""Submodules that are graphs, where the model as a whole is none: each is quantized, and put in its place.

    forward: pictures -> transform -> backbone -> head -> as many boxes as the data says
    in int8:                          backbone    head

All inputs run through the whole model, so each submodule is calibrated with what it is called with there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fx_passes.graph.hooks import has_hooks
from fx_passes.trace.reached import Reached
from fx_passes.trace.skeleton import skeleton
from fx_passes.trace.state import Snapshot
from fx_passes.trace.submodules import Observed, find_submodules
from zendnn_cffi.api.optimize import optimize
from zendnn_cffi.api.quantization.attempt import Attempt
from zendnn_cffi.api.quantization.calibrated import Calibrated, Options
from zendnn_cffi.api.quantization.choose import Limits, as_accuracy
from zendnn_cffi.api.quantization.constants import LAYERS
from zendnn_cffi.api.quantization.inputs import Kept, check_call, copied
from zendnn_cffi.api.quantization.layers import Call, kind
from zendnn_cffi.api.quantization.pt2e import NotExported, Pt2e, calibrate, exported_graph
from zendnn_cffi.api.quantization.rows import compared_ms
from zendnn_cffi.api.quantization_report import Quantization, QuantizationReport
from zendnn_cffi.errors import interrupts

log = logging.getLogger("zendnn_cffi.quantize")


def exported_submodules(model: nn.Module, example: Call) -> dict[str, fx.GraphModule]:
    """The outermost submodules that torch.export can follow and that have layers to quantize, by path.

    example  a call of the model; each submodule is exported for what it is called with then
    """

    def export(module: nn.Module, call: Call | None) -> fx.GraphModule | None:
        try:
            return None if call is None or has_hooks(module) else exported_graph(module, call)
        except ValueError as error:
            log.info("%s", error)
            return None

    is_repeatable = not Snapshot(model).unrepeatable()
    found = find_submodules(model, Observed(model, example if is_repeatable else None, Reached(model)), export)
    return {path: graph for path, graph in found.items() if any(kind(node) in LAYERS for node in graph.graph.nodes)}


def in_place(model: nn.Module, graphs: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of the model on its memory, with these graphs in the places of its submodules.

    They are called as those, and have the attributes of those that the model's own code may read.
    """
    whole = skeleton(model)
    for path, graph in graphs.items():
        for name, value in vars(whole.get_submodule(path)).items():
            if not hasattr(graph, name):
                setattr(graph, name, value)
        whole.set_submodule(path, graph)
    return whole


class Submodules:
    """A model that is no graph, and the graphs that it is quantized in.

    example  the call that they were exported with
    kept     calls of the model
    refused  why the model is no graph, raised where no submodule is one
    calls    of each submodule in these calls of the model, as many as are kept
    """

    def __init__(self, model: nn.Module, example: Call, kept: Sequence[Call], refused: NotExported) -> None:
        self.model, self.example, self.kept = model, example, kept
        self.graphs = exported_submodules(model, example)
        self.calls: dict[str, list[Call]] = {}
        while self.graphs and not self.calls:
            self.calls = self._observed()
        self.graphs = {path: graph for path, graph in self.graphs.items() if self.calls[path]}
        if not self.graphs:
            raise refused

    def _observed(self) -> dict[str, list[Call]]:
        """What the graphs are called with; {} and one graph less, or none left, where the model fails with them."""
        found = {path: Kept(copies=True) for path in self.graphs}
        running: list[str] = []

        def begin(path: str, graph: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            running.append(path)
            found[path].add((args, kwargs))

        def end(*_: Any) -> None:
            running.pop()

        whole, hooks = in_place(self.model, self.graphs), []
        for path, graph in self.graphs.items():
            begins = functools.partial(begin, path)
            hooks.append(graph.register_forward_pre_hook(begins, prepend=True, with_kwargs=True))
            hooks.append(graph.register_forward_hook(end))
        try:
            for number, call in enumerate(self.kept, 1):
                try:
                    args, kwargs = copied(call)
                    with torch.no_grad():
                        whole(*args, **kwargs)
                except Exception as error:  # whatever the model's own code or a graph's guards raise
                    if interrupts(error):
                        raise
                    check_call(self.model, call, f"calibration input {number}")
                    self._leave_out(running[-1:] or list(self.graphs), error)
                    return {}
        finally:
            for hook in hooks:
                hook.remove()
        return {path: kept.calls for path, kept in found.items()}

    def _leave_out(self, paths: Iterable[str], error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        for path in paths:
            log.warning(
                "%s.%s stays float: the model fails with its graph: %s", type(self.model).__name__, path, reason
            )
            del self.graphs[path]

    def quantized(self, others: Iterable[Call], limits: Limits, pt2e: Pt2e, options: Options) -> Quantization:
        """Quantize each submodule, and optimize the model with these in their places.

        others  calls of the model that are not kept
        limits  a budget is for the results of each submodule, accuracy is the whole model's
        """
        model, parts = self.model, dict[str, Calibrated]()
        for path, graph in self.graphs.items():
            parts[path] = Calibrated(model.get_submodule(path), graph, self.calls[path], pt2e, options)
        with torch.no_grad():
            whole = in_place(model, {path: part.prepared for path, part in parts.items()})
            calibrate(whole, map(copied, itertools.chain(self.kept, others)))
            attempts: dict[str, Attempt] = {}
            for number, (path, part) in enumerate(parts.items(), 1):
                within = self._limits_of(path, limits, number / len(parts), attempts)
                attempts[path] = part.attempt(within)
            reports = {path: attempt.report(compare=False) for path, attempt in attempts.items()}
            for path, attempt in attempts.items():
                parts[path].state.restore(attempt.converted)
            converted = in_place(model, {path: attempt.converted for path, attempt in attempts.items()})
            fast = self._optimized(converted, options)
            reached = math.nan if limits.accuracy is None else as_accuracy(limits.accuracy(fast))
            if not limits.allows(reached):
                log.warning("no layer of %s is in int8: the whole does not keep to the limits", type(model).__name__)
                fast, converted = self._optimized(model, options._replace(dtype=None)), in_place(model, {})
                reports = {path: _of_floats(report) for path, report in reports.items()}
            report = self._report(reports, limits, reached, fast, options)
            for path, part in parts.items():
                part.state.restore(fast.get_submodule(path))
        return Quantization(fast, report, converted)

    def _limits_of(self, path: str, limits: Limits, share: float, attempts: Mapping[str, Attempt]) -> Limits:
        """The same with the accuracy of the whole model where a module stands for the submodule there.

        share  of what the accuracy may fall; submodules before have taken theirs
        """
        judge = limits.accuracy
        if judge is None:
            return limits
        before = {each: attempt.fast for each, attempt in attempts.items()}

        def accuracy(module: Any) -> float:
            return judge(in_place(self.model, {**before, path: module}))

        return dataclasses.replace(limits, accuracy=accuracy, max_drop=share * limits.max_drop)

    def _report(
        self,
        reports: Mapping[str, QuantizationReport],
        limits: Limits,
        reached: float,
        fast: nn.Module,
        options: Options,
    ) -> QuantizationReport:
        """That of all submodules; reached: the accuracy of the whole."""
        name, each = type(self.model).__name__, reports.values()
        rows = [
            dataclasses.replace(row, module=_joined(path, row.module), place=_joined(path, row.place))
            for path, report in reports.items()
            for row in report.layers
        ]
        float_ms = int8_ms = None
        if options.compare:
            float_ms, int8_ms = compared_ms(self._optimized(self.model, options), fast, copied(self.kept[0]))
        return QuantizationReport(
            name,
            tuple(rows),
            min(report.sqnr_db for report in each),
            float_ms,
            int8_ms,
            chosen=None if any(report.chosen is None for report in each) else sum(r.chosen or 0 for r in each),
            budget_db=limits.budget_db,
            verified_db=min((r.verified_db for r in each if r.verified_db is not None), default=None),
            accuracies=None if limits.accuracy is None else (limits.float_accuracy, reached),
            bits=min(report.bits for report in each),
            submodules=tuple(reports),
        )

    def _optimized(self, model: nn.Module, options: Options) -> fx.GraphModule:
        args, kwargs = copied(self.example)
        return optimize(model, kwargs if kwargs and not args else args, dtype=options.dtype, tune=options.tune)


def _of_floats(report: QuantizationReport) -> QuantizationReport:
    """The same where no layer is quantized after all."""
    rows = tuple(dataclasses.replace(row, computes_in="float", why="", sqnr_db=math.inf) for row in report.layers)
    return dataclasses.replace(report, layers=rows, chosen=0, sqnr_db=math.inf)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if name else path
