"""Samples of feature maps between pixels: what deformable attention reads."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fx_passes.ops.registry import COMPUTE, op
from zendnn_cffi.runtime.weighted_samples import samples_by_pytorch


@op(kind=COMPUTE, row_major=True)
def weighted_samples(
    maps: Sequence[Tensor], grids: Sequence[Tensor], weights: Tensor, align_corners: bool = False
) -> Tensor:
    """Return [N, D, Q]: of each query the sum of its bilinear samples of all maps, each times its weight.

    maps [N, D, h, w] and grids [N, Q, P, 2], one of each level, as F.grid_sample takes them with zeros outside;
    weights [N, 1, Q, K], K of all P.
    """
    return samples_by_pytorch(maps, grids, weights, align_corners)
