"""Transformers' products of experts become PyTorch's operator, by both entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi.backend
from tests.support.exported import needs_export
from zendnn_cffi.cli.libraries import imported

FALLBACK, OPERATOR = "transformers.grouped_mm_fallback.default", "aten._grouped_mm.default"


class Experts(nn.Module):
    """Rows sorted by expert: one of the first, two of the second, none of the third, one of the last."""

    def __init__(self, size: int, transposed: bool) -> None:
        super().__init__()
        imported("transformers.integrations.moe")
        weights = torch.randn(4, size, 8, generator=torch.Generator().manual_seed(0))
        self.weights, self.transposed = nn.Parameter(weights.mT.contiguous() if transposed else weights), transposed
        self.register_buffer("offs", torch.tensor([1, 3, 3, 4], dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights.mT if self.transposed else self.weights
        assert needs_export(x)
        result: Tensor = torch.ops.transformers.grouped_mm_fallback(x, weights, offs=self.offs)
        return result


def targets(model: nn.Module, x: Tensor, entry: str) -> list[str]:
    """Check that the compiled, or exported, model equals eager; the operators it calls."""
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(x)
        module: Any = zendnn_cffi.optimize(model, (x,), tune="off") if entry == "optimize" else None
        fast = module or torch.compile(model, backend="zendnn")
        torch.testing.assert_close(fast(x), expected)
    module = module or zendnn_cffi.backend.compiled_modules()[-1]
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


pytestmark = pytest.mark.parametrize("entry", ("compile", "optimize"))


@pytest.mark.parametrize("transposed", (False, True))
def test_it_is_one_operator(transposed: bool, entry: str) -> None:
    called = targets(Experts(12, transposed).eval(), torch.randn(4, 12), entry)
    assert OPERATOR in called and FALLBACK not in called


def test_what_the_operator_does_not_take_stays(entry: str) -> None:
    """Rows of 10 float32 numbers: PyTorch's operator raises where 16 does not divide their distance."""
    called = targets(Experts(10, True).eval(), torch.randn(4, 10), entry)
    assert FALLBACK in called and OPERATOR not in called


def test_another_dtype_stays(entry: str) -> None:
    called = targets(Experts(12, False).eval().double(), torch.randn(4, 12, dtype=torch.float64), entry)
    assert FALLBACK in called and OPERATOR not in called
