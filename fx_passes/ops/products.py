"""Matrix products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes.ops.pointwise import PostOps, apply_post_ops
from fx_passes.ops.registry import COMPUTE, op


@op(kind=COMPUTE, post_ops=True, shape="rank", weighted=True, per_sample=True, row_major=True)
def linear(src: Tensor, weight: Tensor, bias: Tensor | None = None, *, post_ops: PostOps = ()) -> Tensor:
    """Return post_ops(src @ weight.T + bias): src [..., K], weight [N, K], bias [N]."""
    return apply_post_ops(F.linear(src, weight, bias), post_ops)


@op(kind=COMPUTE, post_ops=True, row_major=True)
def matmul(a: Tensor, b: Tensor, *, post_ops: PostOps = ()) -> Tensor:
    """Return post_ops(a @ b), batched and broadcast as torch.matmul does.

    A tensor that is added comes before the first rounding, as in torch.addmm and torch.baddbmm.
    """
    scaled = [entry for entry in post_ops[:1] if tuple(entry[:2]) == ("eltwise", "linear") and entry[3] == 0]
    rest = post_ops[len(scaled) :]
    if not rest or tuple(rest[0][:2]) != ("binary", "add") or not _adds_at_once(a, b, rest[0][2]):
        return apply_post_ops(torch.matmul(a, b), post_ops)
    add = torch.addmm if a.ndim == 2 else torch.baddbmm
    return apply_post_ops(add(rest[0][2], a, b, alpha=scaled[0][2] if scaled else 1), rest[1:])


def _adds_at_once(a: Tensor, b: Tensor, other: Any) -> bool:
    """Whether torch.addmm or torch.baddbmm takes these, of few digits."""
    if not isinstance(other, Tensor) or a.dtype not in (torch.bfloat16, torch.float16) or other.dtype != a.dtype:
        return False
    if a.ndim != b.ndim or a.ndim not in (2, 3) or a.shape[:-2] != b.shape[:-2] or other.ndim > a.ndim:
        return False
    result = (*a.shape[:-1], b.shape[-1])
    return all(n in (1, m) for n, m in zip(reversed(other.shape), reversed(result), strict=False))
