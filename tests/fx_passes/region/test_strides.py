"""Results lie in memory as eager PyTorch's do, whatever the operand's strides: view, is_contiguous and stride tell."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from tests.tolerance import assert_close

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "batch_norm": lambda x, w: F.batch_norm(x, w.new_zeros(4), w.new_ones(4), w, w),
    "prelu": F.prelu,
    "rmatmul": lambda x, w: torch.matmul(w.expand(4, 4), x),
    "rms_norm": lambda x, w: F.rms_norm(x, (4,), w),
    "layer_norm": lambda x, w: F.layer_norm(x, (4,), w),
    "group_norm": lambda x, w: F.group_norm(x, 2, w, w),
    "softmax": lambda x, w: F.softmax(x * w, 1),
    "log_softmax": lambda x, w: F.log_softmax(x, 1) * w,
    "product": lambda x, w: x * w,
    "double": lambda x, w: (x * 2).relu() + w.sum(),
    "pool": lambda x, w: F.max_pool2d(x, 2) * w[:1],
    "pool_rows": lambda x, w: F.max_pool1d(x[0], 2) * w[:1],
    "normalize": lambda x, w: F.normalize(x, dim=1) * w,
    "mean": lambda x, w: x.mean((2, 3)) * w,
    "concat": lambda x, w: torch.cat([x * w, x], 1),
}
ARRANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "rows turned": lambda x: x.mT.contiguous().mT,
    "turned around": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "expanded": lambda x: x[..., :1].expand(x.shape),
    "expanded batch": lambda x: x[:1].expand(x.shape),
    "every other": lambda x: torch.cat([x, x], -1)[..., ::2],
    "samples for channels": lambda x: x.transpose(0, 1),
    "windows": lambda x: x.flatten().as_strided(x.shape, (1, 1, 1, 1)),
}


class Model(nn.Module):
    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.operation, self.weight = operation, nn.Parameter(torch.rand(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x, self.weight)


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_lie_as_in_eager(name: str) -> None:
    model = Model(OPERATIONS[name]).eval()
    fast = zendnn_cffi.optimize(model, tune="off")
    assert fast.regions()
    for arrangement, arrange in ARRANGED.items():
        x = arrange(torch.randn(4, 4, 4, 4))
        expected, got = model(x), fast(x)
        assert_close(got, expected, k=64)
        sizes = [dim for dim, size in enumerate(expected.shape) if size > 1]
        assert [got.stride(d) for d in sizes] == [expected.stride(d) for d in sizes], arrangement
