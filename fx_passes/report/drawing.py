"""A graph drawn as SVG, without any tool: rows by the longest path, an arrow per edge."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Mapping

from torch import fx

_BOX, _GAP, _ROW = (190, 34), 14, 70
_COLOURS = {"placeholder": "#d5e8d4", "output": "#d5e8d4", "call_module": "#dae8fc", "get_attr": "#eeeeee"}
_OTHER = "#fff2cc"


def draw(graph: fx.Graph) -> str:
    """Return the SVG: a box per node (its name, and what it calls), inputs on top; parameters are left out."""
    nodes = [node for node in graph.nodes if node.op != "get_attr"]
    rows = rows_of(nodes)
    places: dict[fx.Node, tuple[int, int]] = {}
    width = max(map(len, rows.values()), default=1) * (_BOX[0] + _GAP)
    for row, members in rows.items():
        left = (width - len(members) * (_BOX[0] + _GAP)) // 2
        for column, node in enumerate(members):
            places[node] = left + column * (_BOX[0] + _GAP), _GAP + row * _ROW
    edges = [(source, node) for node in nodes for source in node.all_input_nodes if source in places]
    body = [_arrow(places[source], places[node]) for source, node in edges]
    body += [_box(node, *place) for node, place in places.items()]
    height = (max(rows, default=0) + 1) * _ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, *body, "</svg>", ""])


def rows_of(nodes: list[fx.Node]) -> dict[int, list[fx.Node]]:
    """Nodes by the length of the longest path that leads to them."""
    depth: dict[fx.Node, int] = {}
    rows: dict[int, list[fx.Node]] = defaultdict(list)
    for node in nodes:  # operands stand before their readers
        depth[node] = max((depth[source] + 1 for source in node.all_input_nodes if source in depth), default=0)
        rows[depth[node]].append(node)
    return rows


def called(node: fx.Node) -> str:
    """The name of what a node calls; of an input, its own."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def inside(node: fx.Node, regions: Mapping[str, fx.Graph]) -> fx.Graph | None:
    """The graph of the region that a node of the outer graph calls; None of other nodes."""
    return regions.get(str(node.target)) if node.op == "call_module" else None


def _arrow(source: tuple[int, int], target: tuple[int, int]) -> str:
    (x1, y1), (x2, y2), half = source, target, _BOX[0] // 2
    return f'<line x1="{x1 + half}" y1="{y1 + _BOX[1]}" x2="{x2 + half}" y2="{y2}" stroke="#888888"/>'


def _box(node: fx.Node, x: int, y: int) -> str:
    colour = _COLOURS.get(node.op, _OTHER)
    return (
        f'<rect x="{x}" y="{y}" width="{_BOX[0]}" height="{_BOX[1]}" rx="4" fill="{colour}" stroke="#888888"/>'
        f'<text x="{x + 6}" y="{y + 14}" font-size="11">{html.escape(node.name[:30])}</text>'
        f'<text x="{x + 6}" y="{y + 28}" font-size="9" fill="#555555">{html.escape(called(node)[:36])}</text>'
    )
