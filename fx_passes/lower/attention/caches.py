"""A key-value cache, and the attention over one that grows, by PyTorch: one program serves every length.

Their calls get the tensors of the run as they are. A step of decoding reads each cache once and has a row or a few of
queries: memory sets the time, not the kernel. Except for one query per head in bf16: there making a long cache float32
for two batched products is faster than PyTorch's kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention

from fx_passes.candidates.candidates import Candidate, Operand, Operation, Result, TorchTemplate
from fx_passes.candidates.layouts import is_known_dtype, strided
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.attention.attention import as_it_lies
from fx_passes.lower.context import LoweringContext, NotLowered, eager_layout
from zendnn_cffi.runtime.recycled import results

_LONG = 256  # from so many rows of a bf16 cache on


def lower_grow(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.grow: a new tensor, an output of the region, in the cache's own dtype."""
    arguments, spec = context.values.arguments(node), context.values.specs[node]
    nodes = arguments["cache"], arguments["new"]
    cache, new = (context.tensor(n, "an operand") for n in nodes)
    if cache.dtype != new.dtype:
        raise NotLowered("a cache of another dtype than what it grows by")
    dim = arguments["dim"]

    added = new.shape[dim]

    def allocate(cache: Tensor) -> Tensor:
        shape = [*cache.shape]
        shape[dim] += added
        return results.empty(shape, cache.dtype)

    def grow(cache: Tensor, new: Tensor, out: Tensor) -> None:
        torch.cat((cache, new if new.dtype == cache.dtype else new.to(cache.dtype)), dim, out=out)

    srcs = eager_layout(cache), as_it_lies(nodes[1], context, context.dtype(new))
    candidate = Candidate("torch", srcs, eager_layout(spec), (TorchTemplate(grow, "", True, allocate=allocate),))
    return Operation(node, node.name, "grow", nodes, spec, [candidate])


def lower_write_at(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.write_at: the result is the cache, an input of the region, where it lies."""
    arguments, spec = context.values.arguments(node), context.values.specs[node]
    nodes = arguments["cache"], arguments["index"], arguments["new"]
    cache, index, new = (context.tensor(n, "an operand") for n in nodes)
    if spec.strides != cache.strides:
        raise NotLowered("a cache whose elements share memory")
    dim = arguments["dim"]

    def write(index: Tensor, new: Tensor, cache: Tensor) -> None:
        cache.index_copy_(dim, index, new if new.dtype == cache.dtype else new.to(cache.dtype))

    dtype = context.dtype(new) if is_known_dtype(new.dtype) else new.dtype
    srcs = eager_layout(cache), eager_layout(index), as_it_lies(nodes[2], context, dtype)
    template = TorchTemplate(write, "", True, args=(Operand(1), Operand(2), Result()))
    candidate = Candidate("torch", srcs, srcs[0], (template,), overwrites=0)
    return Operation(node, node.name, "write_at", nodes, spec, [candidate])


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

    b, h, length, d = spec.shape
    attend = _attention(
        query, *(context.values.specs[n] for n in nodes[1:]), is_causal=is_causal, scale=scale, gqa=enable_gqa
    )
    srcs = [as_it_lies(nodes[0], context, dtype), *(eager_layout(context.values.specs[n]) for n in nodes[1:])]
    dst = strided(spec.shape, dtype, (length * h * d, d, h * d, 1))
    flops = 4 * spec.numel * context.values.specs[nodes[1]].shape[2]
    candidate = Candidate("torch", tuple(srcs), dst, (TorchTemplate(attend, "", True),))
    return Operation(node, node.name, "attention", tuple(nodes), spec, [candidate], flops=flops)


def _attention(
    query: TensorSpec,
    key: TensorSpec,
    value: TensorSpec,
    mask: TensorSpec | None = None,
    *,
    is_causal: bool,
    scale: float | None,
    gqa: bool,
) -> Callable[..., None]:
    """function(query, key, value, mask if any, result). What the specs decide is decided here, not in each step."""
    b, heads, length, d = query.shape
    groups = key.shape[1]
    alike = not is_causal and (mask is None or mask.ndim < 3 or mask.shape[-3] == 1)
    rows = gqa and alike and length == 1  # the queries of a group are rows of one head
    shape = (b, groups, heads // groups, d) if rows else query.shape
    narrow = key.dtype == value.dtype and key.dtype in (torch.bfloat16, torch.float16)
    single = length == 1 and heads == groups and alike and narrow
    factor = 1 / math.sqrt(d) if scale is None else scale
    mask_fits = mask is None or mask.dtype in (torch.bool, torch.float32, key.dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> None:
        q = q if q.dtype == k.dtype else q.to(k.dtype)
        q = q.reshape(shape) if rows else q
        bias = rest[0] if mask is not None else None
        if single and k.shape[2] >= _LONG:
            rest[-1].copy_(_one_query(q, k, v, bias, factor))
            return
        bias = bias if bias is None or mask_fits else bias.to(k.dtype)
        result = scaled_dot_product_attention(q, k, v, bias, 0.0, is_causal, scale=scale, enable_gqa=gqa and not rows)
        rest[-1].copy_(result.reshape(query.shape) if rows else result)

    return attend


def _one_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of one query per head, [B, H, 1, D] over [B, H, S, D], in float32; the result is [B, H, 1, D]."""
    b, heads, size, d = k.shape
    wide = torch.empty((2, b, heads, size, d), dtype=torch.float32, device="cpu")
    wide[0].copy_(k)
    wide[1].copy_(v)
    keys, values = wide.view(2, b * heads, size, d)
    rows = q.reshape(b * heads, 1, d).float()
    scores = torch.baddbmm(rows.new_empty(b * heads, 1, size), rows, keys.transpose(1, 2), beta=0, alpha=scale)
    if mask is None:
        weights = torch.softmax(scores, -1)
    else:
        of_heads = scores.view(b, heads, 1, size)
        if mask.dtype == torch.bool:
            of_heads.masked_fill_(mask.logical_not(), -math.inf)
        else:
            of_heads.add_(mask)
        weights = torch._safe_softmax(scores, -1)  # zeros where nothing is left of a row, as PyTorch's attention
    return torch.bmm(weights, values).view(b, heads, 1, d)
