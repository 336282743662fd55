"""Recognise root-mean-square normalization where models write it out.

Before: mul(weight, cast(mul(cast(x), rsqrt(add(mean(square(cast(x)), -1), eps)))))
After:  rms_norm(x, weight, eps)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.fold.casts import is_cast
from fx_passes.graph.graph import finish, is_call, is_constant, only_user


def fuse_rms_norm(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace every written-out normalization, with its weight where that is a constant vector."""
    for node in gm.graph.find_nodes(op="call_function", target=ops.binary):
        if (match := match_norm(node)) is None:
            continue
        src, eps = match
        result, weight = node, None
        scaled = only_user(node)
        if scaled is not None and is_cast(scaled) and _same_dtype(scaled, src):
            result, scaled = scaled, only_user(scaled)
        if scaled is not None and (weight := _weight(scaled, result)) is not None:
            result = scaled
        if not _same_dtype(result, src):
            continue
        with gm.graph.inserting_before(result):
            norm = gm.graph.call_function(ops.rms_norm, (src, weight), {"eps": eps})
        norm.meta = {**result.meta, "source": "RMSNorm"}
        result.replace_all_uses_with(norm)
    return finish(gm)


def match_norm(node: fx.Node) -> tuple[fx.Node, float] | None:
    """(x, eps) where node is x * rsqrt(mean(x * x, -1) + eps)."""
    a, b, kind = node.args
    if kind != "mul":
        return None
    for x, inverse in ((a, b), (b, a)):
        if not is_call(inverse, ops.eltwise) or inverse.args[1] != "rsqrt" or only_user(inverse) is not node:
            continue
        total = inverse.args[0]
        if not is_call(total, ops.binary) or total.args[2] != "add" or isinstance(total.args[1], fx.Node):
            continue
        mean, eps = total.args[0], total.args[1]
        if not is_call(mean, ops.reduce) or mean.args[1] != "mean" or mean.args[2] != (-1,) or not mean.args[3]:
            continue
        square = mean.args[0]
        if is_call(square, ops.eltwise) and square.args[1] == "square" and square.args[0] is x:
            return _uncast(x), float(eps)
    return None


def _uncast(node: fx.Node) -> fx.Node:
    """What node was before a conversion to float32."""
    source = node.args[0] if is_cast(node) else None
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    return source if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else node


def _same_dtype(node: fx.Node, src: fx.Node) -> bool:
    have, want = node.meta.get("val"), src.meta.get("val")
    if have is None or want is None:
        return not is_cast(node)
    return bool(have.dtype == want.dtype)


def _weight(node: fx.Node, norm: fx.Node) -> Any:
    """The constant vector that node multiplies norm with; None where it does not."""
    if not is_call(node, ops.binary) or node.args[2] != "mul":
        return None
    other = node.args[1] if node.args[0] is norm else node.args[0]
    if not isinstance(other, fx.Node) or other is norm or not is_constant(other):
        return None
    return other if other.meta.get("rank") == 1 else None
