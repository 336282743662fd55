"""The vocabulary: the one spelling of every operation that the passes know.

Each op is an ordinary Python function with a plain-torch body of exactly eager's meaning, so a graph in this vocabulary
runs anywhere (also on fake tensors), passes are tested without the native library, and a node that no primitive takes
still computes what the model says. Ops accept whatever eager accepted: shapes and dtypes are settled at lowering.

`post_ops` is a tuple applied in order to the result, each entry one of
    ("eltwise", kind, alpha, beta)      see ELTWISE
    ("binary", kind, other)             kind(result, other); other broadcastable to the result, see BINARY
    ("prelu", weight)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PostOps = Sequence[tuple[Any, ...]]

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_DECONV = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVG_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_ADAPTIVE_POOL = {
    "avg": {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d},
    "max": {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d},
}

# kind -> f(x, alpha, beta). alpha and beta mean what ZenDNN's algorithm of that kind means by them.
ELTWISE: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "relu": lambda x, a, b: F.leaky_relu(x, a) if a else F.relu(x),
    "gelu_erf": lambda x, a, b: F.gelu(x),
    "gelu_tanh": lambda x, a, b: F.gelu(x, approximate="tanh"),
    "swish": lambda x, a, b: F.silu(x) if a == 1 else x * torch.sigmoid(a * x),
    "logistic": lambda x, a, b: torch.sigmoid(x),
    "tanh": lambda x, a, b: torch.tanh(x),
    "hardswish": lambda x, a, b: F.hardswish(x),
    "hardsigmoid": lambda x, a, b: F.hardsigmoid(x),
    "elu": lambda x, a, b: F.elu(x, a),
    "clip": lambda x, a, b: torch.clamp(x, a, b),
    "linear": lambda x, a, b: (x if a == 1 else x * a) + b if b else x * a,
    "exp": lambda x, a, b: torch.exp(x),
    "log": lambda x, a, b: torch.log(x),
    "rsqrt": lambda x, a, b: torch.rsqrt(x),
    "sqrt": lambda x, a, b: torch.sqrt(x),
    "square": lambda x, a, b: torch.square(x),
    "abs": lambda x, a, b: torch.abs(x),
    "mish": lambda x, a, b: F.mish(x),
    "soft_relu": lambda x, a, b: F.softplus(x),
    "pow": lambda x, a, b: torch.pow(x, b) if a == 1 else a * torch.pow(x, b),
    "round": lambda x, a, b: torch.round(x),
}

# Python's operators, not torch.add and friends: sizes and other numbers pass through unharmed.
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "max": torch.maximum,
    "min": torch.minimum,
}


def apply_post_ops(result: Tensor, post_ops: PostOps) -> Tensor:
    """Return `result` after every entry of `post_ops`, in order; ValueError on an entry that is none of the three."""
    for name, *args in post_ops:
        if name == "eltwise":
            result = eltwise(result, *args)
        elif name == "binary":
            result = binary(result, args[1], args[0])
        elif name == "prelu":
            result = F.prelu(result, *args)
        else:
            raise ValueError(f"unknown post-op {name!r}: expected eltwise, binary or prelu")
    return result


def _pads(padding_l: Sequence[int], padding_r: Sequence[int]) -> list[int]:
    """F.pad's argument for per-dimension paddings: last dimension first."""
    return [p for pair in zip(reversed(padding_l), reversed(padding_r), strict=True) for p in pair]


def convolution(
    src: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...],
    padding_l: tuple[int, ...],
    padding_r: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    post_ops: PostOps = (),
) -> Tensor:
    """Return post_ops(conv(src, weight) + bias) with zero padding, in 1, 2 or 3 spatial dimensions.

    src [N, C, *spatial] (or without N), weight [O, C / groups, *kernel], bias [O]; dilation 1 is dense.
    """
    conv = _CONV[len(stride)]
    if padding_l != padding_r:
        src, padding_l = F.pad(src, _pads(padding_l, padding_r)), (0,) * len(stride)
    return apply_post_ops(conv(src, weight, bias, stride, padding_l, dilation, groups), post_ops)


def deconvolution(
    src: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    output_padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    post_ops: PostOps = (),
) -> Tensor:
    """Return post_ops(conv_transpose(src, weight) + bias); weight [C, O / groups, *kernel] as PyTorch keeps it."""
    deconv = _DECONV[len(stride)]
    return apply_post_ops(deconv(src, weight, bias, stride, padding, output_padding, groups, dilation), post_ops)


def linear(src: Tensor, weight: Tensor, bias: Tensor | None = None, *, post_ops: PostOps = ()) -> Tensor:
    """Return post_ops(src @ weight.T + bias): src [..., K], weight [N, K], bias [N]."""
    return apply_post_ops(F.linear(src, weight, bias), post_ops)


def gated_linear(src: Tensor, gate: Tensor, up: Tensor, kind: str, alpha: float = 0.0, beta: float = 0.0) -> Tensor:
    """kind(src @ gate.T) * (src @ up.T): two linear layers of one input, the first through an activation."""
    return eltwise(linear(src, gate), kind, alpha, beta) * linear(src, up)


def matmul(a: Tensor, b: Tensor, *, post_ops: PostOps = ()) -> Tensor:
    """Return post_ops(a @ b), batched and broadcast as torch.matmul does."""
    return apply_post_ops(torch.matmul(a, b), post_ops)


def batch_norm(
    src: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    eps: float,
    post_ops: PostOps = (),
) -> Tensor:
    """Return post_ops((src - mean) / sqrt(var + eps) * weight + bias) per channel (dimension 1), running statistics."""
    return apply_post_ops(F.batch_norm(src, mean, var, weight, bias, False, 0.0, eps), post_ops)


def layer_norm(
    src: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> Tensor:
    """Return the layer normalization of src over its last len(normalized_shape) dimensions."""
    return F.layer_norm(src, list(normalized_shape), weight, bias, eps)


def rms_norm(src: Tensor, weight: Tensor | None, *, eps: float | None) -> Tensor:
    """Return src / sqrt(mean(src * src, -1) + eps) * weight, in float32 inside at least; weight [K] or None.

    eps  None: the machine epsilon of the dtype computed in
    """
    x = src if src.dtype == torch.float64 else src.float()
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    norm = torch.linalg.vector_norm(x, 2, -1, keepdim=True)
    result = (x * torch.rsqrt(norm * norm / src.shape[-1] + eps)).to(src.dtype)
    return result if weight is None else weight * result


def l2_normalize(src: Tensor, dim: int, *, eps: float) -> Tensor:
    """Return src / max(norm(src), eps), Euclidean norms along dim."""
    return F.normalize(src, 2.0, dim, eps)


def rotary(src: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return src * cos + turned * sin, broadcast. turned: concat(-second half, first half) along the last dimension;
    or, interleaved, of each pair (a, b) of neighbours there (-b, a).
    """
    half = src.shape[-1] // 2
    if interleaved:
        turned = torch.stack((-src[..., 1::2], src[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-src[..., half:], src[..., :half]), -1)
    return src * cos + turned * sin


def rotation(cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Return the matrices R [..., D, D] with x @ R = rotary(x, cos, sin, interleaved), for cos and sin [..., D]."""
    ones = torch.eye(cos.shape[-1], dtype=cos.dtype, device=cos.device)
    return rotary(ones, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)


def softmax(src: Tensor, dim: int, log: bool = False) -> Tensor:
    """Return softmax (or its logarithm) along dim."""
    return F.log_softmax(src, dim) if log else F.softmax(src, dim)


def eltwise(src: Tensor, kind: str, alpha: float = 0.0, beta: float = 0.0) -> Tensor:
    """Return kind(src; alpha, beta) element by element; kinds in ELTWISE."""
    return ELTWISE[kind](src, alpha, beta)


def binary(a: Any, b: Any, kind: str) -> Any:
    """Return kind(a, b), broadcast and promoted as eager does; either side may be a number; kinds in BINARY."""
    return BINARY[kind](a, b)


def prelu(src: Tensor, weight: Tensor) -> Tensor:
    """Return src where positive, weight * src elsewhere; weight [1] or one per channel (dimension 1)."""
    return F.prelu(src, weight)


def pool(
    src: Tensor,
    kind: str,
    *,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding_l: tuple[int, ...],
    padding_r: tuple[int, ...],
    dilation: tuple[int, ...],
    ceil_mode: bool,
) -> Tensor:
    """Return windows of src pooled; kind "max", "avg_include_padding" or "avg_exclude_padding".

    Unequal paddings only with "avg_include_padding" and without ceil_mode (that is what folding a pad produces);
    dilation other than 1 only with "max".
    """
    if kind == "max":
        return _MAX_POOL[len(kernel)](src, kernel, stride, padding_l, dilation, ceil_mode)
    if padding_l != padding_r:
        src, padding_l = F.pad(src, _pads(padding_l, padding_r)), (0,) * len(kernel)
    return _AVG_POOL[len(kernel)](src, kernel, stride, padding_l, ceil_mode, kind == "avg_include_padding")


def adaptive_pool(src: Tensor, kind: str, output_size: tuple[int | None, ...]) -> Tensor:
    """Return src pooled ("avg" or "max") to output_size, one entry per spatial dimension; None keeps the input's."""
    function: Callable[..., Tensor] = _ADAPTIVE_POOL[kind][len(output_size)]
    return function(src, output_size if len(output_size) > 1 else output_size[0])


def reduce(src: Tensor, kind: str, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Return src reduced over dims; kind "mean", "sum", "max" or "min"."""
    function = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax, "min": torch.amin}[kind]
    return function(src, dims, keepdim)


def concat(srcs: Sequence[Tensor], dim: int) -> Tensor:
    """Return the concatenation of srcs along dim."""
    return torch.cat(list(srcs), dim)


def resample(
    src: Tensor, kind: str, size: tuple[int, ...] | int | None, scale_factor: tuple[float, ...] | float | None
) -> Tensor:
    """Return src interpolated; kind is F.interpolate's mode: "nearest", or linear in 1, 2 or 3 dimensions ("linear",
    "bilinear", "trilinear"; half-pixel centres, align_corners=False).
    """
    return F.interpolate(src, size, scale_factor, kind)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return softmax(query @ key.T * scale + mask) @ value over the last two dimensions: [..., L, E], [..., S, E]."""
    return F.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def grow(cache: Tensor, new: Tensor, dim: int) -> Tensor:
    """Return new behind cache along dim: concat, where cache has another size in each call (keys and values)."""
    return torch.cat((cache, new), dim)


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention where S, of key, value [..., S, E] and mask [..., L, S], is another one in each call."""
    return attention(query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def embedding(weight: Tensor, indices: Tensor) -> Tensor:
    """torch.embedding: rows of the table weight [R, D]; the result has the shape of indices, then D."""
    return torch.embedding(weight, indices)


def embedding_bag(
    indices: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    mode: str,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Tensor:
    """Return bags of rows of weight combined by mode "sum", "mean" or "max", as F.embedding_bag."""
    return F.embedding_bag(
        indices,
        weight,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
        padding_idx=padding_idx,
    )


def embedding_bags(
    weights: Sequence[Tensor],
    indices: Tensor | Sequence[Tensor],
    mode: str,
    before: Sequence[Tensor] = (),
    after: Sequence[Tensor] = (),
) -> Tensor:
    """Return before, one bag of each table, then after, side by side along dimension 1.

    weights        [E_t, D] each
    indices        [N, L_t] each, or the first slices along dimension 1 of one tensor [N, T or more, L]
    mode           "sum", "mean", or "row": F.embedding, a row in place of a bag, by indices without the dimension L
    before, after  [N, *]
    """
    each = [indices[:, t] for t in range(len(weights))] if isinstance(indices, Tensor) else indices
    one = F.embedding if mode == "row" else partial(F.embedding_bag, mode=mode)
    bags = [one(i, w) for i, w in zip(each, weights, strict=True)]
    return torch.cat([*before, *bags, *after], 1)


def additive_mask(mask: Tensor, of_keys: bool = False) -> Tensor:
    """Return 0 where a boolean mask [B, H or 1, L or 1, S] is True, minus infinity elsewhere, float32.

    Dimensions 1 and 2 that repeat one row (of stride 0; with of_keys whatever their strides) have size 1 in the
    result, which is contiguous.
    """
    repeated = [place in (1, 2) and (of_keys or step == 0) for place, step in enumerate(mask.stride())]
    once = [slice(1) if alike else slice(None) for alike in repeated]
    mask = mask[tuple(once)]
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(mask.logical_not(), -torch.inf)


def pick(src: Tensor, dim: int, indices: Sequence[Tensor]) -> Tensor:
    """Return src[:, ..., i, j, ...]: elements (i[k], j[k], ...) of the dimensions from dim on, index tensors [K]."""
    return src[(*(slice(None),) * dim, *indices)]


# Moving data: the result may be a view of src in eager and plain torch; within a region only the values count.


def reshape(src: Tensor, shape: Sequence[int]) -> Tensor:
    """Return src with another shape of as many elements (-1: whatever is left)."""
    return src.reshape(tuple(shape))


def flatten(src: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Return src with the dimensions from start_dim to end_dim (included) made one."""
    return torch.flatten(src, start_dim, end_dim)


def unflatten(src: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return src with one dimension made several, of these sizes (-1: whatever is left)."""
    return src.unflatten(dim, tuple(sizes))


def permute(src: Tensor, dims: Sequence[int]) -> Tensor:
    """Return src with its dimensions in the order dims."""
    return src.permute(tuple(dims))


def transpose(src: Tensor, dim0: int, dim1: int) -> Tensor:
    """Return src with two dimensions exchanged (permute, where the rank is not known)."""
    return src.transpose(dim0, dim1)


def chunk(src: Tensor, chunks: int, dim: int) -> tuple[Tensor, ...]:
    """Return src in at most `chunks` pieces along dim; read through operator.getitem."""
    return torch.chunk(src, chunks, dim)


def split(src: Tensor, size: int | Sequence[int], dim: int) -> tuple[Tensor, ...]:
    """Return src in pieces of `size` (or of the sizes listed) along dim; read through operator.getitem."""
    return torch.split(src, size, dim)


def narrow(src: Tensor, dim: int, start: int | None, stop: int | None) -> Tensor:
    """Return src[start:stop] along dim, with slice semantics (negative and out-of-range bounds)."""
    return torch.ops.aten.slice.Tensor(src, dim, start, stop)


def index(src: Tensor, item: Any) -> Tensor:
    """Return src[item]: numbers, slices, None and ... only, so a view."""
    return src[item]


def unsqueeze(src: Tensor, dim: int) -> Tensor:
    """Return src with a dimension of size 1 inserted."""
    return src.unsqueeze(dim)


def expand(src: Tensor, shape: Sequence[int]) -> Tensor:
    """Return src with dimensions of size 1 repeated to shape (-1: as it is)."""
    return src.expand(tuple(shape))


def contiguous(src: Tensor) -> Tensor:
    """Return src in row-major order; where only values count, nothing."""
    return src.contiguous()


def pad(src: Tensor, padding: Sequence[int], value: float = 0.0) -> Tensor:
    """Return src with constant borders; padding as F.pad's, last dimension first."""
    return F.pad(src, list(padding), "constant", value)


# Numbers about tensors. Whoever knows the shapes evaluates them, as it evaluates Python arithmetic over them.


def size(src: Any, dim: int | None = None) -> Any:
    """Return the shape of src, or one of its sizes."""
    return src.shape if dim is None else src.shape[dim]


def rank(src: Tensor) -> int:
    """Return the number of dimensions of src."""
    return src.dim()


# Constant operations: over get_attr nodes, evaluated once at lowering (and again after load_state_dict). Computed in
# float64 and rounded once, to the dtype of the parameter they replace.


def _scale(weight: Tensor | None, var: Tensor, eps: float) -> Tensor:
    """Per-channel factor of a batch normalization, f64."""
    inverse = torch.rsqrt(var.double() + eps)
    return inverse if weight is None else weight.double() * inverse


def _shift(mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Per-channel summand of a batch normalization, f64."""
    shift = -mean.double() * _scale(weight, var, eps)
    return shift if bias is None else shift + bias.double()


def _along(vector: Tensor, axis: int, ndim: int) -> Tensor:
    """`vector` shaped to broadcast along one axis of ndim."""
    return vector.reshape([-1 if i == axis else 1 for i in range(ndim)])


def fold_bn_weight(weight: Tensor, var: Tensor, bn_weight: Tensor | None, eps: float) -> Tensor:
    """Weight [O, ...] of a convolution or linear that computes its batch normalization as well."""
    return (weight.double() * _along(_scale(bn_weight, var, eps), 0, weight.ndim)).to(weight.dtype)


def fold_bn_bias(
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    eps: float,
    like: Tensor,
) -> Tensor:
    """Bias [O] that goes with fold_bn_weight, in the dtype of `like` (the weight)."""
    shift = _shift(mean, var, bn_weight, bn_bias, eps)
    return (shift if bias is None else bias.double() * _scale(bn_weight, var, eps) + shift).to(like.dtype)


def fold_bn_deconv_weight(weight: Tensor, var: Tensor, bn_weight: Tensor | None, eps: float, groups: int) -> Tensor:
    """Weight [C, O / groups, ...] of a deconvolution that computes the batch normalization after it as well."""
    scale = _scale(bn_weight, var, eps).reshape(groups, 1, -1)
    grouped = weight.double().reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    return (grouped * scale.unsqueeze(-1)).reshape(weight.shape).to(weight.dtype)


def fold_pre_bn_weight(weight: Tensor, var: Tensor, bn_weight: Tensor | None, eps: float, groups: int = 1) -> Tensor:
    """Weight [O, C / groups, ...] of a convolution or linear that computes the batch normalization before it too."""
    scale = _scale(bn_weight, var, eps).reshape(groups, 1, -1)
    grouped = weight.double().reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    return (grouped * scale.unsqueeze(-1)).reshape(weight.shape).to(weight.dtype)


def fold_pre_bn_bias(
    bias: Tensor | None,
    weight: Tensor,
    mean: Tensor,
    var: Tensor,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    eps: float,
    groups: int = 1,
) -> Tensor:
    """Bias [O] that goes with fold_pre_bn_weight."""
    shift = _shift(mean, var, bn_weight, bn_bias, eps).reshape(groups, 1, -1)
    taps = weight.double().reshape(groups, weight.shape[0] // groups, weight.shape[1], -1).sum(-1)
    total = (taps * shift).sum(-1).reshape(-1)
    return (total if bias is None else total + bias.double()).to(weight.dtype)


def scale_channels(weight: Tensor, scale: Tensor) -> Tensor:
    """Weight [O, ...] or bias [O], multiplied by one factor per output (or a single one)."""
    return (weight.double() * _along(scale.double().reshape(-1), 0, weight.ndim)).to(weight.dtype)


def no_bias(weight: Tensor) -> Tensor:
    """The bias [N] of a linear that has none."""
    return weight.new_zeros(weight.shape[0])


def add_channels(bias: Tensor | None, summand: Tensor, like: Tensor) -> Tensor:
    """Bias [O] with one summand per output (or a single one); O and dtype are those of the weight `like`."""
    total = summand.double().reshape(-1) + (0.0 if bias is None else bias.double())
    return total.expand(like.shape[0]).to(like.dtype).contiguous()


COMPUTE: frozenset[Callable[..., Any]] = frozenset(
    {convolution, deconvolution, linear, gated_linear, matmul, batch_norm, layer_norm, softmax, eltwise, binary,
     prelu, pool, adaptive_pool, reduce, concat, resample, attention, embedding, embedding_bag, embedding_bags, pick,
     rms_norm, l2_normalize, rotary, rotation, grow, cached_attention, additive_mask}
)  # fmt: skip
MOVEMENT: frozenset[Callable[..., Any]] = frozenset(
    {reshape, flatten, unflatten, permute, transpose, chunk, split, narrow, index, unsqueeze, expand, contiguous, pad}
)
SHAPE: frozenset[Callable[..., Any]] = frozenset({size, rank})
CONSTANT: frozenset[Callable[..., Any]] = frozenset(
    {fold_bn_weight, fold_bn_bias, fold_bn_deconv_weight, fold_pre_bn_weight, fold_pre_bn_bias, scale_channels,
     add_channels, no_bias}
)  # fmt: skip
WITH_POST_OPS: frozenset[Callable[..., Any]] = frozenset({convolution, deconvolution, linear, matmul, batch_norm})
VOCABULARY = COMPUTE | MOVEMENT | SHAPE | CONSTANT
