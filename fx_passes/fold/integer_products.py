"""Products of two int8 matrices, as torch._int_mm spells them, become products of values kept with scale 1.

Before: torch._int_mm(a, b).to(torch.float32)      a [M, K], b [K, N] of int8, the sums exact in int32
After:  matmul(dequantize(a), dequantize(b))       b a parameter: linear(dequantize(a), dequantize(b.T))

Kernels add products of integers in int32, so sums are exact there, too, and scales behind them become post-ops. Where
float32 computes instead, sums are exact below 2 ** 24: products of more terms than 1024 stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.fold.casts import is_cast
from fx_passes.graph.graph import finish, is_call, is_constant, tensor_of

_LONGEST = (1 << 24) >> 14  # sums of products of two int8 are that many times 2 ** 14 at most


def fold_integer_products(gm: fx.GraphModule) -> fx.GraphModule:
    """Respell integer products that are read in float32 alone."""
    for node in list(gm.graph.nodes):
        if not is_call(node, torch._int_mm, torch.ops.aten._int_mm.default) or len(node.args) != 2 or node.kwargs:
            continue
        casts = list(node.users)
        if not casts or not all(is_cast(cast) and _dtype(cast) == torch.float32 for cast in casts):
            continue
        a, b = node.args
        terms = next((n for n in (_size(a, -1, gm), _size(b, 0, gm)) if n is not None), None)
        if terms is None or terms > _LONGEST:
            continue
        with gm.graph.inserting_before(node):
            product = _product(gm.graph, a, b)
        product.meta = dict(casts[0].meta)
        for cast in casts:
            cast.replace_all_uses_with(product)
            gm.graph.erase_node(cast)
        gm.graph.erase_node(node)
    return finish(gm)


def _product(graph: fx.Graph, a: fx.Node, b: Any) -> fx.Node:
    def real(integers: Any) -> fx.Node:
        return graph.call_function(ops.dequantize, (integers, 1.0, 0, None, torch.float32))

    if is_constant(b) and not is_constant(a):
        weight = real(graph.call_function(ops.transpose, (b, 0, 1)))
        return graph.call_function(ops.linear, (real(a), weight, None), {"post_ops": ()})
    return graph.call_function(ops.matmul, (real(a), real(b)), {"post_ops": ()})


def _size(node: Any, dim: int, gm: fx.GraphModule) -> int | None:
    """A size of a value; None where it is free."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("val")
    value = tensor_of(gm, node) if value is None else value
    size = value.shape[dim] if isinstance(value, torch.Tensor) else None
    return size if isinstance(size, int) else None


def _dtype(node: fx.Node) -> torch.dtype | None:
    if "val" in node.meta:
        return getattr(node.meta["val"], "dtype", None)
    if node.op == "call_method" and node.target == "float":
        return torch.float32
    named = [argument for argument in (*node.args[1:2], node.kwargs.get("dtype")) if isinstance(argument, torch.dtype)]
    return named[0] if named else None
