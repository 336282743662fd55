"""Attention whose products compute in integers: scaled_dot_product_attention is taken apart, and its operands observed.

    Before: scaled_dot_product_attention(q, k, v, mask)
    After:  observer(softmax(observer(q) @ observer(k).T * scale + mask)) @ observer(v)

Kernels take one zero point for a product of two values. So keys are kept as int8 counted from 0, and queries as uint8
with any zero point. What a softmax writes counts from 0 by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from zendnn_cffi.api.quantization.layers import kind

_DEFAULTS: dict[str, Any] = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
KEYS, VALUES = "keys", "values"  # what a product's second operand is, in node.meta under ROLE
ROLE = "zendnn_cffi_second_operand"


def take_attention_apart(exported: fx.GraphModule) -> list[str]:
    """Write attention as two products and a softmax, in place; return the products' names.

    Attention with a mask of booleans, a causal one, groups of queries or dropout stays as it is.
    """
    products: list[str] = []
    for node in list(exported.graph.nodes):
        if node.op == "call_function" and kind(node) == "scaled_dot_product_attention":
            products += _written_out(exported.graph, node)
    exported.graph.eliminate_dead_code()
    exported.recompile()
    return products


def _written_out(graph: fx.Graph, node: fx.Node) -> list[str]:
    given = _DEFAULTS | dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    shapes = [_value(operand).shape for operand in (query, key, value)]
    if given["is_causal"] or given["enable_gqa"] or given["dropout_p"] or any(len(shape) != 4 for shape in shapes):
        return []
    if mask is not None and not _value(mask).is_floating_point():
        return []
    aten = torch.ops.aten
    scale = given["scale"] if given["scale"] is not None else float(shapes[0][-1]) ** -0.5

    def call(function: Callable[..., Any], *args: Any) -> fx.Node:
        made = graph.call_function(function, args)
        made.meta = {name: node.meta[name] for name in ("nn_module_stack", "stack_trace") if name in node.meta}
        with _value(query).fake_mode:
            made.meta["val"] = function(*fx.node.map_arg(args, _value))
        return made

    with graph.inserting_before(node):
        scores = first = call(aten.matmul.default, query, call(aten.transpose.int, key, -2, -1))
        scores = call(aten.mul.Tensor, scores, scale)
        if mask is not None:
            scores = call(aten.add.Tensor, scores, mask)
        second = call(aten.matmul.default, call(aten.softmax.int, scores, -1), value)
    first.meta[ROLE], second.meta[ROLE] = KEYS, VALUES
    node.replace_all_uses_with(second)
    graph.erase_node(node)
    return [first.name, second.name]


def _value(node: Any) -> Tensor:
    found = node.meta["val"]
    assert isinstance(found, Tensor)
    return found
