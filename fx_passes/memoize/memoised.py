"""What modules share that remember the results of plain operations: keeping them, and moving operations into one."""

from __future__ import annotations

import logging
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import finish, is_constant, is_pure, is_shape, is_vocabulary, run
from fx_passes.partition.partition import add_module, copy_nodes
from zendnn_cffi.locks import new_lock

log = logging.getLogger("zendnn_cffi.passes")

WORTHWHILE = 2  # operations


class Remembering(nn.Module):
    """Computes graph, and keeps what it computed by a key, the oldest out first.

    Readers must not write to what it returns: whoever makes one sees to that.
    """

    reads_numbers = True  # for fx_passes.aliasing.effects: it neither writes to, nor hands on, what it is given
    most_kept = 16

    def __init__(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.graph = graph
        self.constants = constants
        self._kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._lock = new_lock()

    def _compute(self, given: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        results: tuple[torch.Tensor, ...] = run(self.graph, self.constants, given)
        return results

    def _keep(self, key: tuple[Any, ...], entry: Any) -> None:
        with self._lock:
            self._kept[key] = entry
            self._kept.move_to_end(key)
            while len(self._kept) > self.most_kept:
                self._kept.popitem(last=False)

    @property
    def kept(self) -> int:
        """How many results are kept."""
        return len(self._kept)

    def forget(self) -> None:
        """What the graph reads may have changed."""
        with self._lock:
            self._kept.clear()

    @property
    def _operations(self) -> int:
        return sum(node.op == "call_function" for node in self.graph.nodes)


def is_plain_operation(node: fx.Node) -> bool:
    """Whether node computes a tensor of what is given in a run, and writes to nothing; constants belong to regions."""
    if node.op != "call_function" or is_shape(node) or not (is_pure(node) or is_vocabulary(node)):
        return False
    return isinstance(node.meta.get("val"), torch.Tensor) and not is_constant(node)


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
    name = add_module(gm, name, inner, lambda names, _: make(inner, names))
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


def drop_shared(found: dict[fx.Node, None], gm: fx.GraphModule) -> None:
    """Take out of found what the caller gets to see, and what somebody writes to."""
    aliasing = Aliasing(gm)
    for node in list(found):
        escapes = any(user.op == "output" for member in aliasing.members(node) for user in member.users)
        if escapes or aliasing.is_written(node):
            del found[node]
