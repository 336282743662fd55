"""From the arguments of an eager spelling to the vocabulary.

A builder has the signature of the torch function it stands for (so positional, keyword and default arguments bind as in
eager) and returns what the node becomes: `Call(op, args, kwargs)`, `Alias(node)` where the operation returns its input,
or `None` where the vocabulary has no exact equal: the node then stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import fx

from fx_passes import ops


class Call(NamedTuple):
    """A call of a vocabulary op; an argument may itself be a Call, which becomes a node in front."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - read only


class Alias(NamedTuple):
    """The value of another node, unchanged."""

    value: Any


Built = Call | Alias | None


def static(*values: Any) -> bool:
    """Whether attributes are known now: no node among or inside them."""
    found: list[fx.Node] = []
    fx.node.map_arg(values, found.append)
    return not found


def spread(value: Any, n: int) -> tuple[int, ...]:
    """One entry per spatial dimension, from one number or a sequence of 1 or n."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


def is_number(value: Any) -> bool:
    """A plain Python number (bool is not one)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- convolution, linear, matmul


def conv(n: int) -> Callable[..., Built]:
    """Builder of F.conv{n}d."""

    def build(
        input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: Any = 1
    ) -> Built:
        if not static(stride, padding, dilation, groups):
            return None
        stride, dilation = spread(stride, n), spread(dilation, n)
        if isinstance(padding, str):
            if padding != "valid":
                return None  # "same" depends on the kernel size; the module form knows it
            padding = 0
        pads = spread(padding, n)
        return _convolution(input, weight, bias, stride, pads, pads, dilation, groups)

    return build


def _convolution(
    src: Any, weight: Any, bias: Any, stride: Any, padding_l: Any, padding_r: Any, dilation: Any, groups: int
) -> Call:
    return Call(
        ops.convolution,
        (src, weight, bias),
        {
            "stride": stride,
            "padding_l": padding_l,
            "padding_r": padding_r,
            "dilation": dilation,
            "groups": groups,
            "post_ops": (),
        },
    )


def same_padding(
    n: int, input: Any, weight: Any, bias: Any, kernel: Sequence[int], dilation: Any, groups: int
) -> Built:
    """Convolution with padding="same" (stride 1), whose kernel size is known; the odd one goes to the right."""
    dilation = spread(dilation, n)
    total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    left = tuple(t // 2 for t in total)
    right = tuple(t - t // 2 for t in total)
    return _convolution(input, weight, bias, (1,) * n, left, right, dilation, groups)


def conv_transpose(n: int) -> Callable[..., Built]:
    """Builder of F.conv_transpose{n}d."""

    def build(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: Any = 1,
        dilation: Any = 1,
    ) -> Built:
        if not static(stride, padding, output_padding, groups, dilation):
            return None
        kwargs = {
            "stride": spread(stride, n),
            "padding": spread(padding, n),
            "output_padding": spread(output_padding, n),
            "dilation": spread(dilation, n),
            "groups": groups,
            "post_ops": (),
        }
        return Call(ops.deconvolution, (input, weight, bias), kwargs)

    return build


def aten_convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Built:
    """aten.convolution."""
    if not static(stride, padding, dilation, output_padding):
        return None
    n = max(len(stride), len(padding), len(dilation))
    if transposed:
        return conv_transpose(n)(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return conv(n)(input, weight, bias, stride, padding, dilation, groups)


def linear(input: Any, weight: Any, bias: Any = None) -> Built:
    return Call(ops.linear, (input, weight, bias), {"post_ops": ()})


def matmul(input: Any, other: Any, *, out: Any = None) -> Built:
    return None if out is not None else Call(ops.matmul, (input, other), {"post_ops": ()})


def baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Built:
    """beta * input + alpha * batch1 @ batch2, as post-ops of the product."""
    if out is not None or not is_number(beta) or not is_number(alpha) or not isinstance(input, fx.Node):
        return None
    scale = () if alpha == 1 else (("eltwise", "linear", float(alpha), 0.0),)
    product = Call(ops.matmul, (batch1, batch2), {"post_ops": scale})
    if beta == 0:
        return product  # input is not read at all, as in eager
    return Call(ops.binary, (product, input if beta == 1 else Call(ops.binary, (input, beta, "mul")), "add"))


def addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Built:
    """input + mat1 @ mat2, mat2 the transpose of a linear's weight: its bias where input is a vector."""
    if out is not None or not (is_number(beta) and is_number(alpha)) or (beta, alpha) != (1, 1):
        return baddbmm(input, mat1, mat2, beta=beta, alpha=alpha, out=out)
    value = input.meta.get("val") if isinstance(input, fx.Node) else None
    if getattr(value, "ndim", None) != 1:
        return baddbmm(input, mat1, mat2)
    return Call(ops.linear, (mat1, Call(ops.transpose, (mat2, 0, 1)), input), {"post_ops": ()})


def einsum(equation: Any, *operands: Any) -> Built:
    """The two forms that are a matrix product with the same leading dimensions throughout."""
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation:
        return None
    left, _, result = equation.replace(" ", "").partition("->")
    a, _, b = left.partition(",")
    if "." in equation or min(len(a), len(b), len(result)) < 2 or len({len(a), len(b), len(result)}) != 1:
        return None
    batch, m, k, n = a[:-2], a[-2], a[-1], result[-1]
    if len(set(batch + m + k + n)) != len(batch) + 3 or result != batch + m + n:
        return None
    if b == batch + k + n:
        return matmul(*operands)
    if b == batch + n + k:
        return Call(ops.matmul, (operands[0], Call(ops.transpose, (operands[1], -2, -1))), {"post_ops": ()})
    return None


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: Any = 0.0,
    is_causal: Any = False,
    scale: Any = None,
    enable_gqa: Any = False,
) -> Built:
    if dropout_p != 0 or not static(is_causal, scale, enable_gqa):
        return None
    kwargs = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    return Call(ops.attention, (query, key, value, attn_mask), kwargs)


# --- normalization


def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: Any = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Built:
    if training is not False or running_mean is None or running_var is None or not static(eps):
        return None
    return Call(ops.batch_norm, (input, running_mean, running_var, weight, bias), {"eps": eps, "post_ops": ()})


def aten_batch_norm(
    input: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: Any,
    momentum: Any,
    eps: Any,
    cudnn_enabled: Any = False,
) -> Built:
    """torch.batch_norm, aten.batch_norm: another order of arguments."""
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: Any = 1e-5, cudnn_enable: Any = True
) -> Built:
    if not static(normalized_shape, eps):
        return None
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    return Call(ops.layer_norm, (input, shape, weight, bias), {"eps": eps})


def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Built:
    """Over the last dimension, with a given eps (the default depends on the dtype)."""
    if not static(normalized_shape, eps) or not is_number(eps) or len(tuple(normalized_shape)) != 1:
        return None
    return Call(ops.rms_norm, (input, weight), {"eps": eps})


def softmax(log: bool) -> Callable[..., Built]:
    """Builder of F.softmax or F.log_softmax."""

    def build(input: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Built:
        if not isinstance(dim, int) or dtype is not None:
            return None
        return Call(ops.softmax, (input, dim, log))

    return build


def method_softmax(log: bool) -> Callable[..., Built]:
    """Builder of Tensor.softmax, torch.softmax, aten.softmax.int and their log forms."""
    return lambda input, dim, dtype=None: softmax(log)(input, dim, dtype=dtype)


# --- element-wise


def unary(kind: str, alpha: float = 0.0, beta: float = 0.0) -> Callable[..., Built]:
    """Builder of a function without parameters; inplace is settled before builders run."""
    return lambda input, inplace=False, *, out=None: (
        None if out is not None else Call(ops.eltwise, (input, kind, alpha, beta))
    )


def leaky_relu(input: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Built:
    return Call(ops.eltwise, (input, "relu", negative_slope, 0.0)) if is_number(negative_slope) else None


def elu(input: Any, alpha: Any = 1.0, inplace: bool = False) -> Built:
    return Call(ops.eltwise, (input, "elu", alpha, 0.0)) if is_number(alpha) else None


def hardtanh(input: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> Built:
    return clamp(input, min_val, max_val)


def clamp(input: Any, min: Any = None, max: Any = None) -> Built:
    """Limits that are numbers in order (of min > max eager makes max everywhere; clip need not), or 0 and none."""
    if max is None and is_number(min) and min == 0:
        return Call(ops.eltwise, (input, "relu", 0.0, 0.0))
    if not is_number(min) or not is_number(max) or min > max:
        return None
    return Call(ops.eltwise, (input, "clip", min, max))


def gelu(input: Any, approximate: str = "none") -> Built:
    kind = {"none": "gelu_erf", "tanh": "gelu_tanh"}.get(approximate)
    return Call(ops.eltwise, (input, kind, 0.0, 0.0)) if kind else None


def softplus(input: Any, beta: Any = 1, threshold: Any = 20) -> Built:
    return Call(ops.eltwise, (input, "soft_relu", 0.0, 0.0)) if (beta, threshold) == (1, 20) else None


def power(input: Any, exponent: Any, *, out: Any = None) -> Built:
    if out is not None or not is_number(exponent):
        return None
    entry = ("square", 0.0, 0.0) if exponent == 2 else ("pow", 1.0, exponent)
    return Call(ops.eltwise, (input, *entry))


def negative(input: Any, *, out: Any = None) -> Built:
    return None if out is not None else Call(ops.binary, (input, -1, "mul"))


def prelu(input: Any, weight: Any) -> Built:
    return Call(ops.prelu, (input, weight)) if isinstance(weight, fx.Node) else None


def binary(kind: str) -> Callable[..., Built]:
    """Builder of torch.add and friends, alpha 1 only."""

    def build(input: Any, other: Any, *, alpha: Any = 1, rounding_mode: Any = None, out: Any = None) -> Built:
        if not is_number(alpha) or alpha != 1 or rounding_mode is not None or out is not None:
            return None
        if not all(isinstance(side, fx.Node) or is_number(side) for side in (input, other)):
            return None
        if kind in ("max", "min") and not (isinstance(input, fx.Node) and isinstance(other, fx.Node)):
            return None
        return Call(ops.binary, (input, other, kind))

    return build


def reversed_binary(kind: str) -> Callable[..., Built]:
    """Builder of Tensor.__radd__ and friends, torch.rsub."""
    return lambda input, other, *, alpha=1: binary(kind)(other, input, alpha=alpha)


# --- pooling and reduction


def max_pool(n: int) -> Callable[..., Built]:
    """Builder of F.max_pool{n}d."""

    def build(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: Any = False,
        return_indices: Any = False,
    ) -> Built:
        if return_indices is not False or not static(kernel_size, stride, padding, dilation, ceil_mode):
            return None
        return _pool("max", n, input, kernel_size, stride, padding, dilation, ceil_mode)

    return build


def avg_pool(n: int) -> Callable[..., Built]:
    """Builder of F.avg_pool{n}d."""

    def build(
        input: Any,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: Any = False,
        count_include_pad: Any = True,
        divisor_override: Any = None,
    ) -> Built:
        if divisor_override is not None or not static(kernel_size, stride, padding, ceil_mode, count_include_pad):
            return None
        kind = "avg_include_padding" if count_include_pad else "avg_exclude_padding"
        return _pool(kind, n, input, kernel_size, stride, padding, 1, ceil_mode)

    return build


def _pool(kind: str, n: int, src: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Built:
    kernel, padding = spread(kernel, n), spread(padding, n)
    stride = kernel if stride is None or stride == [] else spread(stride, n)
    if kind == "avg_include_padding" and not any(padding) and not ceil_mode:
        kind = "avg_exclude_padding"  # the same thing, and one spelling is enough
    kwargs = {
        "kernel": kernel,
        "stride": stride,
        "padding_l": padding,
        "padding_r": padding,
        "dilation": spread(dilation, n),
        "ceil_mode": ceil_mode,
    }
    return Call(ops.pool, (src, kind), kwargs)


def adaptive_pool(kind: str, n: int) -> Callable[..., Built]:
    """Builder of F.adaptive_{kind}_pool{n}d."""

    def build(input: Any, output_size: Any, return_indices: Any = False) -> Built:
        if return_indices is not False or not static(output_size) or output_size is None:
            return None
        sizes = (output_size,) if isinstance(output_size, int) else tuple(output_size)
        return Call(ops.adaptive_pool, (input, kind, sizes * n if len(sizes) == 1 else sizes))

    return build


def reduction(kind: str) -> Callable[..., Built]:
    """Builder of torch.mean and friends with the dimensions named."""

    def build(
        input: Any, dim: Any = None, keepdim: Any = False, *, dtype: Any = None, out: Any = None, **k: Any
    ) -> Built:
        dim = k.get("axis", dim)
        if dim is None or dtype is not None or out is not None or not static(dim, keepdim):
            return None
        dims = (dim,) if isinstance(dim, int) else tuple(dim)
        return Call(ops.reduce, (input, kind, dims, keepdim)) if dims else None

    return build


# --- moving data


def concat(tensors: Any, dim: Any = 0, *, out: Any = None, axis: Any = None) -> Built:
    dim = dim if axis is None else axis
    if out is not None or not isinstance(tensors, list | tuple) or not isinstance(dim, int):
        return None
    return Call(ops.concat, (tuple(tensors), dim))


def flatten(input: Any, start_dim: Any = 0, end_dim: Any = -1) -> Built:
    return Call(ops.flatten, (input, start_dim, end_dim)) if static(start_dim, end_dim) else None


def reshape(input: Any, *shape: Any) -> Built:
    """Tensor.view, Tensor.reshape, torch.reshape; not view(dtype)."""
    if len(shape) == 1 and isinstance(shape[0], list | tuple):
        shape = tuple(shape[0])
    if not shape or any(not isinstance(s, int | fx.Node) for s in shape):
        return None
    if len(shape) == 1 and isinstance(shape[0], fx.Node):
        return None  # could be a whole torch.Size
    return Call(ops.reshape, (input, tuple(shape)))


def permute(input: Any, *dims: Any) -> Built:
    if len(dims) == 1 and isinstance(dims[0], list | tuple):
        dims = tuple(dims[0])
    return Call(ops.permute, (input, dims)) if dims and static(dims) else None


def transpose(input: Any, dim0: Any, dim1: Any) -> Built:
    return Call(ops.transpose, (input, dim0, dim1)) if static(dim0, dim1) else None


def chunk(input: Any, chunks: Any, dim: Any = 0) -> Built:
    return Call(ops.chunk, (input, chunks, dim)) if static(chunks, dim) else None


def split(tensor: Any, split_size_or_sections: Any, dim: Any = 0) -> Built:
    if not static(split_size_or_sections, dim):
        return None
    return Call(ops.split, (tensor, split_size_or_sections, dim))


def method_split(input: Any, split_size: Any, dim: Any = 0) -> Built:
    return split(input, split_size, dim)


def pad(input: Any, pad: Any, mode: Any = "constant", value: Any = None) -> Built:
    value = 0.0 if value is None else value
    if mode != "constant" or not static(pad, value) or not is_number(value):
        return None
    return Call(ops.pad, (input, tuple(pad), value))


def index(input: Any, item: Any) -> Built:
    """Indexing a tensor with what makes a view of it."""
    items = item if isinstance(item, tuple) else (item,)
    if not all(i is None or i is Ellipsis or type(i) is int or isinstance(i, slice) for i in items):
        return None
    return Call(ops.index, (input, item))


def unsqueeze(input: Any, dim: Any) -> Built:
    return Call(ops.unsqueeze, (input, dim)) if static(dim) else None


def expand(input: Any, *size: Any) -> Built:
    built = reshape(input, *size)
    return Call(ops.expand, built.args) if isinstance(built, Call) else None


def contiguous(input: Any) -> Built:
    return Call(ops.contiguous, (input,))


def size(input: Any, dim: Any = None) -> Built:
    return Call(ops.size, (input, dim)) if static(dim) else None


def rank(input: Any) -> Built:
    return Call(ops.rank, (input,))


# --- what evaluation mode does not do


def dropout(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Built:
    return Alias(input) if training is False else None


def stochastic_depth(input: Any, p: Any, mode: Any, training: Any = True) -> Built:
    return Alias(input) if training is False else None


def identity(input: Any, *args: Any) -> Built:
    return Alias(input)
