"""Values are quantized before views of them, where nobody else reads those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fx_passes import ops
from fx_passes.graph.graph import is_call
from fx_passes.pipeline import compile_graph
from tests.support.lowering import noise
from tests.support.quantized import Integers, Weight, optimized, ran, real, reorders, through

U8, S8 = torch.uint8, torch.int8
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda y: y.reshape(2, -1),
    "flatten": lambda y: y.flatten(1),
    "unflatten": lambda y: y.unflatten(-1, (4, 4)),
    "transpose": lambda y: y.transpose(1, 2),
    "permute": lambda y: y.permute(2, 0, 1),
    "unsqueeze": lambda y: y.unsqueeze(1),
    "heads": lambda y: y.unflatten(-1, (4, 4)).transpose(1, 2),
}


def layer(w: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(through(x, 0.02, 3), w[0](), w[0].bias)


def quantized(gm: Any) -> list[fx.Node]:
    """What is quantized, of the nodes in all regions and outside."""
    graphs = [gm.graph, *(region.graph for region in gm.regions().values())]
    return [node.args[0] for graph in graphs for node in graph.nodes if is_call(node, ops.quantize)]


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("dtype", [U8, S8])
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_views_of_integers(view: str, dtype: torch.dtype) -> None:
    model = Integers(lambda w, x: through(VIEWS[view](layer(w, x)), 0.03, 5, dtype) * 2.0, Weight(16, 16))
    x = noise(2, 9, 16)
    plain = compile_graph(model, (x,))
    assert torch.equal(plain(x), model(x))
    assert is_call(quantized(plain)[-1], ops.linear)
    fast = optimized(model, x, scale=0.06)
    assert ran(fast)[0][:2] == ("matmul", U8)
    assert (torch.float32, dtype) not in reorders(fast)[1:]  # the first is that of the input


def test_it_stays_where_others_read_the_view_or_the_integers() -> None:
    def forward(w: Any, x: Tensor) -> Any:
        seen = layer(w, x).transpose(1, 2)
        return through(seen, 0.03, 5), seen + 1.0

    x = noise(2, 9, 16)
    plain = compile_graph(Integers(forward, Weight(16, 16)), (x,))
    assert is_call(quantized(plain)[-1], ops.transpose, ops.permute)

    def integers(w: Any, x: Tensor) -> Any:
        seen = torch.ops.quantized_decomposed.quantize_per_tensor.default(
            layer(w, x).transpose(1, 2), 0.03, 5, 0, 255, U8
        )
        return seen, real(seen, 0.03, 5)

    plain = compile_graph(Integers(integers, Weight(16, 16)), (x,))
    assert is_call(quantized(plain)[-1], ops.transpose, ops.permute)


@pytest.mark.needs("vnni")
def test_projections_that_are_quantized_apart_are_not_joined() -> None:
    def forward(w: Any, x: Tensor) -> Any:
        kept = through(x, 0.02, 3)
        q, k = (torch.nn.functional.linear(kept, each(), each.bias) for each in w)
        heads = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in (q, k))
        return [through(y, scale, 5) * 2.0 for y, scale in zip(heads, (0.03, 0.05), strict=True)]

    fast = optimized(Integers(forward, Weight(16, 16), Weight(16, 16, seed=1)), noise(2, 9, 16), scale=0.1)
    assert [kind for kind, source, _ in ran(fast) if source == U8].count("matmul") == 2
