"""Gate and up projections of one row: one operation, by two primitives or one product of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.candidates import Candidate, Operation, PrimitiveTemplate, TorchTemplate
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.lower.products import gated_rows
from fx_passes.lower.products.matrix_vector import NAME
from fx_passes.lower.rules import lower_graph
from fx_passes.search.measure import TOLERANCE, Bench, is_rival
from tests.support.lowering import net, noise, offload

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swish": F.silu,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "logistic": torch.sigmoid,
    "tanh": torch.tanh,
}


def lowered(
    shape: tuple[int, ...] = (1, 24),
    sizes: tuple[int, int] = (16, 16),
    activation: tuple[Any, ...] = ("swish", 1.0, 0.0),
    *,
    bias: str = "",
    read_again: str = "",
    kind: str = "mul",
    other_input: bool = False,
    **options: Any,
) -> tuple[list[Operation], RegionValues]:
    """up(x) * activation(gate(x)), as fused, and what becomes of it."""
    graph = fx.Graph()
    x, other = graph.placeholder("x"), graph.placeholder("other")
    constants = {"a": noise(sizes[0], shape[-1]), "b": noise(sizes[1], shape[-1])}
    weights = {name: graph.get_attr(name) for name in constants}
    biases: dict[str, fx.Node | None] = dict.fromkeys(("a", "b"))
    if bias:
        constants["bias"], biases[bias] = noise(sizes[0]), graph.get_attr("bias")
    post_ops: dict[str, Any] = {"post_ops": (("eltwise", *activation),)}
    gate = graph.call_function(ops.linear, (x, weights["a"], biases["a"]), post_ops)
    post_ops = {"post_ops": (("binary", kind, gate),)}
    up = graph.call_function(ops.linear, (other if other_input else x, weights["b"], biases["b"]), post_ops)
    graph.output((up, gate) if read_again else up)
    spec = TensorSpec.of(torch.empty(shape))
    return lower_graph(graph, [spec, spec], constants, **options)


def joined(operations: list[Operation]) -> list[Operation]:
    return [operation for operation in operations if operation.name != operation.node.name]


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(8, 40),  # of one number alone, the error may be large beside it
    k=st.integers(1, 70),
    rank=st.integers(2, 4),
    activation=st.sampled_from([*ACTIVATIONS]),
)
def test_every_candidate_gives_the_same_numbers(n: int, k: int, rank: int, activation: str) -> None:
    operations, values = lowered((*[1] * (rank - 1), k), (n, n), (activation, float(activation == "swish"), 0.0))
    (operation,) = joined(operations)
    assert len(operations) == 1 and not operation.fallback_reason
    in_primitives = [c for c in operation.candidates if not is_rival(c)]
    assert in_primitives and all(
        [type(call) for call in c.calls] == [PrimitiveTemplate, PrimitiveTemplate] for c in in_primitives
    )
    (by_torch,) = (c for c in operation.candidates if is_rival(c))  # 2 n rows are two pieces at least
    assert by_torch.implementation.startswith(NAME) and len(by_torch.calls) == 3
    bench = Bench(operation, values)
    for candidate in operation.candidates:
        assert sum(call.flops or 0 for call in candidate.calls) == operation.flops == 2 * (2 * n) * k
        result = bench.check_and_time(candidate)
        assert result.right and result.error <= TOLERANCE[torch.float32], candidate.implementation


@pytest.mark.parametrize(
    "options",
    [
        {"shape": (2, 24)},  # two rows
        {"shape": (1, 3, 24)},
        {"sizes": (16, 1)},  # broadcast
        {"bias": "a"},
        {"bias": "b"},
        {"kind": "add"},
        {"read_again": "gate"},
        {"other_input": True},
        {"activation": ("hardsigmoid", 0.0, 0.0)},  # two post-ops of the library
        {"compute_dtype": torch.bfloat16},
        {"join_rows": False},
    ],
    ids=str,
)
def test_near_misses_stay_two_operations(options: dict[str, Any]) -> None:
    operations, _ = lowered(**options)
    assert not joined(operations)
    assert sum(operation.node.target is ops.linear for operation in operations) == 2


def test_without_kernels_pytorch_computes_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_rows, "_pairs", lambda *_: iter(()))
    operations, values = lowered()
    (operation,) = operations
    (candidate,) = operation.candidates
    (template,) = candidate.calls
    assert "no optimized product" in operation.fallback_reason and isinstance(template, TorchTemplate)
    assert [node.name for node in operation.operands] == ["x"]
    x = noise(1, 24)
    gate, up = (values.constants[node] for node in values.constants)
    torch.testing.assert_close(template.function(x), F.silu(x @ gate.T) * (x @ up.T))


def test_saved_with_both_in_one_product(torch_is_fastest: list[Candidate], tmp_path: Path) -> None:
    model, x = Gated().eval(), noise(1, 24)
    gm = zendnn_cffi.optimize(model, (x,), tune="full")
    with torch.no_grad():
        gm(x)
        zendnn_cffi.save(gm, tmp_path / "m.safetensors")
        again = zendnn_cffi.load(tmp_path / "m.safetensors")
        torch.testing.assert_close(again(x), model(x))
    (region,) = again.regions().values()
    assert torch_is_fastest and region.known.used == 1
    (lowered,) = region.lowered.values()
    names = [call.name for call in lowered.program.calls]
    assert len({name for name in names if "gate" in name}) == 1 and names.count(names[0]) == 3
    assert zendnn_cffi.explain(again).nodes == zendnn_cffi.explain(gm).nodes


class Gated(nn.Module):
    """down(activation(gate(x)) * up(x)), as decoders have it."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.silu, tied: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(24, 40, bias=False)
        self.up = self.gate if tied else nn.Linear(24, 40, bias=False)
        self.down = nn.Linear(40, 24, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.activation(self.gate(x)) * self.up(x))
        return result


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_in_a_network(name: str, torch_is_fastest: list[Candidate]) -> None:
    model = net(lambda m, x: m[1](m[0](x)), Gated(ACTIVATIONS[name]), Gated(ACTIVATIONS[name]))
    found = offload(model, noise(1, 1, 24), tune="full")
    gated = [node for node in found.nodes if "gate" in node.name]
    assert torch_is_fastest and len(found.nodes) == 4
    assert [node.became for node in gated] == ["inner_product"] * 2
    assert all(node.implementation.startswith(NAME) for node in gated)


def test_in_a_network_by_primitives() -> None:
    """Whatever is faster: two rows, then one, of one module."""
    model = Gated().eval()
    gm = zendnn_cffi.optimize(model)
    with torch.no_grad():
        for shape in ((2, 24), (1, 24), (1, 1, 24)):
            x = noise(*shape)
            torch.testing.assert_close(gm(x), model(x))


def test_tied_weights() -> None:
    model = Gated(torch.tanh, tied=True).eval()
    gm = zendnn_cffi.optimize(model)
    with torch.no_grad():
        torch.testing.assert_close(gm(noise(1, 24)), model(noise(1, 24)))


def test_both_matrices_are_packed_once_for_all_ranks(torch_is_fastest: list[Candidate]) -> None:
    gm = zendnn_cffi.optimize(Gated().eval())
    with torch.no_grad():
        gm(noise(1, 24)), gm(noise(1, 1, 24))
    (region,) = gm.regions().values()
    packed = region.weights.by_name()
    assert torch_is_fastest and [len(copies) for name, copies in packed.items() if "gate" in name] == [1]


def test_weights_written_later_count() -> None:
    model = Gated().eval()
    gm = zendnn_cffi.optimize(model)
    with torch.no_grad():
        gm(noise(1, 24))
        gm.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        expected = Gated().eval()
        expected.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        torch.testing.assert_close(gm(noise(1, 24)), expected(noise(1, 24)))


def test_released_weights_are_not_copied() -> None:
    """Packed or plain, each matrix is there once."""
    gm = zendnn_cffi.optimize(Gated().eval(), release_weights=True)
    with torch.no_grad():
        gm(noise(1, 24))
    assert sorted(node.name for node in zendnn_cffi.explain(gm).nodes) == ["down", "gate", "up"]


@pytest.mark.parametrize("learned", ["row", "row and weights"])
def test_of_a_constant_row(learned: str) -> None:
    """As of a learned query: nothing depends on the input, or the weights alone do."""

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row, self.weights = nn.Parameter(noise(1, 24)), nn.Linear(24, 2 * 40 * 24)
            self.gate, self.up = nn.Linear(24, 40, bias=False), nn.Linear(24, 40, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            if learned == "row":
                a, b = self.gate.weight, self.up.weight
            else:
                a, b = self.weights(x).view(2, 40, 24)
            return F.silu(F.linear(self.row, a)) * F.linear(self.row, b) + self.up(x)

    offload(Learned().eval(), noise(1, 24), tune="full")
    estimated = offload(Learned().eval(), noise(1, 24), tune="off")
    assert any(node.became == "inner_product" for node in estimated.nodes)  # PyTorch's is as fast on some CPUs
