"""Embedding bags that are concatenated become one operation that computes them all.

    Before: concat((x, embedding_bag(i0, w0), ..., embedding_bag(i25, w25)), 1)
    After:  embedding_bags((w0, ..., w25), (i0, ..., i25), "sum", before=(x,))

    Before: concat((embedding(i0, w0), embedding(i1, w1)), 1)
    After:  embedding_bags((w0, w1), (i0, i1), "row")                  rows of any lengths

Indices that are slices of one tensor, s[:, 0], s[:, 1], ..., are replaced by that tensor. Only bags of fixed length
(two-dimensional indices) from constant tables: those between offsets are fx_passes.fuse.offset_bags's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import RANK, argument, finish, get_attribute, is_call, is_constant, only_user
from fx_passes.graph.inference import rank
from fx_passes.graph.inner import is_plain
from fx_passes.spellings.registry import refusal as refused_module

MODES = ("sum", "mean")
FEWEST = 2


def fuse_embedding_bags(gm: fx.GraphModule) -> fx.GraphModule:
    """Fuse the longest run of bags in each concatenation along dimension 1; say of the others why they stay."""
    return fuse_runs(gm, lambda concat, aliasing: match_bags(gm, concat, lookups=not aliasing.writers), fuse)


def fuse_runs(
    gm: fx.GraphModule,
    match: Callable[[fx.Node, Aliasing], slice | None],
    fuse: Callable[[fx.GraphModule, fx.Node, slice], None],
) -> fx.GraphModule:
    """Fuse what match finds among the pieces of each concatenation, where that may be computed as late as there.

    Of the bags that are left, say why each is one by itself.
    """
    aliasing = Aliasing(gm)
    for concat in gm.graph.find_nodes(op="call_function", target=ops.concat):
        run = match(concat, aliasing)
        if run is not None and all(aliasing.may_move_down(bag, concat) for bag in concat.args[0][run]):
            fuse(gm, concat, run)
    for bag in gm.graph.find_nodes(op="call_function", target=ops.embedding_bag):
        bag.meta["reason"] = refusal(bag) or "not concatenated with bags of its kind from other tables"
    return finish(gm)


def match_bags(gm: fx.GraphModule, concat: fx.Node, lookups: bool) -> slice | None:
    """Which pieces of the concatenation are bags of one kind, read by nothing else: the longest run of them.

    lookups  whether rows count as well; they may have more than two dimensions, so dimension -1 has to be 1 for certain
    """
    lookups = lookups and (concat.args[1] == 1 or rank(concat) == 2)
    return longest_run(concat, lambda piece: _kind(gm, piece, concat, lookups))


def longest_run(concat: fx.Node, kind_of: Callable[[Any], Any]) -> slice | None:
    """Which neighbouring pieces of a concatenation along dimension 1 are of one kind, None for no kind: the most."""
    pieces, dim = concat.args
    if dim not in (1, -1) or not isinstance(pieces, list | tuple):
        return None
    best, start = slice(0, 0), 0
    for kind, group in groupby(map(kind_of, pieces)):
        length = len(list(group))
        if kind is not None and length > best.stop - best.start:
            best = slice(start, start + length)
        start += length
    return best if best.stop - best.start >= FEWEST else None


def _kind(gm: fx.GraphModule, bag: Any, concat: fx.Node, lookups: bool) -> tuple[Any, ...] | None:
    """What bags of one operation have in common: mode, row length (of bags alone) and dtype; None where it cannot be
    one of them.
    """
    if not isinstance(bag, fx.Node) or only_user(bag) is not concat:
        return None
    found = _read(gm, bag)
    if found is None or (found[0] == "row" and not lookups):
        return None
    mode, target, _ = found
    table = get_attribute(gm, target)
    if not isinstance(table, torch.Tensor) or table.ndim != 2 or not table.numel():
        return None
    return mode, None if mode == "row" else table.shape[1], table.dtype


def _read(gm: fx.GraphModule, node: fx.Node) -> tuple[str, str, fx.Node] | None:
    """(mode, name of the table, indices) of a bag or a lookup."""
    if is_call(node, ops.embedding_bag):
        weight: Any = node.args[1]
        between = node.args[2] is not None
        return (str(node.args[3]), weight.target, node.args[0]) if not between and not refusal(node) else None
    found = read_lookup(gm, node)
    return None if found is None else ("row", *found)


def read_lookup(gm: fx.GraphModule, node: fx.Node) -> tuple[str, fx.Node] | None:
    """(name of the table, indices) of an embedding in any spelling, from a parameter that nothing writes to."""
    if is_call(node, ops.embedding, torch.embedding):
        return None
    table, indices = lookup_of(gm, node) or (None, None)
    if isinstance(table, str):
        fixed = is_plain(get_attribute(gm, table))
    else:
        fixed = isinstance(table, fx.Node) and table.op == "get_attr" and is_constant(table)
    name = table.target if isinstance(table, fx.Node) else table
    return (str(name), indices) if fixed and isinstance(indices, fx.Node) else None


def lookup_of(gm: fx.GraphModule, node: fx.Node) -> tuple[Any, Any] | None:
    """(table, indices) of an embedding, the table as a node or a name; None for other nodes."""
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        known = type(module) is nn.Embedding and module.max_norm is None and refused_module(module) is None
        return (f"{node.target}.weight", node.args[0]) if known and len(node.args) == 1 else None
    if is_call(node, ops.embedding, torch.embedding, torch.ops.aten.embedding.default):
        return argument(node, 0, "weight"), argument(node, 1, "indices")
    if is_call(node, F.embedding) and argument(node, 3, "max_norm") is None:
        return argument(node, 1, "weight"), argument(node, 0, "input")
    return None


def refusal(bag: fx.Node) -> str:
    """Why a bag cannot be computed together with others; empty where it can."""
    _, weight, _, mode, per_sample_weights, _, padding_idx = bag.args
    if mode not in MODES:
        return f"bags of mode {mode}: joined tables give sums and means"
    if per_sample_weights is not None or padding_idx is not None:
        return "bags with weights for samples, or with a padding index"
    if not isinstance(weight, fx.Node) or weight.op != "get_attr" or not is_constant(weight):
        return "the table is computed, or written to"
    return ""


def fuse(gm: fx.GraphModule, concat: fx.Node, run: slice) -> None:
    """Make the concatenation the operation that computes these of its pieces."""
    pieces: Any = tuple(concat.args[0])
    bags = pieces[run]
    concat.meta["source"] = sources(bags)
    found: Any = [_read(gm, bag) for bag in bags]
    with concat.graph.inserting_before(concat):
        weights = tuple(table_node(concat.graph, target) for _, target, _ in found)
        indices = _together(concat.graph, [index for _, _, index in found])
    concat.target = ops.embedding_bags
    concat.args = (weights, indices, found[0][0], pieces[: run.start], pieces[run.stop :])
    for bag in bags:
        concat.graph.erase_node(bag)


def sources(bags: Sequence[fx.Node]) -> str:
    """Where bags come from, for explain()."""
    source = "; ".join(str(bag.meta.get("source", bag.name)) for bag in bags[:2])
    return f"{source}, ... ({len(bags)} bags)" if len(bags) > 2 else source


def table_node(graph: fx.Graph, target: str) -> fx.Node:
    """The node of a table: a parameter that nothing writes to."""
    node = graph.create_node("get_attr", target)
    node.meta.update({"constant": True, RANK: 2})
    return node


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
