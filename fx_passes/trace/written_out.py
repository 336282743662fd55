"""Write out what PyTorch computes by one call: multi-head attention, and a whole layer of a transformer's encoder.

Before: multi_head_attention_forward(query, query, query, 768, 12, weight, bias, ...) -> getitem(.., 0)
After:  linear -> unflatten -> permute -> scaled_dot_product_attention -> permute -> flatten -> linear

TorchDynamo leaves such calls in its graphs, torch.export would take them apart in PyTorch's own way. By both ways the
graph is the one made here. Arguments out of the ordinary (added keys, separate projections, weights that are read)
are computed by PyTorch's own Python code, whose parts are then in the graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import operator
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fx_passes.graph.graph import is_call, replace

log = logging.getLogger("zendnn_cffi.passes")
aten = torch.ops.aten

_OUT_OF_THE_ORDINARY = ("bias_k", "bias_v", "add_zero_attn", "use_separate_proj_weight", "static_k", "static_v")


class _NotWrittenOut(Exception):
    """Arguments that none of the bodies takes."""


def write_out(gm: fx.GraphModule) -> None:
    """Replace each such call, where its arguments have examples (meta["val"]), by the nodes of its body."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _BODIES:
            continue
        try:
            _write_out(node, *_BODIES[node.target](node))
        except Exception as error:  # whatever PyTorch raises on examples: the call stays
            log.info("%s stays one call: %s: %s", node.name, type(error).__name__, error)


def write_out_modules(root: nn.Module, literal: Collection[str] = ()) -> None:
    """Let each nn.MultiheadAttention in root compute by the parts above; root is a copy that is exported.

    Layers of encoders that torch.export follows through PyTorch's Python code leave results as their operator does.

    literal  paths of those whose weights are read: PyTorch's own code, which needs them for the result as well
    """
    for path, module in root.named_modules():
        if "forward" in module.__dict__:
            continue
        if type(module) is nn.MultiheadAttention:
            own = module.forward
            module.forward = functools.wraps(own)(_in_order(module) if path in literal else _forward(module))
        elif type(module) is nn.TransformerEncoderLayer and _is_one_operator(module):
            module.forward = _layer_in_order(module)


@contextlib.contextmanager
def modules_written_out(root: nn.Module, literal: Collection[str] = ()) -> Iterator[None]:
    """The same of a root that is no copy, for as long as it is exported."""
    before = {module for module in root.modules() if "forward" in module.__dict__}
    write_out_modules(root, literal)
    try:
        yield
    finally:
        for module in root.modules():
            if type(module) in (nn.MultiheadAttention, nn.TransformerEncoderLayer) and module not in before:
                module.__dict__.pop("forward", None)


def read_weights(graph: fx.Graph) -> set[str]:
    """Return the paths of nn.MultiheadAttention modules that compute weights, read in graph, beside their result."""
    softmax, attention = aten.softmax.int, aten.scaled_dot_product_attention.default
    return _attentions_with(graph, softmax) & _attentions_with(graph, attention)


def _attentions_with(graph: fx.Graph, target: Any) -> set[str]:
    """The paths of nn.MultiheadAttention modules in which this operator is called, and its result read."""
    found = set()
    for node in graph.find_nodes(op="call_function", target=target):
        path, kind = next(reversed((node.meta.get("nn_module_stack") or {"": ("", "")}).values()))
        if node.users and str(getattr(kind, "__name__", kind)).endswith(nn.MultiheadAttention.__name__):
            found.add(path)
    return found


def _in_order(module: nn.MultiheadAttention) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """PyTorch's own forward, whose result lies in order as that of its fast path does: a view of it may follow."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        result, weights = own(*args, **kwargs)
        return result.contiguous() if module.batch_first else result, weights

    return forward


def _is_one_operator(module: nn.TransformerEncoderLayer) -> bool:
    """Whether PyTorch computes this layer by torch._transformer_encoder_layer_fwd, of batches without gradients."""
    attention = module.self_attn
    is_plain = attention.batch_first and attention.in_proj_bias is not None and attention._qkv_same_embed_dim
    alike = bool(module.activation_relu_or_gelu) and module.norm1.eps == module.norm2.eps
    return is_plain and alike and attention.num_heads % 2 == 0


def _layer_in_order(module: nn.TransformerEncoderLayer) -> Callable[..., Tensor]:
    """PyTorch's own forward, whose sums lie as src does: those of the operator lie in order."""
    own = module.forward

    @functools.wraps(own)
    def forward(src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = own(src, *args, **kwargs)
        return result.contiguous() if src.dim() == 3 and not src.is_nested else result

    return forward


def _forward(module: nn.MultiheadAttention) -> Callable[..., Any]:
    """module.forward; PyTorch's own for arguments out of the ordinary."""
    own = _in_order(module)
    ordinary = module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        masked = attn_mask is not None or key_padding_mask is not None
        options = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        if (need_weights and masked) or not ordinary or query.dim() != 3 or query.is_nested:
            return own(query, key, value, *options)
        mask, causal = _merge_masks(query.dtype, attn_mask, key_padding_mask, is_causal, module.num_heads)
        weights = module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias
        result = attend((query, key, value), weights, module.num_heads, mask, causal, module.batch_first)
        return result, own(query, key, value, *options)[1] if need_weights else None

    return forward


def attend(
    sources: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    n_heads: int,
    mask: Tensor | None = None,
    is_causal: bool = False,
    batch_first: bool = True,
) -> Tensor:
    """Return multi-head attention of queries [B, L, E] to keys and values [B, S, E]; [L, B, E] without batch_first.

    weights  of the three projections in one, [3 * E, E] and [3 * E], and of the last one
    mask     as scaled_dot_product_attention takes it
    """
    weight, bias, out_weight, out_bias = weights
    query, key, value = sources
    to_heads = (0, 2, 1, 3) if batch_first else (1, 2, 0, 3)
    if query is key and key is value:
        wide = F.linear(query, weight, bias).unflatten(-1, (3, n_heads, -1))
        q, k, v = wide.permute(2, *(d + (d > 1) for d in to_heads)).unbind(0)
    else:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = (
            F.linear(source, rows, summand).unflatten(-1, (n_heads, -1)).permute(to_heads)
            for source, rows, summand in zip(sources, weight.chunk(3), biases, strict=True)
        )
    attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
    merged = attended.permute((0, 2, 1, 3) if batch_first else (2, 0, 1, 3)).flatten(2)
    return F.linear(merged, out_weight, out_bias)


def _merge_masks(
    dtype: torch.dtype, attention: Tensor | None, padding: Tensor | None, is_causal: bool, n_heads: int
) -> tuple[Tensor | None, bool]:
    """The one mask that F.multi_head_attention_forward makes of two, and whether causal attention stands for it."""
    if is_causal and attention is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as PyTorch does
    if is_causal and padding is None:
        return None, True
    merged = None if padding is None else _additive(padding, dtype)[:, None, None]
    if attention is None:
        return merged, False
    added = _additive(attention, dtype)
    if added.dim() == 3:
        added = added.unflatten(0, (-1, n_heads))
    return (added if merged is None else added + merged), False


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """Return what torch._transformer_encoder_layer_fwd does of src [B, L, E]."""
    keep = _kept(src, mask, mask_type)

    def attention(x: Tensor) -> Tensor:
        return attend((x, x, x), (qkv_weight, qkv_bias, proj_weight, proj_bias), num_heads, keep)

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:  # sums lie as the first one does: the operator adds src in place, to what lies in order
        x = attention(norm_1(src)) + src
        return feed_forward(norm_2(x)) + x
    x = norm_1(src + attention(src))
    return norm_2(x + feed_forward(x))


def native_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, None]:
    """Return what torch._native_multi_head_attention does where the weights are not read."""
    keep = _kept(query, mask, mask_type)
    weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
    return attend((query, key, value), weights, num_head, keep), None


def _kept(src: Tensor, mask: Tensor | None, mask_type: int | None) -> Tensor | None:
    """A mask of those operators as scaled_dot_product_attention takes it: they leave out whatever is not 0."""
    if src.dim() != 3 or src.is_nested:
        raise _NotWrittenOut("no tensor of three dimensions")
    if mask is None:
        return None
    keep = mask == 0 if mask.dtype != torch.bool else mask.logical_not()
    if (mask_type, mask.dim()) == (1, 2):
        return keep[:, None, None]
    if (mask_type, mask.dim()) not in ((0, 2), (2, 4)):
        raise _NotWrittenOut(f"a mask of kind {mask_type} with {mask.dim()} dimensions")
    return keep


_Parts = tuple[Callable[..., Any], dict[str, Any], Callable[[fx.Node], None]]


def _of_operator(body: Callable[..., Any]) -> Callable[[fx.Node], _Parts]:
    def parts(node: fx.Node) -> _Parts:
        return body, _bound(body, node), lambda result: None

    return parts


def _bound(function: Callable[..., Any], node: fx.Node) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _of_native_attention(node: fx.Node) -> _Parts:
    if _weights_are_read(node):
        raise _NotWrittenOut("its weights are read")
    return native_attention, _bound(native_attention, node), lambda result: None


def _weights_are_read(node: fx.Node) -> bool:
    return any(not is_call(user, operator.getitem) or user.args[1] != 0 for user in node.users if user.users)


def _of_function(node: fx.Node) -> _Parts:
    """F.multi_head_attention_forward, of inputs [L, B, E], which nn.MultiheadAttention(batch_first=True) swaps."""
    arguments = _bound(F.multi_head_attention_forward, node)
    masked = arguments["attn_mask"] is not None or arguments["key_padding_mask"] is not None
    needs_weights = arguments["need_weights"] and (masked or _weights_are_read(node))
    if needs_weights or arguments["training"] or any(arguments[name] for name in _OUT_OF_THE_ORDINARY):
        return F.multi_head_attention_forward, arguments, lambda result: None
    names = ("query", "key", "value")
    if arguments["query"].meta["val"].dim() != 3:
        return F.multi_head_attention_forward, arguments, lambda result: None
    batch_first = all(_is_swapped(arguments[name]) for name in names)
    if batch_first:
        arguments |= {name: arguments[name].args[0] for name in names}

    def body(
        query: Tensor, key: Tensor, value: Tensor, num_heads: int, attn_mask: Any, key_padding_mask: Any,
        is_causal: bool, in_proj_weight: Tensor, in_proj_bias: Any, out_proj_weight: Tensor, out_proj_bias: Any,
        **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        mask, causal = _merge_masks(query.dtype, attn_mask, key_padding_mask, is_causal, num_heads)
        weights = in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias
        result = attend((query, key, value), weights, num_heads, mask, causal, batch_first)
        return (result.transpose(0, 1) if batch_first else result), None

    return body, arguments, _swap_back if batch_first else lambda result: None


def _is_swapped(node: fx.Node) -> bool:
    dims = node.args[1:]
    return node.op == "call_method" and node.target == "transpose" and dims in ((0, 1), (1, 0)) and not node.kwargs


def _swap_back(result: fx.Node) -> None:
    """Let readers that swap the first two dimensions of result again read what was swapped."""
    for user in list(result.users):
        if _is_swapped(user):
            replace(user, result.args[0])


def _write_out(
    node: fx.Node, body: Callable[..., Any], arguments: dict[str, Any], polish: Callable[[fx.Node], None]
) -> None:
    """Put the nodes of body in place of node and of what takes its results apart."""
    from torch.fx.experimental.proxy_tensor import make_fx  # imports PyTorch's compiler

    sources: list[fx.Node] = []
    fx.node.map_arg(arguments, lambda n: sources.append(n) if n not in sources else None)
    examples = [source.meta["val"] for source in sources]

    def call(*values: Any) -> Any:
        held = dict(zip(sources, values, strict=True))
        return body(**fx.node.map_arg(arguments, held.__getitem__))

    mode = next(example.fake_mode for example in examples if hasattr(example, "fake_mode"))
    with mode, torch.no_grad():
        made = make_fx(call, pre_dispatch=True)(*examples)
    copies: dict[fx.Node, Any] = dict(zip(made.graph.find_nodes(op="placeholder"), sources, strict=True))
    with node.graph.inserting_before(node):
        results: Any = node.graph.graph_copy(made.graph, copies)
    if isinstance(results, fx.Node):
        replace(node, results)
        return
    for user in list(node.users):
        replace(user, results[user.args[1]])
    node.graph.erase_node(node)
    polish(results[0])


_BODIES: dict[Any, Callable[[fx.Node], _Parts]] = {
    F.multi_head_attention_forward: _of_function,
    torch._transformer_encoder_layer_fwd: _of_operator(encoder_layer),
    torch._native_multi_head_attention: _of_native_attention,
}
