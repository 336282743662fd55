"""Recognise the samples that deformable attention takes of each level's map, weighted and summed, as one operation.

Before: samples = [grid_sample(map, grid, "bilinear", "zeros") for map, grid in levels]          each [N, D, Q, P]
        (stack(samples, -2).flatten(-2) * weights).sum(-1)       or concat(samples, -1) where levels differ in P
After:  weighted_samples(maps, grids, weights)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import argument, erase_unread, finish, is_call, is_stack, only_user, set_example
from fx_passes.graph.inference import rank
from zendnn_cffi.values import dataclass

aten = torch.ops.aten
_OVERLOADS = (torch.grid_sampler, torch.grid_sampler_2d, aten.grid_sampler.default, aten.grid_sampler_2d.default)
_BY_NAME = "bilinear", "zeros"
_BY_NUMBER = 0, 0  # the same two
_RANK = 4


@dataclass(frozen=True)
class Samples:
    """What the sum is of; the operands of ops.weighted_samples."""

    maps: tuple[fx.Node, ...]
    grids: tuple[fx.Node, ...]
    weights: fx.Node
    align_corners: bool


def fuse_weighted_samples(gm: fx.GraphModule) -> fx.GraphModule:
    """Rewrite every such sum."""
    matches = [(node, found) for node in gm.graph.nodes if (found := match_samples(node)) is not None]
    if not matches:
        return gm
    aliasing = Aliasing(gm)
    for node, found in matches:
        if not any(aliasing.is_written(source) for source in (*found.maps, *found.grids, found.weights)):
            _rewrite(node, found)
    return finish(gm)


def match_samples(node: fx.Node) -> Samples | None:
    """What node sums, where it is the sum of weighted samples that nobody else reads."""
    if not is_call(node, ops.reduce) or node.args[1:] != ("sum", (-1,), False):
        return None
    product = node.args[0]
    if not is_call(product, ops.binary) or product.args[2] != "mul" or only_user(product) is not node:
        return None
    for joined, weights in (product.args[:2], product.args[1::-1]):
        pieces = _pieces(joined)
        if pieces is not None and isinstance(weights, fx.Node) and only_user(joined) is product:
            return _of_levels(pieces, weights)
    return None


def _pieces(joined: Any) -> list[Any] | None:
    """The samples that are joined along the last dimension."""
    if is_call(joined, ops.concat):
        return list(joined.args[0]) if joined.args[1] in (-1, _RANK - 1) else None
    if not is_call(joined, ops.flatten) or joined.args[1:] not in ((-2, -1), (_RANK - 1, _RANK), (_RANK - 1, -1)):
        return None
    stack = joined.args[0]
    if not is_stack(stack) or only_user(stack) is not joined or argument(stack, 1, "dim", 0) not in (-2, 3):
        return None
    return list(argument(stack, 0, "tensors"))


def _of_levels(pieces: list[Any], weights: fx.Node) -> Samples | None:
    """Of samples of maps, all between the same pixels."""
    found = [_sampled(piece) for piece in pieces]
    if not found or None in found or len({corners for _, _, corners in filter(None, found)}) > 1:
        return None
    maps, grids, corners = zip(*filter(None, found), strict=True)
    return Samples(maps, grids, weights, corners[0])


def _sampled(node: Any) -> tuple[fx.Node, fx.Node, bool] | None:
    """(map, grid, align_corners) of bilinear samples of a map of two dimensions, with zeros around it."""
    if is_call(node, F.grid_sample):
        modes = argument(node, 2, "mode", "bilinear"), argument(node, 3, "padding_mode", "zeros")
        is_known = modes == _BY_NAME
    elif is_call(node, *_OVERLOADS):
        is_known = (argument(node, 2, "interpolation_mode"), argument(node, 3, "padding_mode")) == _BY_NUMBER
    else:
        return None
    level, grid = argument(node, 0, "input"), argument(node, 1, "grid")
    if not is_known or only_user(node) is None or _RANK not in (rank(level), rank(grid)):  # of five: volumes
        return None
    return level, grid, bool(argument(node, 4, "align_corners", False))


def _rewrite(node: fx.Node, found: Samples) -> None:
    graph = node.graph
    with graph.inserting_before(node):
        operands = (found.maps, found.grids, found.weights, found.align_corners)
        sums = graph.call_function(ops.weighted_samples, operands)
    sums.meta["source"] = node.meta.get("source", "")
    set_example(sums, node.meta.get("val"))
    node.replace_all_uses_with(sums)
    erase_unread(node)
