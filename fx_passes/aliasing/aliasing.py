"""Who shares memory with whom, and who writes: what decides whether an in-place operation may become out-of-place.

    y = x.add_(1)  ->  y = x + 1, later readers of x read y

is right when x is neither an input of the graph nor a parameter, and no other name for the same memory is read later.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.effects import aliases, is_inplace_call, is_inplace_module, may_be_held, writes
from fx_passes.graph.graph import AUGMENTED, get_attribute, is_shape
from fx_passes.graph.inference import dtype, is_tensor, rank
from fx_passes.spellings.registry import FUNCTIONS, INPLACE, METHODS, MODULES, refusal

# Of several tensors, in-place arithmetic keeps the first one's dtype, out-of-place promotes.
_PROMOTING = {"clamp", "clip", "clamp_min", "clamp_max",
              "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow",
              *(operation.__name__ for operation in AUGMENTED)}  # fmt: skip
# Out of place they keep the dtype, whatever that of indices, masks and values is.
_KEEPING = ("copy", "index_", "masked_", "put", "scatter")
# Out of place they give truth values.
_ANSWERING = {"lt", "le", "gt", "ge", "eq", "ne", "less", "less_equal", "greater", "greater_equal", "not_equal",
              "logical_and", "logical_or", "logical_xor", "logical_not"}  # fmt: skip

_WHOLE = (slice(None), slice(0, None), slice(None, None, 1), slice(0, None, 1))


class Aliasing:
    """Classes of nodes that may share memory, and the nodes that write. A snapshot: make a new one after edits."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.order = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.writers = {node: written for node in gm.graph.nodes if (written := writes(node, gm))}
        self._parent: dict[fx.Node, fx.Node] = {}
        self._members: dict[fx.Node, list[fx.Node]] = {}
        self._written: set[fx.Node] = set()
        self._written_unspelled: set[fx.Node] = set()
        if self.writers:  # else who shares memory matters to few passes
            self._join_all()

    def _join_all(self) -> None:
        """Find the classes."""
        storages: dict[int, fx.Node] = {}
        for node in self.order:
            for source in aliases(node, self.gm):
                self._join(node, source)
            if node.op == "get_attr" and isinstance(value := get_attribute(self.gm, node.target), torch.Tensor):
                self._join(node, storages.setdefault(value.untyped_storage()._cdata, node))
        for node in self.order:
            self._members.setdefault(self._find(node), []).append(node)
        self._written = {self._find(n) for written in self.writers.values() for n in written}
        unspelled = [written for node, written in self.writers.items() if node.target not in ops.WRITING]
        self._written_unspelled = {self._find(n) for written in unspelled for n in written}

    def members(self, node: fx.Node) -> list[fx.Node]:
        """Nodes that may share memory with node, itself among them. Without writers, ask before the first edit."""
        if not self._members:
            self._join_all()
        return self._members[self._find(node)]

    def is_written(self, node: fx.Node) -> bool:
        """Whether some node writes to memory that node may share."""
        return bool(self.writers) and node in self.order and self._find(node) in self._written

    def is_written_unspelled(self, node: fx.Node) -> bool:
        """As is_written, but by others than operations of the vocabulary: who reads the memory reads their results."""
        return bool(self.writers) and node in self.order and self._find(node) in self._written_unspelled

    def writers_of(self, node: fx.Node) -> list[fx.Node]:
        """Nodes that write to memory that node may share."""
        memory = self._find(node)
        return [writer for writer, written in self.writers.items() if memory in map(self._find, written)]

    def is_written_after(self, node: fx.Node, place: fx.Node) -> bool:
        """Whether some node further down than place writes to memory that node may share."""
        if not self.is_written(node):
            return False
        return any(self.order[writer] > self.order[place] for writer in self.writers_of(node))

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Nodes that read memory that node may share."""
        return list(dict.fromkeys(user for member in self.members(node) for user in member.users))

    def may_move_down(self, node: fx.Node, target: fx.Node) -> bool:
        """Whether node computes the same right before target, further down: nobody writes to its operands between."""
        return not self.is_written_between(node.all_input_nodes, node, target)

    def may_compute_at(self, node: fx.Node, sources: Iterable[fx.Node]) -> bool:
        """Whether node's place may compute all that leads from sources to node: nobody writes to any of it before."""
        if not self.writers:
            return True
        seen, pending = set(sources), node.all_input_nodes
        while pending:
            if (each := pending.pop()) in seen:
                continue
            seen.add(each)
            if self.is_written_between((each, *each.all_input_nodes), each, node):
                return False
            pending += each.all_input_nodes
        return True

    def is_written_between(self, values: Iterable[fx.Node], start: fx.Node, end: fx.Node) -> bool:
        """Whether a node behind start and before end writes to memory that one of these values may share."""
        if not self.writers:
            return False
        memory = {self._find(value) for value in values}
        between = start.next
        while between is not end:
            if any(self._find(written) in memory for written in self.writers.get(between, ())):
                return True
            between = between.next
        return False

    def out_of_place(self, node: fx.Node) -> bool:
        """Respell an in-place node out of place if nobody can tell the difference. Return whether it was done."""
        written = writes(node, self.gm)  # as it is now: one before it may have been respelled
        if len(written) != 1 or not self._has_out_of_place(node) or not self._keeps_dtype(node):
            return False
        source, now = written[0], self.order[node]
        for other in self._sharing(source):
            if self._is_held(other):
                return False
            is_another = other not in (source, node) and self._is_read_after(other, now)
            if is_another and not self._comes_from(other, node, source):
                return False
        if node.target is operator.setitem and not self._may_stand_for(node.args[2], source, node):
            return False
        for user in list(source.users):
            if self.order.get(user, now) > now:
                user.replace_input_with(source, node)
        _respell(node)
        return True

    def _may_stand_for(self, new: fx.Node, source: fx.Node, node: fx.Node) -> bool:
        """Whether the value that node writes over all of source may be read in its place, memory and all."""
        later = [*self.writers_of(source), *self.writers_of(new)]
        if any(self.order[writer] > self.order[node] for writer in later):
            return False
        return not any(
            self._is_held(other) or self._is_read_after(other, self.order[node]) for other in self._sharing(new)
        )

    def _is_held(self, node: fx.Node) -> bool:
        """Whether somebody outside of the graph has the tensor, too."""
        return node.op in ("placeholder", "get_attr") or may_be_held(node, self.gm)

    def _is_read_after(self, node: fx.Node, place: int) -> bool:
        """Whether somebody further down than place reads node. What a write before that became reads it there."""
        return any(self.order.get(user, place) > place for user in node.users)

    def _sharing(self, node: fx.Node) -> list[fx.Node]:
        """As members(), but values that are together in a result alone share no memory."""
        members = self.members(node)
        joined: dict[fx.Node, list[fx.Node]] = {member: [] for member in members}
        for member in members:
            if not _holds_results(member):
                for source in aliases(member, self.gm):
                    if source in joined:  # not what a write became, of whose memory nobody else knows
                        joined[member].append(source)
                        joined[source].append(member)
        found, pending = {node: None}, [node]
        while pending:
            new = [other for other in joined[pending.pop()] if other not in found]
            found.update(dict.fromkeys(new))
            pending += new
        return list(found)

    def _has_out_of_place(self, node: fx.Node) -> bool:
        """Whether there is an out-of-place spelling of the operation; of modules nobody knows, what they do is not."""
        if node.op == "call_module":
            module = self.gm.get_submodule(node.target)
            return is_inplace_module(module) and type(module) in MODULES and refusal(module) is None
        if node.op == "call_method":
            return node.target[:-1] in METHODS
        if isinstance(node.target, torch._ops.OpOverload):
            return _functional(node.target) is not None
        if node.target is operator.setitem:
            return self._replaces_all(*node.args)
        return node.target in INPLACE or (node.target in FUNCTIONS and is_inplace_call(node))

    def _replaces_all(self, source: fx.Node, place: Any, new: Any) -> bool:
        """Whether source[place] = new writes to all of source, which is row-major, what has its dtype."""
        places = place if isinstance(place, tuple) else (place,)
        if source.target not in ops.ROW_MAJOR or not is_tensor(new) or not all(map(_is_whole, places)):
            return False
        found, dimensions, given = dtype(source, self.gm), rank(source), rank(new)
        is_as_large = dimensions is not None and given is not None and given <= dimensions
        return is_as_large and found is not None and found == dtype(new, self.gm)

    def _comes_from(self, other: fx.Node, node: fx.Node, source: fx.Node) -> bool:
        """Whether other shares memory by being made from node: then the out-of-place result serves it as well.

        So it does what is made from source further down, which will read node.
        """
        while other is not node:
            sources = aliases(other, self.gm)
            if len(sources) != 1:
                return False
            if sources[0] is source and self.order[other] > self.order[node]:
                return True
            other = sources[0]
        return True

    def _keeps_dtype(self, node: fx.Node) -> bool:
        """Whether the operation gives what is written to its own dtype, out of place as well."""
        name = node.target if isinstance(node.target, str) else node.target.__name__
        name = name.partition(".")[0].rstrip("_")
        first = dtype(node.all_input_nodes[0], self.gm)
        if name in _ANSWERING:
            return first is torch.bool
        is_operator = isinstance(node.target, torch._ops.OpOverload) and not name.startswith(_KEEPING)
        if not (is_operator or name in _PROMOTING):
            return True
        # numbers promote no tensor, or eager raises
        others = [dtype(each, self.gm) for each in node.all_input_nodes[1:] if not is_shape(each)]
        return not others or (
            first is not None and all(other and torch.promote_types(first, other) == first for other in others)
        )

    def _find(self, node: fx.Node) -> fx.Node:
        while node in self._parent:
            node = self._parent[node]
        return node

    def _join(self, a: fx.Node, b: fx.Node) -> None:
        a, b = self._find(a), self._find(b)
        if a is not b:
            self._parent[a] = b


def _holds_results(node: fx.Node) -> bool:
    """Whether node puts values together that the graph returns, and does nothing else with them."""
    return getattr(node.target, "puts_together", False) and all(user.op == "output" for user in node.users)


def _functional(overload: Any) -> Any:
    """aten.relu_.default -> aten.relu.default; None if there is no such operator."""
    packet = getattr(getattr(torch.ops, overload.namespace), overload._opname.rstrip("_"), None)
    return None if packet is None else getattr(packet, overload._overloadname, None)


def _is_whole(place: Any) -> bool:
    """Whether an entry of an index takes all of its dimension, or of several."""
    return place is Ellipsis or (isinstance(place, slice) and place in _WHOLE)


def _respell(node: fx.Node) -> None:
    if node.target is operator.setitem:
        source, _, new = node.args
        with node.graph.inserting_before(node):
            sizes = [node.graph.call_function(ops.size, (source, dim)) for dim in range(rank(source) or 0)]
            whole = node.graph.call_function(ops.expand, (new, tuple(sizes)))
        node.target, node.args = ops.contiguous, (whole,)
    elif node.op == "call_module":
        node.meta["out_of_place"] = True  # the table of modules has the out-of-place function for it
    elif node.op == "call_method":
        node.target = node.target[:-1]
    elif isinstance(node.target, torch._ops.OpOverload):
        node.target = _functional(node.target)
    elif node.target in INPLACE:
        node.target = INPLACE[node.target]
    else:
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
        node.args = tuple(False if a is True else a for a in node.args)
