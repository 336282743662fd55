"""Over rows, channels or other dimensions: normalizations, softmax, reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes.ops.pointwise import PostOps, apply_post_ops
from fx_passes.ops.registry import COMPUTE, op


@op(kind=COMPUTE, post_ops=True, shape="same", per_sample=True, torch_candidate=True)
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


@op(kind=COMPUTE, shape="same", torch_candidate=True, row_major=True)
def layer_norm(
    src: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> Tensor:
    """Return the layer normalization of src over its last len(normalized_shape) dimensions."""
    return F.layer_norm(src, list(normalized_shape), weight, bias, eps)


@op(kind=COMPUTE, post_ops=True, shape="same", per_sample=True, torch_candidate=True)
def group_norm(
    src: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, *, eps: float, post_ops: PostOps = ()
) -> Tensor:
    """Return post_ops(src normalized over each group of channels of a sample, times weight, plus bias).

    src [N, C, ...], weight and bias [C] or None
    """
    return apply_post_ops(torch.group_norm(src, groups, weight, bias, eps), post_ops)


@op(kind=COMPUTE, shape="rank")
def rms_norm(src: Tensor, weight: Tensor | None, *, eps: float | None, rounds_last: bool = False) -> Tensor:
    """Return src / sqrt(mean(src * src, -1) + eps) * weight, in float32 inside at least; weight [K] or None.

    eps          None: the machine epsilon of the dtype computed in
    rounds_last  whether the product with the weight is computed in float32, too, and the result has src's dtype
    Raises  TypeError for integers, of which PyTorch takes no means, and complex numbers, whose squares are others
    """
    if not src.is_floating_point():
        raise TypeError(f"rms_norm of {src.dtype}")
    x = src if src.dtype == torch.float64 else src.float()
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    norm = torch.linalg.vector_norm(x, 2, -1, keepdim=True)
    result = x * torch.rsqrt(norm * norm / src.shape[-1] + eps)
    if rounds_last and weight is not None:
        return (weight * result).to(src.dtype)
    result = result.to(src.dtype)
    return result if weight is None else weight * result


@op(kind=COMPUTE, shape="rank")
def l2_normalize(src: Tensor, dim: int, *, eps: float, of_squares: bool = False) -> Tensor:
    """Return src / max(norm(src), eps), Euclidean norms along dim.

    of_squares  norms are roots of the sums of src * src, which are complex where src is, and not of magnitudes
    """
    if of_squares and src.is_complex():
        return src / (src * src).sum(dim, keepdim=True).sqrt()
    return F.normalize(src, 2.0, dim, eps)


@op(kind=COMPUTE, shape="same", torch_candidate=True)
def softmax(src: Tensor, dim: int, log: bool = False) -> Tensor:
    """Return softmax (or its logarithm) along dim."""
    return F.log_softmax(src, dim) if log else F.softmax(src, dim)


def euclidean_norm(src: Tensor, dims: Sequence[int], keepdim: bool, *, out: Tensor | None = None) -> Tensor:
    """Return the roots of the sums of squares over dims; into out, if it is given."""
    return torch.linalg.vector_norm(src, 2, dims, keepdim, out=out)


REDUCTIONS: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {"mean": torch.mean, "sum": torch.sum, "max": torch.amax, "min": torch.amin, "norm": euclidean_norm}
)


@op(kind=COMPUTE, light=True, torch_candidate=True, row_major=True)
def reduce(src: Tensor, kind: str, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """Return src reduced over dims; kind "mean", "sum", "max", "min" or "norm"."""
    return REDUCTIONS[kind](src, dims, keepdim)
