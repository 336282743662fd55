"""A softmax in float32 of scores in 16 bits: folded where only these are read of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.fold.wide_softmax import fold_wide_softmax
from tests.support.graphs import count, traced
from tests.support.lowering import net

Scores = Callable[[Tensor], Any]
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

FOLDED: dict[str, Scores] = {
    "F.softmax": lambda x: F.softmax(x, dim=-1, dtype=F32).to(x.dtype),
    "torch.softmax": lambda x: torch.softmax(x, -1, dtype=F32).to(x.dtype),
    "method": lambda x: x.softmax(1, dtype=F32).type_as(x),
    "converted before": lambda x: F.softmax(x.float(), dim=-1).to(x.dtype),
    "source written behind": lambda x: source_written_behind(x),
    "read in float32 as well": lambda x: (x.float() * 2, F.softmax(x.float(), -1).to(x.dtype)),
}


def scores_written(x: Tensor) -> Tensor:
    """Masked in float32, as the converted scores may hold more than 16 bits."""
    wide = x.float()
    wide.select(0, 0).fill_(-50)
    return F.softmax(wide, -1).to(x.dtype)


def source_written(x: Tensor) -> Tensor:
    x = x * 1
    wide = x.float()
    x.select(0, 0).fill_(7)
    return F.softmax(wide, -1).to(x.dtype)


def source_written_before_the_conversion_back(x: Tensor) -> Tensor:
    x = x * 1
    shares = F.softmax(x, -1, dtype=F32)
    x.select(0, 0).fill_(7)
    return shares.to(x.dtype)


def source_written_behind(x: Tensor) -> Any:
    x = x * 1
    shares = F.softmax(x.float(), -1).to(x.dtype)
    x.select(0, 0).fill_(7)
    return shares, x


STAYS: dict[str, Scores] = {
    "scores written": scores_written,
    "source written": source_written,
    "source written before the conversion back": source_written_before_the_conversion_back,
    "no conversion back": lambda x: F.softmax(x, dim=-1, dtype=F32),
    "float32 is returned": lambda x: (y := F.softmax(x, dim=-1, dtype=F32), y.to(x.dtype)),
    "logarithm": lambda x: F.log_softmax(x.float(), dim=-1).to(x.dtype),
    "float64": lambda x: F.softmax(x, dim=-1, dtype=torch.float64).to(x.dtype),
    "scaled between": lambda x: F.softmax(x.float() * 3, dim=-1).to(x.dtype),
}


def is_folded(scores: Scores, dtype: torch.dtype) -> bool:
    x = torch.randn(3, 40).to(dtype)
    gm = fold_wide_softmax(traced(net(lambda m, x: scores(x)), x))
    torch.testing.assert_close(gm(x), scores(x))
    (softmax,) = (node for node in gm.graph.nodes if "softmax" in str(node.target))
    return softmax.target is ops.softmax and softmax.args[0].meta["val"].dtype == dtype


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("case", FOLDED)
def test_folded(case: str, dtype: torch.dtype) -> None:
    assert is_folded(FOLDED[case], dtype)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("case", STAYS)
def test_stays(case: str, dtype: torch.dtype) -> None:
    assert not is_folded(STAYS[case], dtype)


@pytest.mark.parametrize("have, want", [(BF16, F16), (F16, BF16)], ids=str)
def test_stays_where_the_result_has_another_dtype(have: torch.dtype, want: torch.dtype) -> None:
    assert not is_folded(lambda x: F.softmax(x, dim=-1, dtype=F32).to(want), have)


@pytest.mark.parametrize("by_compile", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_attention_as_models_write_it_is_one_region(dtype: torch.dtype, by_compile: bool) -> None:
    """Softcapped, as Gemma 2: it is no scaled_dot_product_attention. The softmax stood outside of regions."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 99:  # a condition: torch.export follows it, symbolic tracing does not
                x = x * 1
            q, k, v = (m(x).view(x.shape[0], x.shape[1], 2, 16).transpose(1, 2) for m in (self.q, self.k, self.v))
            scores = torch.tanh(q @ k.transpose(2, 3) / 5) * 5
            shares = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
            return self.out((shares @ v).transpose(1, 2).flatten(2))

    model, exact = Attention().eval(), Attention().eval()
    exact.load_state_dict(model.to(dtype).state_dict())
    exact.double()
    x = torch.randn(2, 9, 32).to(dtype)
    if by_compile:
        fast: Any = torch.compile(model, backend="zendnn", options={"tune": "off"})
    else:
        fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        actual, eager, expected = fast(x), model(x), exact(x.double())
    gm = zendnn_cffi.backend.compiled_modules()[-1] if by_compile else fast
    assert len(gm.regions()) == 1 and count(gm)["softmax"] == 1
    assert (actual - expected).abs().max() <= 1.5 * (eager - expected).abs().max() + 1e-6
