"""One region under one input signature, from graph to program."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fx_passes.candidates.candidates import Candidate, Operation, PrimitiveTemplate, TorchTemplate, measurable
from fx_passes.candidates.layouts import Layout, Quantized, is_describable, is_known_dtype
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.layout.assign import assign_layouts
from fx_passes.lower.context import NotLowered, eager_layout, torch_operation
from fx_passes.lower.rules import lower_graph
from fx_passes.plan.prepack import WeightStore
from fx_passes.plan.schedule import build_program
from fx_passes.plan.sparing import LITTLE, spare_weights
from fx_passes.plan.transforms import limit_transforms
from fx_passes.region.kept import Kept
from fx_passes.region.key import region_key
from fx_passes.region.lowered import LoweredRegion, Lowering, NodeReport, boundary, row_major_copy
from fx_passes.region.options import RegionOptions
from fx_passes.search.measure import is_rival
from fx_passes.search.progress import ProgressBar
from fx_passes.search.refine import refine
from fx_passes.search.tuner import Tuner
from fx_passes.search.turn import Turn
from zendnn_cffi.primitives.verification.unchecked import unchecked
from zendnn_cffi.runtime.program import Program

log = logging.getLogger("zendnn_cffi.lower")


class Laps:
    """Times of stages that follow each other: end(stage) takes what passed since the one before."""

    def __init__(self) -> None:
        self.times_ns: dict[str, int] = {}
        self._since = time.perf_counter_ns()

    def end(self, stage: str) -> None:
        now = time.perf_counter_ns()
        self.times_ns[stage] = now - self._since
        self._since = now


@unchecked()  # whatever is chosen here was compared with plain PyTorch
def lower_region(
    graph: fx.Graph,
    inputs: Sequence[TensorSpec],
    parameters: Mapping[str, torch.Tensor],
    weights: WeightStore,
    options: RegionOptions,
    *,
    turn: Turn | None = None,
    refined: bool = True,
    keep: bool = False,
    key: str = "",
) -> LoweredRegion:
    """Return the program for one signature. graph is edited: pass a copy.

    turn     leave to measure (None: without limit)
    refined  whether implementations are chosen once more inside the network, where any are measured
    keep     whether the result holds what it was built from
    key      region_key() of these, where it is known
    Raises NotLowered where no operation has a primitive: plain PyTorch then does without our copies.
    """
    laps = Laps()
    measures = options.tune in ("auto", "full")
    if measures and not key:
        key = region_key(graph, inputs, parameters, options)
    operations, values = _operations(graph, inputs, parameters, options, join_rows=measures)
    laps.end("candidates")
    with ProgressBar("zendnn_cffi: measuring implementations") as show:
        tuner = Tuner(options.tune, show, turn)
        tuner.price(operations, values)
    laps.end("measuring each alone" if measures else "estimating")
    arriving, leaving = boundary(graph, values)
    wanted = {node: eager_layout(spec) for node, spec in leaving}
    with tuner.turn.measuring():
        choice = _choose(operations, arriving, wanted, tuner, values, _sparing(operations, parameters, weights, tuner))
    tuner.let_go()
    laps.end("choosing layouts, checking numbers")
    alone_ns = sum(map(_fastest_alone_ns, operations)) if measures else 0.0

    def build(choice: Sequence[Candidate], weights: WeightStore) -> Program:
        return build_program(operations, choice, arriving, leaving, weights)

    if measures and refined:
        tried = WeightStore(is_tried=True)  # what is packed for a trial goes with it
        choice = refine(operations, choice, inputs, lambda c: build(c, tried), tuner.turn, key)
        laps.end("measuring inside the network")
    tuner.database.save()
    program = build(choice, weights)
    laps.end("planning memory, packing weights")
    seconds = sum(laps.times_ns.values()) / 1e9
    log.debug("lowered %d operations to %d calls in %.3f s", len(operations), len(program.calls), seconds)
    reports = tuple(_report(o, c, options.dtype) for o, c in zip(operations, choice, strict=True))
    lowering = Lowering(graph, operations, choice, values=values)
    if not keep:
        lowering.let_go()
    return LoweredRegion(program, reports, alone_ns, measures, laps.times_ns, tuple(inputs), lowering if keep else None)


def _operations(
    graph: fx.Graph,
    inputs: Sequence[TensorSpec],
    parameters: Mapping[str, torch.Tensor],
    options: RegionOptions,
    join_rows: bool,
) -> tuple[list[Operation], RegionValues]:
    """The operations with their candidates, and what is known of values. Raises NotLowered where PyTorch has all.

    join_rows  whether products of the same rows may be one
    """
    _copy_inputs(graph, inputs)
    operations, values = lower_graph(
        graph,
        inputs,
        parameters,
        compute_dtype=options.dtype,
        allow_winograd=options.allow_winograd,
        without=options.without,
        join_rows=join_rows and not options.release_weights,
    )
    if options.release_weights:
        limit_transforms(operations, sum(t.numel() * t.element_size() for t in parameters.values()))
    if all(operation.fallback_reason or operation.kind == "view" for operation in operations):
        reasons = dict.fromkeys(o.fallback_reason for o in operations if o.fallback_reason)
        raise NotLowered("; ".join(reasons) or "nothing in it is computed")
    return operations, values


def _sparing(
    operations: Sequence[Operation], parameters: Mapping[str, torch.Tensor], weights: WeightStore, tuner: Tuner
) -> Callable[[Sequence[Candidate]], list[Candidate]]:
    """What replaces candidates by others that are about as fast, and need no copy of the weights."""
    plain = parameters.plain if isinstance(parameters, Kept) else parameters.values()
    storages = {tensor.untyped_storage().data_ptr() for tensor in plain}
    return lambda choice: spare_weights(operations, choice, weights, storages, tuner.are_comparable)


def _fastest_alone_ns(operation: Operation) -> float:
    """The time of its fastest implementation, as measured; 0 where none was (views, what PyTorch alone computes)."""
    measured = measurable(operation.candidates)
    return min((c.cost_ns for c in measured), default=0.0) if len(measured) == len(operation.candidates) else 0.0


def _copy_inputs(graph: fx.Graph, inputs: Sequence[TensorSpec]) -> None:
    """Copy inputs whose strides the library does not take, before anything reads them."""
    for node, spec in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        if is_known_dtype(spec.dtype) and not is_describable(spec.shape, spec.strides):
            with graph.inserting_after(node):
                copied = graph.call_function(row_major_copy, (node,))
            node.replace_all_uses_with(copied, delete_user_cb=lambda user, copied=copied: user is not copied)


def _choose(
    operations: list[Operation],
    arriving: dict[fx.Node, Layout],
    wanted: dict[fx.Node, Layout],
    tuner: Tuner,
    values: RegionValues,
    sparing: Callable[[Sequence[Candidate]], list[Candidate]],
) -> list[Candidate]:
    """The cheapest assignment of candidates whose numbers are known to be right.

    sparing  replaces candidates by others that are about as fast
    """
    while True:
        for number, operation in enumerate(operations):
            if not operation.candidates:
                tuner.doubt(operation)
                operations[number] = torch_operation(operation.node, values, "no implementation gave right numbers")
        choice = sparing(assign_layouts(operations, arriving, wanted, tuner.reorder_ns))
        wrong = [(o, c) for o, c in zip(operations, choice, strict=True) if not tuner.approve(o, c, values)]
        if not wrong:
            return choice
        for operation, candidate in wrong:
            operation.candidates = [other for other in operation.candidates if other is not candidate]


def _report(operation: Operation, candidate: Candidate, compute_dtype: torch.dtype | None) -> NodeReport:
    reason = operation.fallback_reason
    if not reason and is_rival(candidate) and not any(isinstance(c, PrimitiveTemplate) for c in candidate.calls):
        stated = [call.reason for call in candidate.calls if isinstance(call, TorchTemplate) and call.reason]
        others_ns = [c.cost_ns for c in operation.candidates if not is_rival(c)]
        reason = stated[0] if stated else _why_torch(candidate, others_ns)
    entries: Any = operation.node.kwargs.get("post_ops", ())
    post_ops = tuple(str(entry[1]) for entry in entries)
    return NodeReport(
        operation.name,
        str(operation.node.meta.get("source", "")),
        operation.kind,
        candidate.implementation,
        _layout(operation, candidate, compute_dtype),
        post_ops,
        reason,
        operation.flops,
        candidate.expected_ns,
    )


def _why_torch(candidate: Candidate, others_ns: Sequence[float]) -> str:
    if not others_ns:
        return f"PyTorch has the fastest kernel ({candidate.cost_ns / 1e3:.0f} us)"
    if candidate.from_memory and candidate.cost_ns < min(others_ns):
        times = f"{candidate.cost_ns / 1e3:.0f} us against {min(others_ns) / 1e3:.0f} us"
        return f"plain PyTorch reads the weights from memory faster ({times})"
    if min(others_ns) <= candidate.cost_ns <= LITTLE * min(others_ns):
        return "plain PyTorch is about as fast, and needs no copy of the weights"
    if candidate.cost_ns >= min(others_ns):  # alone, with its weights in cache, it was not
        return "plain PyTorch measured faster inside the network"
    return f"plain PyTorch measured faster ({candidate.cost_ns / 1e3:.0f} us against {min(others_ns) / 1e3:.0f} us)"


def _layout(operation: Operation, candidate: Candidate, compute_dtype: torch.dtype | None) -> str:
    if isinstance(candidate.dst, Quantized):
        return str(candidate.dst)
    given = operation.spec.dtype
    inside = compute_dtype if given == torch.float32 and compute_dtype is not None else given
    wider = not operation.fallback_reason and inside.itemsize == 2 and candidate.dst.dtype == torch.float32
    return f"{candidate.dst.format} float32" if wider else candidate.dst.format
