"""Structural patterns: the expression that some nodes compute, with names for what it is computed of.

    x, eps = Value("x"), Value("eps", is_number)
    norm = binary("mul", x, once(eltwise("rsqrt", binary("add", mean, eps))))
    match(norm, node)           {"x": node, "eps": 1e-6}, or None

Parts of a pattern are patterns; tuples, of such; and plain values, which only equal ones match. Sums and products
commute. A pattern only reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import is_call, only_user
from zendnn_cffi.values import dataclass

Found = dict[str, Any]
_COMMUTING = ("add", "mul", "max", "min")


def is_node(value: Any) -> bool:
    """Whether a value is computed in the graph."""
    return isinstance(value, fx.Node)


@dataclass(frozen=True)
class Value:
    """Any value that `accepts` takes; wherever the name stands again, the same one."""

    name: str
    accepts: Callable[[Any], bool] = is_node


@dataclass(frozen=True)
class Parts:
    """A value that `read` takes apart into what matches `parts`; commutes: in either order."""

    read: Callable[[Any], Sequence[Any] | None]
    parts: tuple[Any, ...]
    commutes: bool = False


class Either(tuple[Any, ...]):
    """One of several patterns, the first ones first."""


def match(pattern: Any, value: Any) -> Found | None:
    """What the pattern's names stand for, in the first way in which it matches."""
    return next(_ways(pattern, value, {}), None)


def _ways(pattern: Any, value: Any, found: Found) -> Iterator[Found]:
    """Every way in which pattern matches value, as `found` and what else its names stand for."""
    if isinstance(pattern, Value):
        if found[pattern.name] == value if pattern.name in found else pattern.accepts(value):
            yield {**found, pattern.name: value}
    elif isinstance(pattern, Either):
        for option in pattern:
            yield from _ways(option, value, found)
    elif isinstance(pattern, Parts):
        if (values := pattern.read(value)) is not None:
            yield from _all_ways(pattern.parts, values, found)
            if pattern.commutes:
                yield from _all_ways(pattern.parts, values[::-1], found)
    elif isinstance(pattern, tuple):
        if isinstance(value, list | tuple):
            yield from _all_ways(pattern, value, found)
    elif pattern == value:
        yield found


def _all_ways(patterns: tuple[Any, ...], values: Sequence[Any], found: Found) -> Iterator[Found]:
    if len(patterns) != len(values):
        return
    if not patterns:
        yield found
        return
    for more in _ways(patterns[0], values[0], found):
        yield from _all_ways(patterns[1:], values[1:], more)


def call(target: Callable[..., Any], *parts: Any) -> Parts:
    """A call of target; arguments behind the parts may be any."""
    return Parts(lambda value: value.args[: len(parts)] if is_call(value, target) else None, parts)


def eltwise(kind: Any, src: Any) -> Parts:
    """An element-wise function of src."""
    return call(ops.eltwise, src, kind)


def binary(kind: str, a: Any, b: Any) -> Parts:
    """a and b, added, multiplied, ..."""

    def operands(value: Any) -> Sequence[Any] | None:
        return value.args[:2] if is_call(value, ops.binary) and value.args[2] == kind else None

    return Parts(operands, (a, b), kind in _COMMUTING)


def once(pattern: Any) -> Parts:
    """A value that one node reads, once."""
    return Parts(lambda value: (value,) if is_node(value) and only_user(value) is not None else None, (pattern,))
