"""Recognise L2 normalization where an export left its parts, or a model wrote them.

Before: div(x, expand_as(clamp_min(linalg_vector_norm(x, 2, [dim], True), eps), x)); clamp_min and expand_as may be
        missing; the norm may be Tensor.norm, torch.norm, or sqrt(sum(square(x), dim, True))
After:  l2_normalize(x, dim, eps)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import finish, is_call, only_user

aten = torch.ops.aten


def fuse_l2_normalize(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace every quotient of a tensor and its own norms."""
    for node in gm.graph.find_nodes(op="call_function", target=ops.binary):
        if (match := match_norm(node)) is None:
            continue
        src, dim, eps = match
        with gm.graph.inserting_before(node):
            normalized = gm.graph.call_function(ops.l2_normalize, (src, dim), {"eps": eps})
        normalized.meta = {**node.meta, "source": "L2 normalization"}
        node.replace_all_uses_with(normalized)
    return finish(gm)


def match_norm(node: fx.Node) -> tuple[fx.Node, int, float] | None:
    """(x, dim, eps) where node is x / max(norm(x), eps), the norms seen by nothing else."""
    src, norm, kind = node.args
    if kind != "div" or not isinstance(src, fx.Node) or not isinstance(norm, fx.Node):
        return None
    chain, eps = node, 0.0
    if is_call(norm, aten.expand_as.default) and norm.args[1] is src and only_user(norm) is chain:
        chain, norm = norm, norm.args[0]
    if is_call(norm, aten.clamp_min.default) and only_user(norm) is chain:
        if not isinstance(norm.args[1], int | float):
            return None
        chain, norm, eps = norm, norm.args[0], float(norm.args[1])
    dim = _euclidean(norm, src) if only_user(norm) is chain else None
    return None if dim is None else (src, dim, eps)


def _euclidean(norm: fx.Node, src: fx.Node) -> int | None:
    """The dimension along which norm is that of src, kept as one of size 1; None if it is not."""
    if is_call(norm, *_NORMS) or (norm.op == "call_method" and norm.target == "norm"):
        return _of_function(norm, src)
    if is_call(norm, ops.eltwise) and norm.args[1] == "sqrt":
        return _of_squares(norm.args[0], src)
    return None


def _of_function(norm: fx.Node, src: fx.Node) -> int | None:
    """The dimension that a call of a norm names."""
    names = ("ord" if norm.target in _BY_ORDER else "p", "dim", "keepdim")
    keywords = {name: value for name, value in norm.kwargs.items() if value is not None}  # torch.norm: out, dtype
    given: dict[str, Any] = {**dict(zip(names, norm.args[1:], strict=False)), **keywords}
    if norm.args[:1] != (src,) or len(norm.args) > 4 or not set(given) <= set(names):
        return None
    if given.get(names[0], 2) not in (2, "fro", None) or given.get("keepdim") is not True:
        return None
    return _single(given.get("dim"))


def _of_squares(total: Any, src: fx.Node) -> int | None:
    """The dimension along which total sums the squares of src."""
    if not is_call(total, ops.reduce) or total.args[1] != "sum" or not total.args[3]:
        return None
    square: Any = total.args[0]
    is_square = is_call(square, ops.eltwise) and square.args[:2] == (src, "square")
    is_product = is_call(square, ops.binary) and square.args == (src, src, "mul")
    return _single(total.args[2]) if is_square or is_product else None


def _single(dims: Any) -> int | None:
    """The one dimension that is named."""
    if isinstance(dims, list | tuple) and len(dims) == 1:
        dims = dims[0]
    return dims if isinstance(dims, int) else None


_BY_ORDER = (aten.linalg_vector_norm.default, torch.linalg.vector_norm)
_NORMS = (*_BY_ORDER, torch.norm)
