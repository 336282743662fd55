"""Matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes.ops.pointwise import PostOps, apply_post_ops
from fx_passes.ops.registry import COMPUTE, op


@op(kind=COMPUTE, post_ops=True, shape="rank", weighted=True, per_sample=True)
def linear(src: Tensor, weight: Tensor, bias: Tensor | None = None, *, post_ops: PostOps = ()) -> Tensor:
    """Return post_ops(src @ weight.T + bias): src [..., K], weight [N, K], bias [N]."""
    return apply_post_ops(F.linear(src, weight, bias), post_ops)


@op(kind=COMPUTE, post_ops=True)
def matmul(a: Tensor, b: Tensor, *, post_ops: PostOps = ()) -> Tensor:
    """Return post_ops(a @ b), batched and broadcast as torch.matmul does."""
    return apply_post_ops(torch.matmul(a, b), post_ops)
