"""Linear layers, matrix products, attention."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fx_passes import ops
from fx_passes.graph.inference import rank
from fx_passes.spellings.registry import Built, Call, is_number, row, spelled, static

aten = torch.ops.aten


@spelled(
    functions=[F.linear],
    overloads=[aten.linear.default],
    modules=dict.fromkeys((nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear), ("weight", "bias")),
)
def linear(input: Any, weight: Any, bias: Any = None) -> Built:
    return Call(ops.linear, (input, weight, bias), {"post_ops": ()})


@spelled("matmul", "bmm", "mm", functions=[operator.matmul], strict=["bmm", "mm"])
def matmul(input: Any, other: Any, *, out: Any = None) -> Built:
    return None if out is not None else Call(ops.matmul, (input, other), {"post_ops": ()})


@spelled("baddbmm", overloads=[aten.baddbmm.default], strict=["baddbmm"])
def baddbmm(input: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Built:
    """input + alpha * batch1 @ batch2, as post-ops of the product; beta of others would round input before the sum."""
    if out is not None or not is_number(beta) or not is_number(alpha) or not isinstance(input, fx.Node):
        return None
    scale = () if alpha == 1 else (("eltwise", "linear", alpha, type(alpha)(0)),)
    product = Call(ops.matmul, (batch1, batch2), {"post_ops": scale})
    if beta == 0:
        return product  # input is not read at all, as in eager
    return Call(ops.binary, (product, input, "add")) if beta == 1 else None


@spelled("addmm", overloads=[aten.addmm.default], strict=["addmm"])
def addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Built:
    """input + mat1 @ mat2, mat2 the transpose of a linear's weight: its bias where input is a vector."""
    if out is not None or not (is_number(beta) and is_number(alpha)) or (beta, alpha) != (1, 1):
        return baddbmm(input, mat1, mat2, beta=beta, alpha=alpha, out=out)
    if rank(input) != 1:
        return baddbmm(input, mat1, mat2)
    return Call(ops.linear, (mat1, Call(ops.transpose, (mat2, 0, 1)), input), {"post_ops": ()})


@spelled(functions=[torch.einsum], strict=["einsum"])
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
    if built is not product:  # PyTorch's order in memory depends on sizes, and is this one where it can be
        built = Call(ops.contiguous, (built,))
    return built if isinstance(built, Call) else None


row(lambda equation, tensors, *, path=None: einsum(equation, tensors), overloads=[aten.einsum.default])


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


@spelled(functions=[F.scaled_dot_product_attention], overloads=[aten.scaled_dot_product_attention.default])
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
