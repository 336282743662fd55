"""Fingerprints and estimates are made once for equal work, and are those that each would have had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.candidates import Candidate, Operation
from fx_passes.candidates.layouts import Numerics, Quantized, in_memory, layout
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.rules import lower_graph
from fx_passes.search import equal_work
from fx_passes.search.cost import estimate_ns
from fx_passes.search.equal_work import EqualWork
from fx_passes.search.measure import fingerprint
from tests.support.lowering import noise

NONE, RELU, CLIP = (), (("eltwise", "relu", 0.0, 0.0),), (("eltwise", "clip", 0.0, 6.0),)
Layer = tuple[int, int, tuple[tuple[str, str, float, float], ...]]
Change = Callable[[Operation], Operation]


def convolutions(*layers: Layer) -> list[Operation]:
    """A chain of 3x3 convolutions on 8 x 8 pixels: channels in, channels out, post-ops."""
    graph, parameters = fx.Graph(), {}
    value = graph.placeholder("x")
    for number, (inputs, outputs, post_ops) in enumerate(layers):
        parameters[f"w{number}"] = noise(outputs, inputs, 3, 3)
        value = graph.call_function(ops.convolution, (value, graph.get_attr(f"w{number}")), {
            "stride": (1, 1), "padding_l": (1, 1), "padding_r": (1, 1), "dilation": (1, 1), "groups": 1,
            "post_ops": post_ops})  # fmt: skip
    graph.output(value)
    return lower_graph(graph, [TensorSpec.of(torch.empty(1, layers[0][0], 8, 8))], parameters)[0]


class Estimates:
    """Estimates of the table, and the operations that they were made for."""

    def __init__(self) -> None:
        self.of: list[Operation] = []

    def __call__(self, operation: Operation) -> list[Candidate]:
        self.of.append(operation)
        return [replace(c, cost_ns=estimate_ns(operation, c, 1)) for c in operation.candidates]


def times_ns(candidates: list[Candidate]) -> list[float]:
    return [c.cost_ns for c in candidates]


@pytest.mark.needs("avx512")
def test_equal_layers_are_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Candidate] = []
    monkeypatch.setattr(equal_work, "fingerprint", lambda c: made.append(c) or fingerprint(c))
    first, other, again = convolutions((16, 16, RELU), (16, 16, CLIP), (16, 16, RELU))
    shared, estimates = EqualWork(), Estimates()
    for operation in (first, other, again):
        assert operation.candidates
        priced = shared.priced(operation, estimates, from_memory=False)
        assert times_ns(priced) == times_ns(Estimates()(operation))
        assert [c.calls for c in priced] == [c.calls for c in operation.candidates], "weights of another layer"
        assert [shared.fingerprint(c) for c in priced] == [fingerprint(c) for c in operation.candidates]
    assert estimates.of == [first, other]
    assert len(made) == len(first.candidates) + len(other.candidates)


def test_what_is_forgotten_elsewhere_is_not_taken_for_another() -> None:
    """Descriptors that nobody else holds keep their place in memory, by which work is told."""
    shared, seen = EqualWork(), set[str]()
    for limit in range(1, 30):
        (operation,) = convolutions((16, 16, (("eltwise", "clip", 0.0, float(limit)),)))
        found = [shared.fingerprint(c) for c in operation.candidates]
        assert found == [fingerprint(c) for c in operation.candidates]
        assert not seen & set(found)
        seen |= set(found)
        operation.candidates = []  # as after lowering


def _in_other_layouts(operation: Operation) -> Operation:
    other = layout((1, 16, 64, 64), torch.float32, "nhwc")
    return replace(operation, candidates=[replace(c, srcs=(other,), dst=other) for c in operation.candidates])


def _by_another_name(operation: Operation) -> Operation:
    return replace(operation, candidates=[replace(c, implementation="slow:sse41") for c in operation.candidates])


@pytest.mark.parametrize(
    "changed",
    [
        lambda operation: replace(operation, flops=1000 * operation.flops),
        lambda operation: replace(operation, kind="deconvolution"),
        lambda operation: replace(operation, candidates=operation.candidates[::-1]),
        lambda operation: replace(operation, candidates=operation.candidates[1:]),
        _in_other_layouts,
        _by_another_name,
    ],
    ids=["arithmetic", "kind", "order", "fewer", "layouts", "name"],
)
def test_other_work_has_other_estimates(changed: Change) -> None:
    (operation,) = convolutions((16, 16, RELU))
    shared, estimates = EqualWork(), Estimates()
    shared.priced(operation, estimates, from_memory=False)
    other = changed(operation)
    assert times_ns(shared.priced(other, estimates, from_memory=False)) == times_ns(Estimates()(other))
    assert estimates.of == [operation, other]
    shared.priced(operation, estimates, from_memory=True)
    assert estimates.of == [operation, other, operation]


def _of_integers(operation: Operation) -> Operation:
    numbers = Numerics(torch.uint8, 0.5, 3)
    kept = [replace(c, dst=Quantized(in_memory(c.dst), numbers)) for c in operation.candidates]
    return replace(operation, candidates=kept)


def _in_place(operation: Operation) -> Operation:
    return replace(operation, candidates=[*operation.candidates, replace(operation.candidates[0], slices_bytes=(0,))])


def _a_view(operation: Operation) -> Operation:
    return replace(operation, candidates=[*operation.candidates, replace(operation.candidates[0], calls=())])


@pytest.mark.parametrize("changed", [_of_integers, _in_place, _a_view])
def test_what_descriptors_do_not_tell_is_asked_each_time(changed: Change) -> None:
    operation = changed(convolutions((16, 16, RELU))[0])
    shared, estimates = EqualWork(), Estimates()
    for _ in range(2):
        assert times_ns(shared.priced(operation, estimates, from_memory=False)) == times_ns(Estimates()(operation))
    assert estimates.of == [operation, operation]
