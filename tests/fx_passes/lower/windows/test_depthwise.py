"""Products with one number for each sample and channel, as depthwise 1x1 convolutions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fx_passes import ops
from fx_passes.candidates.candidates import Candidate, Operation
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.lower.rules import lower_graph
from fx_passes.search.measure import Bench
from tests.support.lowering import net, noise, offload

DTYPES = (torch.float32, torch.bfloat16)


def product(value: tuple[int, ...], other: tuple[int, ...], dtype: torch.dtype, kind: str = "mul", swapped: bool = False
            ) -> tuple[Operation, RegionValues]:  # fmt: skip
    """A graph of one binary operation, lowered."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(graph.call_function(ops.binary, (y, x, kind) if swapped else (x, y, kind)))
    specs = [TensorSpec.of(torch.empty(shape)) for shape in (value, other)]
    (operation,), values = lower_graph(graph, specs, {}, compute_dtype=dtype)
    return operation, values


def depthwise(operation: Operation) -> list[Candidate]:
    return [c for c in operation.candidates if "_dw" in c.implementation]


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("swapped", (False, True))
@pytest.mark.parametrize(
    "shape", ((1, 16, 3, 5), (3, 32, 2, 1), (2, 17, 4, 3), (1, 1, 5, 2), (1, 72, 7, 7), (33, 16, 2, 2)), ids=str
)
def test_gates_are_weights(shape: tuple[int, ...], swapped: bool, dtype: torch.dtype) -> None:
    """Every such candidate is right; blocks take one call, channels-last samples one each, up to a limit."""
    operation, values = product(shape, (*shape[:2], 1, 1), dtype, swapped=swapped)
    found = depthwise(operation)
    calls = {c.dst.format: len(c.calls) for c in found}
    assert calls["nChw16c"] == 1
    if shape[1] % 16 == 0:
        assert calls.get("nhwc") == (shape[0] if shape[0] <= 32 else None)
    bench = Bench(operation, values)
    for candidate in found:
        assert bench.check_and_time(candidate).error <= (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(
    ("other", "kind"),
    (((2, 32, 1, 1), "add"), ((2, 32, 4, 4), "mul"), ((1, 32, 1, 1), "mul"), ((2, 1, 1, 1), "mul"),
     ((2, 32, 1, 4), "mul"), ((32, 1, 1), "mul")),
    ids=str,
)  # fmt: skip
def test_other_operands_are_no_gates(other: tuple[int, ...], kind: str) -> None:
    """Nor is another function, or a factor that several samples share."""
    operation, _ = product((2, 32, 4, 4), other, torch.float32, kind)
    assert not depthwise(operation)


def test_no_image_is_no_gate() -> None:
    assert not depthwise(product((2, 32, 1, 1), (2, 32, 1, 1), torch.float32)[0])
    assert not depthwise(product((2, 32, 4), (2, 32, 1), torch.float32)[0])


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("batch", (1, 3))
def test_squeeze_and_excite(batch: int, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a network, where the product overwrites the value, and where it must not."""
    monkeypatch.setattr("fx_passes.search.cost._CALL_NS", 0.0)  # a call for each sample costs no more than one
    convolutions = (
        nn.Conv2d(3, 32, 3), nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1), nn.Conv2d(32, 16, 1)
    )  # fmt: skip

    def gated(m: nn.ModuleList, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.relu(m[0](x))
        return y, torch.sigmoid(m[2](F.relu(m[1](F.adaptive_avg_pool2d(y, 1))))) * y

    for fn in (lambda m, x: m[3](gated(m, x)[1]), lambda m, x: m[3](sum(gated(m, x)))):
        found = offload(net(fn, *convolutions), noise(batch, 3, 12, 13), dtype=dtype)
        (node,) = [node for node in found.nodes if node.became == "binary" and "mul" in node.name]
        assert "_dw" in node.implementation
