"""Embedding bags that are concatenated become one operation that computes them all.

    Before: concat((x, embedding_bag(i0, w0), ..., embedding_bag(i25, w25)), 1)
    After:  embedding_bags((w0, ..., w25), (i0, ..., i25), "sum", before=(x,))

Indices that are slices of one tensor, s[:, 0], s[:, 1], ..., are replaced by that tensor. Only bags of fixed length
(two-dimensional indices) from constant tables: with offsets, each call may have another number of indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph import finish, get_attribute, is_call, is_constant, only_user
from fx_passes.normalize.aliasing import Aliasing

MODES = ("sum", "mean")
FEWEST = 2


def fuse_embedding_bags(gm: fx.GraphModule) -> fx.GraphModule:
    """Fuse the longest run of bags in each concatenation along dimension 1; say of the others why they stay."""
    aliasing = Aliasing(gm)
    for concat in gm.graph.find_nodes(op="call_function", target=ops.concat):
        run = match_bags(gm, concat)
        if run is not None and all(aliasing.may_move_down(bag, concat) for bag in concat.args[0][run]):
            fuse(concat, run)
    for bag in gm.graph.find_nodes(op="call_function", target=ops.embedding_bag):
        bag.meta["reason"] = refusal(gm, bag) or "not concatenated with bags of its kind from other tables"
    return finish(gm)


def match_bags(gm: fx.GraphModule, concat: fx.Node) -> slice | None:
    """Which pieces of the concatenation are bags of one kind, read by nothing else: the longest run of them."""
    pieces, dim = concat.args
    if dim not in (1, -1) or not isinstance(pieces, list | tuple):
        return None
    best, start = slice(0, 0), 0
    for kind, group in groupby(_kind(gm, piece, concat) for piece in pieces):
        length = len(list(group))
        if kind is not None and length > best.stop - best.start:
            best = slice(start, start + length)
        start += length
    return best if best.stop - best.start >= FEWEST else None


def _kind(gm: fx.GraphModule, bag: Any, concat: fx.Node) -> tuple[Any, ...] | None:
    """What bags of one operation have in common: mode, row length and dtype; None where it cannot be one of them."""
    if not is_call(bag, ops.embedding_bag) or only_user(bag) is not concat or refusal(gm, bag):
        return None
    weight: Any = bag.args[1]
    table = get_attribute(gm, weight.target)
    return bag.args[3], table.shape[1], table.dtype


def refusal(gm: fx.GraphModule, bag: fx.Node) -> str:
    """Why a bag cannot be computed together with others; empty where it can."""
    _, weight, offsets, mode, per_sample_weights, _, padding_idx = bag.args
    if offsets is not None:
        return "bags between offsets: each call may have another number of indices"
    if mode not in MODES:
        return f"bags of mode {mode}: joined tables give sums and means"
    if per_sample_weights is not None or padding_idx is not None:
        return "bags with weights for samples, or with a padding index"
    if not isinstance(weight, fx.Node) or weight.op != "get_attr" or not is_constant(weight):
        return "the table is computed, or written to"
    table = get_attribute(gm, str(weight.target))
    return "" if isinstance(table, torch.Tensor) and table.ndim == 2 else "the table is no matrix"


def fuse(concat: fx.Node, run: slice) -> None:
    """Make the concatenation the operation that computes these of its pieces."""
    pieces: Any = tuple(concat.args[0])
    bags = pieces[run]
    source = "; ".join(str(bag.meta.get("source", bag.name)) for bag in bags[:2])
    concat.meta["source"] = f"{source}, ... ({len(bags)} bags)" if len(bags) > 2 else source
    weights = tuple(bag.args[1] for bag in bags)
    with concat.graph.inserting_before(concat):
        indices = _together(concat.graph, [bag.args[0] for bag in bags])
    concat.target = ops.embedding_bags
    concat.args = (weights, indices, bags[0].args[3], pieces[: run.start], pieces[run.stop :])
    for bag in bags:
        concat.graph.erase_node(bag)


def _together(graph: fx.Graph, indices: Sequence[fx.Node]) -> fx.Node | tuple[fx.Node, ...]:
    """One tensor [N, T or more, L] that begins with these as its slices along dimension 1, where there is one."""
    if not all(is_call(node, ops.index) and isinstance(node.args[0], fx.Node) for node in indices):
        return tuple(indices)
    source: Any = indices[0].args[0]
    places = [_place(node.args[1]) for node in indices]
    first = places[0]
    if first is None or any(node.args[0] is not source for node in indices):
        return tuple(indices)
    if places != list(range(first, first + len(places))):
        return tuple(indices)
    if first == 0:
        return source
    whole = source.meta.get("val")
    part = graph.call_function(ops.narrow, (source, 1, first, first + len(places)))
    if isinstance(whole, torch.Tensor):
        part.meta["val"] = whole[:, first : first + len(places)]
    return part


def _place(item: Any) -> int | None:
    """k of s[:, k] and s[:, k, :], None of other items."""
    if not isinstance(item, tuple) or len(item) < 2 or type(item[1]) is not int or item[1] < 0:
        return None
    rest = (item[0], *item[2:])
    return item[1] if all(entry == slice(None) for entry in rest) and len(item) <= 3 else None
