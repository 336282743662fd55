"""Linear layers of 4-bit weights: PyTorch's kernel for a few rows, products with dequantized weights for many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import fx_passes.lower.products.int4 as lowering
from fx_passes import ops
from fx_passes.candidates.candidates import Candidate, Operation, PrimitiveTemplate, TorchTemplate, weights_of
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.lower.products.int4 import NAME
from fx_passes.lower.rules import lower_graph
from fx_passes.plan.prepack import WeightStore
from fx_passes.search.measure import TOLERANCE, Bench, fingerprint
from fx_passes.search.noise import twins_on_noise
from tests.support.int4_tensors import packed
from tests.support.lowering import noise
from zendnn_cffi.runtime.packed_int4 import block_here

F32, BF16 = torch.float32, torch.bfloat16


def lowered(
    shape: tuple[int, ...],
    n: int,
    *,
    group: int = 32,
    bias: bool = True,
    dtype: torch.dtype = BF16,
    inside: torch.dtype | None = None,
    block: int | None = None,
) -> tuple[Operation, RegionValues]:
    """A layer [..., K] to [..., N] with all its candidates."""
    graph = fx.Graph()
    x, added = graph.placeholder("x"), graph.get_attr("b") if bias else None
    block = block_here() if block is None else block
    nodes = x, graph.get_attr("w"), graph.get_attr("s"), group, block, added
    graph.output(graph.call_function(ops.int4_linear, nodes))
    _, weights, scales = packed(n, shape[-1], group, dtype)
    constants = {"w": weights, "s": scales, "b": noise(n, dtype=dtype)}
    (operation,), values = lower_graph(
        graph, [TensorSpec.of(torch.empty(shape, dtype=dtype))], constants, compute_dtype=inside
    )
    return operation, values


def kinds(candidate: Candidate) -> list[str]:
    """Each call: torch, or the kind of primitive."""
    return [call.kind if isinstance(call, PrimitiveTemplate) else "torch" for call in candidate.calls]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 5, 31, 32, 50, 64]),
    n=st.integers(1, 20).map(lambda i: 16 * i),
    k=st.sampled_from([64, 128, 192]),
    group=st.sampled_from([32, 64]),
    bias=st.booleans(),
    dtype=st.sampled_from([F32, BF16]),
    rank=st.integers(2, 4),
)
def test_all_candidates_compute_the_layer(
    rows: int, n: int, k: int, group: int, bias: bool, dtype: torch.dtype, rank: int
) -> None:
    shape = (*[1] * (rank - 2), rows, k)
    operation, values = lowered(shape, n, group=group, bias=bias, dtype=dtype)
    bench = Bench(operation, values)
    for candidate in operation.candidates:
        result = bench.check_and_time(candidate)
        assert result.right and result.error <= TOLERANCE[dtype], candidate.implementation


@pytest.mark.needs("bf16")
@pytest.mark.parametrize(
    ("rows", "dtype", "inside", "by_torch", "dequantized"),
    [
        (1, BF16, None, True, False),
        (31, BF16, None, True, False),
        (32, BF16, None, True, True),
        (500, BF16, None, True, True),
        (1, F32, None, False, True),  # that kernel has no vectors
        (64, F32, None, False, True),
        (1, F32, BF16, True, False),
        (64, F32, BF16, True, True),
    ],
)
def test_which_candidates_there_are(
    rows: int, dtype: torch.dtype, inside: torch.dtype | None, by_torch: bool, dequantized: bool
) -> None:
    operation, _ = lowered((rows, 64), 48, dtype=dtype, inside=inside)
    found = [c for c in operation.candidates if c.implementation == NAME]
    others = [c for c in operation.candidates if c not in found]
    assert [kinds(c) for c in found] == [["torch"]] * by_torch
    assert bool(others) == dequantized and all(kinds(c) == ["torch", "matmul"] for c in others)
    assert all(c.implementation.startswith("dequantized brg") for c in others[:1])


@pytest.mark.parametrize(("rows", "first"), [(32, NAME), (47, NAME), (48, "dequantized"), (500, "dequantized")])
def test_which_is_taken_where_times_are_estimates(rows: int, first: str) -> None:
    assert lowered((rows, 64), 48)[0].candidates[0].implementation.startswith(first)


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [512, 1040])
def test_some_outputs_at_a_time(n: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the temporary is small: the memory of a whole weight is what 4 bits are to save."""
    monkeypatch.setattr(lowering, "_WEIGHTS_AT_ONCE", 1)
    operation, values = lowered((64, 96), n, bias=bias)
    candidates = [c for c in operation.candidates if c.implementation != NAME]
    assert candidates[0].implementation.startswith("dequantized brg")
    for candidate in candidates:
        assert kinds(candidate) == ["torch", "matmul", "torch"] * -(-n // 256)
        result = Bench(operation, values).check_and_time(candidate)
        assert result.right and result.error <= TOLERANCE[BF16]


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("n", [96, 1040])
def test_no_second_copy_of_the_weights(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "_WEIGHTS_AT_ONCE", 1)
    operation, values = lowered((64, 96), n)
    store, storages = WeightStore(), {t.untyped_storage().data_ptr() for t in values.constants.values()}
    assert len(operation.candidates) > 1
    for candidate in operation.candidates:
        added = sum(store.added_bytes(weights, storages) for weights in weights_of(candidate))
        assert added <= 4 * n  # a bias in float32


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("block", [0, 32, 64])
def test_weights_that_another_machine_packed(block: int, rows: int) -> None:
    """Those of a file: here the bytes stand for other weights, and each candidate has to say which."""
    operation, values = lowered((rows, 64), 112, block=block)
    assert operation.candidates[-1 if rows > 1 else 0].implementation == NAME
    for candidate in operation.candidates:
        result = Bench(operation, values).check_and_time(candidate)
        assert result.right and result.error <= TOLERANCE[BF16], candidate.implementation


def test_candidates_are_checked_on_noise() -> None:
    operation, values = lowered((64, 64), 48)
    twins, noisy = twins_on_noise(operation, values, torch.Generator().manual_seed(0), fingerprint)
    assert twins and set(twins) == {fingerprint(c) for c in operation.candidates} and noisy is not values


@pytest.mark.parametrize("case", ["one row", "another dtype", "weights of the call", "groups"])
def test_what_stays_plain(case: str) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    _, weights, scales = packed(48, 64)
    group = 64 if case == "groups" else 32
    constants: dict[str, Any] = {"w": weights, "s": scales.float() if case == "another dtype" else scales}
    inputs = [torch.empty((64,) if case == "one row" else (3, 64), dtype=BF16)]
    w = graph.get_attr("w")
    if case == "weights of the call":
        w = graph.placeholder("given")
        inputs.append(weights)
    graph.output(graph.call_function(ops.int4_linear, (x, w, graph.get_attr("s"), group, block_here())))
    if case == "another dtype":  # eager raises, too
        with pytest.raises(RuntimeError, match="expected scalar type"):
            lower_graph(graph, list(map(TensorSpec.of, inputs)), constants)
        return
    (operation,), _ = lower_graph(graph, list(map(TensorSpec.of, inputs)), constants)
    (candidate,) = operation.candidates
    assert operation.fallback_reason and isinstance(candidate.calls[0], TorchTemplate)
