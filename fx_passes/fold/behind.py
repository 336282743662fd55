"""The operations behind a node, each of which reads the one before it alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.fold.casts import dtype_of, is_cast
from fx_passes.fold.rows import restores
from fx_passes.graph.graph import example, is_call, only_user


class Behind:
    """A walk along such a chain: each step is taken where the next operation is the one that is asked for."""

    def __init__(self, first: fx.Node) -> None:
        self.last = first

    def cast(self, dtype: torch.dtype | None) -> bool:
        """Go over a conversion to this dtype; return whether there was one."""
        user = only_user(self.last)
        return self._go_to(user if is_cast(user) and dtype_of(user) == dtype else None)

    def operand(self, kind: str, accepts: Callable[[Any], bool]) -> Any:
        """Go over a binary operation with an operand that is accepted, and return that; None where there is none."""
        user = only_user(self.last)
        if not is_call(user, ops.binary) or user.args[2] != kind:
            return None
        a, b, _ = user.args
        other = b if a is self.last else a if kind != "sub" else None
        if not isinstance(other, fx.Node) or not accepts(other):
            return None
        self._go_to(user)
        return other

    def restored(self, source: fx.Node) -> bool:
        """Go over a reshape to the sizes of source, where source is no matrix; return whether it is so far."""
        user = only_user(self.last)
        return self._go_to(user if restores(user, source) else None) or has_shape(source, 2)

    def _go_to(self, node: fx.Node | None) -> bool:
        self.last = node or self.last
        return node is not None


def stripped(node: Any) -> Any:
    """What has the numbers of node, in another shape, or before it became floats."""
    while is_call(node, ops.reshape, ops.flatten) or is_cast_to_float(node):
        node = node.args[0]
    return node


def is_cast_to_float(node: Any) -> bool:
    """Whether node is a conversion to floats."""
    return is_cast(node) and (dtype := dtype_of(node)) is not None and dtype.is_floating_point


def has_shape(node: Any, dimensions: int) -> bool:
    """Whether a node's example has so many dimensions."""
    value = example(node)
    return value is not None and value.ndim == dimensions
