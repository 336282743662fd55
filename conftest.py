"""Settings of all tests: the checkout is importable after what is installed, and a skip is a failure.

On a machine where the library is expected (Linux, x86-64 with AVX2) a test that skips itself has tested nothing, so
it fails. `@pytest.mark.may_skip("why")` allows a skip for a stated reason; ZENDNN_CFFI_TEST_MAY_SKIP=1 allows all.
Tests of kernels that this CPU has not (`@pytest.mark.needs`) are left out, and counted as deselected.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent
# What kernels of the library need, beyond AVX2: each instruction set as the library names it.
KERNELS = {"avx512": "cpu_isa_avx512_core", "vnni": "cpu_isa_avx512_core_vnni", "bf16": "cpu_isa_avx512_core_bf16"}

# Last, so that an installed zendnn_cffi wins over the source tree; tests also import `demo` and `benchmarks`.
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


def library_expected() -> bool:
    """Return whether this machine is one that the engine library runs on."""
    if os.environ.get("ZENDNN_CFFI_TEST_MAY_SKIP") == "1":
        return False
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    return "avx2" in Path("/proc/cpuinfo").read_text().split()


def pytest_configure(config: pytest.Config) -> None:
    # Measurements on a busy machine must not outlive the tests, nor do processes of one run wait for each other.
    if "ZENDNN_CFFI_CACHE" not in os.environ or hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="zendnn_cffi-tests-")
        os.environ["ZENDNN_CFFI_CACHE"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    # Processes beside each other lose most of their time to OpenMP's threads that turn in a circle while they wait.
    if config.getoption("numprocesses", None):
        os.environ.setdefault("GOMP_SPINCOUNT", "100")
    config.addinivalue_line("markers", "may_skip(reason): this test may skip itself even where the library is expected")
    config.addinivalue_line("markers", f"needs(*kernels): left out on a CPU without one of {', '.join(KERNELS)}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collector of garbage from what stays: PyTorch, libraries and ten thousand tests are 700,000 objects.

    It would look at them again and again, which took a fifth of the tests' time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _hide_structured_trace()
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs kernels that this CPU, or its setting (ZENDNN_MAX_CPU_ISA), has not."""
    missing = _missing_kernels()
    is_old = "avx512" in missing  # takes half as long again: slow tests, too, are left to newer ones

    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        is_left_out = missing & _needs(item) or (is_old and item.get_closest_marker("slow"))
        (left_out if is_left_out else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _needs(item: pytest.Item) -> set[str]:
    """The kernels that an item's marks name; KeyError where a name is none of KERNELS."""
    return {name for mark in item.iter_markers("needs") for name in mark.args if KERNELS[name]}


def _missing_kernels() -> set[str]:
    if not library_expected():
        return set()
    from zendnn_cffi.engine.library import load

    return {name for name, instructions in KERNELS.items() if not load().runs(instructions)}


def _hide_structured_trace() -> None:
    """Keep pytest's handlers from PyTorch's log for tlparse, which a user's process does not write either.

    Since 9.1 pytest gives them to each logger that does not propagate. PyTorch takes a handler there as a wish for its
    trace, and writes the stack of each step of torch.export as JSON: a tenth of an export's time.
    """
    logging.root.manager.loggerDict.pop("torch.__trace", None)  # PyTorch holds the logger itself


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """After a file's last test, do the same with what libraries keep: each collection takes two seconds in the end."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


def pytest_unconfigure() -> None:
    """Let the interpreter end as usual: libraries say on the way out what of theirs nobody collected."""
    gc.unfreeze()


def pytest_report_header() -> list[str]:
    import zendnn_cffi

    lines = [
        f"zendnn_cffi: {Path(zendnn_cffi.__file__).parent}, skips {'fail' if library_expected() else 'are allowed'}"
    ]
    if missing := sorted(_missing_kernels()):
        lines.append(f"left out: tests of kernels that this CPU has not ({', '.join(missing)}), and slow tests")
    return lines


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_xfail = hasattr(report, "wasxfail")
    if report.skipped and not is_xfail and library_expected() and item.get_closest_marker("may_skip") is None:
        report.outcome = "failed"
        report.longrepr = f"skipped where the library is expected: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.outcome == "skipped" and library_expected():  # pytest.skip or importorskip while a module is imported
        report.outcome = "failed"
        report.longrepr = f"module skipped where the library is expected: {report.longrepr}"
    return report


@pytest.fixture(scope="session", autouse=True)
def no_measuring_beside_tests() -> Generator[None, None, None]:
    """What first calls left out stays so, and calls make no threads: tests count calls, threads and memory."""
    from fx_passes.region import later
    from zendnn_cffi.engine.brief_waits import crowding

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(later, "FIRST_SECONDS", 3600.0)
        patch.setattr(crowding, "next_look", math.inf)
        yield
