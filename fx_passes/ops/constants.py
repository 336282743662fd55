"""Constant operations: over get_attr nodes, evaluated once at lowering (and again after load_state_dict).

Computed in float64 and rounded once, to the dtype of the parameter they replace.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fx_passes.ops.registry import CONSTANT, op
from zendnn_cffi.runtime import huge_pages


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


_BLOCK_NUMBERS = 1 << 17  # multiplied at once: their f64 copies, 1 MB each, stay in cache


def _times(weight: Tensor, factor: Tensor) -> Tensor:
    """weight * factor, an f64 factor per output or a single one, rounded once to the dtype of weight.

    Where nobody differentiates, no f64 copy of the whole is made: block by block it takes a seventh of the time.
    """
    if torch.is_grad_enabled():
        return (weight.double() * factor).to(weight.dtype)
    result, wide = _memory_for(weight)
    rows = max(1, _BLOCK_NUMBERS * weight.shape[0] // max(1, weight.numel()))
    blocks = [weight.split(rows), result.split(rows)]
    factors = factor.split(rows) if factor.shape[0] == weight.shape[0] else [factor] * len(blocks[0])
    for block, own, product in zip(blocks[0], factors, blocks[1], strict=True):
        if wide is None:
            torch.mul(block, own, out=product)
        else:
            numbers = wide[: block.numel()].view(block.shape)
            product.copy_(numbers.copy_(block).mul_(own))
    return result


def _memory_for(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Memory for the result, and for a block in f64 where that is not to be allocated."""
    memory = huge_pages.lent()
    if memory is None or type(weight) not in (Tensor, nn.Parameter) or not weight.is_cpu or not weight.numel():
        return huge_pages.empty_like(weight), None
    row = weight.numel() // weight.shape[0]
    own_bytes, wide_bytes = -(-weight.nbytes // 64) * 64, 8 * max(row, min(weight.numel(), _BLOCK_NUMBERS))
    taken = memory.take(own_bytes + wide_bytes)
    return huge_pages.like(weight, taken[: weight.nbytes]), taken[own_bytes:].view(torch.float64)


@op(kind=CONSTANT)
def fold_bn_weight(weight: Tensor, var: Tensor, bn_weight: Tensor | None, eps: float) -> Tensor:
    """Weight [O, ...] of a convolution or linear that computes its batch normalization as well."""
    return _times(weight, _along(_scale(bn_weight, var, eps), 0, weight.ndim))


@op(kind=CONSTANT)
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


@op(kind=CONSTANT)
def fold_bn_deconv_weight(weight: Tensor, var: Tensor, bn_weight: Tensor | None, eps: float, groups: int) -> Tensor:
    """Weight [C, O / groups, ...] of a deconvolution that computes the batch normalization after it as well."""
    scale = _scale(bn_weight, var, eps).reshape(groups, 1, -1)
    grouped = weight.double().reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    return (grouped * scale.unsqueeze(-1)).reshape(weight.shape).to(weight.dtype)


@op(kind=CONSTANT)
def fold_pre_bn_weight(weight: Tensor, var: Tensor, bn_weight: Tensor | None, eps: float, groups: int = 1) -> Tensor:
    """Weight [O, C / groups, ...] of a convolution or linear that computes the batch normalization before it too."""
    scale = _scale(bn_weight, var, eps).reshape(groups, 1, -1)
    grouped = weight.double().reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
    return (grouped * scale.unsqueeze(-1)).reshape(weight.shape).to(weight.dtype)


@op(kind=CONSTANT)
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


@op(kind=CONSTANT)
def scale_channels(weight: Tensor, scale: Tensor) -> Tensor:
    """Weight [O, ...] or bias [O], multiplied by one factor per output (or a single one)."""
    return _times(weight, _along(scale.double().reshape(-1), 0, weight.ndim))


@op(kind=CONSTANT)
def no_bias(weight: Tensor) -> Tensor:
    """The bias [N] of a linear that has none."""
    return weight.new_zeros(weight.shape[0])


@op(kind=CONSTANT)
def add_channels(bias: Tensor | None, summand: Tensor, like: Tensor) -> Tensor:
    """Bias [O] with one summand per output (or a single one); O and dtype are those of the weight `like`."""
    total = summand.double().reshape(-1) + (0.0 if bias is None else bias.double())
    return total.expand(like.shape[0]).to(like.dtype).contiguous()
