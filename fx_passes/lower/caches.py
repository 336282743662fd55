"""A growing key-value cache and the attention over it, by PyTorch: one program serves every length.

Their calls get the tensors of the run as they are. A step of decoding reads each cache once and has a row or a few of
queries: memory sets the time, not the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fx_passes.lower.attention import as_it_lies
from fx_passes.lower.candidates import Candidate, Operation, TorchTemplate
from fx_passes.lower.context import LoweringContext, NotLowered, eager_layout
from fx_passes.lower.layouts import contiguous_strides, strided
from zendnn_cffi.recycled import results


def lower_grow(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.grow: a new tensor, an output of the region, in the cache's own dtype."""
    arguments, spec = context.values.arguments(node), context.values.specs[node]
    nodes = arguments["cache"], arguments["new"]
    cache, new = (context.tensor(n, "an operand") for n in nodes)
    if cache.dtype != new.dtype:
        raise NotLowered("a cache of another dtype than what it grows by")
    dim = arguments["dim"]

    def grow(cache: Tensor, new: Tensor) -> Tensor:
        parts = cache, new.to(cache.dtype)
        if not cache.is_contiguous():
            return torch.cat(parts, dim)
        shape = [*cache.shape]
        shape[dim] += new.shape[dim]
        out = results.empty_strided(shape, contiguous_strides(tuple(shape)), cache.dtype)
        return torch.cat(parts, dim, out=out)

    srcs = eager_layout(cache), as_it_lies(nodes[1], context, context.dtype(new))
    candidate = Candidate("torch", srcs, eager_layout(spec), (TorchTemplate(grow, ""),))
    return Operation(node, node.name, "grow", nodes, spec, [candidate])


def lower_cached_attention(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.cached_attention of [B, H, L, D] over [B, G, S, D]; the result is [B, L, H, D] in memory."""
    arguments, spec = context.values.arguments(node), context.values.specs[node]
    query = context.tensor(arguments["query"], "query")
    mask = arguments["mask"]
    nodes = [arguments[name] for name in ("query", "key", "value")] + ([mask] if isinstance(mask, fx.Node) else [])
    if query.ndim != 4 or (mask is not None and not isinstance(mask, fx.Node)):
        raise NotLowered("cached attention of another rank than 4, or with a constant mask")
    dtype = context.dtype(query)
    is_causal, scale, enable_gqa = (arguments[name] for name in ("is_causal", "scale", "enable_gqa"))

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        grouped = enable_gqa
        heads, groups = q.shape[1], k.shape[1]
        q = q.to(k.dtype)
        alike = not is_causal and (mask is None or mask.ndim < 3 or mask.shape[-3] == 1)
        if grouped and alike and q.shape[2] == 1:  # the queries of a group are rows of one head
            q, grouped = q.reshape(q.shape[0], groups, heads // groups, q.shape[3]), False
        if mask is not None and mask.dtype not in (torch.bool, torch.float32, q.dtype):
            mask = mask.to(q.dtype)
        result = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=grouped
        )
        return result.reshape(result.shape[0], heads, -1, result.shape[3])

    b, h, length, d = spec.shape
    srcs = [as_it_lies(nodes[0], context, dtype), *(eager_layout(context.values.specs[n]) for n in nodes[1:])]
    dst = strided(spec.shape, dtype, (length * h * d, d, h * d, 1))
    flops = 4 * spec.numel * context.values.specs[nodes[1]].shape[2]
    candidate = Candidate("torch", tuple(srcs), dst, (TorchTemplate(attend, ""),))
    return Operation(node, node.name, "attention", tuple(nodes), spec, [candidate], flops=flops)
