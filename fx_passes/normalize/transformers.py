"""PyTorch's fused transformer functions, written out: what TorchDynamo captures of nn.MultiheadAttention and encoders.

Before: multi_head_attention_forward(x, x, x, 64, 4, weight, bias, ...)
After:  linear -> unflatten -> permute -> scaled_dot_product_attention -> permute -> flatten -> linear
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fx_passes.graph.graph import finish, is_call
from fx_passes.graph.inference import dtype, rank

Arguments = dict[str, Any]

_ENCODER_LAYER = (
    "src", "embed_dim", "num_heads", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias", "use_gelu", "norm_first",
    "eps", "norm_weight_1", "norm_bias_1", "norm_weight_2", "norm_bias_2", "ffn_weight_1", "ffn_bias_1",
    "ffn_weight_2", "ffn_bias_2", "mask", "mask_type",
)  # fmt: skip
_NATIVE_ATTENTION = (
    "query", "key", "value", "embed_dim", "num_heads", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias", "mask",
    "need_weights", "average_attn_weights", "mask_type",
)  # fmt: skip
_SRC_MASK = 0  # the kind of a mask [L, S]; others may leave a row nothing to attend to
_WHERE_HEADS_GO = {"batch second": (1, 2, 0, 3), "batch first": (0, 2, 1, 3), "no batch": (1, 0, 2)}
_WHERE_HEADS_COME_FROM = {"batch second": (2, 0, 1, 3), "batch first": (0, 2, 1, 3), "no batch": (1, 0, 2)}


def write_out_transformers(gm: fx.GraphModule) -> fx.GraphModule:
    """Write out each fused function of which only the attention's result is read; what has no plain form stays."""
    out = Writer(gm)
    for node in list(gm.graph.nodes):
        writer = _WRITERS.get(node.target) if node.op == "call_function" else None
        if writer is None:
            continue
        with gm.graph.inserting_before(node):
            before = node.prev
            result = writer(out, node)
        if result is None:
            continue
        made = before.next
        while made is not node:
            made.meta["source"] = node.meta.get("source", getattr(node.target, "__name__", ""))
            made = made.next
        _replace(node, result)
    return finish(gm)


def _replace(node: fx.Node, result: fx.Node) -> None:
    """Let readers have result in place of node, or of the first of its results."""
    if "val" in node.meta and isinstance(node.meta["val"], torch.Tensor):
        result.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            if user.args[1] == 0:
                if "val" in user.meta:
                    result.meta["val"] = user.meta["val"]
                user.replace_all_uses_with(result)
            node.graph.erase_node(user)
    node.graph.erase_node(node)


def _only_first_is_read(node: fx.Node) -> bool:
    readers = list(node.users)
    return all(is_call(user, operator.getitem) and (user.args[1] == 0 or not user.users) for user in readers)


def _named(node: fx.Node, names: Sequence[str]) -> Arguments:
    return dict.fromkeys(names) | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _are_numbers(embed_dim: Any, heads: Any) -> bool:
    """Whether features and heads are known, and eager accepts them."""
    return isinstance(embed_dim, int) and isinstance(heads, int) and heads > 0 and embed_dim % heads == 0


class Writer:
    """Writes functions out in the graph of one module, in front of the node at hand."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm = gm
        self._tracer = fx.proxy.GraphAppendingTracer(gm.graph)

    def _proxy(self, value: Any) -> Any:
        return fx.Proxy(value, self._tracer) if isinstance(value, fx.Node) else value

    def attention(self, node: fx.Node) -> fx.Node | None:
        """multi_head_attention_forward: [L, N, E] or [L, E]."""
        try:
            bound = inspect.signature(F.multi_head_attention_forward).bind(*node.args, **node.kwargs)
        except TypeError:  # eager says what is wrong with the call
            return None
        bound.apply_defaults()
        a = bound.arguments
        if not _are_numbers(a["embed_dim_to_check"], a["num_heads"]):
            return None
        added = (a["bias_k"], a["bias_v"], a["static_k"], a["static_v"])
        if any(value is not None for value in added) or a["add_zero_attn"] or not _only_first_is_read(node):
            return None
        ranks = {rank(a[name]) for name in ("query", "key", "value")}
        if (a["training"] and a["dropout_p"]) or ranks not in ({3}, {2}):
            return None
        where = "batch second" if ranks == {3} else "no batch"
        masks = self._masks(a["attn_mask"], a["key_padding_mask"], where, a["num_heads"], dtype(a["query"], self._gm))
        if masks is None:
            return None
        weights: Any = a["in_proj_weight"]
        if a["use_separate_proj_weight"]:
            weights = tuple(a[f"{name}_proj_weight"] for name in "qkv")
        sources = a["query"], a["key"], a["value"]
        heads = a["embed_dim_to_check"], a["num_heads"]
        out = a["out_proj_weight"], a["out_proj_bias"]
        return self._attention(sources, heads, weights, a["in_proj_bias"], out, where, masks[0]).node

    def native_attention(self, node: fx.Node) -> fx.Node | None:
        """_native_multi_head_attention: [N, L, E]."""
        a = _named(node, _NATIVE_ATTENTION)
        if (
            not _are_numbers(a["embed_dim"], a["num_heads"])
            or not _only_first_is_read(node)
            or (a["mask"] is not None and a["mask_type"] != _SRC_MASK)
        ):
            return None
        masks = self._masks(a["mask"], None, "batch first", a["num_heads"], dtype(a["query"], self._gm))
        if masks is None:
            return None
        sources, heads = (a["query"], a["key"], a["value"]), (a["embed_dim"], a["num_heads"])
        out = a["proj_weight"], a["proj_bias"]
        made = self._attention(sources, heads, a["qkv_weight"], a["qkv_bias"], out, "batch first", masks[0])
        return made.node

    def encoder_layer(self, node: fx.Node) -> fx.Node | None:
        """_transformer_encoder_layer_fwd: [N, L, E]."""
        a = _named(node, _ENCODER_LAYER)
        if (
            not _are_numbers(a["embed_dim"], a["num_heads"])
            or rank(a["src"]) != 3
            or (a["mask"] is not None and a["mask_type"] != _SRC_MASK)
        ):
            return None
        masks = self._masks(a["mask"], None, "batch first", a["num_heads"], dtype(a["src"], self._gm))
        if masks is None:
            return None
        p = {name: self._proxy(value) for name, value in a.items()}

        def norm(x: Any, number: int) -> Any:
            return F.layer_norm(x, (a["embed_dim"],), p[f"norm_weight_{number}"], p[f"norm_bias_{number}"], a["eps"])

        def attend(x: Any) -> Any:
            heads, out = (a["embed_dim"], a["num_heads"]), (a["proj_weight"], a["proj_bias"])
            return self._attention((x.node,) * 3, heads, a["qkv_weight"], a["qkv_bias"], out, "batch first", masks[0])

        def feed(x: Any) -> Any:
            inner = F.linear(x, p["ffn_weight_1"], p["ffn_bias_1"])
            return F.linear(F.gelu(inner) if a["use_gelu"] else F.relu(inner), p["ffn_weight_2"], p["ffn_bias_2"])

        x = p["src"]
        if a["norm_first"]:
            x = x + attend(norm(x, 1))
            return (x + feed(norm(x, 2))).node
        x = norm(x + attend(x), 1)
        return norm(x + feed(x), 2).node

    def _attention(
        self,
        sources: Sequence[fx.Node],
        heads: tuple[int, int],
        weights: Any,
        bias: Any,
        out: tuple[Any, Any],
        where: str,
        mask: Any,
    ) -> Any:
        """Projections, attention, and the projection of its result, as a proxy.

        sources  query, key and value; equal ones are projected together
        heads    features and heads
        weights  [3 E, E], or one for each source
        """
        n = heads[1]
        order, back = _WHERE_HEADS_GO[where], _WHERE_HEADS_COME_FROM[where]
        same = all(source is sources[0] for source in sources) and not isinstance(weights, tuple)
        if same:
            wide = F.linear(self._proxy(sources[0]), self._proxy(weights), self._proxy(bias)).unflatten(-1, (3, n, -1))
            third = len(order) - 2  # the dimension of the three
            moved = wide.permute(third, *(axis + (axis >= third) for axis in order))
            parts = [moved[i] for i in range(3)]
        else:
            parts = []
            for i, source in enumerate(sources):
                rows = slice(i * heads[0], (i + 1) * heads[0])
                weight = self._proxy(weights[i]) if isinstance(weights, tuple) else self._proxy(weights)[rows]
                summand = None if bias is None else self._proxy(bias)[rows]
                parts.append(F.linear(self._proxy(source), weight, summand).unflatten(-1, (n, -1)).permute(*order))
        attended = F.scaled_dot_product_attention(*parts, attn_mask=mask)
        merged = attended.permute(*back).flatten(-2)
        return F.linear(merged, self._proxy(out[0]), self._proxy(out[1]))

    def _masks(self, mask: Any, padding: Any, where: str, heads: int, kind: torch.dtype | None) -> tuple[Any] | None:
        """What is added to scores of dtype `kind`, as a proxy; (None,) for nothing, None where it cannot be told."""
        found: Any = None
        if mask is not None:
            found = self._added(mask, kind)
            if found is None or rank(mask) not in (2, 3) or (rank(mask) == 3 and where == "batch first"):
                return None
            if rank(mask) == 3 and where == "batch second":
                found = found.unflatten(0, (-1, heads))
        if padding is not None:
            added = self._added(padding, kind)
            if added is None or rank(padding) != (1 if where == "no batch" else 2):
                return None
            added = added.unsqueeze(-2) if where == "no batch" else added.unsqueeze(-2).unsqueeze(-2)
            found = added if found is None else found + added
        return (found,)

    def _added(self, mask: Any, kind: torch.dtype | None) -> Any:
        """A mask as numbers that are added: minus infinity where a boolean one is True."""
        if kind is None:
            return None
        if dtype(mask, self._gm) == torch.bool:
            return torch.zeros_like(self._proxy(mask), dtype=kind).masked_fill(self._proxy(mask), float("-inf"))
        return self._proxy(mask) if dtype(mask, self._gm) == kind else None


_WRITERS: dict[Any, Callable[[Writer, fx.Node], fx.Node | None]] = {
    F.multi_head_attention_forward: Writer.attention,
    torch._native_multi_head_attention: Writer.native_attention,
    torch._transformer_encoder_layer_fwd: Writer.encoder_layer,
}
