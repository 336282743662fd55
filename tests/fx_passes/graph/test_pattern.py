"""Patterns: names stand for one value each, sums commute, one of several, and all ways are tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.pattern import Either, Found, Parts, Value, binary, call, eltwise, match, once

A, B = Value("a"), Value("b")


def graph() -> dict[str, fx.Node]:
    """x; half = x * 0.5; root = sqrt(half); total = root + x; ratio = x / root; joined = concat((x, half), 1)."""
    made = fx.Graph()
    x = made.placeholder("x")
    half = made.call_function(ops.binary, (x, 0.5, "mul"))
    root = made.call_function(ops.eltwise, (half, "sqrt", 0.0, 0.0))
    total = made.call_function(ops.binary, (root, x, "add"))
    ratio = made.call_function(ops.binary, (x, root, "div"))
    joined = made.call_function(ops.concat, ((x, half), 1))
    return {"x": x, "half": half, "root": root, "total": total, "ratio": ratio, "joined": joined}


NUMBER = Value("n", lambda value: isinstance(value, float))
CASES: dict[str, tuple[Any, str, dict[str, Any] | None]] = {
    "any node": (A, "x", {"a": "x"}),
    "a number is no node": (binary("mul", A, B), "half", None),
    "a number": (binary("mul", A, NUMBER), "half", {"a": "x", "n": 0.5}),
    "the other way round": (binary("mul", NUMBER, A), "half", {"a": "x", "n": 0.5}),
    "an equal value": (binary("mul", 0.5, A), "half", {"a": "x"}),
    "another value": (binary("mul", 0.25, A), "half", None),
    "another kind": (binary("add", A, NUMBER), "half", None),
    "a quotient does not commute": (binary("div", eltwise("sqrt", A), B), "ratio", None),
    "as it stands": (binary("div", B, eltwise("sqrt", A)), "ratio", {"a": "half", "b": "x"}),
    "one name, one value": (binary("add", A, eltwise("sqrt", binary("mul", A, NUMBER))), "total", {"a": "x", "n": 0.5}),
    "one name, two values": (binary("add", A, eltwise("sqrt", A)), "total", None),
    "inside of a tuple": (call(ops.concat, (A, B), 1), "joined", {"a": "x", "b": "half"}),
    "too few": (call(ops.concat, (A,), 1), "joined", None),
    "read once": (once(A), "root", None),
    "read twice": (once(A), "x", None),
    "the second of two": (Either((eltwise("exp", A), eltwise("sqrt", A))), "root", {"a": "half"}),
    "back to the second": (
        binary("add", Either((A, eltwise("sqrt", binary("mul", A, 0.5)))), A), "total", {"a": "x"}
    ),
    "parts": (Parts(lambda n: (n.name,) if isinstance(n, fx.Node) else None, ("x",)), "x", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_match(name: str) -> None:
    nodes = graph()
    pattern, node, expected = CASES[name]
    wanted: Found | None = None
    if expected is not None:
        wanted = {key: nodes[value] if isinstance(value, str) else value for key, value in expected.items()}
    assert match(pattern, nodes[node]) == wanted


def test_read_once() -> None:
    nodes = graph()
    nodes["total"].graph.erase_node(nodes["total"])
    assert match(once(eltwise("sqrt", A)), nodes["root"]) == {"a": nodes["half"]}


def test_twice_by_one_reader_is_not_once() -> None:
    made = fx.Graph()
    x = made.placeholder("x")
    made.call_function(torch.add, (x, x))
    assert match(once(A), x) is None
