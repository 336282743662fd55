"""torch.export as the second way to a graph: it follows the example inputs through control flow on shapes and values.

The graph keeps every size free that the model does not depend on. What it does depend on is collected as guards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree


class Guards:
    """Conditions on the inputs under which an exported graph is the model."""

    def __init__(self, check: Callable[..., Any] | None, in_spec: pytree.TreeSpec) -> None:
        self._check = check
        self._in_spec = in_spec

    def hold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments may use the graph."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            return False
        if self._check is None:
            return True
        try:
            self._check(*flat)
        except AssertionError:
            return False
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> Guards:
        return self


def export(
    root: nn.Module, traced_root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.Graph, Guards]:
    """Return the graph of root (its constants are put on root) and the guards it rests on.

    traced_root  a skeleton of root, on which the export itself is done
    Raises       whatever torch.export raises for a model it cannot follow.
    """
    free = pytree.tree_map(_free_sizes, (args, kwargs))
    try:
        shapes = _by_name(traced_root, free)
        program = torch.export.export(traced_root, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception:  # sizes that cannot be free: take the example's
        program = torch.export.export(traced_root, args, kwargs, strict=False)
    gm: Any = program.module()
    check = getattr(gm, "_guards_fn", None)
    graph: fx.Graph = gm.graph
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            graph.erase_node(node)
        elif node.op == "get_attr":
            owner, _, name = node.target.rpartition(".")
            if not hasattr(root.get_submodule(owner), name):  # a tensor that forward creates
                setattr(root.get_submodule(owner), name, getattr(gm.get_submodule(owner), name))
    return graph, Guards(check, gm._in_spec)


def _free_sizes(value: Any) -> Any:
    """Leave every size of a tensor to torch.export to find out."""
    return dict.fromkeys(range(value.ndim), torch.export.Dim.AUTO) if isinstance(value, torch.Tensor) else None


def _by_name(root: nn.Module, free: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    """dynamic_shapes by argument name."""
    args, kwargs = free
    return {**dict(zip(inspect.signature(root.forward).parameters, args, strict=False)), **kwargs}
