"""Conversions that convert nothing, and those that do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fx_passes.fold.casts import fold_casts
from tests.support.graphs import traced


def test_casts_that_change_something_stay() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.float32).to(torch.bfloat16).float()

    x = torch.randn(4)
    gm = fold_casts(traced(Casts(), x))
    assert len(gm.graph.find_nodes(op="call_method", target="to")) == 1
    torch.testing.assert_close(gm(x), Casts()(x))
