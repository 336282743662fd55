"""explain(): what optimize() made of each node of a model, and why not more."""

from __future__ import annotations

import html
import json
import operator
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from fx_passes.report.explanation import NodeExplanation
from zendnn_cffi.engine.library import is_available, unavailable_reason

if TYPE_CHECKING:
    from fx_passes.module import OptimizedModule
    from fx_passes.region.lowered import NodeReport
    from fx_passes.report.profile import Profile

_CELL = 40  # characters of input sizes in a table


@dataclass(frozen=True)
class WeightsExplanation:
    """What the weights of an optimized module take.

    original_bytes  parameters that regions read, shared with the original model, counted once each
    packed_bytes    copies of them in the layouts that kernels want, folded ones included, over all signatures
    """

    original_bytes: int
    packed_bytes: int

    def __str__(self) -> str:
        return f"weights: {self.original_bytes:,} bytes original plus {self.packed_bytes:,} bytes packed copies"


@dataclass(frozen=True)
class Drawing:
    """A picture that notebooks show.

    svg  its text
    """

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"Drawing of {len(self.svg):,} characters of SVG"


class Explanation:
    """What explain() returns: print it, show it in a notebook, or read it.

    nodes    a NodeExplanation per node and signature
    notes    remarks on the whole
    weights  WeightsExplanation
    profile  the latest profile() of the module, None where there was none
    measured whether the times of operations were measured, not estimated
    """

    def __init__(
        self,
        nodes: list[NodeExplanation],
        notes: list[str],
        weights: WeightsExplanation,
        profile: Profile | None = None,
        measured: bool = False,
        graphs: tuple[fx.Graph, dict[str, fx.Graph]] | None = None,
    ) -> None:
        self.nodes = nodes
        self.notes = notes
        self.weights = weights
        self.profile = profile
        self.measured = measured
        self._graphs = graphs

    def svg(self) -> str:
        """Return the graph as SVG: regions as boxes, coloured by where operations run, with their times alone."""
        from fx_passes.report.picture import svg

        return svg(*self._held_graphs(), self.nodes)

    def draw(self, path: str | os.PathLike[str] | None = None) -> Drawing:
        """Draw the graph as svg() has it: for a notebook, which shows what is returned, and for any browser.

        path     of a file to write, or None
        Returns  a Drawing; of several input signatures the last one is drawn
        """
        drawing = Drawing(self.svg())
        if path is not None:
            Path(path).write_text(drawing.svg, encoding="utf-8")
        return drawing

    def model_explorer(self, path: str | os.PathLike[str]) -> Path:
        """Write the graph for Model Explorer (pip install ai-edge-model-explorer), which shows large ones well.

        path  a file that ends in .json; regions are layers that unfold, the last of several input signatures is shown

        Return the file beside it, `path` with .times.json at its end: microseconds of each operation alone, to lay over
        the graph. Raises  ValueError for another ending.

            model-explorer graph.json --node_data_paths=graph.times.json
        """
        from fx_passes.report.model_explorer import graph_collection, node_times

        target = Path(path)
        if target.suffix != ".json":
            raise ValueError(f"Model Explorer reads graphs from files that end in .json, got {str(path)!r}")
        times = target.with_suffix(".times.json")
        target.write_text(json.dumps(graph_collection(*self._held_graphs(), self.nodes)), encoding="utf-8")
        times.write_text(json.dumps(node_times(self.nodes)), encoding="utf-8")
        return times

    def _held_graphs(self) -> tuple[fx.Graph, dict[str, fx.Graph]]:
        if self._graphs is None:
            raise ValueError(
                "this explanation holds no graph, or several: take explain() of one module"
                " (zendnn_cffi.backend.compiled_modules() returns those behind torch.compile)"
            )
        return self._graphs

    @property
    def share_basis(self) -> str:
        """What offloaded_share is a share of.

        "call"        of the time of a call, as profile() measured it
        "time"        of the time of the operations in regions, each alone: all regions were lowered
        "operations"  of the operations that compute, counted
        """
        if self.profile is not None and self.profile.total_ns:
            return "call"
        inside = [node for node in self.nodes if node.region and node.computes]
        known = all(node.time_ns is not None for node in inside) and any(node.time_ns for node in inside)
        return "time" if known else "operations"

    @property
    def offloaded_share(self) -> float:
        """Share that the engine runs, 0 to 1; `share_basis` says of what."""
        if self.share_basis == "call" and self.profile is not None:
            return min(self.profile.engine_ns / self.profile.total_ns, 1.0)
        computing = [node for node in self.nodes if node.computes]
        if self.share_basis == "time":
            own = sum(node.time_ns or 0.0 for node in computing if node.in_engine)
            return own / sum(node.time_ns or 0.0 for node in computing)
        return sum(node.in_engine for node in computing) / len(computing) if computing else 0.0

    def counts(self) -> Counter[tuple[str, str]]:
        """How many nodes became each (primitive, implementation)."""
        return Counter((node.became, node.implementation) for node in self.nodes)

    def __str__(self) -> str:
        columns = self._columns()
        rows = [tuple(columns), *(tuple(cell(node) for cell in columns.values()) for node in self.nodes)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self._summary()])

    def _columns(self) -> dict[str, Callable[[NodeExplanation], str]]:
        """The columns of the table, and what each has for a node; the inputs where a region was lowered for several."""
        several = len({(n.region, n.signature) for n in self.nodes}) > len({n.region for n in self.nodes})
        inputs = {"inputs": lambda n: _shortened(n.signature)} if several else {}
        return {
            "node": lambda n: n.name,
            **inputs,
            "became": lambda n: n.became,
            "implementation": lambda n: n.implementation,
            "layout": lambda n: n.layout,
            "absorbed": lambda n: " ".join(n.post_ops),
            "why not": lambda n: n.reason,
        }

    def _summary(self) -> list[str]:
        counts = ", ".join(_counted(count, *kind) for kind, count in self.counts().most_common())
        return [f"{self._share()}: {counts or 'nothing to compute'}", str(self.weights), *self.notes]

    def _share(self) -> str:
        share = f"{self.offloaded_share:.0%}"
        if self.share_basis == "call" and self.profile is not None:
            inside = max(self.profile.primitives_ns - self.profile.engine_ns, 0) / self.profile.total_ns
            rest = max(1.0 - self.offloaded_share - inside, 0.0)
            return (
                f"{share} of a call's time in the engine, {inside:.0%} in PyTorch's kernels inside of regions,"
                f" {rest:.0%} in Python and outside of regions (as profile() measured)"
            )
        outside = sum(node.computes and not node.region for node in self.nodes)
        if self.share_basis == "time":
            how = "measured" if self.measured else "estimated"
            others = f"; {outside} more operations outside, which profile() would time" if outside else ""
            return f"{share} of the time of the regions' operations in the engine (each {how} alone{others})"
        computing = [node for node in self.nodes if node.computes]
        waiting = sum(node.became == "waiting" for node in computing)
        if waiting:
            return f"{waiting} of {len(computing)} operations in regions, which the first call lowers"
        return f"{share} of {len(computing)} operations in the engine"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        columns = self._columns()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        body = []
        for node in self.nodes:
            values = [cell(node) for cell in columns.values()]
            colour = "" if node.offloaded or not node.computes else " style='background:#fff3cd'"
            body.append(f"<tr{colour}>" + "".join(f"<td>{html.escape(v)}</td>" for v in values) + "</tr>")
        summary = "<br>".join(html.escape(line) for line in self._summary())
        picture = "" if self._graphs is None else f"<details open><summary>graph</summary>{self.svg()}</details>"
        return f"<p>{summary}</p>{picture}<table><tr>{head}</tr>{''.join(body)}</table>"


def _shortened(text: str) -> str:
    """As a cell of the table."""
    return text if len(text) <= _CELL else f"{text[: _CELL - 3]}..."


_PLURALS = {"number": "sizes", "check": "assertions", "movement": "movements of data", "container": "containers"}


def _counted(count: int, became: str, implementation: str) -> str:
    """One entry of the list of what became of the nodes."""
    if became == "torch":
        return f"{count} in PyTorch"
    if became == "view":
        return f"{count} view{'s' * (count != 1)}"
    return f"{count} {_PLURALS.get(became, f'{became} {implementation}'.rstrip())}"


def explain(module: Any) -> Explanation:
    """Return what each node of an optimized module became, for every signature its regions were lowered for.

    module  what optimize(), replace_forward() or torch.compile(..., backend="zendnn") returned, or a model that holds
            such. Regions are lowered on the first call: call it once to see implementations. After profile(module, ...)
            the share of time is that of a call.
    Raises  TypeError for anything else, and for what was compiled or replaced and has no graph yet.
    """
    from fx_passes.module import OptimizedModule

    return _explain_optimized(module) if isinstance(module, OptimizedModule) else _explain_parts(module)


def _explain_parts(whole: Any) -> Explanation:
    """Of what holds optimized modules, or runs them behind torch.compile; of several, each by its name."""
    from fx_passes.region.region import weights_bytes
    from fx_passes.report.profile import latest_profile

    modules = _parts(whole)
    profile = latest_profile(whole)
    parts = {name: _explain_optimized(module) for name, module in modules.items()}
    if len(parts) == 1:
        (part,) = parts.values()
        part.profile = profile
        return part
    nodes = [_within(name, node) for name, part in parts.items() for node in part.nodes]
    notes = [f"{len(parts)} optimized modules: {', '.join(parts)}"]
    notes += dict.fromkeys(note for part in parts.values() for note in part.notes)
    regions = [region for gm in modules.values() for region in _own_regions(gm)]
    measured = all(part.measured for part in parts.values())
    return Explanation(nodes, notes, WeightsExplanation(*weights_bytes(regions)), profile, measured)


def _parts(whole: Any) -> dict[str, OptimizedModule]:
    """The optimized modules in it or in place of forwards, by path; those behind torch.compile: graph_0, graph_1."""
    from fx_passes.module import OptimizedModule
    from fx_passes.report.compiled import behind, is_compiled, replaced_forwards, why_plain

    inside = whole.named_modules() if isinstance(whole, nn.Module) else ()
    held = {path: module for path, module in inside if isinstance(module, OptimizedModule)}
    replaced = replaced_forwards(whole)
    held |= {path: modules[0] for path, modules in replaced.items() if modules}  # which tells of the others
    was_compiled = is_compiled(whole)
    compiled = behind(whole) if was_compiled else []
    if held or compiled:
        return held | {f"graph_{i}": module for i, module in enumerate(compiled)}
    if replaced:
        because = why_plain(whole)
        last = f"calls stayed plain PyTorch: {'; '.join(because)}" if because else "call the model once"
        raise TypeError(f"explain(): this forward was replaced, and no call was optimized yet: {last}")
    if was_compiled:
        raise TypeError("explain(): this was compiled, and has no graph yet: call it once under torch.no_grad()")
    raise TypeError(
        "explain() takes what zendnn_cffi.optimize(), zendnn_cffi.replace_forward() or"
        f' torch.compile(..., backend="zendnn") returned, or a model that holds it, got {type(whole).__name__}'
    )


def _explain_optimized(gm: OptimizedModule) -> Explanation:
    from fx_passes.region.region import ZenRegion, weights_bytes
    from fx_passes.report.outside import explain_outside
    from fx_passes.report.profile import latest_profile

    nodes: list[NodeExplanation] = []
    regions = gm.regions()
    for node in gm.graph.nodes:
        if node.op == "call_module" and node.target in regions:
            nodes += _region(regions[node.target])
        elif node.target is operator.getitem and node.args[0].op == "call_module":
            continue  # one of a region's results
        elif node.op in ("call_module", "call_function", "call_method"):
            nodes.append(explain_outside(node, gm))
    for path, submodule in gm.optimized_submodules.items():
        nodes += [_within(path, node) for node in _explain_optimized(submodule).nodes]
    for number, module in enumerate(gm.call_kinds.modules, 2):
        nodes += [_within(f"kind_{number}", node) for node in _explain_optimized(module).nodes]
    notes = [*gm.notes] if is_available() else [f"No engine: {unavailable_reason()}"]
    own = _own_regions(gm)
    notes += _beside_other_work(own) + _until_programs_pay(own)
    measured = all(found.is_measured for region in own for found in region.lowered.values() if found)
    graphs = (gm.graph, {name: region.graph for name, region in regions.items() if isinstance(region, ZenRegion)})
    return Explanation(nodes, notes, WeightsExplanation(*weights_bytes(own)), latest_profile(gm), measured, graphs)


def _own_regions(gm: OptimizedModule) -> list[Any]:
    """The regions of a module, those that compute packed sequences included."""
    from fx_passes.region.region import ZenRegion

    return [part for region in gm.regions().values() if isinstance(region, ZenRegion) for part in region.with_packed]


def _within(path: str, node: NodeExplanation) -> NodeExplanation:
    """What is said of a node of a submodule, where that is part of a model."""
    return replace(node, region=node.region and f"{path}.{node.region}", name=f"{path}.{node.name}")


def explain_report(region: str, signature: str, report: NodeReport, slices: int) -> NodeExplanation:
    """What lowering says of one node of a region; slices: how often its program runs it in a call."""
    return NodeExplanation(
        region,
        signature,
        report.name,
        report.source,
        "torch" if report.reason else report.kind,
        report.implementation,
        report.layout,
        report.post_ops,
        report.reason,
        report.flops,
        report.time_ns * slices,
    )


def _beside_other_work(regions: Sequence[Any]) -> list[str]:
    """Which regions take fewer threads just now."""
    taking = [(r.name, f.sharing) for r in regions for f in r.lowered.values() if f is not None and f.sharing]
    return [
        f"{name} computes with {sharing.threads_now} of {sharing.threads} threads: other work takes cores"
        for name, sharing in taking
        if sharing.threads_now < sharing.threads
    ]


def _until_programs_pay(regions: Sequence[Any]) -> list[str]:
    """Which regions run some input sizes as plain PyTorch, as these were not met often."""
    return [
        f"{region.name} runs {region.patience.waiting} further input sizes as plain PyTorch until programs for them"
        " pay (zendnn_cffi.warm_up)"
        for region in regions
        if region.patience.waiting
    ]


def _region(region: Any) -> list[NodeExplanation]:
    rows = [] if region.packed is None else _packed(region)
    for signature, lowered in region.lowered.items():
        rows += _lowered(region, signature, lowered)
    return rows or [_waiting(region, node, "", "waiting", "lowered on the first call") for node in _calls(region)]


def _lowered(region: Any, signature: Any, lowered: Any) -> list[NodeExplanation]:
    """What a region's nodes became for one signature; lowered: None where PyTorch computes."""
    shapes = " ".join("x".join(map(str, shape)) for shape, *_ in signature[1:])
    if lowered is None:
        return [_waiting(region, node, shapes, "torch", region.reason(signature)) for node in _calls(region)]
    return [explain_report(region.name, shapes, report, lowered.program.slices) for report in lowered.nodes]


def _packed(region: Any) -> list[NodeExplanation]:
    """Of a region's packed sequences: the programs in use for them, and for which ones PyTorch computes."""
    from fx_passes import ops

    packed, rows = region.packed, []
    stack = [node for node in _calls(region) if node.target is ops.recurrent]
    for (*size, _eighths), reason in ((key or (0,), reason) for key, reason in packed.left.items() if reason):
        shapes = "x".join(map(str, (*size, "packed")))
        rows += [_waiting(region, node, shapes, "torch", reason) for node in stack]
    in_use = {key[:2] for key, reason in packed.left.items() if not reason}
    for signature, lowered in packed.region.lowered.items():
        steps_and_samples = tuple(signature[1][0][:2])
        if lowered is None or steps_and_samples in in_use:
            rows += _lowered(packed.region, signature, lowered)
    return rows


def _calls(region: Any) -> list[fx.Node]:
    """The nodes that become operations: no sizes, nothing over parameters alone."""
    from fx_passes import ops

    settled = ops.SHAPE | ops.CONSTANT
    calls = [node for node in region.graph.nodes if node.op == "call_function" and not node.meta.get("constant")]
    return [node for node in calls if node.target not in settled]


def _waiting(region: Any, node: fx.Node, shapes: str, became: str, reason: str) -> NodeExplanation:
    from fx_passes import ops

    source = str(node.meta.get("source", ""))
    became = "movement" if node.target in ops.MOVEMENT else became
    implementation = "torch" if became == "torch" else ""
    return NodeExplanation(region.name, shapes, node.name, source, became, implementation, "", (), reason)
