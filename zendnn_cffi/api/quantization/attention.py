"""Attention whose first product computes in integers: queries and keys are observed.

    Before: scaled_dot_product_attention(q, k, v)
    After:  scaled_dot_product_attention(observer(q), observer(k), v)

Kernels take one zero point for a product of two values. So keys are kept as int8 counted from 0, and queries as uint8
with any zero point. What follows the scores stays float: a softmax that rounds takes longer than it saves.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from zendnn_cffi.api.quantization.layers import ATTENTION, kind

_DEFAULTS: dict[str, Any] = {"dropout_p": 0.0, "enable_gqa": False}
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
OBSERVED = "zendnn_cffi_observed"  # in node.meta: queries and keys of this attention are observed


def mark_attention(exported: fx.GraphModule) -> list[str]:
    """Note on each attention [B, H, L, D] that its queries and keys are to be observed; return their names.

    Groups of queries that share keys, and dropout, stay as they are.
    """
    found: list[str] = []
    for node in exported.graph.nodes:
        if node.op == "call_function" and kind(node) == ATTENTION and _is_plain(node):
            node.meta[OBSERVED] = True
            found.append(node.name)
    return found


def _is_plain(node: fx.Node) -> bool:
    given = _DEFAULTS | dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)
    if given["enable_gqa"] or given["dropout_p"] or len(node.args) < 3:
        return False
    return len({*node.args[:2]}) == 2 and all(_rank(operand) == 4 for operand in node.args[:3])


def _rank(node: Any) -> int | None:
    found = node.meta.get("val")
    return found.ndim if isinstance(found, Tensor) else None
