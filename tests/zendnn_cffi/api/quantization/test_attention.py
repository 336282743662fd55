"""Attention taken apart: the float model stays, and its products run on integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from tests.support.lowering import noise
from tests.support.mixed_precision import called
from tests.support.quantized import ran
from zendnn_cffi.api.quantization.attention import take_attention_apart
from zendnn_cffi.api.quantization.layers import Call, kind
from zendnn_cffi.api.quantization.pt2e import exported_graph
from zendnn_cffi.api.quantization_report import sqnr_db


class Attention(nn.Module):
    """A block of attention; options are those of scaled_dot_product_attention."""

    def __init__(self, heads: int = 4, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.options = heads, options
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.eval()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, mask, **self.options)
        return self.out(y.transpose(1, 2).flatten(2))


FLOATS = torch.zeros(1, 1, 9, 9).masked_fill(torch.ones(9, 9).tril() == 0, -1e9)


@pytest.mark.parametrize(
    ("model", "rest"), [(Attention(), ()), (Attention(scale=0.4), ()), (Attention(), (FLOATS,)), (Attention(2), ())]
)
def test_it_is_exact_in_float(model: nn.Module, rest: tuple[Tensor, ...]) -> None:
    call: Call = ((noise(2, 9, 64), *rest), {})
    graph = exported_graph(model, call)
    products = take_attention_apart(graph)
    assert len(products) == 2 and not any(kind(node) == "scaled_dot_product_attention" for node in graph.graph.nodes)
    torch.testing.assert_close(called(graph, call), called(model, call), atol=1e-5, rtol=0)
    other: Call = ((noise(3, 9, 64), *rest), {})
    torch.testing.assert_close(called(graph, other), called(model, other), atol=1e-5, rtol=0)  # the batch stays free


@pytest.mark.parametrize(("options", "mask"), [({"is_causal": True}, None), ({}, FLOATS == 0)])
def test_other_forms_stay_whole(options: dict[str, Any], mask: Tensor | None) -> None:
    call: Call = ((noise(2, 9, 64),) if mask is None else (noise(2, 9, 64), mask), {})
    graph = exported_graph(Attention(**options), call)
    code = graph.code
    assert take_attention_apart(graph) == [] and graph.code == code


@pytest.mark.parametrize("attention", [False, True])
def test_its_products_run_on_integers_where_asked(attention: bool) -> None:
    x = noise(2, 33, 64)
    fast, report, converted = zendnn_cffi.quantize(Attention(), [x], attention=attention, tune="off", compare=False)
    integers = [call for call in ran(fast) if call[1] == torch.uint8]
    assert len(integers) == (4 if attention else 2)  # the joined projections, and the last layer
    assert report.sqnr_db > 25 and sqnr_db(called(converted, ((x,), {})), called(fast, ((x,), {}))) > 30
