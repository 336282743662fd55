"""Linears of one input as one wider linear: which are, and what whoever reads the results can see of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from tests.support.graphs import model_of
from tests.tolerance import assert_close


def heads(x: Tensor) -> Tensor:
    return x.view(2, 6, 4, 8).transpose(1, 2)


READERS: dict[str, Callable[[Tensor], Any]] = {
    "leaves as heads": heads,
    "leaves transposed": lambda k: k.transpose(0, 1),
    "leaves in parts": lambda k: k.chunk(2, -1)[1],
    "leaves, and is read inside": lambda k: (heads(k), heads(k) @ heads(k).transpose(-1, -2)),
    "memory is addressed": lambda k: heads(k).reshape(8, 6, 8).as_strided((8, 2, 4, 8), (8, 64, 32, 1)),
    "is viewed by what nobody knows": lambda k: torch.view_as_complex(k.view(2, 6, 16, 2)).real,
}


@pytest.mark.parametrize("entry", ("traced", "exported", "compiled"))
@pytest.mark.parametrize("reader", READERS)
def test_strides_are_those_of_a_tensor_of_its_own(reader: str, entry: str) -> None:
    """A slice of the wider result has gaps: as_strided would read between, a cache take three times the memory."""

    def forward(m: Any, x: Tensor) -> Any:
        keys, queries, values = m.k(x), m.q(x), m.v(x)
        return READERS[reader](keys), heads(queries) @ heads(values).transpose(-1, -2)

    eager = model_of(forward, k=nn.Linear(64, 32), q=nn.Linear(64, 32), v=nn.Linear(64, 32)).float()
    x = torch.randn(2, 6, 64)
    if entry == "compiled":
        torch._dynamo.reset()
        fast: Any = torch.compile(eager, backend="zendnn", options={"tune": "off"})
    else:
        fast = zendnn_cffi.optimize(eager, (x,) if entry == "exported" else None, tune="off")
    with torch.inference_mode():
        ours, theirs = (torch.utils._pytree.tree_leaves(module(x)) for module in (fast, eager))
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, k=64)
        assert mine.stride() == other.stride()
        assert mine.untyped_storage().nbytes() <= other.untyped_storage().nbytes()
    if entry != "compiled":
        assert [n.became for n in zendnn_cffi.explain(fast).nodes].count("inner_product") == 1
