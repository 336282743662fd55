"""Measuring: wrong numbers are rejected, and nothing is measured twice."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.candidates import Operation, PrimitiveTemplate, TorchTemplate, measurable
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.lower.rules import lower_graph
from fx_passes.search import measure, tuner
from fx_passes.search.database import Result, kept_ns
from fx_passes.search.measure import Bench, fingerprint, is_rival
from fx_passes.search.tuner import Tuner, database_for
from fx_passes.search.turn import Turn
from tests.support.lowering import net, noise
from zendnn_cffi import descriptors
from zendnn_cffi.primitives.attributes import ARG_SRC, Attr, PostOps
from zendnn_cffi.primitives.primitive import PrimitiveDesc


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operations whose candidates were run, and "reorder" for reorders."""
    seen: list[str] = []
    check, time_reorder = Bench.check_and_time, measure.time_reorder
    monkeypatch.setattr(Bench, "check_and_time", lambda self, *a: seen.append(self.operation.name) or check(self, *a))
    monkeypatch.setattr(tuner, "time_reorder", lambda *a: seen.append("reorder") or time_reorder(*a))
    return seen


def lowered(
    shape: tuple[int, ...] = (1, 16, 8, 8), kind: str = "relu", weight: torch.Tensor | None = None
) -> tuple[list[Operation], RegionValues]:
    """One convolution with an eltwise post-op."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("w")
    graph.output(graph.call_function(ops.convolution, (x, w), {
        "stride": (1, 1), "padding_l": (1, 1), "padding_r": (1, 1), "dilation": (1, 1), "groups": 1,
        "post_ops": (("eltwise", kind, 0.0, 0.0),)}))  # fmt: skip
    return lower_graph(
        graph, [TensorSpec.of(torch.empty(shape))], {"w": noise(16, shape[1], 3, 3) if weight is None else weight}
    )


def test_every_candidate_of_a_plain_convolution_is_right() -> None:
    (operation,), values = lowered()
    assert len(operation.candidates) > 2
    bench = Bench(operation, values)
    for candidate in operation.candidates:
        result = bench.check_and_time(candidate)
        assert result.right and result.error < 5e-5 and 0 < result.time_ns < math.inf


def test_wrong_numbers_are_rejected(fresh: Path) -> None:
    """A candidate whose primitive computes something else (a missing post-op) is never used."""
    (operation,), values = lowered()
    good = operation.candidates[0]
    (template,) = good.calls
    assert isinstance(template, PrimitiveTemplate)
    wrong_pd = PrimitiveDesc(template.pd.op, Attr(PostOps().eltwise("relu", 0.7)))
    wrong = replace(good, implementation="fake", calls=(replace(template, pd=wrong_pd),), cost_ns=0.0)
    result = Bench(operation, values).check_and_time(wrong)
    assert not result.right and result.time_ns == math.inf and result.error > 1e-2
    operation.candidates = [wrong, good]
    for mode in ("full", "off"):
        assert not Tuner(mode).approve(operation, wrong, values)
        assert Tuner(mode).approve(operation, good, values)
    tuner_of_all = Tuner("full")
    tuner_of_all.price([operation], values)
    assert not tuner_of_all._scratch._free, "memory for measuring goes with it"
    assert [c.implementation for c in operation.candidates] == [good.implementation]


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("sign", (1, -1))
def test_a_result_of_one_number_is_checked_on_both_sides_of_a_relu(sign: int, fresh: Path) -> None:
    """The library's x64:gemm:jit leaves out the relu of such a convolution: right for positive numbers."""
    (operation,), values = lowered((1, 1, 1, 1), weight=sign * noise(1, 1, 3, 3))
    good = next(c for c in operation.candidates if Tuner("off").approve(operation, c, values))
    (template,) = good.calls
    assert isinstance(template, PrimitiveTemplate)
    without = replace(good, calls=(replace(template, pd=PrimitiveDesc(template.pd.op, Attr(PostOps()))),))
    assert not Tuner("off").approve(operation, without, values)


@pytest.mark.parametrize("value", (-3.0, 2.0))
def test_one_pixel(value: float, fresh: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.LeakyReLU(0.5)).eval()
    nn.init.ones_(model[0].weight)
    x = torch.full((1, 1, 1, 1), value)
    torch.testing.assert_close(zendnn_cffi.optimize(model, (x,), tune="off")(x), model(x).detach())


@pytest.mark.parametrize(
    "attributes",
    [{"output_scales": 0.5}, {"output_scales": [0.5] * 16, "output_scales_mask": 2}, {"zero_points": {ARG_SRC: 0}},
     {"scales": {ARG_SRC: (0, torch.float32)}}, {"woq_scales": (2, (1, 1), torch.float32)}],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_candidates_that_scale_otherwise_have_verdicts_of_their_own(attributes: dict[str, Any]) -> None:
    (operation,), _ = lowered()
    good = operation.candidates[0]
    (template,) = good.calls
    assert isinstance(template, PrimitiveTemplate)

    def with_attributes(**given: Any) -> str:
        attr = Attr(template.pd.attr.post_ops, **given)
        pd = SimpleNamespace(op=template.pd.op, implementation=template.pd.implementation, attr=attr)
        return fingerprint(replace(good, calls=(replace(template, pd=pd),)))  # type: ignore[arg-type]

    assert with_attributes() == fingerprint(good) == with_attributes(output_scales=None, zero_points={})
    assert with_attributes(**attributes) != fingerprint(good)
    if "output_scales" in attributes:
        assert with_attributes(output_scales=0.5) != with_attributes(output_scales=0.25)


def test_a_wrong_library_ends_in_plain_pytorch(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every convolution wrong, the result is still right."""
    right = descriptors.convolution

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **{**kwargs, "padding_l": (0, 2), "padding_r": (2, 0)})

    monkeypatch.setattr(descriptors, "convolution", wrong)
    model, x = net(lambda m, x: F.relu(m[0](x)), nn.Conv2d(3, 17, 3, padding=1)), noise(2, 3, 9, 8)
    for mode in ("off", "full"):
        gm = zendnn_cffi.optimize(model, tune=mode)
        torch.testing.assert_close(gm(x), model(x))
        (node,) = zendnn_cffi.explain(gm).nodes
        assert node.became == "torch" and node.reason


def test_a_refusing_candidate_is_passed_over(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Bench, candidate: Any, best_ns: float = math.inf) -> Any:
        raise zendnn_cffi.ZenDNNError("no")

    monkeypatch.setattr(Bench, "check_and_time", refuse)
    (operation,), values = lowered()
    assert not Tuner("full").approve(operation, operation.candidates[0], values)


def test_those_near_the_best_are_timed_again(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The better of two times counts, also where the disturbed one was the first; what is far behind has one."""
    (operation,), values = lowered()
    names = {fingerprint(c): number for number, c in enumerate(operation.candidates)}
    first = {number: 100.0 * (1 + number * 0.2) for number in names.values()}  # the third is 1.4 times behind
    again: list[int] = []

    def time_again(self: Bench, candidate: Any) -> float:
        number = names[fingerprint(candidate)]
        again.append(number)
        return 50.0 if number == 1 else 1e6

    monkeypatch.setattr(
        Bench, "check_and_time", lambda self, c, best_ns: Result(first[names[fingerprint(c)]], 0.0, True)
    )
    monkeypatch.setattr(Bench, "time_again", time_again)
    Tuner("full").price([operation], values)
    assert sorted(again) == [0, 1]
    expected = {**first, 1: 50.0}
    assert {names[fingerprint(c)]: c.cost_ns for c in operation.candidates} == expected
    Tuner("full").price([operation], values)
    assert len(again) == 2 and {names[fingerprint(c)]: c.cost_ns for c in operation.candidates} == expected


@pytest.mark.parametrize("mode", ("auto", "full"))
def test_a_warm_start_measures_nothing(mode: str, fresh: Path, runs: list[str]) -> None:
    model = net(lambda m, x: m[1](torch.cat([F.relu(m[0](x)), x], 1)), nn.Conv2d(16, 16, 3, padding=1),
                nn.Conv2d(32, 16, 1))  # fmt: skip
    x = noise(2, 16, 8, 8)
    first = zendnn_cffi.optimize(model, tune=mode, tune_seconds=math.inf)  # a slow machine leaves something otherwise
    first(x)
    assert runs and list(fresh.glob("*.sqlite"))
    runs.clear()
    zendnn_cffi.optimize(model, tune=mode, tune_seconds=math.inf)(x)
    assert runs == [], "in the same process"
    database_for.cache_clear()
    second = zendnn_cffi.optimize(model, tune=mode, tune_seconds=math.inf)
    second(x)
    assert runs == [], "from the file"
    assert str(zendnn_cffi.explain(first)) == str(zendnn_cffi.explain(second))


def test_full_measures_more_than_auto_and_off_only_checks(
    fresh: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {}
    for mode in ("off", "auto", "full"):
        monkeypatch.setenv("ZENDNN_CFFI_CACHE", "")
        database_for.cache_clear()
        runs.clear()
        (operation,), values = lowered((1, 32, 16, 16))
        Tuner(mode).price([operation], values)
        counts[mode] = len(runs)
    assert counts["off"] == 0 < counts["auto"] <= counts["full"]


def test_modes_are_named() -> None:
    with pytest.raises(ValueError, match="tune must be one of auto, full, off|tune must be one of auto, off, full"):
        Tuner("fast")


def test_progress_is_told(fresh: Path) -> None:
    (operation,), values = lowered()
    told: list[tuple[int, int]] = []
    Tuner("auto", lambda done, all: told.append((done, all))).price([operation], values)
    assert told and told[0] == (0, 1)


def test_equal_work_has_equal_keys() -> None:
    """Keys depend on shapes, post-ops and layouts, not on weights or names."""

    def keys(*args: Any) -> list[str]:
        return [fingerprint(c) for c in lowered(*args)[0][0].candidates]

    assert keys() == keys() and len(set(keys())) == len(keys())
    assert not set(keys()) & set(keys((2, 16, 8, 8))) and not set(keys()) & set(keys((1, 16, 8, 8), "abs"))


def test_reorders_of_other_shapes_have_other_keys() -> None:
    def keys(*widths: int) -> set[str]:
        graph = fx.Graph()
        nodes = [graph.placeholder(f"x{i}") for i in range(len(widths))]
        graph.output(graph.call_function(ops.concat, (tuple(nodes), 1)))
        operations, _ = lower_graph(graph, [TensorSpec.of(torch.empty(1, w, 4, 4)) for w in widths], {})
        return {fingerprint(c) for c in operations[0].candidates}

    assert keys(16, 32) and not keys(16, 32) & keys(32, 16)


def test_one_value_in_two_places_is_one_tensor() -> None:
    """x + conv(x): the reference and the candidate must see the same x twice."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("w")
    graph.output(graph.call_function(ops.convolution, (x, w), {
        "stride": (1, 1), "padding_l": (1, 1), "padding_r": (1, 1), "dilation": (1, 1), "groups": 1,
        "post_ops": (("binary", "add", x),)}))  # fmt: skip
    (operation,), values = lower_graph(graph, [TensorSpec.of(torch.empty(1, 16, 8, 8))], {"w": noise(16, 16, 3, 3)})
    bench = Bench(operation, values)
    assert bench.operands[0] is bench.operands[1]
    assert bench.check_and_time(operation.candidates[0]).right


def test_a_candidate_that_writes_nothing_is_wrong_after_a_right_one_too() -> None:
    """Memory is used again: the numbers of the one before must not be taken for its own."""
    (operation,), values = lowered()
    bench = Bench(operation, values)
    for good in operation.candidates:
        assert bench.check_and_time(good).right
        idle = replace(good, calls=())
        result = bench.check_and_time(idle)
        assert not result.right and result.error == pytest.approx(1.0)
    bench.close()


def test_candidates_that_overwrite_an_operand_leave_it_to_the_others() -> None:
    """conv(x) + y, written over y by some: the sum is right however often, and whoever was before."""
    graph = fx.Graph()
    x, y, w = graph.placeholder("x"), graph.placeholder("y"), graph.get_attr("w")
    own = graph.call_function(ops.eltwise, (y, "relu", 0.0, 0.0))
    graph.output(graph.call_function(ops.convolution, (x, w), {
        "stride": (1, 1), "padding_l": (1, 1), "padding_r": (1, 1), "dilation": (1, 1), "groups": 1,
        "post_ops": (("binary", "add", own),)}))  # fmt: skip
    specs = [TensorSpec.of(torch.empty(1, 16, 8, 8))] * 2
    operations, values = lower_graph(graph, specs, {"w": noise(16, 16, 3, 3)})
    operation = operations[-1]
    overwriting = [c for c in operation.candidates if c.overwrites is not None]
    assert overwriting
    bench = Bench(operation, values)
    for candidate in (*overwriting, *operation.candidates, *overwriting):
        result = bench.check_and_time(candidate)
        assert result.right, (candidate.implementation, result.error)


@pytest.mark.parametrize("position", (0, 3, 4, -1))
@pytest.mark.parametrize("kind", ("nan", "inf", "finite"))
def test_one_wrong_number_is_noticed_wherever_it_is(kind: str, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_CHUNK", 4)
    (operation,), values = lowered()
    bench = Bench(operation, values)
    bench.expected.view(-1)[position] += float({"finite": "1e-2"}.get(kind, kind)) * bench.expected.max()
    result = bench.check_and_time(operation.candidates[0])
    assert not result.right and result.time_ns == math.inf


def test_what_is_behind_is_run_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "run_ns", lambda program: program.append(1) or 1e5)
    runs: dict[float, int] = {}
    for best_ns in (math.inf, 1e5, 0.9e5, 0.5e5):
        program: list[int] = []
        assert measure.fastest_ns(program, 2e5, best_ns) == 1e5  # type: ignore[arg-type]
        runs[best_ns] = len(program)
    assert runs[math.inf] == runs[1e5] == runs[0.9e5] > runs[0.5e5] >= 3


def test_code_made_in_a_first_run_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product generates its kernel when it first runs: a candidate is not hopeless for that."""
    (operation,), values = lowered()
    bench, times = Bench(operation, values), iter((3e6, 2e4))
    monkeypatch.setattr(measure, "run_ns", lambda program: program.run_timed(()) and next(times, 2e4))
    assert bench.check_and_time(operation.candidates[0], best_ns=1e5).time_ns == kept_ns(2e4)
    times = iter((3e9,))
    assert bench.check_and_time(operation.candidates[0], best_ns=1e5).time_ns == kept_ns(3e9)


def test_what_was_not_measured_is_never_pytorch_beside_a_known_primitive(fresh: Path) -> None:
    (operation,), values = lowered()
    candidates = measurable(operation.candidates)
    own = next(c for c in candidates if not is_rival(c))
    key = TorchTemplate(torch.relu, "", key="plain convolution")
    rival = replace(own, implementation="torch", calls=(key,), srcs=(*own.srcs, own.dst), cost_ns=1.0)
    assert is_rival(rival)
    operation.candidates = [own, rival]
    given = Tuner("auto", turn=Turn(database_for(torch.get_num_threads()), 1, seconds=0.0))
    given.database.put(fingerprint(own), Result(50.0, 0.0, True))
    given.price([operation], values)
    assert [(c.implementation, c.cost_ns) for c in operation.candidates] == [(own.implementation, 50.0)]
    assert given.turn.left_out


def test_other_builds_of_a_version_have_results_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is right in one may be wrong in another."""
    file = tmp_path / "libamdZenDNN.so"

    def path_for(provider: str, content: str, **config: str) -> Path | None:
        file.write_text(content)
        library = SimpleNamespace(version="5.1.0", provider=provider, config=config, path=str(file))
        monkeypatch.setattr("zendnn_cffi.engine.library.load", lambda: library)
        database_for.cache_clear()
        return database_for(2, own_only=True).path

    published = {path_for("prebuilt", "a", sha256="1"), path_for("prebuilt", "a", sha256="1")}
    builds = {path_for("source", "a", sha256="1"), path_for("source", "a", sha256="2"), path_for("system", "longer")}
    assert len(published) == 1 and len(builds) == 3 and published.isdisjoint(builds)
    assert path_for("source", "elsewhere", sha256="2") in builds
    database_for.cache_clear()
