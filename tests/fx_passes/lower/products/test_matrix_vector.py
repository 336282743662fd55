"""Linear layers of one row: PyTorch's batched product beside the primitives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.candidates import Candidate, Operation
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.lower.products.matrix_vector import NAME
from fx_passes.lower.rules import lower_graph
from fx_passes.search.measure import TOLERANCE, Bench, is_rival
from tests.support.lowering import net, noise, offload

POST_OPS: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda y, z: y,
    "relu": lambda y, z: F.relu(y),
    "silu": lambda y, z: F.silu(y),
    "gelu": lambda y, z: F.gelu(y),
    "tanh gelu": lambda y, z: F.gelu(y, approximate="tanh"),
    "number": lambda y, z: y * 0.5 + 1,
    "gate": lambda y, z: F.silu(y) * z,
    "add": lambda y, z: y + z,
    "add and relu": lambda y, z: F.relu(z + y),
    "subtract and clip": lambda y, z: torch.clamp(y - z, -0.5, 0.5),
}


def lowered(
    shape: tuple[int, ...], n: int, bias: bool = True, dtype: torch.dtype = torch.float32, post_ops: Any = ()
) -> tuple[Operation, RegionValues]:
    """A linear layer [..., K] to [..., N] with all its candidates."""
    graph = fx.Graph()
    nodes = graph.placeholder("x"), graph.get_attr("w"), graph.get_attr("b") if bias else None
    graph.output(graph.call_function(ops.linear, nodes, {"post_ops": post_ops}))
    constants = {"w": noise(n, shape[-1]), "b": noise(n)}
    (operation,), values = lower_graph(
        graph, [TensorSpec.of(torch.empty(shape))], constants, compute_dtype=dtype, allow_winograd=True
    )
    return operation, values


def by_torch(operation: Operation) -> list[Candidate]:
    return [c for c in operation.candidates if c.implementation == NAME]


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 80).filter(lambda n: n % 2 == 0 or n % 3 == 0),  # pieces for one thread, too
    k=st.integers(1, 70),
    bias=st.booleans(),
    rank=st.integers(2, 4),
)
def test_same_numbers(n: int, k: int, bias: bool, rank: int) -> None:
    operation, values = lowered((*[1] * (rank - 1), k), n, bias)
    (candidate,) = by_torch(operation)
    result = Bench(operation, values).check_and_time(candidate)
    assert result.right and result.error <= TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("shape", "n", "dtype"),
    [
        ((2, 64), 64, torch.float32),  # two rows
        ((1, 3, 64), 64, torch.float32),
        ((1, 64), 67, torch.float32),  # no equal pieces
        ((1, 64), 1, torch.float32),
        pytest.param((1, 64), 64, torch.bfloat16, marks=pytest.mark.needs("bf16")),  # its batched product is slow
    ],
    ids=str,
)
def test_no_candidate(shape: tuple[int, ...], n: int, dtype: torch.dtype) -> None:
    operation, _ = lowered(shape, n, dtype=dtype)
    assert operation.candidates and not by_torch(operation)


def test_no_candidate_for_what_pytorch_has_no_function_that_writes_for() -> None:
    operation, _ = lowered((1, 64), 64, post_ops=(("eltwise", "swish", 1.7, 0.0),))
    assert operation.candidates and not by_torch(operation)


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_pieces_are_as_many_for_each_thread(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    (candidate,) = by_torch(lowered((1, 8), 48)[0])
    (template,) = candidate.calls
    assert "bmm of 4 " in template.key if threads == 1 else f"bmm of {4 * threads} " in template.key  # type: ignore[union-attr]


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("name", POST_OPS)
def test_post_ops(name: str, bias: bool, torch_is_fastest: list[Candidate]) -> None:
    """As part of a region, with what follows the product; the results of the whole are compared."""
    model = net(
        lambda m, x, z: m[1](POST_OPS[name](m[0](x), z)), nn.Linear(24, 48, bias=bias), nn.Linear(48, 40, bias=bias)
    )
    found = offload(model, noise(1, 24), noise(1, 48), tune="full")
    assert any(c.implementation == NAME for c in torch_is_fastest if is_rival(c))
    products = [node for node in found.nodes if node.implementation == NAME]
    assert len(products) == 2 and all(node.became == "torch" for node in products)


@pytest.mark.parametrize("bias", (True, False))
def test_the_residual_is_overwritten(bias: bool, torch_is_fastest: list[Candidate]) -> None:
    """What is added lies where the result goes."""
    model = net(
        lambda m, x: m[2](m[0](x) + m[1](F.relu(x))), *(nn.Linear(k, 48, bias=bias) for k in (24, 24)), nn.Linear(48, 8)
    )
    found = offload(model, noise(1, 24), tune="full")
    assert any(c.implementation == NAME and c.overwrites is not None for c in torch_is_fastest)
    assert sum(node.implementation == NAME for node in found.nodes) == 3


def test_weights_are_read_where_they_are(torch_is_fastest: list[Candidate]) -> None:
    """No packed copy of them."""
    model, x = net(lambda m, x: m[0](x), nn.Linear(64, 48)), noise(1, 64)
    gm = zendnn_cffi.optimize(model, (x,), tune="full")
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x))
    (region,) = gm.regions().values()
    assert torch_is_fastest and region.weights.size_bytes(region.originals) == 0
