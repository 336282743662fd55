"""Recognise attention that models write out over a cache that grows: products, sums with masks and a softmax.

Before: matmul(softmax(add(matmul(q, transpose(grown keys)) * scale, mask), -1), grown values)
After:  attention(q, grown keys, grown values, mask, scale=scale)

Of several tensors that are added to the scores, the sum is made once for all layers. Heads may share a dimension with
the batch (BLOOM). Written out, all of it would stay outside of regions, which ended at each layer so. Elsewhere such
products are operations of regions as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.fuse.caches import grows_along, is_cache
from fx_passes.fuse.grouped_heads import repeated_heads
from fx_passes.graph.free_sizes import known_sizes
from fx_passes.graph.graph import example, finish, is_call, known_shape, only_user
from fx_passes.spellings.registry import is_number
from zendnn_cffi.values import dataclass

_VIEWS = (ops.reshape, ops.flatten, ops.unflatten)


@dataclass(frozen=True)
class Term:
    """A tensor that is added to scores of so many dimensions."""

    node: fx.Node
    rank: int


@dataclass(frozen=True)
class Scores:
    """The operands of a product of queries [..., L, D] and transposed keys, its factor, what is added behind that."""

    query: Any
    keys: Any
    scale: float
    terms: tuple[Term, ...] = ()


Masks = dict[tuple[Term, ...], fx.Node]


def fuse_written_attention(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrite every written-out attention over caches that are results of the graph as well."""
    known = known_sizes(gm)
    if known is None:
        return gm
    nodes = gm.graph.find_nodes(op="call_function", target=ops.matmul)
    matches = [(node, found) for node in nodes if (found := match_written(node, known)) is not None]
    if not matches:
        return gm
    aliasing, masks = Aliasing(gm), Masks()
    for node, (scores, values) in matches:
        read = (scores.query, scores.keys, values, *(term.node for term in scores.terms))
        if not any(map(aliasing.is_written, read)):
            _rewrite(node, scores, values, masks)
    return finish(gm)


def match_written(node: fx.Node, known: set[Any]) -> tuple[Scores, fx.Node] | None:
    """(scores of queries and keys [B, H, ., D], values [B, H, S, D]) of the attention that ends with node."""
    weights = _by_heads(node.args[0], alone=True)
    if node.kwargs.get("post_ops") or not is_call(weights, ops.softmax) or only_user(weights) is None:
        return None
    if weights.args[2:3] == (True,) or not _is_last(weights, weights.args[1]):
        return None
    scores = _scores(weights.args[0])
    if scores is None or (transposed := _transposed(scores.keys)) is None:
        return None
    query, keys, values = map(_by_heads, (scores.query, transposed, node.args[1]))
    shapes = [known_shape(part) for part in (query, keys, values)]
    if any(len(shape) != 4 for shape in shapes) or len({str(shape[:2]) for shape in shapes}) != 1:
        return None
    if not all(is_cache(repeated_heads(cache) or cache, known) for cache in (keys, values)):
        return None
    if not all(_is_mask(term, shapes[0], query, known) for term in scores.terms):
        return None
    return Scores(query, keys, scores.scale, scores.terms), values


def _scores(node: Any, terms: tuple[Term, ...] = (), scale: float = 1.0) -> Scores | None:
    """The product at the bottom of sums, factors and views that nobody else reads."""
    node = _by_heads(node, alone=True)
    if not isinstance(node, fx.Node) or only_user(node) is None:
        return None
    if is_call(node, ops.matmul):
        factors = node.kwargs.get("post_ops", ())
        if any(entry[:2] != ("eltwise", "linear") or entry[3] != 0 for entry in factors):
            return None
        for entry in factors:
            scale *= entry[2]
        return Scores(node.args[0], node.args[1], scale, terms)
    if not is_call(node, ops.binary):
        return None
    first, second, kind = node.args
    if kind in ("mul", "div") and is_number(second) and second:
        return _scores(first, terms, scale * second if kind == "mul" else scale / second)
    if kind != "add" or scale != 1 or not isinstance(second, fx.Node):
        return None  # below a factor, what is added would have it, too
    rank = len(known_shape(node))
    found = _scores(first, (Term(second, rank), *terms))
    return found or (_scores(second, (Term(first, rank), *terms)) if isinstance(first, fx.Node) else None)


def _by_heads(node: Any, *, alone: bool = False) -> Any:
    """What node is a view of in which the batch and heads are in one dimension, or the other way round.

    alone  where something else reads the view, it stays
    """
    while is_call(node, *_VIEWS) and not (alone and only_user(node) is None):
        given, viewed = known_shape(node.args[0]), known_shape(node)
        if {len(given), len(viewed)} != {3, 4} or str(given[-2:]) != str(viewed[-2:]):
            break
        node = node.args[0]
    return node


def _transposed(node: Any) -> Any:
    """x where node is x with its last dimensions exchanged; None for anything else."""
    rank = len(known_shape(node))
    if not is_call(node, ops.transpose) or only_user(node) is None or not rank:
        return None
    return node.args[0] if {dim % rank for dim in node.args[1:3]} == {rank - 2, rank - 1} else None


def _is_last(node: fx.Node, dim: Any) -> bool:
    return dim in (-1, len(known_shape(node)) - 1)


def _is_mask(term: Term, query: tuple[Any, ...], scored: fx.Node, known: set[Any]) -> bool:
    """Whether a term has the scores' dimensions and dtype, and a number for each place of the cache."""
    value, score = example(term.node), example(scored)
    if value is None or score is None or value.dtype != score.dtype or value.ndim != term.rank:
        return False
    if term.rank == 3 and str(value.shape[0]) != str(query[0] * query[1]):
        return False
    return grows_along(term.node, -1, known)


def _rewrite(node: fx.Node, scores: Scores, values: fx.Node, masks: Masks) -> None:
    graph, value = node.graph, example(node)
    assert value is not None
    shape = (*known_shape(scores.query)[:3], value.shape[-1])
    with graph.inserting_before(node):
        mask = _mask(scores, masks) if scores.terms else None
        kwargs = {"is_causal": False, "scale": scores.scale, "enable_gqa": False}
        attended = graph.call_function(ops.attention, (scores.query, scores.keys, values, mask), kwargs)
        attended.meta = {"source": node.meta.get("source", "matmul"), "val": value.new_empty(shape)}
        if value.ndim == 4:
            node.replace_all_uses_with(attended)
            return
        joined = graph.call_function(ops.flatten, (attended, 0, 1))
        joined.meta = dict(node.meta)
    for user in list(node.users):
        if is_call(user, *_VIEWS) and str(known_shape(user)) == str(shape) and user.args[0] is node:
            user.replace_all_uses_with(attended)
    node.replace_all_uses_with(joined)


def _mask(scores: Scores, masks: Masks) -> fx.Node:
    """The sum of what is added to the scores, in front of the first that reads it."""
    if scores.terms in masks:
        return masks[scores.terms]
    first, *others = (_four_dimensional(term, scores.query) for term in scores.terms)
    for other in others:
        total = first.graph.call_function(ops.binary, (first, other, "add"))
        total.meta["val"] = _sum(first.meta["val"], other.meta["val"])
        first = total
    masks[scores.terms] = first
    return first


def _four_dimensional(term: Term, query: fx.Node) -> fx.Node:
    """A term [B * H, L or 1, S] as [B, H, L or 1, S]."""
    if term.rank == 4:
        return term.node
    heads, value = known_shape(query)[1], term.node.meta["val"]
    split = term.node.graph.call_function(ops.unflatten, (term.node, 0, (-1, heads)))
    split.meta["val"] = value.new_empty((known_shape(query)[0], heads, *value.shape[1:]))
    return split


def _sum(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """An example of a sum; sizes are compared as text, as symbolic ones would become conditions."""
    sizes = [b if str(a) == "1" else a for a, b in zip(first.shape, second.shape, strict=True)]
    return first.new_empty(sizes)
