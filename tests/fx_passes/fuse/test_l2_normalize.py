"""L2 normalization in the spellings that models use, and quotients that only look like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from tests.support.lowering import net, noise, offload

Norm = Callable[[Tensor], Tensor]

SPELLINGS: dict[str, Norm] = {
    "normalize": lambda y: F.normalize(y, p=2, dim=1),
    "normalize the last": lambda y: F.normalize(y, dim=-1),
    "normalize with an eps": lambda y: F.normalize(y, dim=-1, eps=0.7),
    "method": lambda y: y / y.norm(p=2, dim=-1, keepdim=True),
    "method by position": lambda y: y / y.norm(2, -1, True),
    "Frobenius": lambda y: y / y.norm(dim=-1, keepdim=True),
    "function": lambda y: y / torch.norm(y, dim=-1, keepdim=True),
    "linalg": lambda y: y / torch.linalg.vector_norm(y, dim=-1, keepdim=True),
    "powers": lambda y: y / torch.pow(torch.sum(torch.pow(y, 2), dim=-1, keepdim=True), 0.5),
    "root": lambda y: y / (y * y).sum(-1, keepdim=True).sqrt(),
}
OTHERS: dict[str, Norm] = {
    "another norm": lambda y: F.normalize(y, p=1.0, dim=-1),
    "norm 1": lambda y: y / y.norm(1, -1, True),
    "no dimension": lambda y: y / y.norm(),
    "norms without their dimension": lambda y: (y.t() / y.norm(dim=-1)).t(),
    "norm of something else": lambda y: y / (y + 1).norm(dim=-1, keepdim=True),
    "another root": lambda y: y / torch.pow(torch.sum(torch.pow(y, 2), dim=-1, keepdim=True), 0.25),
    "norm that is read twice": lambda y: (lambda norm: y / norm + norm)(y.norm(dim=-1, keepdim=True)),
    "tensor by keyword": lambda y: y / torch.linalg.vector_norm(x=y, dim=-1, keepdim=True),
    "norm over it": lambda y: y.norm(dim=-1, keepdim=True) / (y.abs() + 1),
}


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_in_primitives(spelling: str, dtype: torch.dtype | None) -> None:
    model = net(lambda m, x: SPELLINGS[spelling](m[0](x)), nn.Linear(8, 40))
    found = offload(model, noise(3, 8), dtype=dtype, tune="off")
    (norm,) = [node for node in found.nodes if node.became == "l2_normalize"]
    assert norm.implementation != "torch"


@pytest.mark.parametrize("other", OTHERS)
def test_not_taken_for_it(other: str) -> None:
    model = net(lambda m, x: OTHERS[other](m[0](x)), nn.Linear(8, 40))
    found = offload(model, noise(3, 8), tune="off")
    assert not [node for node in found.nodes if node.became == "l2_normalize"]


def test_parts_that_export_leaves() -> None:
    class Conditional(nn.Module):
        """Cannot be traced symbolically."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 40)

        def forward(self, x: Tensor) -> Tensor:
            return F.normalize(self.linear(x * 2 if x.shape[0] > 99 else x), p=2, dim=1)

    model, x = Conditional().eval(), noise(3, 8)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert [node.became for node in zendnn_cffi.explain(fast).nodes].count("l2_normalize") == 1


@pytest.mark.parametrize("eps", (1e-12, 0.0, 1e-3))
def test_rows_without_a_length(eps: float) -> None:
    """Zeros stay zeros, or are no numbers without an eps; short rows are divided by eps."""
    model = net(lambda m, x: F.normalize(m[0](x), dim=-1, eps=eps), nn.Linear(8, 24, bias=False))
    x = noise(4, 8) * torch.tensor([[1.0], [0.0], [1e-5], [1e-14]])
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), equal_nan=True)


def test_along_another_dimension_is_pytorch() -> None:
    model = net(lambda m, x: F.normalize(m[0](x), dim=1), nn.Conv2d(3, 16, 3))
    found = offload(model, noise(2, 3, 9, 9), tune="off")
    (norm,) = [node for node in found.nodes if "normalize" in node.name]
    assert norm.became == "torch"
