"""Products with a constant matrix are linear layers, as a user writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes import ops
from tests.support.exported import needs_export
from tests.support.lowering import offload

K, N = 24, 16


class Projection(nn.Module):
    """A matrix [K, N] that is no nn.Linear's: CLIP's projections, many a written-out layer."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(K, N) / 5)
        self.weight = nn.Parameter(torch.randn(N, K) / 5)
        self.bias = nn.Parameter(torch.randn(N))
        self.heads = nn.Parameter(torch.randn(K, 4, 4) / 5)
        self.stack = nn.Parameter(torch.randn(3, K, N) / 5)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


class Exported(Projection):
    """What symbolic tracing cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x) if needs_export(x) and x.shape[0] > 1 else x


LINEAR: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "operator": lambda m, x: x @ m.matrix,
    "function": lambda m, x: torch.matmul(x, m.matrix),
    "transposed": lambda m, x: x @ m.weight.T,
    "bias": lambda m, x: x @ m.matrix + m.bias,
    "activation": lambda m, x: torch.relu(x @ m.matrix),
    "scaled parameter": lambda m, x: x @ (m.matrix * 0.5),
    "einsum": lambda m, x: torch.einsum("btk,kn->btn", x, m.matrix),
    "einsum to heads": lambda m, x: torch.einsum("btk,khd->bthd", x, m.heads),
    "einsum from heads": lambda m, x: torch.einsum("bthd,khd->btk", x[..., :16].unflatten(-1, (4, 4)), m.heads),
}


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", LINEAR)
def test_a_constant_matrix_is_packed(name: str, dtype: torch.dtype | None) -> None:
    model, x = Projection(LINEAR[name]).eval(), torch.randn(2, 5, K)
    for traced in (model, Exported(LINEAR[name]).eval()):
        gm = zendnn_cffi.optimize(traced, (x,), tune="off")
        products = [n for r in gm.regions().values() for n in r.graph.nodes if n.target in (ops.matmul, ops.linear)]
        assert [n.target for n in products] == [ops.linear]
    found = offload(model, x, dtype=dtype, k=K)
    assert [node.became for node in found.nodes if node.flops] == ["inner_product"]


@pytest.mark.parametrize("rows", (1, 3))
def test_of_a_matrix(rows: int) -> None:
    found = offload(Projection(LINEAR["bias"]).eval(), torch.randn(rows, K), k=K)
    assert [node.became for node in found.nodes] == ["inner_product"]  # the bias is one of the layer


@pytest.mark.parametrize(
    "compute",
    [
        lambda m, x: m.matrix.T @ x.transpose(1, 2),  # from the left
        lambda m, x: x[:1].expand(3, -1, -1) @ m.stack,  # several matrices
        lambda m, x: x @ x.transpose(1, 2),
    ],
    ids=("from the left", "stack", "both at run time"),
)
def test_near_misses_stay_products(compute: Callable[[Any, Tensor], Tensor]) -> None:
    model, x = Projection(compute).eval(), torch.randn(2, 5, K)
    gm = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x))
    nodes = [n for m in (gm, *gm.regions().values()) for n in m.graph.nodes]
    assert any(n.target is ops.matmul for n in nodes) and not any(n.target is ops.linear for n in nodes)


def test_a_vector_and_a_matrix_written_to() -> None:
    model = Projection(LINEAR["operator"]).eval()
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        for x in (torch.randn(K), torch.randn(4, K)):
            torch.testing.assert_close(gm(x), model(x))
    written = Projection(lambda m, x: x @ m.matrix.add_(1)).eval()
    again = Projection(lambda m, x: x @ m.matrix.add_(1)).eval()
    again.load_state_dict(written.state_dict())
    gm = zendnn_cffi.optimize(written, tune="off")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(gm(torch.ones(2, K)), again(torch.ones(2, K)))
