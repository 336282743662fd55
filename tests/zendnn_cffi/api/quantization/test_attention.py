"""Attention of which queries and keys are quantized: which is marked, and that its first product runs on integers."""

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
from zendnn_cffi.api.quantization.attention import mark_attention
from zendnn_cffi.api.quantization.layers import Call
from zendnn_cffi.api.quantization.pt2e import exported_graph
from zendnn_cffi.api.quantization_report import sqnr_db


class Attention(nn.Module):
    """A block of attention; options are those of scaled_dot_product_attention."""

    def __init__(self, heads: int = 4, keys: int = 64, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.size, self.options = 64 // heads, options
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, keys), nn.Linear(64, keys)
        self.out = nn.Linear(64, 64)
        self.eval()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, mask, **self.options)
        return self.out(y.transpose(1, 2).flatten(2))


FLOATS = torch.zeros(1, 1, 33, 33).masked_fill(torch.ones(33, 33).tril() == 0, -1e9)
FORMS: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "plain": (Attention(), ()),
    "scale": (Attention(scale=0.4), ()),
    "two heads": (Attention(2), ()),
    "added mask": (Attention(), (FLOATS,)),
    "mask of booleans": (Attention(), (FLOATS == 0,)),
    "causal": (Attention(is_causal=True), ()),
}


@pytest.mark.parametrize("form", FORMS)
def test_it_is_marked(form: str) -> None:
    model, rest = FORMS[form]
    graph = exported_graph(model, ((noise(2, 33, 64), *rest), {}))
    assert len(mark_attention(graph)) == 1


def test_groups_of_queries_are_not_marked() -> None:
    graph = exported_graph(Attention(keys=32, enable_gqa=True), ((noise(2, 33, 64),), {}))
    assert mark_attention(graph) == []


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_its_first_product_runs_on_integers_where_asked(form: str, attention: bool, dtype: torch.dtype | None) -> None:
    model, rest = FORMS[form]
    call: Call = ((noise(2, 33, 64), *rest), {})
    fast, report, converted = zendnn_cffi.quantize(
        model, [call[0]], attention=attention, dtype=dtype, tune="off", compare=False
    )
    integers = [kind for kind, source, _ in ran(fast) if source == torch.uint8]
    assert len(integers) == (5 if attention else 2)  # projections apart, or joined; attention; the last layer
    assert report.sqnr_db > 25 and sqnr_db(called(converted, call), called(fast, call)) > 30
    assert len(report.layers) == (5 if attention else 4)
