"""What a builder returns, and questions about arguments that all builders ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import fx


class Call(NamedTuple):
    """A call of a vocabulary op; an argument may itself be a Call, which becomes a node in front."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - read only


class Alias(NamedTuple):
    """The value of another node, unchanged."""

    value: Any


Built = Call | Alias | None


def static(*values: Any) -> bool:
    """Whether attributes are known now: no node among or inside them."""
    found: list[fx.Node] = []
    fx.node.map_arg(values, found.append)
    return not found


def spread(value: Any, n: int) -> tuple[int, ...]:
    """One entry per spatial dimension, from one number or a sequence of 1 or n."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


def is_number(value: Any) -> bool:
    """A plain Python number (bool is not one)."""
    return isinstance(value, int | float) and not isinstance(value, bool)
