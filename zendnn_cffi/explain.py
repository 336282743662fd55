"""explain(): what optimize() made of each node of a model, and why not more."""

from __future__ import annotations

import html
import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import fx

from zendnn_cffi.library import is_available, unavailable_reason


@dataclass(frozen=True)
class NodeExplanation:
    """One node of the optimized graph.

    region          name of the region it is in, "" for what stayed in the outer graph
    signature       shapes of the inputs it was lowered for, "" before the first call
    name, source    the node, and the module or function it comes from
    became          the primitive, "view", or "torch"
    implementation  the implementation that runs, such as "brgconv:avx512_core"
    layout          memory layout of the result
    post_ops        operations absorbed into it
    reason          why plain PyTorch computes it, "" if it does not
    flops           floating point operations of one run, 0 where not counted
    """

    region: str
    signature: str
    name: str
    source: str
    became: str
    implementation: str
    layout: str
    post_ops: tuple[str, ...]
    reason: str
    flops: int = 0

    @property
    def offloaded(self) -> bool:
        """Whether the engine computes it."""
        return self.became not in ("torch", "view", "waiting")


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


class Explanation:
    """What explain() returns: print it, show it in a notebook, or read it.

    nodes    a NodeExplanation per node and signature
    notes    remarks on the whole
    weights  WeightsExplanation
    """

    def __init__(self, nodes: list[NodeExplanation], notes: list[str], weights: WeightsExplanation) -> None:
        self.nodes = nodes
        self.notes = notes
        self.weights = weights

    @property
    def offloaded_share(self) -> float:
        """Share of the computing nodes (views left out) that the engine runs, 0 to 1."""
        computing = [node for node in self.nodes if node.became != "view"]
        return sum(node.offloaded for node in computing) / len(computing) if computing else 0.0

    def counts(self) -> Counter[tuple[str, str]]:
        """How many nodes became each (primitive, implementation)."""
        return Counter((node.became, node.implementation) for node in self.nodes)

    def __str__(self) -> str:
        rows = [("node", "became", "implementation", "layout", "absorbed", "why not")]
        rows += [(n.name, n.became, n.implementation, n.layout, " ".join(n.post_ops), n.reason) for n in self.nodes]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self._summary()])

    def _summary(self) -> list[str]:
        counts = ", ".join(f"{count} {kind} {name}".rstrip() for (kind, name), count in self.counts().most_common())
        share = f"{self.offloaded_share:.0%} of computing nodes on the engine: {counts}"
        return [share, str(self.weights), *self.notes]

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cells = ("name", "became", "implementation", "layout", "post_ops", "reason")
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in cells)
        body = []
        for node in self.nodes:
            values = [" ".join(v) if isinstance(v := getattr(node, cell), tuple) else str(v) for cell in cells]
            colour = "" if node.offloaded or node.became == "view" else " style='background:#fff3cd'"
            body.append(f"<tr{colour}>" + "".join(f"<td>{html.escape(v)}</td>" for v in values) + "</tr>")
        summary = "<br>".join(html.escape(line) for line in self._summary())
        return f"<p>{summary}</p><table><tr>{head}</tr>{''.join(body)}</table>"


def explain(gm: fx.GraphModule) -> Explanation:
    """Return what each node of an optimized module became, for every signature its regions were lowered for.

    gm      what optimize() returned. Regions are lowered on the first call: call gm once to see implementations.
    Raises  TypeError for anything else.
    """
    from fx_passes.module import OptimizedModule
    from fx_passes.region import ZenRegion, weights_bytes

    if not isinstance(gm, OptimizedModule):
        raise TypeError(f"explain() takes what zendnn_cffi.optimize() returned, got {type(gm).__name__}")
    nodes: list[NodeExplanation] = []
    regions = gm.regions()
    for node in gm.graph.nodes:
        if node.op == "call_module" and node.target in regions:
            nodes += _region(regions[node.target])
        elif node.target is operator.getitem and node.args[0].op == "call_module":
            continue  # one of a region's results
        elif node.op in ("call_module", "call_function", "call_method"):
            nodes.append(_outside(node))
    notes = [] if is_available() else [f"No engine: {unavailable_reason()}"]
    own = [region for region in regions.values() if isinstance(region, ZenRegion)]
    return Explanation(nodes, notes, WeightsExplanation(*weights_bytes(own)))


def _outside(node: fx.Node) -> NodeExplanation:
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    reason = str(node.meta.get("reason", "")) or "not an operation that regions know"
    source = str(node.meta.get("source", target))
    return NodeExplanation("", "", node.name, source, "torch", "torch", "", (), reason)


def _region(region: Any) -> list[NodeExplanation]:
    rows = []
    for signature, lowered in region.lowered.items():
        shapes = " ".join("x".join(map(str, shape)) for shape, *_ in signature[1:])
        if lowered is None:
            rows += [_waiting(region, node, shapes, "torch", region.reason(signature)) for node in _calls(region)]
            continue
        for report in lowered.nodes:
            rows.append(
                NodeExplanation(
                    region.name,
                    shapes,
                    report.name,
                    report.source,
                    "torch" if report.reason else report.kind,
                    report.implementation,
                    report.layout,
                    report.post_ops,
                    report.reason,
                    report.flops,
                )
            )
    return rows or [_waiting(region, node, "", "waiting", "lowered on the first call") for node in _calls(region)]


def _calls(region: Any) -> list[fx.Node]:
    return [node for node in region.graph.nodes if node.op == "call_function"]


def _waiting(region: Any, node: fx.Node, shapes: str, became: str, reason: str) -> NodeExplanation:
    source = str(node.meta.get("source", ""))
    return NodeExplanation(region.name, shapes, node.name, source, became, "", "", (), reason)
