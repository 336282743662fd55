"""Let values that are quantized to fewer than all 8-bit integers (reduce_range) be clipped before.

Before: quantize(conv, 0.1, 20, low=0, high=127, uint8)
After:  quantize(clip(conv, -2.0, 10.7), 0.1, 20, low=0, high=127, uint8, is_within=True)

The integers are the same: the value at a limit is a whole number of steps, so it is rounded to that limit. In bf16
the value is off by a quarter of a step at most, where it is no more than 127 steps from zero. Primitives
round to all integers of a dtype, and clip as a post-op. The average, the largest or a view of such integers is
within the limits without that.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import argument, finish, is_call, only_user
from fx_passes.graph.inference import dtype as dtype_of
from fx_passes.spellings.registry import is_number
from zendnn_cffi.values import dataclass

_POOLS = (ops.pool, ops.adaptive_pool)
_VIEWS = ops.having(view=True)
_CLIPS = ("clip", "hardtanh")
_LARGEST = torch.finfo(torch.float32).max
_EXACT_IN_BF16 = 127  # so many steps from zero a limit may be: 127 / 512 is less than half a step


@dataclass(frozen=True)
class Steps:
    """Integers from low to high, and what they stand for."""

    scale: float
    zero_point: int
    low: int
    high: int
    dtype: torch.dtype

    @property
    def farthest(self) -> int:
        """How many steps from zero the limits are."""
        return max(self.zero_point - self.low, self.high - self.zero_point)

    @property
    def limits(self) -> tuple[float, float]:
        """The real numbers of the first and the last."""
        return (self.low - self.zero_point) * self.scale, (self.high - self.zero_point) * self.scale


def clip_narrow_integers(gm: fx.GraphModule) -> fx.GraphModule:
    """Clip every value that is quantized by one scale to a part of the integers."""
    aliasing, narrow = Aliasing(gm), dict[fx.Node, Steps]()
    clipped: dict[tuple[fx.Node, Steps], fx.Node] = {}
    for node in gm.graph.find_nodes(op="call_function", target=ops.quantize):
        if (steps := match_narrow(node)) is None:
            continue
        narrow[node] = steps
        src = node.args[0]
        if any(map(aliasing.is_written, (src, *src.all_input_nodes))):
            src = _clip(node, src, steps, takes_limits=False)
        elif not _is_within(src, steps, narrow):
            if (src, steps) not in clipped:
                clipped[src, steps] = _clip(node, src, steps)
            src = clipped[src, steps]
        node.update_arg(0, src)
        node.update_kwarg("is_within", True)
    return finish(gm) if narrow else gm


def match_narrow(node: fx.Node) -> Steps | None:
    """The integers of an ops.quantize, where these are some of a dtype's, and numbers say which."""
    src, scale, zero_point, axis, low, high, dtype = node.args
    if node.kwargs.get("is_within") or axis is not None or dtype not in (torch.uint8, torch.int8):
        return None
    if not (is_number(scale) and all(type(number) is int for number in (zero_point, low, high))):
        return None
    steps, limits = Steps(scale, zero_point, low, high, dtype), torch.iinfo(dtype)
    if not limits.min <= low <= zero_point <= high <= limits.max or (low, high) == (limits.min, limits.max):
        return None
    usual = torch.finfo(torch.float32).tiny <= scale and max(map(abs, steps.limits)) <= _LARGEST
    if not usual or not math.isfinite(scale):
        return None
    owner = node.graph.owning_module
    is_exact = steps.farthest <= _EXACT_IN_BF16 or (owner is not None and dtype_of(src, owner) is torch.float32)
    return steps if is_exact else None


def _is_within(node: Any, steps: Steps, narrow: dict[fx.Node, Steps]) -> bool:
    """Whether a value is between numbers that were quantized to these integers."""
    if is_call(node, ops.dequantize):
        src, scale, zero_point, axis, _ = node.args
        return narrow.get(src) == steps and axis is None and (scale, zero_point) == (steps.scale, steps.zero_point)
    if is_call(node, ops.concat):
        return all(_is_within(piece, steps, narrow) for piece in node.args[0])
    if is_call(node, *_POOLS, *_VIEWS):
        return not node.kwargs.get("post_ops") and _is_within(argument(node, 0, "src"), steps, narrow)
    return False


def _limits_of(node: fx.Node) -> tuple[float, float] | None:
    """Between which numbers a relu or clip leaves its source; None for all else."""
    if not is_call(node, ops.eltwise):
        return None
    _, kind, low, high = (*node.args, 0, 0)[:4]
    if kind == "relu" and low == 0:
        return 0.0, math.inf
    is_clip = kind in _CLIPS and is_number(low) and is_number(high) and low <= high
    return (float(low), float(high)) if is_clip else None


def _clip(node: fx.Node, src: fx.Node, steps: Steps, takes_limits: bool = True) -> fx.Node:
    """src between the limits; those of a relu or clip that nobody else reads are part of it.

    Kernels take one clip as a post-op, not two.
    """
    low, high = steps.limits
    meta = {key: value for key, value in src.meta.items() if key == "val"}
    if takes_limits and (before := _limits_of(src)) is not None and only_user(src) is not None:
        src, (low, high) = src.args[0], (min(max(number, low), high) for number in before)
    with node.graph.inserting_before(node):
        clip = node.graph.call_function(ops.eltwise, (src, "clip", low, high))
    clip.meta.update({**meta, "source": node.meta.get("source", "quantize")})
    return clip
