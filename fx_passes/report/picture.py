"""explain(...).draw(): the outer graph with its regions as boxes, coloured by where each operation runs.

Each part of the outer graph stands below what it reads; inside a region's box its own graph is drawn the same way.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from torch import fx

from fx_passes.report.drawing import inside, rows_of
from fx_passes.report.explanation import NodeExplanation

_BOX, _GAP, _ROW, _EDGE = (196, 36), 14, 62, 24
COLOURS = {"engine": "#cfe3f7", "PyTorch": "#ffd9a0", "view": "#eeeeee", "not run yet": "#ffffff", "input": "#d5e8d4"}


def where(found: NodeExplanation | None) -> str:
    """Where a node runs: one of COLOURS."""
    if found is None:
        return "input"
    if found.in_engine:
        return "engine"
    if found.became == "waiting":
        return "not run yet"
    return "PyTorch" if found.computes else "view"


def svg(outer: fx.Graph, regions: Mapping[str, fx.Graph], found: Sequence[NodeExplanation]) -> str:
    """Return the picture; of several signatures the last one's. found: what explain() says of the nodes."""
    by_name = {(each.region, each.name): each for each in found}
    nodes = [node for node in outer.nodes if node.op != "get_attr"]
    parts: dict[fx.Node, tuple[list[str], int, int]] = {}
    for node in nodes:
        inner = inside(node, regions)
        if inner is None:
            parts[node] = (_box(node.name, by_name.get(("", node.name)), node, 0, 0), *_BOX)
        else:
            parts[node] = _region(str(node.target), inner, by_name)
    rows = rows_of(nodes)
    width = max(sum(parts[node][1] + _GAP for node in row) for row in rows.values()) + _GAP
    width = max(width, len(COLOURS) * 110 + _GAP)
    places: dict[fx.Node, tuple[int, int]] = {}
    y = 40
    for number in sorted(rows):
        x = (width - sum(parts[node][1] + _GAP for node in rows[number]) + _GAP) // 2
        for node in rows[number]:
            places[node] = x, y
            x += parts[node][1] + _GAP
        y += max(parts[node][2] for node in rows[number]) + 28
    body = _legend()
    for node in nodes:
        for source in node.all_input_nodes:
            if source in places:
                (x1, y1), (x2, y2) = places[source], places[node]
                start = x1 + parts[source][1] // 2, y1 + parts[source][2]
                body.append(_line(*start, x2 + parts[node][1] // 2, y2))
    for node, (x, top) in places.items():
        body += [f'<g transform="translate({x},{top})">', *parts[node][0], "</g>"]
    size = f'width="{width}" height="{y}" viewBox="0 0 {width} {y}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{y}" fill="#ffffff"/>', *body, "</svg>", ""])


def _region(name: str, graph: fx.Graph, found: Mapping[tuple[str, str], NodeExplanation]) -> tuple[list[str], int, int]:
    """A region's box, its width and height."""
    nodes = [node for node in graph.nodes if (name, node.name) in found]
    rows = rows_of(nodes)
    width = max(map(len, rows.values()), default=1) * (_BOX[0] + _GAP) + _GAP
    height = max(len(rows), 1) * _ROW + _EDGE
    total_ns = sum(found[name, node.name].time_ns or 0.0 for node in nodes)
    title = f"{name}   {total_ns / 1e6:.3f} ms alone" if total_ns else name
    body = [
        f'<rect width="{width}" height="{height}" rx="6" fill="#f7f9fc" stroke="#5b7fa6"/>',
        _text(8, 16, title, 12),
    ]
    places = {}
    for row, members in rows.items():
        left = (width - len(members) * (_BOX[0] + _GAP) + _GAP) // 2
        for column, node in enumerate(members):
            places[node] = left + column * (_BOX[0] + _GAP), _EDGE + row * _ROW
    half = _BOX[0] // 2
    for node in nodes:
        for source in (source for source in node.all_input_nodes if source in places):
            (x1, y1), (x2, y2) = places[source], places[node]
            body.append(_line(x1 + half, y1 + _BOX[1], x2 + half, y2))
    for node, (x, y) in places.items():
        body += _box(node.name, found[name, node.name], node, x, y)
    return body, width, height


def _box(name: str, found: NodeExplanation | None, node: fx.Node, x: int, y: int) -> list[str]:
    under = node.op
    if found is not None:
        time = f"{found.time_ns / 1e3:,.1f} us  " if found.time_ns else ""
        under = time + " ".join(dict.fromkeys((found.became, found.implementation)))
    colour = COLOURS[where(found)]
    why = f"<title>{html.escape(found.reason)}</title>" if found is not None and found.reason else ""
    place = f'x="{x}" y="{y}" width="{_BOX[0]}" height="{_BOX[1]}" rx="4"'
    return [
        f'<rect {place} fill="{colour}" stroke="#888888">{why}</rect>',
        _text(x + 6, y + 14, name[:30], 11),
        _text(x + 6, y + 29, under[:38], 9),
    ]


def _legend() -> list[str]:
    body = []
    for number, (name, colour) in enumerate(COLOURS.items()):
        x = _GAP + number * 110
        body.append(f'<rect x="{x}" y="10" width="14" height="14" fill="{colour}" stroke="#888888"/>')
        body.append(_text(x + 20, 22, name, 11))
    return body


def _line(x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#888888"/>'


def _text(x: int, y: int, text: str, size: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}">{html.escape(text)}</text>'
