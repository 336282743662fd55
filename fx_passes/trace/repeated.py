"""A forward traced, or called, a second time: what it reads elsewhere may change from call to call.

    def forward(self, x): return x * next(COUNTER)        first trace: mul(x, 1), second: mul(x, 2)

Attributes, globals and the like are compared by themselves (fx_passes.trace.state), and put back. This also notices
what lies where nobody looks: files, clocks, environment variables, caches, random generators of other libraries.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes.graph.graph import get_attribute
from fx_passes.trace.compared import agree, call, callable_copy
from fx_passes.trace.held import bytes_of
from fx_passes.trace.state import Snapshot
from zendnn_cffi.errors import is_of_signal_handler

log = logging.getLogger("zendnn_cffi.passes")

_SAME_AGAIN = 1e-6  # the same code on the same numbers; sums of several threads may round in another order
_OWN_NAMES = "_tensor_constant"


def first_difference(first: fx.Graph, second: fx.Graph, root: nn.Module) -> fx.Node | None:
    """The first node of a graph that another trace of the same forward has not; None where they are alike.

    root  holds the tensors that both traces made
    """
    other_of: dict[fx.Node, fx.Node] = {}
    theirs = iter(second.nodes)
    for node in first.nodes:
        other = next(theirs, None)
        if other is None or not _alike(node, other, other_of, root):
            return node
        other_of[node] = other
    return None if next(theirs, None) is None else node


def _alike(node: fx.Node, other: fx.Node, other_of: Mapping[fx.Node, fx.Node], root: nn.Module) -> bool:
    if node.op != other.op:
        return False
    if node.op == "get_attr" and str(node.target).startswith(_OWN_NAMES):
        return _equal(get_attribute(root, str(node.target)), get_attribute(root, str(other.target)))
    if node.target != other.target and getattr(node.target, "__name__", "") != getattr(other.target, "__name__", None):
        return False  # functions may be made for each trace
    mine, structure = pytree.tree_flatten((node.args, node.kwargs))
    leaves, other_structure = pytree.tree_flatten((other.args, other.kwargs))
    if structure != other_structure:
        return False
    return all(
        other_of.get(a) is b if isinstance(a, fx.Node) else _equal(a, b) for a, b in zip(mine, leaves, strict=True)
    )


def _equal(a: Any, b: Any) -> bool:
    """Whether two constants are equal; objects that nothing tells apart are."""
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and (a.is_meta or _bytes(a) == _bytes(b))
    return not isinstance(a, bool | int | float | complex | str | bytes) or a == b or a != a


def _bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's numbers, NaN and all; none where there is no way to them."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or type(tensor) is not torch.Tensor:
        return b""
    return bytes_of(tensor).tobytes() if tensor.numel() else b""


def changes_when_called(root: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]], *, writes: bool) -> bool:
    """Whether a second call of root.forward on the same example gives something else.

    writes  whether its graph writes to what root holds: then each call is of a copy as root is
    """
    rng, before = torch.get_rng_state(), Snapshot(root)
    try:
        with torch.no_grad():
            module = callable_copy(root, own_parameters=True)
            results = call(module, example, root)
            torch.set_rng_state(rng)
            again = call(callable_copy(root, own_parameters=True) if writes else module, example, root)
            return not agree(again, results, _SAME_AGAIN)
    except Exception as error:  # whatever the model raises, or an example that cannot be copied
        if is_of_signal_handler(error):
            raise
        log.info("the model was not called a second time: %s: %s", type(error).__name__, error)
        return False
    finally:
        torch.set_rng_state(rng)
        before.restore_shared()
