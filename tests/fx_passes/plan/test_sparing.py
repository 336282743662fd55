"""Implementations that need no copy of the weights, or a smaller one, where they are about as fast."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.candidates import Candidate, Operation
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.rules import lower_graph
from fx_passes.plan.prepack import WeightStore
from fx_passes.plan.sparing import LITTLE, added_bytes, spare_weights
from fx_passes.region.region import weights_bytes
from tests.support.lowering import noise
from tests.tolerance import assert_close

WEIGHT = noise(64, 64, 3, 3)


def always(chosen: Candidate, other: Candidate) -> bool:
    return True


def convolution() -> tuple[Operation, Candidate, Candidate]:
    """A convolution; Winograd's candidate and a direct one that stands in for it."""
    graph = fx.Graph()
    sizes = {"stride": (1, 1), "padding_l": (1, 1), "padding_r": (1, 1), "dilation": (1, 1), "groups": 1}
    operands = graph.placeholder("x"), graph.get_attr("w")
    value = graph.call_function(ops.convolution, operands, {**sizes, "post_ops": ()})
    graph.output(value)
    ((operation,), _) = lower_graph(graph, [TensorSpec.of(torch.empty(1, 64, 14, 14))], {"w": WEIGHT})
    by_place: dict[Any, list[Candidate]] = {}
    for candidate in operation.candidates:
        by_place.setdefault((candidate.srcs, candidate.dst), []).append(candidate)
    for rivals in by_place.values():
        transformed = [c for c in rivals if "wino" in c.implementation]
        direct = [c for c in rivals if "wino" not in c.implementation]
        if transformed and direct:
            return operation, transformed[0], direct[0]
    raise AssertionError("no layouts have both")


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("factor, is_spared", ((0.9, True), (LITTLE - 0.001, True), (LITTLE + 0.001, False)))
def test_a_smaller_copy_is_taken_where_it_costs_little(factor: float, is_spared: bool) -> None:
    operation, transformed, direct = convolution()
    chosen, other = replace(transformed, cost_ns=1e5), replace(direct, cost_ns=factor * 1e5)
    operation.candidates = [chosen, other]
    store = WeightStore()
    assert added_bytes(chosen, store, ()) > added_bytes(other, store, ()) > 0
    assert spare_weights([operation], [chosen], store, (), always) == [other if is_spared else chosen]
    assert spare_weights([operation], [other], store, (), always) == [other]
    assert spare_weights([operation], [chosen], store, (), lambda *_: False) == [chosen]


@pytest.mark.needs("avx512")
def test_what_is_packed_already_costs_nothing() -> None:
    operation, transformed, direct = convolution()
    chosen, other = replace(transformed, cost_ns=1e5), replace(direct, cost_ns=1e5)
    operation.candidates = [chosen, other]
    store = WeightStore()
    (template,) = chosen.calls
    kept = [store.get(a) for a in template.args.values() if type(a).__name__ == "Weights"]  # type: ignore[union-attr]
    assert kept and added_bytes(chosen, store, ()) == 0
    assert spare_weights([operation], [chosen], store, (), always) == [chosen]
    assert spare_weights([operation], [replace(other)], store, (), always) == [chosen]


class Large(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(wide, 2048), nn.Linear(2048, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(F.relu(self.a(x)))


@pytest.mark.parametrize("wide, is_read_where_it_lies", ((2048, True), (640, False)))
def test_one_row_reads_large_weights_where_they_lie(wide: int, is_read_where_it_lies: bool) -> None:
    torch.manual_seed(0)
    model = Large(wide).eval()
    oracle = copy.deepcopy(model).double()
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    for rows in (1, 3):
        x = noise(rows, wide)
        assert_close(fast(x), oracle(x.double()).detach(), k=2048)
        (region,) = fast.regions().values()
        parameters, packed = weights_bytes([region])
        nodes = [*region.lowered.values()][-1].nodes
        spared = [node for node in nodes if node.implementation == "torch:bmm"]
        if rows == 1 and is_read_where_it_lies:
            assert packed == 0 and len(spared) == 2
            reasons = ("no copy of the weights", "reads the weights from memory faster")  # the last cache decides
            assert all(any(reason in node.reason for reason in reasons) for node in spared)
        else:
            assert 0.9 * parameters < packed < 1.1 * parameters and not spared
