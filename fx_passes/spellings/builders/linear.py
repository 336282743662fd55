"""Convolution, linear, matrix products, attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fx_passes import ops
from fx_passes.graph.inference import rank
from fx_passes.spellings.builders.base import Built, Call, is_number, spread, static


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
    if rank(input) != 1:
        return baddbmm(input, mat1, mat2)
    return Call(ops.linear, (mat1, Call(ops.transpose, (mat2, 0, 1)), input), {"post_ops": ()})


def einsum(equation: Any, *operands: Any) -> Built:
    """Matrix products: labels summed over, labels of each operand alone, all others common, in any order."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation or "." in equation:
        return None
    sources, _, result = equation.replace(" ", "").partition("->")
    a, _, b = sources.partition(",")
    if any(len(set(labels)) != len(labels) for labels in (a, b, result)):
        return None
    batch = [label for label in result if label in a and label in b]
    rows, columns, summed = (
        [label for label in labels if label not in batch and (label in other) == inside]
        for labels, other, inside in ((a, b, False), (b, a, False), (a, b, True))
    )
    if not (rows and columns and summed) or sorted(result) != sorted(batch + rows + columns):
        return None
    left = _joined(_arranged(operands[0], a, batch + rows + summed), len(batch), (len(rows), len(summed)))
    if list(b) == batch + columns + summed:  # joined as it lies, without a copy
        right = Call(ops.transpose, (_joined(operands[1], len(batch), (len(columns), len(summed))), -2, -1))
    else:
        right = _joined(_arranged(operands[1], b, batch + summed + columns), len(batch), (len(summed), len(columns)))
    product = Call(ops.matmul, (left, right), {"post_ops": ()})
    for labels, operand, names, dim in ((columns, operands[1], b, len(batch) + 1), (rows, operands[0], a, len(batch))):
        if len(labels) > 1:
            sizes = tuple(Call(ops.size, (operand, names.index(label))) for label in labels)
            product = Call(ops.unflatten, (product, dim, sizes))
    built = _arranged(product, batch + rows + columns, result)
    return built if isinstance(built, Call) else None


def _joined(value: Any, start: int, counts: tuple[int, int]) -> Any:
    """value with the two groups of dimensions from `start` on made one dimension each."""
    first, second = counts
    if second > 1:
        value = Call(ops.flatten, (value, start + first, start + first + second - 1))
    return Call(ops.flatten, (value, start, start + first - 1)) if first > 1 else value


def _arranged(value: Any, labels: Sequence[str], wanted: Sequence[str]) -> Any:
    """value, whose dimensions have these labels, with its dimensions in the wanted order."""
    if list(labels) == list(wanted):
        return value
    if list(labels[:-2]) == list(wanted[:-2]):
        return Call(ops.transpose, (value, -2, -1))
    return Call(ops.permute, (value, tuple(list(labels).index(label) for label in wanted)))


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
