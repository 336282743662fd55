"""Bags between offsets that are concatenated become one operation, whose bags the concatenation takes from one tensor.

    Before: concat((x, embedding_bag(i0, w0, o0), ..., embedding_bag(i25, w25, o25)), 1)
    After:  concat_bags(offset_bags((w0, ..., w25), (i0, ..., i25), (o0, ..., o25), "sum", False), before=(x,))

Each call may have another number of indices, so the bags stay outside of regions (fx_passes.bags); their concatenation
does not. Offsets that are the first rows of one tensor, o[0], o[1], ..., are replaced by that tensor; so are those of a
list.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.fuse.embedding_bags import fuse_runs, longest_run, refusal, sources, table_node
from fx_passes.graph.graph import get_attribute, is_call, only_user


def fuse_offset_bags(gm: fx.GraphModule) -> fx.GraphModule:
    """Fuse the longest run of bags between offsets in each concatenation along dimension 1."""
    return fuse_runs(gm, lambda concat, _: match_bags(gm, concat), fuse)


def match_bags(gm: fx.GraphModule, concat: fx.Node) -> slice | None:
    """Which pieces of the concatenation are bags of one kind, read by nothing else: the longest run of them."""
    return longest_run(concat, lambda piece: _kind(gm, piece, concat))


def _kind(gm: fx.GraphModule, bag: Any, concat: fx.Node) -> tuple[Any, ...] | None:
    """What bags of one operation have in common: mode, last offset, row length, dtype; None where it is no such bag."""
    if not is_call(bag, ops.embedding_bag) or only_user(bag) is not concat or refusal(bag):
        return None
    indices, weight, offsets, mode, _, include_last, _ = bag.args
    if not isinstance(indices, fx.Node) or not isinstance(offsets, fx.Node) or not isinstance(weight, fx.Node):
        return None
    table = get_attribute(gm, str(weight.target))
    if not isinstance(table, torch.Tensor) or table.ndim != 2 or not isinstance(include_last, bool):
        return None
    return mode, include_last, table.shape[1], table.dtype


def fuse(gm: fx.GraphModule, concat: fx.Node, run: slice) -> None:
    """Let one operation compute these pieces of the concatenation."""
    pieces: Any = tuple(concat.args[0])
    graph, bags = concat.graph, pieces[run]
    with graph.inserting_before(concat):
        weights = tuple(table_node(graph, bag.args[1].target) for bag in bags)
        offsets = _rows_of_one(tuple(bag.args[2] for bag in bags))
        args = (weights, tuple(bag.args[0] for bag in bags), offsets, bags[0].args[3], bags[0].args[5])
        together = graph.call_function(ops.offset_bags, args)
    together.meta["source"] = sources(bags)
    whole = concat.meta.get("val")
    if isinstance(whole, torch.Tensor):
        width = get_attribute(gm, str(weights[0].target)).shape[1]
        together.meta["val"] = whole.new_empty((whole.shape[0], len(bags), width))
    concat.target, concat.args = ops.concat_bags, (together, pieces[: run.start], pieces[run.stop :])
    for bag in bags:
        graph.erase_node(bag)


def _rows_of_one(offsets: tuple[fx.Node, ...]) -> fx.Node | tuple[fx.Node, ...]:
    """The tensor [T or more, N] whose first rows these are, or the list that begins with them, where there is one."""
    source = offsets[0].args[0] if is_call(offsets[0], ops.index, operator.getitem) else None
    if not isinstance(source, fx.Node):
        return offsets
    for number, node in enumerate(offsets):
        if not is_call(node, ops.index, operator.getitem) or node.args[0] is not source or _row(node.args[1]) != number:
            return offsets
    return source


def _row(item: Any) -> int | None:
    """k of o[k] and o[k, :], None of other items."""
    items = item if isinstance(item, tuple) else (item,)
    is_row = bool(items) and type(items[0]) is int and all(entry == slice(None) for entry in items[1:])
    return items[0] if is_row and len(items) <= 2 else None
