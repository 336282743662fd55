"""Estimates learned from shipped times: what a file says, what it does not, and what becomes of a damaged one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.candidates import Operation, PrimitiveTemplate, TorchTemplate
from fx_passes.candidates.layouts import layout
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.rules import lower_graph
from fx_passes.search import cost, learned, shipped, tuner
from fx_passes.search.features import Facts, facts_of
from fx_passes.search.learned import Kernel, Learned
from fx_passes.search.tuner import Tuner
from tests.support.lowering import net, noise

SORTS = {"convolution float32": (0.06, 0.04)}
PLAIN = Kernel((1.0, 0.0), (5.0, 3.0), (7.0, 1.0, 0.25, 0.0))  # one factor of work, one other size, one product


def convolution(shape: tuple[int, ...] = (1, 16, 8, 8), outputs: int = 16, size: int = 3) -> Operation:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("w")
    padding = (size // 2,) * 2
    graph.output(graph.call_function(ops.convolution, (x, w), {
        "stride": (1, 1), "padding_l": padding, "padding_r": padding, "dilation": (1, 1), "groups": 1,
        "post_ops": (("eltwise", "relu", 0.0, 0.0), ("eltwise", "gelu_erf", 0.0, 0.0))}))  # fmt: skip
    inputs = [TensorSpec.of(torch.empty(shape))]
    (operation,), _ = lower_graph(graph, inputs, {"w": noise(outputs, shape[1], size, size)})
    return operation


def known(operation: Operation) -> dict[str, Kernel]:
    """Every kernel of an operation, the later ones the faster."""
    calls = [c.calls[0] for c in operation.candidates if len(c.calls) == 1]
    facts = [facts_of(call) for call in calls if isinstance(call, PrimitiveTemplate)]
    found = {}
    for number, fact in enumerate(fact for fact in facts if fact is not None):
        sizes = (*fact.work, *fact.others)
        products = len(fact.work) * (len(fact.work) + 1) // 2
        weights = (20.0 - number, *(0.0,) * (len(sizes) + products))
        found.setdefault(fact.kernel, Kernel(sizes, sizes, weights))
    return found


numbers = st.floats(-1e3, 1e3)
kernels = st.integers(1, 4).flatmap(
    lambda work: st.integers(work, work + 3).flatmap(
        lambda n: st.builds(
            Kernel,
            st.tuples(*[numbers] * n),
            st.tuples(*[numbers] * n),
            st.tuples(*[numbers] * (1 + n + work * (work + 1) // 2)),
        )
    )
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(max_size=9), kernels, max_size=5), st.dictionaries(st.text(), st.tuples(*[numbers] * 4)))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, of: dict[str, Kernel], reorders: dict[str, tuple[float, ...]]
) -> None:
    path = tmp_path_factory.mktemp("estimates") / "file.json"
    learned.write(path, {"machine": "m", "networks": ["a", "b"]}, of, reorders, SORTS)
    found = learned.read(path)
    assert found is not None and found.about == {"machine": "m", "networks": ["a", "b"]}
    assert (found._kernels, found._reorders, found.sorts) == (of, reorders, SORTS)
    before = path.read_bytes()
    learned.write(path, {"networks": ["a", "b"], "machine": "m"}, dict(reversed(of.items())), reorders, SORTS)
    assert path.read_bytes() == before, "the order does not matter"


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", "\x00", '{"kernels": {}, "reorders": {}}', '{"kernels": [], "reorders": {}, "sorts": {}}',
        '{"kernels": {"k": [[1.0], [2.0]]}, "reorders": {}, "sorts": {}}',
        '{"kernels": {"k": [[1.0], [2.0], [1.0, 2.0]]}, "reorders": {}, "sorts": {}}',
        '{"kernels": {"k": [[1.0], [2.0, 3.0], [1.0, 2.0, 3.0]]}, "reorders": {}, "sorts": {}}',
        '{"kernels": {"k": [[1.0], [2.0], [1.0, 2.0, NaN]]}, "reorders": {}, "sorts": {}}',
        '{"kernels": {"k": [[1.0], [2.0], [1.0, 2.0, "x"]]}, "reorders": {}, "sorts": {}}',
        '{"kernels": {}, "reorders": {"p": [1.0, 2.0, 3.0]}, "sorts": {}}',
        '{"kernels": {}, "reorders": {"p": 1}, "sorts": {}}', '{"kernels": {}, "reorders": {}, "sorts": {"s": [1.0]}}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_none(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    assert learned.read(path) is None and "cannot be read" in caplog.text
    assert learned.read(tmp_path / "absent") is None


def test_within_what_was_measured_it_interpolates_and_beyond_the_work_counts() -> None:
    found = Learned({}, {"k": PLAIN}, {}, SORTS)

    def time_ns(work: float, other: float = 0.0, size_bytes: int = 1 << 20) -> float:
        time = found.time_ns(Facts("k", (work,), (other,), size_bytes))
        assert time is not None
        return time

    assert time_ns(3.0) == 2.0**10 and time_ns(3.0, 2.0) == 2.0**10.5
    assert time_ns(0.0) == time_ns(1.0) == 2.0**8, "no less than the least that was measured"
    assert time_ns(6.0) > 2 * time_ns(5.0), "beyond, the share of the peak is unknown"
    assert time_ns(3.0, 9.0) == time_ns(3.0, 3.0)
    assert time_ns(3.0, size_bytes=1 << 30) - time_ns(3.0) > 1e9 / 100, "memory is slower than 100 GB/s"
    assert found.time_ns(Facts("another", (3.0,), (0.0,), 1)) is None


def test_facts_say_kernel_sizes_and_what_is_absorbed() -> None:
    operation = convolution((2, 24, 9, 7), outputs=40)
    calls = {c.implementation: c.calls[0] for c in operation.candidates if c.srcs[0].format == "nhwc"}
    call = next(call for name, call in calls.items() if name.startswith(("brgconv", "jit:")))
    assert isinstance(call, PrimitiveTemplate)
    facts = facts_of(call)
    assert facts is not None
    assert facts.kernel == f"convolution {call.pd.implementation} nhwc float32 nhwc float32"
    assert facts.work == tuple(map(math.log2, (24, 40, 2 * 9 * 7, 9)))
    stride, inputs, outputs, width, *absorbed = facts.others
    assert (stride, width) == (0.0, math.log2(7)) and absorbed[::2] == [1.0, 0.0] and 0 < absorbed[1] < 2
    assert (inputs, outputs) == (math.log2(32 / 24), math.log2(48 / 40))
    assert facts.size_bytes == 4 * (2 * 24 * 63 + 2 * 40 * 63 + 40 * 24 * 9)


def test_kernels_that_nothing_is_known_of_have_the_tables_time(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = convolution()
    monkeypatch.setattr(tuner, "learned_for", lambda threads: Learned({}, {"other": PLAIN}, {}, SORTS))
    priced = Tuner("off")._estimated(operation)
    expected = [cost.estimate_ns(operation, c, torch.get_num_threads()) for c in operation.candidates]
    assert [c.cost_ns for c in priced] == expected
    have, want = (layout((1, 16, 8, 8), torch.float32, tag) for tag in ("nhwc", "nChw16c"))
    assert Tuner("off").reorder_ns(have, want) == cost.reorder_ns(have, want)
    for sorts in ({}, {"convolution bfloat16": (0.06, 0.04)}):  # what the table predicts as well
        found = Learned({}, known(operation), {}, sorts)
        monkeypatch.setattr(tuner, "learned_for", lambda threads, found=found: found)
        assert [c.cost_ns for c in Tuner("off")._estimated(operation)] == expected


def test_what_is_not_known_does_not_come_before_what_is() -> None:
    table, some = [10.0, 20.0, 5.0, 40.0], [200.0, 100.0, None, None]
    times = cost.completed(table, some)
    assert times[:2] == [200.0, 100.0] and times[2] > 100.0 and times[3] == 40 * 12.5
    assert cost.completed(table, [None] * 4) == table


def test_a_candidate_with_a_call_of_pytorchs_is_not_known() -> None:
    operation = convolution()
    found = Learned({}, known(operation), {}, SORTS)
    candidate = operation.candidates[0]
    assert found.estimate_ns(candidate) is not None
    torch_call = TorchTemplate(lambda x: x, "", key="k")
    assert found.estimate_ns(replace(candidate, calls=(*candidate.calls, torch_call))) is None
    assert found.estimate_ns(replace(candidate, calls=())) is None
    twice = found.estimate_ns(replace(candidate, calls=candidate.calls * 2))
    assert twice == 2 * (found.estimate_ns(candidate) or 0.0)


def test_reorders_by_bytes_within_what_was_measured() -> None:
    have, want = (layout((1, 16, 64, 64), torch.float32, tag) for tag in ("nhwc", "nChw16c"))
    moved = have.size_bytes + want.size_bytes
    line = (math.log2(moved) - 1, math.log2(moved) + 1, -4.0, 0.5)
    found = Learned({}, {}, {learned.pair(have, want): line}, {})
    assert found.reorder_ns(have, want) == pytest.approx(moved * 2**-3.5)
    small = layout((1, 16, 1, 1), torch.float32, "nhwc")
    assert found.reorder_ns(small, layout((1, 16, 1, 1), torch.float32, "nChw16c")) == pytest.approx(
        2 * small.size_bytes * 2**-4
    )
    assert found.reorder_ns(want, have) is None


def test_off_chooses_by_what_was_learned(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    operation = convolution(size=1)
    found = Learned({}, known(operation), {}, SORTS)
    fastest = min(operation.candidates, key=lambda c: found.estimate_ns(c) or math.inf)
    monkeypatch.setattr(tuner, "learned_for", lambda threads: found)
    priced = Tuner("off")._estimated(operation)
    assert min(priced, key=lambda c: c.cost_ns).implementation == fastest.implementation


def test_a_model_is_right_by_the_packages_estimates(monkeypatch: pytest.MonkeyPatch, fresh: Path) -> None:
    monkeypatch.delenv(shipped.VARIABLE)
    used: list[float | None] = []
    estimate = Learned.estimate_ns
    monkeypatch.setattr(Learned, "estimate_ns", lambda self, c: used.append(estimate(self, c)) or used[-1])
    files = map(learned.read, sorted(shipped.FOLDER.glob("*.estimates.json")))
    known = next(found for found in files if found is not None and "convolution float32" in found.sorts)
    monkeypatch.setattr(tuner, "learned_for", lambda threads: known)
    model = net(lambda m, x: m[1](m[0](x).relu()), nn.Conv2d(19, 23, 3, padding=1), nn.Conv2d(23, 17, 1))
    x = noise(1, 19, 13, 11)
    fast = zendnn_cffi.optimize(model, tune="off")
    torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)
    assert any(used), "AVX-512 or not, float32 convolutions of some kernels are known"


def test_the_nearest_number_of_threads_of_this_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.delenv(shipped.VARIABLE)
    assert learned.learned_for(2) is None
    for name, threads in ((shipped.machine(), 1), (shipped.machine(), 8), ("0.0-other", 2)):
        learned.write(learned.path_of(name, threads), {"threads": threads}, {"k": PLAIN}, {}, SORTS)
    found = {threads: learned.learned_for(threads) for threads in (1, 2, 6, 64)}
    assert {n: None if f is None else f.about["threads"] for n, f in found.items()} == {1: 1, 2: 1, 6: 8, 64: 8}
    learned.path_of(shipped.machine(), 1).write_text("{")
    learned.read.cache_clear()
    assert (other := learned.learned_for(1)) is not None and other.about["threads"] == 8, "the damaged one is left out"
    monkeypatch.setenv(shipped.VARIABLE, "")
    assert learned.learned_for(2) is None, "switched off"


def test_the_packages_own_files_are_whole_and_more_work_takes_longer() -> None:
    paths = [*shipped.FOLDER.glob("*.estimates.json")]
    assert paths
    for path in paths:
        found = learned.read(path)
        assert found is not None and len(found) > 20 and found.about["networks"], path
        assert all(table > own >= 0 for table, own in found.sorts.values()), path
        content = json.loads(path.read_text())
        for name, (low, high, weights) in content["kernels"].items():
            work = 1
            while 1 + len(low) + work * (work + 1) // 2 < len(weights):
                work += 1
            for sizes in (low, high):
                facts = Facts(name, tuple(sizes[:work]), tuple(sizes[work:]), 0)
                more = facts._replace(work=tuple(most + 2 for most in high[:work]))
                first, second = found.time_ns(facts), found.time_ns(more)
                assert first is not None and second is not None and 0 < first < second < math.inf, (path, name)
