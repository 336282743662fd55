"""Rotary embedding of a single token: a product with one matrix per call, which all layers and heads share.

Before: rotary(x, cos, sin)                                            x [B, H, 1, D], cos and sin [B or 1, 1, 1, D]
After:  transpose(matmul(transpose(x), rotation(cos, sin)))            [B, 1, H, D] @ [B or 1, 1, D, D]

Queries and keys that lie side by side in one projection are turned together. In a step of decoding, what is called
counts more than what is computed: the caches hold weights, and calls find their own code in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import finish, is_call, only_user, only_values_count

Angles = tuple[Any, ...]  # cos, sin, and whether neighbours turn
_VIEWS = ops.having(view=True)


def fuse_rotations(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrite every rotary embedding of heads with one position."""
    matrices: dict[Angles, fx.Node] = {}
    waiting = [node for node in gm.graph.find_nodes(op="call_function", target=ops.rotary) if match_rotation(node)]
    if not waiting:
        return gm
    aliasing = Aliasing(gm)
    while waiting:
        node = waiting.pop(0)
        angles = tuple(map(_what_it_shows, node.args[1:]))
        if angles not in matrices or aliasing.is_written_between(node.args[1:3], matrices[angles], node):
            matrices[angles] = _matrix(node)
        near = (other for other in waiting if match_neighbours(node, other))
        beside = next((each for each in near if not aliasing.is_written_between(each.args[1:3], node, each)), None)
        if beside is not None:
            waiting.remove(beside)
            turn_together(node, beside, matrices[angles])
        else:
            turn(node, matrices[angles])
    return finish(gm)


def _what_it_shows(angle: Any) -> Any:
    """Equal for equal views of one value: each layer may shape cos and sin for itself."""
    if not isinstance(angle, fx.Node) or angle.target not in _VIEWS or angle.kwargs:
        return angle
    return angle.target, _what_it_shows(angle.args[0]), repr(angle.args[1:])  # slices have no hash


def match_rotation(node: fx.Node) -> bool:
    """Whether node turns heads [B, H, 1, D] by angles that all heads share."""
    values: list[Any] = [source.meta.get("val") if isinstance(source, fx.Node) else None for source in node.args[:3]]
    if not all(isinstance(value, torch.Tensor) and value.ndim == 4 for value in values):
        return False
    x, cos, sin = values
    shared = all(tuple(t.shape[1:3]) == (1, 1) and t.shape[3] == x.shape[3] for t in (cos, sin))
    same = cos.dtype == sin.dtype == x.dtype and isinstance(x.shape[3], int) and isinstance(x.shape[1], int)
    return bool(shared and same and x.shape[2] == 1)


def match_neighbours(a: fx.Node, b: fx.Node) -> bool:
    """Whether b's heads begin where a's end: transposed views, in the same shape but for the heads, of one value."""
    piece, other_piece = (_piece(node.args[0]) for node in (a, b))
    if a.args[1:] != b.args[1:] or piece is None or other_piece is None:
        return False
    source, start, stop, shape = piece
    other, other_start, _, other_shape = other_piece
    return bool(source is other and stop == other_start and shape == other_shape and start < stop)


def _piece(x: fx.Node) -> tuple[fx.Node, int, int, Any] | None:
    """(source, start, stop, shape) where x is transpose(reshape(source[..., start:stop], shape), 1, 2)."""
    if not _swaps_heads(x) or only_user(x) is None:
        return None
    heads = x.args[0]
    if not is_call(heads, ops.reshape) or only_user(heads) is not x or len(heads.args[1]) != 4:
        return None
    piece, shape = heads.args
    if not is_call(piece, ops.narrow) or only_user(piece) is not heads or shape[2] != -1:
        return None
    source, dim, start, stop = piece.args
    value = source.meta.get("val")
    last = isinstance(value, torch.Tensor) and dim in (-1, value.ndim - 1)
    bounds = all(type(bound) is int and bound >= 0 for bound in (start, stop))
    return (source, start, stop, tuple(shape)) if last and bounds else None


def _swaps_heads(x: fx.Node) -> bool:
    """Whether x is transpose(heads, 1, 2)."""
    return is_call(x, ops.transpose) and sorted(d % 4 for d in x.args[1:]) == [1, 2]


def _matrix(node: fx.Node) -> fx.Node:
    """The matrices [B or 1, 1, D, D] of node's angles."""
    graph, (_, cos, sin, interleaved) = node.graph, node.args
    value = cos.meta["val"]
    rows = value[..., 0, :]
    with graph.inserting_before(node):
        picked = [graph.call_function(ops.index, (angle, (Ellipsis, 0, slice(None)))) for angle in (cos, sin)]
        matrix = graph.call_function(ops.rotation, (*picked, interleaved))
    for pick in picked:
        pick.meta["val"] = rows
    matrix.meta["val"] = rows.new_empty((*rows.shape, rows.shape[-1]))
    return matrix


def turn(node: fx.Node, matrix: fx.Node) -> None:
    """Put the product in place of one rotary embedding."""
    graph, x = node.graph, node.args[0]
    with graph.inserting_before(node):
        if _swaps_heads(x):
            heads = x.args[0]
        else:
            heads = graph.call_function(ops.transpose, (x, 1, 2))
            heads.meta["val"] = x.meta["val"].transpose(1, 2)
        turned = _product(heads, matrix, node)
    _put(node, turned)


def turn_together(a: fx.Node, b: fx.Node, matrix: fx.Node) -> None:
    """Put slices of one product in place of the embeddings of neighbours."""
    graph = a.graph
    piece_of_a, piece_of_b = (_piece(node.args[0]) for node in (a, b))
    assert piece_of_a is not None and piece_of_b is not None
    (source, start, _, shape), end = piece_of_a, piece_of_b[2]
    value, first, second = source.meta["val"], a.meta["val"], b.meta["val"]
    heads, more = first.shape[1], second.shape[1]
    with graph.inserting_before(min(a, b)):
        piece = graph.call_function(ops.narrow, (source, -1, start, end))
        piece.meta["val"] = value[..., start:end]
        wide = graph.call_function(ops.reshape, (piece, shape))
        wide.meta["val"] = first.new_empty((first.shape[0], 1, heads + more, first.shape[3]))
        turned = _product(wide, matrix, a)
        parts = []
        for node, low, high in ((a, 0, heads), (b, heads, heads + more)):
            part = graph.call_function(ops.narrow, (turned, 2, low, high))
            part.meta["val"] = turned.meta["val"][:, :, low:high]
            if not only_values_count(node):  # somebody sees its strides: those of a tensor of its own
                part = graph.call_function(ops.contiguous, (part,))
                part.meta["val"] = turned.meta["val"][:, :, low:high].contiguous()
            parts.append(part)
    for node, part in zip((a, b), parts, strict=True):
        _put(node, part)


def _product(heads: fx.Node, matrix: fx.Node, node: fx.Node) -> fx.Node:
    turned = node.graph.call_function(ops.matmul, (heads, matrix), {"post_ops": ()})
    turned.meta.update({"val": heads.meta["val"].new_empty(heads.meta["val"].shape), "source": "rotary embedding"})
    return turned


def _put(node: fx.Node, turned: fx.Node) -> None:
    """Let [B, H, 1, D] of turned [B, 1, H, D] stand in node's place."""
    with node.graph.inserting_before(node):
        result = node.graph.call_function(ops.transpose, (turned, 1, 2))
    result.meta.update({key: value for key, value in node.meta.items() if key in ("val", "source")})
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
