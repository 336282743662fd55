"""explain(...).model_explorer(): the graph and its times as JSON for Model Explorer, which folds large graphs up.

Source: https://github.com/google-ai-edge/model-explorer, its "Graph JSON" and "Custom node data" guides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch import fx

from fx_passes.report.drawing import called, inside
from fx_passes.report.explanation import NodeExplanation
from fx_passes.report.picture import COLOURS, where

_GRAPH = "optimized"
_GRADIENT = [{"stop": 0, "bgColor": "#ffffff"}, {"stop": 1, "bgColor": "#e4572e"}]
_SAID = ("source", "became", "implementation", "layout", "post_ops", "flops", "signature", "reason")


def graph_collection(
    outer: fx.Graph, regions: Mapping[str, fx.Graph], found: Sequence[NodeExplanation]
) -> dict[str, Any]:
    """Return the graph: a node per operation, regions as layers that unfold, coloured as in draw().

    found  what explain() says of the nodes; of several signatures the last one's is shown
    """
    by_name = {(each.region, each.name): each for each in found}
    nodes = []
    for node in _shown(outer):
        inner = inside(node, regions)
        if inner is None:
            nodes.append(_node("", node, by_name, _sources(outer, regions, node)))
        else:
            nodes += _inside(str(node.target), inner, by_name, _sources(outer, regions, node))
    return {"label": "zendnn_cffi", "graphs": [{"id": _GRAPH, "nodes": nodes}]}


def node_times(found: Sequence[NodeExplanation]) -> dict[str, Any]:
    """Return microseconds of each operation alone, as node data over the graph of graph_collection()."""
    results = {
        _identity(each.region, each.name): {"value": round(each.time_ns / 1e3, 3)} for each in found if each.time_ns
    }
    return {_GRAPH: {"name": "time alone, us", "results": results, "gradient": _GRADIENT}}


def _shown(graph: fx.Graph) -> Iterator[fx.Node]:
    """All but parameters."""
    return (node for node in graph.nodes if node.op != "get_attr")


def _identity(region: str, name: str) -> str:
    return f"{region}/{name}" if region else name


def _sources(outer: fx.Graph, regions: Mapping[str, fx.Graph], node: fx.Node) -> list[str]:
    """Identities of what a node of the outer graph reads; of a region, its output."""
    sources = []
    for source in node.all_input_nodes:
        inner = inside(source, regions)
        if inner is not None:
            sources.append(_identity(str(source.target), inner.output_node().name))
        elif source.op != "get_attr":
            sources.append(source.name)
    return sources


def _inside(
    region: str, graph: fx.Graph, found: Mapping[tuple[str, str], NodeExplanation], sources: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Nodes of a region's graph; its inputs read `sources`, in order."""
    feeding = iter(sources)
    for node in _shown(graph):
        if node.op == "placeholder":
            reads = list(islice(feeding, 1))
        else:
            reads = [_identity(region, source.name) for source in node.all_input_nodes if source.op != "get_attr"]
        yield _node(region, node, found, reads)


def _node(
    region: str, node: fx.Node, found: Mapping[tuple[str, str], NodeExplanation], reads: Sequence[str]
) -> dict[str, Any]:
    said = found.get((region, node.name))
    attributes = {} if said is None else {name: _text(getattr(said, name)) for name in _SAID}
    return {
        "id": _identity(region, node.name),
        "label": _label(node) if said is None else said.became,
        "namespace": region,
        "attrs": [{"key": "name", "value": node.name}]
        + [{"key": key, "value": value} for key, value in attributes.items() if value],
        "incomingEdges": [
            {"sourceNodeId": source, "sourceNodeOutputId": "0", "targetNodeInputId": str(number)}
            for number, source in enumerate(reads)
        ],
        "style": {"backgroundColor": COLOURS[where(said)]},
    }


def _label(node: fx.Node) -> str:
    """The name of what a node calls; of inputs and the output, what they are."""
    return node.op if node.op in ("placeholder", "output") else called(node)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value or "")
