"""Let a convolution or average pooling do the zero padding in front of it.

Before: pad(x, (1, 1, 1, 1)) -> convolution(padding 0)      Needs: normalize
After:  convolution(x, padding 1)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import finish, is_call, only_user


def fold_pad(gm: fx.GraphModule) -> fx.GraphModule:
    """Fold every zero padding that one windowed operation alone reads."""
    aliasing = Aliasing(gm)
    for pad in gm.graph.find_nodes(op="call_function", target=ops.pad):
        if (change := match_reader(pad)) is not None and aliasing.may_move_down(pad, change[0]):
            reader, kwargs, args = change
            reader.args, reader.kwargs = args, kwargs
            gm.graph.erase_node(pad)
    return finish(gm)


def match_reader(pad: fx.Node) -> tuple[fx.Node, dict[str, Any], tuple[Any, ...]] | None:
    """The reader with its new arguments. Not max pooling: it ignores its own padding, but would see zeros."""
    src, padding, value = pad.args
    reader = only_user(pad)
    if not is_call(reader, ops.convolution, ops.pool) or reader.args[0] is not pad or value != 0:
        return None
    n = len(reader.kwargs["stride"])
    if any(isinstance(size, fx.Node) for size in padding):
        return None
    if len(padding) > 2 * n or min(padding) < 0:
        return None
    padding = (*padding, *(0,) * (2 * n - len(padding)))
    left = tuple(padding[2 * (n - 1 - i)] + reader.kwargs["padding_l"][i] for i in range(n))
    right = tuple(padding[2 * (n - 1 - i) + 1] + reader.kwargs["padding_r"][i] for i in range(n))
    kwargs = {**reader.kwargs, "padding_l": left, "padding_r": right}
    if reader.target is ops.convolution:
        return reader, kwargs, (src, *reader.args[1:])
    kind = reader.args[1]
    padded = any(reader.kwargs["padding_l"] + reader.kwargs["padding_r"])
    if kind == "max" or reader.kwargs["ceil_mode"] or (kind == "avg_exclude_padding" and padded):
        return None
    kernel = reader.kwargs["kernel"]
    if _is_wide(reader.kwargs["padding_l"], kernel) or (left == right and _is_wide(left, kernel)):
        return None
    return reader, kwargs, (src, "avg_include_padding")


def _is_wide(padding: tuple[int, ...], kernel: tuple[int, ...]) -> bool:
    """Whether average pooling refuses this padding on both sides: more than half of a window."""
    return any(2 * size > window for size, window in zip(padding, kernel, strict=True))
