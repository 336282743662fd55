"""Let a graph be one for calls with as many dimensions as its batch normalizations ask for.

    Before: conv2d(x) -> batch_norm          x may be an image alone, of which batch_norm takes the rows for channels
    After:  the same, and rank(x) is 4       each call is compared with that

    Before: linear(x) -> batch_norm          x may be [N, L, K], of which batch_norm takes L for channels: it must be as
    After:  the same, and rank(x) is 2       many as the features that lie last, which hardly any model means

Passes that come later find the ranks, and fold what is right for these alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import fx, nn

from fx_passes import ops
from fx_passes.graph.graph import RANK, is_call, only_user
from fx_passes.graph.inference import LAYER, rank, rank_of
from fx_passes.trace.assumptions import Assumption, Path

# The other layers of this kind take several numbers of dimensions.
_ASK: Mapping[type[nn.Module] | None, int] = MappingProxyType({nn.BatchNorm2d: 4, nn.BatchNorm3d: 5})
_MOST = 8  # dimensions that are tried


def assume_ranks(gm: fx.GraphModule) -> fx.GraphModule:
    """Note the rank of each argument on which that of a batch normalization rests, where no other would do.

    A module that has no rest_on() compares no call, so nothing is assumed.
    """
    rest_on: Callable[[Assumption], None] | None = getattr(gm, "rest_on", None)
    if rest_on is None:
        return gm
    known: dict[fx.Node, Any] = {}
    for norm in gm.graph.find_nodes(op="call_function", target=ops.batch_norm):
        needed = needed_rank(norm)
        if needed is None or rank(norm, known) is not None:
            continue
        if (match := match_source(norm, needed)) is not None:
            source, path, dimensions = match
            source.meta[RANK] = dimensions
            known.clear()  # others follow from it
            rest_on(Assumption(*path, dimensions))
    return gm


def needed_rank(norm: fx.Node) -> int | None:
    """How many dimensions norm takes, or has to, so that a neighbour may compute it; None where several are right."""
    layer: type[nn.Module] | None = norm.meta.get(LAYER)
    if layer in _ASK:
        return _ASK[layer]
    for neighbour in (norm.args[0], only_user(norm)):
        if is_call(neighbour, ops.convolution, ops.deconvolution, ops.linear):
            return rank_with_batch(neighbour)
    return None


def rank_with_batch(layer: fx.Node) -> int:
    """How many dimensions samples of a convolution or deconvolution, or rows of a linear, have: of these alone the
    channels lie along dimension 1. Of [N, L, K] a linear's are the last, of [C, L] a convolution's the first.
    """
    return 2 if layer.target is ops.linear else len(layer.kwargs["stride"]) + 2


def match_source(norm: fx.Node, needed: int) -> tuple[fx.Node, tuple[str, Path], int] | None:
    """The one argument, or part of one, that decides norm's rank, where it is, and the only rank of it that does."""
    _, asked = rank_of(norm, 0)
    if len(asked) != 1 or (path := path_of(asked[0])) is None:
        return None
    right = [dimensions for dimensions in range(_MOST) if rank_of(norm, dimensions)[0] == needed]
    return (asked[0], path, right[0]) if len(right) == 1 else None


def path_of(node: fx.Node) -> tuple[str, Path] | None:
    """The argument of the model's that node is, or is taken out of, and how."""
    if node.op == "placeholder":
        return None if str(node.target).startswith("*") else (str(node.target), ())
    if not is_call(node, operator.getitem, getattr) or type(node.args[1]) not in (int, str) or len(node.args) != 2:
        return None
    source, key = node.args
    inside = path_of(source) if isinstance(source, fx.Node) else None
    return None if inside is None else (inside[0], (*inside[1], ("attr" if node.target is getattr else "item", key)))
