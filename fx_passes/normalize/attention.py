"""nn.MultiheadAttention, written out: projections as linear, the middle as one attention.

Before: y, _ = self.attention(x, x, x, need_weights=False)
After:  linear -> reshape [B, L, 3, H, D] -> permute -> q, k, v -> attention -> permute -> reshape -> linear
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from fx_passes import ops
from fx_passes.graph.graph import argument, is_call
from fx_passes.graph.inference import rank
from fx_passes.spellings.registry import Alias, Built, refusal


def build_attention(node: fx.Node, module: nn.MultiheadAttention, p: Callable[[str], Any]) -> Built:
    """Rewrite the readers of node, where nothing but the plain case is asked for; node itself is then dead.

    Plain: three-dimensional, no masks, no added keys, weights not read, and parameters that nobody computes.
    """
    query, key, value = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    extras = [argument(node, 3, "key_padding_mask"), argument(node, 5, "attn_mask")]
    if refusal(module) or refusal(module.out_proj) or module.training or any(e is not None for e in extras):
        return None
    if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
        return None
    if any(rank(x) != 3 for x in (query, key, value)) or argument(node, 7, "is_causal", False) is not False:
        return None
    readers = list(node.users)
    if not all(is_call(user, operator.getitem) for user in readers):
        return None
    if any(user.users for user in readers if user.args[1] != 0):
        return None  # the attention weights are asked for
    weight, bias = p("in_proj_weight"), p("in_proj_bias")
    out_weight, out_bias = p("out_proj.weight"), p("out_proj.bias")
    graph = node.graph
    with graph.inserting_before(node):
        call = _caller(graph, node)
        heads = _project(call, module, query, key, value, weight, bias)
        attended = call(ops.attention, *heads, None, is_causal=False, scale=None, enable_gqa=False)
        back = (0, 2, 1, 3) if module.batch_first else (2, 0, 1, 3)
        merged = call(ops.permute, attended, back)
        shape = (call(ops.size, query, 0), call(ops.size, query, 1), module.embed_dim)
        result = call(ops.linear, call(ops.reshape, merged, shape), out_weight, out_bias, post_ops=())
    for user in readers:
        if user.args[1] == 0:
            user.replace_all_uses_with(result)
        graph.erase_node(user)
    return Alias(result)


def _caller(graph: fx.Graph, node: fx.Node) -> Callable[..., fx.Node]:
    def call(op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.create_node("call_function", op, args, kwargs, name=f"{node.name}_{op.__name__}")
        made.meta["source"] = f"MultiheadAttention {node.target}"
        return made

    return call


def _project(
    call: Callable[..., fx.Node],
    module: nn.MultiheadAttention,
    query: Any,
    key: Any,
    value: Any,
    weight: Any,
    bias: Any,
) -> list[fx.Node]:
    """q, k, v as [B, H, L, D]; one wide linear where they are made from the same input."""
    embed, n_heads, depth = module.embed_dim, module.num_heads, module.head_dim
    to_heads = (0, 2, 1, 3) if module.batch_first else (1, 2, 0, 3)
    if query is key and key is value:
        wide = call(ops.linear, query, weight, bias, post_ops=())
        shape: tuple[Any, ...] = (call(ops.size, query, 0), call(ops.size, query, 1), 3, n_heads, depth)
        order = (2, *(d + (d > 1) for d in to_heads))
        split = call(ops.permute, call(ops.reshape, wide, shape), order)
        return [call(ops.index, split, i) for i in range(3)]
    heads = []
    for i, source in enumerate((query, key, value)):
        rows = call(ops.narrow, weight, 0, i * embed, (i + 1) * embed)
        summand = None if bias is None else call(ops.narrow, bias, 0, i * embed, (i + 1) * embed)
        projected = call(ops.linear, source, rows, summand, post_ops=())
        shape = (call(ops.size, source, 0), call(ops.size, source, 1), n_heads, depth)
        heads.append(call(ops.permute, call(ops.reshape, projected, shape), to_heads))
    return heads
