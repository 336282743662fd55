"""Times that ship with the package: read as measurements on their kind of CPU, as estimates on others."""

from __future__ import annotations

import math
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.candidates import Candidate
from fx_passes.candidates.layouts import Numerics, Quantized, layout
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.rules import lower_graph
from fx_passes.region.key import region_key
from fx_passes.search import cost, measure, shipped
from fx_passes.search.database import Database, Result, Source, kept_ns
from fx_passes.search.measure import Bench, fingerprint
from fx_passes.search.tuner import Tuner, database_for
from fx_passes.search.turn import Turn
from tests.support import torchvision_models
from tests.support.lowering import net, noise

times = st.floats(1e-2, 3e10)
results = st.builds(Result, times, st.just(0.0), st.just(True))


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=20), results, max_size=40))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, known: dict[str, Result]) -> None:
    path = tmp_path_factory.mktemp("times") / "file.times"
    shipped.write(path, known, {"machine": "m"})
    found = shipped.read(path)
    assert found is not None and len(found) == len(known) and found.about["machine"] == "m"
    for key, result in known.items():
        read = found.get(key)
        assert read is not None and read.right
        assert math.isclose(read.time_ns, result.time_ns, rel_tol=1e-3)
    assert found.get("some other key, longer than those") is None


def test_wrong_numbers_and_what_never_ends_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "file.times"
    shipped.write(path, {"wrong": Result(math.inf, 1.0, False), "never": Result(math.inf, 0.0, True)}, {})
    found = shipped.read(path)
    assert found is not None
    wrong, never = found.get("wrong"), found.get("never")
    assert wrong is not None and not wrong.right
    assert never is not None and never.right and math.isinf(never.time_ns)


def test_a_file_grows_and_newer_times_win(tmp_path: Path) -> None:
    path = tmp_path / "file.times"
    shipped.write(path, {"a": Result(100.0, 0.0, True), "b": Result(200.0, 0.0, True)}, {})
    shipped.write(path, {"b": Result(300.0, 0.0, True), "c": Result(400.0, 0.0, True)}, {}, shipped.read(path))
    found = shipped.read(path)
    assert found is not None and len(found) == 3
    assert [round(r.time_ns) for k in "abc" if (r := found.get(k)) is not None] == [100, 300, 400]


@given(st.floats(1e-3, 1e11))
def test_a_time_that_was_kept_is_read_as_it_is(time_ns: float) -> None:
    kept = kept_ns(time_ns)
    assert math.isclose(kept, time_ns, rel_tol=1e-3) and kept_ns(kept) == kept
    code = shipped._code(Result(kept, 0.0, True))
    found = shipped.Shipped({}, array("Q", [shipped.digest_of("k")]), array("H", [code]))
    assert found.get("k") == Result(kept, 0.0, True)


@pytest.mark.parametrize("content", [b"", b"{}\n", b'{"count": 2}\n123', b"\xff\xfe\n", b'{"count": "x"}\n', b"[]\n"])
def test_a_damaged_file_is_none(content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "file.times"
    path.write_bytes(content)
    assert shipped.read(path) is None and "cannot be read" in caplog.text
    assert shipped.read(tmp_path / "absent") is None


def test_own_results_come_first_then_shipped_ones_then_hints() -> None:
    class Given(dict[str, Result]):
        pass

    own, near, far = (Result(float(n), 0.0, True) for n in (1, 2, 3))
    wrong = Result(math.inf, 1.0, False)
    database = Database("m", None, Given(a=near, b=near, d=wrong), [Given(b=far, c=far, d=far)])
    database.put("a", own)
    assert [database.get(key) for key in "abc"] == [own, near, None]
    assert [database.hint_ns(key) for key in "abcde"] == [2.0, 2.0, 3.0, None, None]
    assert database.measured() == {"a": own}, "what is shipped is not written again"


@pytest.fixture
def folder(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the package's."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "measured")
    monkeypatch.delenv(shipped.VARIABLE)
    database_for.cache_clear()
    return tmp_path / "measured"


def tuned(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Any]:
    """What a first call times, and how it is offloaded, when no file of this machine knows anything.

    It takes the time that it needs: a slow machine would leave something to the next call otherwise.
    """
    seen: list[str] = []
    check = Bench.check_and_time
    with monkeypatch.context() as patch:
        patch.setenv("ZENDNN_CFFI_CACHE", "")
        patch.setattr(Bench, "check_and_time", lambda self, *a: seen.append(self.operation.name) or check(self, *a))
        patch.setattr(
            "fx_passes.search.tuner.time_reorder", lambda *a: seen.append("reorder") or measure.time_reorder(*a)
        )
        database_for.cache_clear()
        model = net(lambda m, x: m[1](F.relu(m[0](x))), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1))
        x = noise(2, 16, 8, 8)
        fast = zendnn_cffi.optimize(model, tune_seconds=math.inf)
        torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)
    return seen, fast


def test_what_ships_is_not_measured_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    seen, first = tuned(monkeypatch)
    assert seen
    known = database_for(threads).measured()
    shipped.write(shipped.path_of(shipped.machine(), threads), known, {})
    seen, second = tuned(monkeypatch)
    assert seen == [] and database_for(threads).measured() == {}
    assert str(zendnn_cffi.explain(first)) == str(zendnn_cffi.explain(second))
    monkeypatch.setenv(shipped.VARIABLE, "")
    seen, _ = tuned(monkeypatch)
    assert seen, "switched off"


@pytest.mark.parametrize("seconds", (1e6, math.inf))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_shipped_times_are_no_reason_to_measure_more(
    seconds: float, data: st.DataObject, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they are: the estimates of what was not worth measuring are brought to them, and may become near."""
    seen: list[str] = []

    def made_up(self: Bench, candidate: Candidate, best_ns: float = math.inf) -> Result:
        seen.append(fingerprint(candidate))
        return Result(kept_ns(data.draw(st.floats(1e2, 1e7))), 0.0, True)

    def price(shipped_times: Source | None) -> tuple[dict[str, Result], list[float]]:
        seen.clear()
        database, operation.candidates = Database("m", None, shipped_times), candidates
        Tuner("auto", turn=Turn(database, 1, seconds)).price([operation], values)
        return database.measured(), [c.cost_ns for c in operation.candidates]

    graph = fx.Graph()
    graph.output(graph.call_function(ops.convolution, (graph.placeholder("x"), graph.get_attr("w")), {
        "stride": (1, 1), "padding_l": (1, 1), "padding_r": (1, 1), "dilation": (1, 1), "groups": 1}))  # fmt: skip
    (operation,), values = lower_graph(graph, [TensorSpec.of(noise(1, 16, 8, 8))], {"w": noise(16, 16, 3, 3)})
    candidates = operation.candidates
    with monkeypatch.context() as patch:
        patch.setattr(Bench, "check_and_time", made_up)
        patch.setattr(Bench, "time_again", lambda self, candidate: math.inf)
        known, costs = price(None)
        assert seen
        shipped.write(folder / "file.times", known, {})
        assert price(shipped.read(folder / "file.times")) == ({}, costs) and not seen


def test_times_of_another_cpu_are_estimates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    version, _, _ = shipped.machine().partition("-")
    tuned(monkeypatch)
    known = database_for(threads).measured()
    alone = {k: r.time_ns for k, r in known.items() if r.right and not k.startswith(("region", "reorder", "check"))}
    slowest = max((time_ns, k) for k, time_ns in alone.items())
    shipped.write(shipped.path_of(f"{version}-other", threads), known, {})
    database_for.cache_clear()
    database = database_for(threads)
    assert database.get(slowest[1]) is None
    hint = database.hint_ns(slowest[1])
    assert hint is not None and math.isclose(hint, slowest[0], rel_tol=1e-3)
    seen, _ = tuned(monkeypatch)
    assert seen, "numbers and times are this machine's"


def test_files_of_this_cpu_come_before_others(folder: Path) -> None:
    version, _, _ = shipped.machine().partition("-")
    own = shipped.machine()
    for name, threads in ((f"{version}-other", 2), (own, 8), (own, 2), (own, 1), ("0.0-other", 2)):
        shipped.write(shipped.path_of(name, threads), {}, {"name": name, "threads": threads})
    told = [(found.about["name"], found.about["threads"]) for found in shipped.hints_for(2)]
    assert told == [(own, 1), (own, 8), (f"{version}-other", 2)]


def test_full_measures_what_ships(folder: Path) -> None:
    shipped.write(shipped.path_of(shipped.machine(), torch.get_num_threads()), {"k": Result(1.0, 0.0, True)}, {})
    database_for.cache_clear()
    assert Tuner("auto").database.get("k") is not None
    assert Tuner("full").database.get("k") is None


def test_the_packages_own_files_are_whole() -> None:
    for path in shipped.FOLDER.glob("*.times"):
        found = shipped.read(path)
        assert found is not None and len(found) > 100 and found.about["networks"], path
        assert path.stat().st_size < 1.5e6


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("squeezenet1_1", "fp32"),
        ("mobilenet_v2", "fp32"),
        ("resnet18", "fp32"),
        pytest.param("resnet18", "int8", marks=pytest.mark.needs("vnni")),  # else quantize() takes 7 bits
    ],
)
def test_regions_of_shipped_networks_are_found(
    fresh: Path, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What names a region has to stay as it was when these were measured: else each process measures again."""
    asked: list[str] = []

    def noting(*about: Any) -> str:
        asked.append(region_key(*about))
        return asked[-1]

    model, x, example = torchvision_models.build(name), noise(1, 3, 224, 224), None
    if dtype == "int8":  # as quantize() itself makes its module
        model, example = zendnn_cffi.quantize(model, [x], tune="off", compare=False).converted, x
    monkeypatch.setattr("fx_passes.region.variants.region_key", noting)
    zendnn_cffi.optimize(model, example, tune_seconds=0)(x)
    files = [shipped.read(path) for path in sorted(shipped.FOLDER.glob("*-zen4-*.times"))]
    measured = [file for file in files if file is not None and f"{name} {dtype} b1" in file.about["networks"]]
    assert len(asked) == 1 and measured
    assert all(file.get(f"{asked[0]} whole") and file.get(f"{asked[0]} inside") for file in measured)


def test_conversions_between_integers_and_float_are_estimated_as_what_lies_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tuner = Tuner("off")
    floats = layout((1, 8, 4, 4), torch.float32, "nhwc"), layout((1, 8, 4, 4), torch.float32, "nchw")
    integers = Quantized(layout((1, 8, 4, 4), torch.uint8, "nhwc"), Numerics(torch.uint8, 0.5, 3))
    pairs = (floats[0], integers), (integers, floats[0]), floats
    estimated = [cost.reorder_ns(*pair) for pair in pairs]
    monkeypatch.setattr(Database, "hint_ns", lambda *_: 1e-3)
    assert [tuner.reorder_ns(*pair) == ns for pair, ns in zip(pairs, estimated, strict=True)] == [True, True, False]
