"""Recurrent layers of one sample by products of one row."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.candidates import Candidate, LoopTemplate, weights_of
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.recurrent import steps
from fx_passes.lower.rules import lower_graph
from fx_passes.plan.prepack import layout_key
from fx_passes.region.lowered import LoweredRegion
from fx_passes.search.turn import Turn
from tests.support.lowering import noise, tensors
from tests.support.made_up_times import prefer
from tests.tolerance import assert_close
from zendnn_cffi.engine.openmp import computing_with
from zendnn_cffi.runtime.loop_call import LoopCall
from zendnn_cffi.runtime.other_threads import for_threads

NETWORKS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
KINDS = ("steps brg:avx512_core", "steps brgemm:avx512_core")  # by matmul, by inner_product


@pytest.fixture(params=KINDS, ids=["matmul", "inner_product"])
def by_steps(request: Any, monkeypatch: pytest.MonkeyPatch, fresh: Path) -> str:
    """Layers of any size are computed by steps, with products of one kind; which one."""
    monkeypatch.setattr(steps, "_LEAST_BYTES", dict.fromkeys(NETWORKS, 0))
    prefer(monkeypatch, lambda candidate: candidate.implementation == request.param)
    return str(request.param)


def loops(fast: Any) -> int:
    """How many layers are computed by steps."""
    return sum(isinstance(call, LoopCall) for found in lowerings(fast) for call in found.program.calls)


def lowerings(fast: Any) -> list[LoweredRegion]:
    return [found for region in fast.regions().values() for found in region.lowered.values() if found]


def states_of(kind: str, rows: int, hidden: int) -> Any:
    h, c = noise(rows, 1, hidden).tanh(), noise(rows, 1, hidden, seed=1)
    return (h, c) if kind == "lstm" else h


def compare(model: nn.Module, *inputs: Any, k: int, expected_loops: int) -> Any:
    fast = zendnn_cffi.optimize(model, inputs, tune="full")
    wide = model.double()
    with torch.no_grad():
        expected = tensors(wide(*torch.utils._pytree.tree_map(lambda t: t.double(), inputs)))
        model.float()
        for _ in range(2):
            for ours, e in zip(tensors(fast(*inputs)), expected, strict=True):
                assert_close(ours, e, k=k)
    assert loops(fast) == expected_loops
    return fast


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_stacks(kind: str, bidirectional: bool, bias: bool, by_steps: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[kind](24, 32, 2, bidirectional=bidirectional, bias=bias).eval()
    compare(model, noise(7, 1, 24), k=64, expected_loops=2 * (1 + bidirectional))


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("kind", NETWORKS)
def test_states_in_and_out(kind: str, by_steps: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[kind](24, 32, bidirectional=True, batch_first=True).eval()
    compare(model, noise(1, 5, 24), states_of(kind, 2, 32), k=64, expected_loops=2)


@pytest.mark.needs("avx512")
@given(
    kind=st.sampled_from(list(NETWORKS)), inputs=st.integers(1, 70), hidden=st.integers(1, 70), count=st.integers(2, 9)
)
@settings(max_examples=12, deadline=None)
def test_odd_sizes(kind: str, inputs: int, hidden: int, count: int) -> None:
    torch.manual_seed(0)
    model = NETWORKS[kind](inputs, hidden).eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "_LEAST_BYTES", dict.fromkeys(NETWORKS, 0))
        measured = prefer(patch, lambda candidate: candidate.implementation.startswith("steps"))
        compare(model, noise(count, 1, inputs), k=max(inputs, hidden), expected_loops=1)
    assert any(candidate.implementation in KINDS for candidate in measured)


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh"])  # relu makes 0 of a NaN: docs/low-level.md
def test_what_is_not_finite_or_large_comes_through(kind: str, number: float, by_steps: str) -> None:
    """From the step on that it is given to, and not before."""
    torch.manual_seed(0)
    model, x = NETWORKS[kind](8, 16).eval(), noise(6, 1, 8)
    fast: Any = zendnn_cffi.optimize(model, (x,), tune="full")
    x[3, 0, 2] = number
    with torch.no_grad():
        torch.testing.assert_close(fast(x)[0], model(x)[0], equal_nan=True, rtol=1e-4, atol=1e-5)
    assert loops(fast) == 1


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("tune", ["full", "auto"])
def test_large_weights_by_default(tune: str, monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    """Both kinds of product are measured beside the library's primitive and PyTorch's layer."""
    monkeypatch.setattr(Turn, "allows", lambda *_, **__: True)  # whatever else the machine does
    measured = prefer(monkeypatch, lambda candidate: candidate.implementation == "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the region could not be lowered
        offered(nn.LSTM(64, 320), noise(3, 1, 64), tune=tune)
    assert {c.implementation for c in measured} >= {*KINDS, "brgemm", "torch"}
    assert all(any(isinstance(t, LoopTemplate) for t in c.calls) for c in measured if c.implementation in KINDS)


def offered(model: nn.Module, x: Tensor, **options: Any) -> None:
    with torch.no_grad():
        zendnn_cffi.optimize(model.eval(), (x,), **{"tune": "full", **options})(x)


REFUSALS: dict[str, Any] = {
    "two samples": (lambda: nn.LSTM(64, 320), (3, 2, 64), None),
    "one step": (lambda: nn.LSTM(64, 320), (1, 1, 64), None),
    "small weights": (lambda: nn.LSTM(64, 256), (3, 1, 64), None),
    "bfloat16": (lambda: nn.LSTM(64, 320), (3, 1, 64), torch.bfloat16),
    "a projection": (lambda: nn.LSTM(64, 1024, proj_size=64), (3, 1, 64), None),
}


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("reason", REFUSALS)
def test_near_misses(reason: str, monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    make, shape, dtype = REFUSALS[reason]
    measured: list[Candidate] = prefer(monkeypatch, lambda candidate: candidate.implementation == "torch")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LSTM with projections")
        offered(make(), noise(*shape), dtype=dtype)
    assert measured and not any(candidate.implementation.startswith("steps") for candidate in measured)


def test_an_estimate_takes_the_primitive(fresh: Path) -> None:
    model, x = nn.LSTM(64, 512).eval(), noise(3, 1, 64)
    fast: Any = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        fast(x)
    assert loops(fast) == 0


@pytest.mark.needs("avx512")
def test_other_lengths_share_the_weights(by_steps: str) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(24, 32).eval()
    fast: Any = zendnn_cffi.optimize(model, tune="full")
    packed = []
    with torch.no_grad():
        for count in (5, 9, 5, 2):
            x = noise(count, 1, 24)
            assert_close(fast(x)[0], model(x)[0], k=64)
            packed.append(zendnn_cffi.explain(fast).weights.packed_bytes)
    assert loops(fast) == 3 and len(set(packed)) == 1


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("kind", NETWORKS)
def test_saved_and_loaded(kind: str, by_steps: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = NETWORKS[kind](24, 32, bidirectional=True).eval(), noise(5, 1, 24)
    fast: Any = zendnn_cffi.optimize(model, (x,), tune="full")
    with torch.no_grad():
        expected = tensors(fast(x))
        zendnn_cffi.save(fast, tmp_path / "network.safetensors")
        again: Any = zendnn_cffi.load(tmp_path / "network.safetensors")
        for ours, e in zip(tensors(again(x)), expected, strict=True):
            assert torch.equal(ours, e)
    assert loops(again) == 2


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("kind", NETWORKS)
def test_one_thread_gives_the_same_bits(kind: str, by_steps: str) -> None:
    torch.manual_seed(0)
    model, x = NETWORKS[kind](24, 32).eval(), noise(5, 1, 24)
    fast: Any = zendnn_cffi.optimize(model, (x,), tune="full")
    with torch.no_grad():
        fast(x)
    (found,) = lowerings(fast)
    alone = for_threads(found.program, 1, [x])
    assert alone is not None
    made = [call for call in alone.calls if isinstance(call, LoopCall)]
    assert [p.num_threads for p, _ in made[0].steps] == [1] * len(made[0].steps)
    with computing_with(1):
        for ours, e in zip(alone([x]), found.program([x]), strict=True):
            assert torch.equal(ours, e)


@pytest.mark.needs("avx512")
def test_profile_and_debug_text(by_steps: str) -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(24, 32).eval(), noise(5, 1, 24)
    fast: Any = zendnn_cffi.optimize(model, (x,), tune="full")
    with torch.no_grad():
        fast(x)
    from fx_passes.report.debug_folder import program_text

    (found,) = lowerings(fast)
    assert "4 rounds of 3 primitives on" in program_text(found)
    rows = [row for row in zendnn_cffi.profile(fast, x).records if row.kind == "rnn"]
    assert sum(row.flops for row in rows) == 5 * 2 * 32 * 4 * 32


@pytest.mark.parametrize("kind", NETWORKS)
def test_layers_that_share_some_biases(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is packed for one is no other's."""
    monkeypatch.setattr(steps, "_LEAST_BYTES", dict.fromkeys(NETWORKS, 0))
    size = 8 * ops.GATES[kind]
    parameters = {"w": noise(size, 8), "r": noise(size, 8, seed=1)} | {f"b{i}": noise(size, seed=i) for i in range(3)}
    graph = fx.Graph()
    x, (w, r, *biases) = graph.placeholder("x"), [graph.get_attr(name) for name in parameters]
    for other in biases[1:]:
        x = graph.call_function(ops.recurrent_layer, (x, None, None, (w, r, biases[0], other), kind))
    graph.output(x)
    operations, _ = lower_graph(graph, [TensorSpec.of(noise(3, 1, 8))], parameters)
    packed: dict[tuple[Any, ...], Tensor] = {}
    for candidate in (c for operation in operations for c in operation.candidates):
        for weights in weights_of(candidate):
            plain = weights.computed().plain
            known = packed.setdefault((weights.key, layout_key(weights.desc), weights.transposed), plain)
            assert torch.equal(known, plain), weights.key
    assert any(key.endswith("by steps") for key, *_ in packed)
