"""Plain operations that depend on sizes and constants alone: computed once for each combination of sizes.

Positions, token types, masks of what comes later, tables of angles: models make them anew in each call, dozens of small
operations that cost more than a region. Here they become one module that remembers its results by the sizes it is
called with.

    ids -> size -> arange -> add -> embedding(table) \\
    ids -> embedding(table) -------------------------- region
becomes
    ids -> size -> per_size_0 -> region
"""

from __future__ import annotations

import logging
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from fx_passes.graph import finish, is_constant, is_pure, is_shape, is_vocabulary, run
from fx_passes.normalize.aliasing import Aliasing
from fx_passes.partition.partition import Constants, copy_nodes, unique_name
from fx_passes.watched import is_watched

log = logging.getLogger("zendnn_cffi.passes")

_MAX_KEPT = 16  # combinations of sizes
_MAX_KEPT_BYTES = 64 << 20  # of one combination's results; more are computed each time
_WORTHWHILE = 2  # operations


class PerSize(nn.Module):
    """Computes graph from sizes and constants; results are kept, the oldest out first.

    Readers must not write to what it returns: memoize_sizes sees to that.
    """

    reads_numbers = True  # for fx_passes.normalize.effects: it neither writes to, nor hands on, what it is given

    def __init__(self, graph: fx.Graph, constants: Constants) -> None:
        super().__init__()
        self.graph = graph
        self.constants = constants
        self._kept: OrderedDict[tuple[Any, ...], tuple[torch.Tensor, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def forward(self, *sizes: Any) -> tuple[torch.Tensor, ...]:
        """Return the tensors that others read, in graph order."""
        if is_watched():
            return self._compute(sizes)
        kept = self._kept.get(sizes)
        if kept is not None and not torch.is_grad_enabled():
            return kept
        if torch.is_autocast_enabled("cpu"):
            return self._compute(sizes)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.constants.values()):
            return self._compute(sizes)
        with torch.inference_mode(False), torch.no_grad():
            results = self._compute(sizes)
        if sum(t.numel() * t.element_size() for t in results) <= _MAX_KEPT_BYTES:
            with self._lock:
                self._kept[sizes] = results
                self._kept.move_to_end(sizes)
                while len(self._kept) > _MAX_KEPT:
                    self._kept.popitem(last=False)
        return results

    def _compute(self, sizes: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        results: tuple[torch.Tensor, ...] = run(self.graph, self.constants, sizes)
        return results

    def forget(self) -> None:
        """The constants may have changed."""
        with self._lock:
            self._kept.clear()

    def extra_repr(self) -> str:
        ops = sum(node.op == "call_function" for node in self.graph.nodes)
        return f"{ops} operations, known for {len(self._kept)} combinations of sizes"


def memoize_sizes(gm: fx.GraphModule, root: nn.Module) -> fx.GraphModule:
    """Move what depends on sizes and constants alone into a PerSize module, if that is more than an operation."""
    members = _members(gm)
    if len(members) < _WORTHWHILE:
        return gm
    members = _merge_equal(members)
    inside = set(members)
    sizes = list(dict.fromkeys(s for n in members for s in n.all_input_nodes if s not in inside and is_shape(s)))
    return move_into_module(gm, members, sizes, "per_size", lambda inner, names: PerSize(inner, Constants(root, names)))


def move_into_module(
    gm: fx.GraphModule,
    members: Sequence[fx.Node],
    arguments: Sequence[fx.Node],
    name: str,
    make: Callable[[fx.Graph, tuple[str, ...]], nn.Module],
) -> fx.GraphModule:
    """Replace members, which read arguments, constants and each other, by one call of a submodule with their results.

    make  makes it of the members' graph and the names of the constants they read
    """
    inside = set(members)
    inner, copies = copy_nodes(list(members), list(arguments))
    read = [node for node in members if any(user not in inside for user in node.users)]
    inner.output(tuple(copies[node] for node in read))
    inner.lint()
    names = tuple(dict.fromkeys(str(n.target) for n in inner.find_nodes(op="get_attr")))
    name = unique_name(gm, name)
    gm.add_submodule(name, make(inner, names))
    with gm.graph.inserting_after(members[-1]):
        call = gm.graph.call_module(name, tuple(arguments))
    for number, node in enumerate(read):
        with gm.graph.inserting_after(call):
            result = gm.graph.call_function(operator.getitem, (call, number))
        result.meta.update({k: v for k, v in node.meta.items() if k == "val"})
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
    for node in reversed(members):
        gm.graph.erase_node(node)
    log.debug("%s: %d operations, %d arguments, %d results", name, len(members), len(arguments), len(read))
    return finish(gm)


def _merge_equal(members: list[fx.Node]) -> list[fx.Node]:
    """Let one node stand for all that compute the same (each layer shapes the tables of angles for itself)."""
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in members:
        key = node.target, repr(node.args), repr(node.kwargs)
        other = first.setdefault(key, node)
        if other is not node:
            node.replace_all_uses_with(other)
            node.graph.erase_node(node)
    return list(first.values())


def _members(gm: fx.GraphModule) -> list[fx.Node]:
    """Operations on sizes and constants whose memory nobody writes to, and that the caller does not get to see."""
    found: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or is_shape(node) or not (is_pure(node) or is_vocabulary(node)):
            continue
        if not isinstance(node.meta.get("val"), torch.Tensor) or is_constant(node):
            continue  # constants belong to the regions that read them
        if all(source in found or is_constant(source) or is_shape(source) for source in node.all_input_nodes):
            found[node] = None
    drop_shared(found, gm)
    kept: dict[fx.Node, None] = {}
    for node in found:  # again: what read a removed one is no member either
        if all(source in kept or is_constant(source) or is_shape(source) for source in node.all_input_nodes):
            kept[node] = None
    return list(kept)


def drop_shared(found: dict[fx.Node, None], gm: fx.GraphModule) -> None:
    """Take out of found what the caller gets to see, and what somebody writes to."""
    aliasing = Aliasing(gm)
    for node in list(found):
        escapes = any(user.op == "output" for member in aliasing.members(node) for user in member.users)
        if escapes or aliasing.is_written(node):
            del found[node]
