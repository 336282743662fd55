"""profile(): the time of every call, in order."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.region import variants
from fx_passes.report import peak
from fx_passes.report.profile import Profile, profile
from fx_passes.report.records import PrimitiveTime
from tests.support.lowering import net, noise
from zendnn_cffi import backend
from zendnn_cffi.engine import host

X = noise(2, 3, 8, 8)
PRODUCTS = ("matmul", "inner_product")  # what a linear layer becomes


@pytest.fixture(autouse=True)
def known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring the peak takes a second, and these tests are about what is made of it."""
    monkeypatch.setattr(peak, "peak_gflops", lambda dtype, threads: {torch.float32: 200.0}.get(dtype, 400.0))
    monkeypatch.setattr(peak, "peak_gbytes_per_s", lambda threads: 40.0)


def made(**options: Any) -> Any:
    model = net(lambda m, x: m[1](F.relu(m[0](x))), nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 3))
    return zendnn_cffi.optimize(model, tune="off", **options)


def test_every_call_has_a_time() -> None:
    gm = made()
    found = profile(gm, X, runs=5)
    (lowered,) = next(iter(gm.regions().values())).lowered.values()
    assert [r.name for r in found.records] == [c.name for c in lowered.program.calls]
    assert all(r.time_ns > 0 and r.region == "zen_region_0" for r in found.records)
    convolutions = [r for r in found.records if r.kind == "convolution"]
    assert [r.flops for r in convolutions] == [2 * 2 * 16 * 36 * 27, 2 * 2 * 4 * 16 * 144]
    assert all(r.gflops > 0 and "avx" in r.implementation for r in convolutions)
    assert 0 < found.primitives_ns == sum(r.time_ns for r in found.records) and found.total_ns > 0


def test_what_the_fastest_implementations_take_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of what was measured of each operation, once for each call of a program."""
    monkeypatch.setattr(variants, "_CLEARLY_FASTER", 1e-9)  # so small a region may well be faster in plain PyTorch
    model = net(lambda m, x: F.max_pool2d(m[1](F.relu(m[0](x))), 2), nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 3))
    gm = zendnn_cffi.optimize(model, tune="full")
    found = profile(gm, X, runs=3)
    (lowered,) = next(iter(gm.regions().values())).lowered.values()
    assert 0 < found.alone_ns == int(lowered.alone_ns)
    assert f"alone, its operands in cache: {found.alone_ns / 1e6:.3f} ms" in str(found)


def test_calls_of_other_threads_are_not_counted() -> None:
    """A server goes on answering: each call of a run is there once."""
    gm = made()
    gm(X)

    def called_by_others_too(x: torch.Tensor) -> Any:
        in_a_thread(gm, x)
        return gm(x)

    found = profile(gm, X, runs=3)
    both = profile(_Beside(gm, called_by_others_too), X, runs=3)
    assert [r.flops for r in both.records] == [r.flops for r in found.records]
    alone = profile(_Beside(gm, lambda x: in_a_thread(gm, x)), X, runs=3)
    assert [r.flops for r in alone.records] == [r.flops for r in found.records], "a module's own threads count"


class _Beside(nn.Module):
    """A module that holds an optimized one, and how it is called."""

    def __init__(self, gm: nn.Module, call: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.gm, self.call = gm, call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(x)


def in_a_thread(gm: nn.Module, x: torch.Tensor) -> None:
    thread = threading.Thread(target=gm, args=(x,))
    thread.start()
    thread.join()


def test_not_known_without_measuring() -> None:
    found = profile(made(), X, runs=2)
    assert found.alone_ns == 0 and "alone" not in str(found)


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_bytes_are_those_of_operands_weights_and_result(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(33, 17), nn.ReLU()).eval()
    gm = zendnn_cffi.optimize(model, example_inputs=(noise(5, 33),), tune="off", dtype=dtype)
    found = profile(gm, noise(5, 33), runs=2)
    (linear,) = [r for r in found.records if r.kind in PRODUCTS]
    size = dtype.itemsize
    least = size * 5 * 33 + size * 17 * 33 + 4 * 17 + size * 5 * 17
    assert least <= linear.bytes_moved <= least + size * 64 * 64  # weights are padded to whole blocks
    assert linear.dtype == str(dtype).removeprefix("torch.")
    assert linear.peak_gflops == {torch.float32: 200.0, torch.bfloat16: 400.0}[dtype]


def test_bytes_of_a_residual_sum_and_of_a_slice_of_columns() -> None:
    from zendnn_cffi import Attr, MemoryDesc, PostOps, Primitive, PrimitiveDesc, descriptors
    from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_WEIGHTS
    from zendnn_cffi.runtime.calls import PrimitiveCall
    from zendnn_cffi.runtime.places import Slot

    src, weights, dst = (MemoryDesc(s, torch.float32) for s in ((3, 5), (5, 7), (3, 7)))
    strided = MemoryDesc((3, 5), torch.float32, strides=(100, 1))
    summed = PostOps().sum(1.0)
    for first, post_ops, expected in ((src, None, 71), (src, summed, 71 + 21), (strided, None, 71)):
        attr = Attr(post_ops, scratchpad="library")
        pd = PrimitiveDesc(descriptors.matmul(first, weights, None, dst), attr)
        args = {a: (Slot("arena"), d) for a, d in ((ARG_SRC, first), (ARG_WEIGHTS, weights), (ARG_DST, dst))}
        assert PrimitiveCall("m", Primitive(pd), args, "matmul").bytes_moved == 4 * expected


def record(**values: Any) -> PrimitiveTime:
    known = {"region": "r", "name": "c", "kind": "convolution", "implementation": "brgconv", "dtype": "float32"}
    return PrimitiveTime(**{**known, "peak_gflops": 200.0, "peak_gbytes_per_s": 40.0, **values})


def test_shares_of_the_peak() -> None:
    busy = record(time_ns=1000, flops=150_000, bytes_moved=1000)
    assert (busy.gflops, busy.gbytes_per_s, busy.intensity) == (150.0, 1.0, 150.0)
    assert busy.bound == "arithmetic" and busy.peak_share == 0.75
    waiting = record(time_ns=1000, flops=2_000, bytes_moved=30_000)
    assert waiting.bound == "memory" and waiting.peak_share == 0.75
    unknown = record(time_ns=0, flops=0, bytes_moved=0, peak_gflops=0.0, peak_gbytes_per_s=0.0)
    assert unknown.peak_share == unknown.gflops == unknown.gbytes_per_s == unknown.intensity == 0.0


def test_records_are_ready_for_a_data_frame() -> None:
    rows = profile(made(), X, runs=2).to_dicts()
    assert {frozenset(row) for row in rows} == {frozenset(rows[0])}
    assert {"name", "kind", "implementation", "time_ns", "gflops", "gbytes_per_s", "peak_share", "bound"} <= set(
        rows[0]
    )
    assert all(type(value) in (str, int, float) for row in rows for value in row.values())


def test_text() -> None:
    lines = str(profile(made(), X, runs=2)).splitlines()
    assert lines[1].split() == ["call", "kind", "ms", "share", "GFLOP/s", "GB/s", "of", "peak", "implementation"]
    assert any("convolution" in line and "%" in line for line in lines)
    assert lines[-2].startswith("total ")
    assert lines[-1] == "peak measured here: 200 GFLOP/s float32, 40 GB/s memory"


@pytest.mark.needs("bf16")
def test_the_peak_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(peak, "_SMALLEST_ARRAY_BYTES", 1 << 20)
    monkeypatch.setattr(peak, "_third_level_bytes", lambda: 0)
    threads = torch.get_num_threads()
    for function, arguments in (
        (peak.peak_gflops, (torch.float32, threads)),
        (peak.peak_gflops, (torch.bfloat16, threads)),
        (peak.peak_gbytes_per_s, (threads,)),
    ):
        assert function(*arguments) > 0
        assert function(*arguments) == function(*arguments)
    assert peak.peak_gflops(torch.int8, threads) == 0.0
    peak.peak_gbytes_per_s.cache_clear()  # measured on small arrays


def test_third_level_caches_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_CPUS", tmp_path)
    monkeypatch.setattr(peak.os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert peak._third_level_bytes() == 0
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3")):
        folder = tmp_path / f"cpu{cpu}" / "cache" / "index3"
        folder.mkdir(parents=True)
        (folder / "size").write_text("32768K\n")
        (folder / "shared_cpu_list").write_text(f"{shared}\n")
    assert peak._third_level_bytes() == 2 * (32 << 20)


def test_results_are_the_same_while_profiling_and_it_ends() -> None:
    gm = made()
    before = gm(X)
    profile(gm, X, runs=2)
    assert torch.equal(gm(X), before)
    assert all(region.on_run is None for region in gm.regions().values())


def test_it_ends_after_an_error_too() -> None:
    gm = made()
    with pytest.raises(RuntimeError):
        profile(gm, X[:, :2])
    assert all(region.on_run is None for region in gm.regions().values())


def test_a_module_without_regions() -> None:
    found = profile(zendnn_cffi.optimize(nn.Identity().eval()), X, runs=1)
    assert found.records == [] and "total" in str(found)


def test_a_module_that_contains_an_optimized_one() -> None:
    other = made()  # alive, and not meant
    found = profile(nn.Sequential(made(), nn.ReLU()), X, runs=2)
    assert [r.kind for r in found.records].count("convolution") == 2
    assert profile(other, X, runs=1).records


def test_a_compiled_model_with_inputs_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Halved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(9, 7)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x)) * scale

    backend.register()
    torch._dynamo.reset()
    model = torch.compile(Halved().eval(), backend="zendnn", options={"tune": "off"})
    monkeypatch.setattr("fx_passes.region.region._regions", weakref.WeakSet())  # this process has compiled nothing yet
    found = profile(model, noise(4, 9), scale=noise(4, 7), runs=2)
    assert [r.flops for r in found.records if r.kind in PRODUCTS] == [2 * 4 * 9 * 7]
    torch._dynamo.reset()


def test_a_region_that_runs_several_times_in_one_call() -> None:
    gm = made()
    gm(X)
    once = profile(gm, X, runs=2)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = gm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x) + self.part(x)

    assert [r.flops for r in profile(Twice(), X, runs=2).records] == [2 * r.flops for r in once.records]


def test_slices_count_as_often_as_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = made()
    gm(X)
    before = profile(gm, X, runs=1)
    (region,) = gm.regions().values()
    (lowered,) = region.lowered.values()
    monkeypatch.setattr(lowered.program, "slices", 2)
    after = profile(gm, X, runs=1)
    assert [r.flops for r in after.records] == [2 * r.flops for r in before.records]
    assert [r.bytes_moved for r in after.records] == [2 * r.bytes_moved for r in before.records]


def test_plot_to_a_file_and_on_axes(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    found = profile(made(), X, runs=2)
    found.plot(tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    bars, roofline = Figure().subplots(1, 2)
    assert found.plot((bars, roofline)) is bars.figure
    assert len(bars.patches) == len(found.records)
    counted = [r for r in found.records if r.flops]
    points = [tuple(map(float, c.get_offsets()[0])) for c in roofline.collections]
    assert points == [(r.intensity, r.gflops) for r in counted]
    (roof,) = roofline.lines
    assert list(roof.get_ydata())[1:] == [200.0, 200.0] and list(roof.get_xdata())[1] == 5.0
    assert bars.get_title(loc="left").startswith(found.about)
    found.plot()
    Profile([], 0).plot()
    with pytest.raises(TypeError, match="pair of matplotlib axes"):
        found.plot(bars)


def test_what_was_measured_is_named() -> None:
    found = profile(made(), X, runs=1)
    shape = "x".join(map(str, X.shape))
    assert f", {shape}, float32, {host.cpu_name()} ({host.cpu_generation()}), " in found.about
    assert f", {torch.get_num_threads()} thread" in found.about and str(found).splitlines()[0] == found.about
    model = nn.Sequential(nn.Conv2d(X.shape[1], 16, 3), nn.ReLU()).eval()
    assert profile(zendnn_cffi.optimize(model, dtype=torch.bfloat16), X, runs=1).about.startswith("Sequential, ")


def test_points_above_the_roof_are_explained() -> None:
    """A roof of 100 GFLOP/s and 10 GB/s: they meet at ten operations a byte."""
    from matplotlib.figure import Figure

    def notes(implementation: str, flops: int, bytes_moved: int) -> str:
        record = PrimitiveTime("", "c", "convolution", implementation, 1000, flops, bytes_moved, "float32", 100.0, 10.0)
        bars, roofline = Figure().subplots(1, 2)
        Profile([record], 1000).plot((bars, roofline))
        return " ".join(text.get_text() for text in roofline.texts)

    assert "Winograd" in notes("jit_wino_4x3:avx512_core", 150_000, 1000)
    assert "cache" in notes("brgemm", 50_000, 20_000) and "Winograd" not in notes("brgemm", 50_000, 20_000)
    assert "above" not in notes("brgemm", 90_000, 1000) and "above" not in notes("jit_wino_4x3", 90_000, 1000)


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"zendnn_cffi\[plot\]"):
        Profile([], 0).plot()


def test_refusals() -> None:
    with pytest.raises(TypeError, match=r"profile\(\) takes what"):
        profile(nn.Conv2d(3, 4, 1), X)
    with pytest.raises(ValueError, match="runs must be at least 1"):
        profile(made(), X, runs=0)
