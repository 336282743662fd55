"""Exactly one libgomp in the process, whichever of torch and the engine comes first."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from zendnn_cffi.engine import openmp

ENGINE = "from zendnn_cffi.engine import library; loaded = library.load()"
TORCH = "import torch; torch.set_num_threads(2); torch.ones(256, 256) @ torch.ones(256, 256)"
REPORT = """
import os
lines = open("/proc/self/maps").read().splitlines()
print(sorted({line.split()[-1] for line in lines if "libgomp" in line}))
from zendnn_cffi.engine import openmp
print(openmp.mapped_runtimes())
"""
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None"


@pytest.mark.parametrize(
    "order", [(ENGINE,), (ENGINE, TORCH), (TORCH, ENGINE)], ids=["engine", "engine-torch", "torch-engine"]
)
def test_one_libgomp_is_mapped_and_it_is_torchs(run_python, order: tuple[str, ...]) -> None:
    seen, told = run_python("\n".join((*order, REPORT))).stdout.splitlines()
    assert seen == told == repr([openmp.torch_runtime()])


def test_the_systems_libgomp_serves_without_torch(run_python) -> None:
    seen, told = run_python("\n".join((WITHOUT_TORCH, ENGINE, REPORT))).stdout.splitlines()
    assert seen == told
    assert seen.count(".so") == 1
    assert "/torch/" not in seen


def test_a_runtime_already_mapped_is_kept(run_python) -> None:
    """Loading torch's copy by its path beside the system's would map a second one."""
    code = "import ctypes; ctypes.CDLL('libgomp.so.1')"
    seen, _ = run_python("\n".join((code, ENGINE, TORCH, REPORT))).stdout.splitlines()
    assert seen.count(".so") == 1


def test_threads_follow_torch(run_python) -> None:
    code = f"""
{ENGINE}
import torch
from zendnn_cffi.engine import openmp
for n in (1, 2, 3):
    torch.set_num_threads(n)
    print(openmp.thread_count(), end=" ")
"""
    assert run_python(code).stdout.split() == ["1", "2", "3"]


def test_absent_runtime_is_named(monkeypatch) -> None:
    monkeypatch.setattr(openmp, "mapped_runtimes", list)
    monkeypatch.setattr(openmp, "torch_runtime", lambda: "/nowhere/libgomp.so.1")
    monkeypatch.setattr(openmp, "SONAME", "libgomp-that-is-not-there.so.1")
    with pytest.raises(openmp.LibraryError, match=r"no libgomp-that-is-not-there\.so\.1.*libgomp1 package"):
        openmp.ensure_runtime()


def test_torch_is_found_without_importing_it(run_python) -> None:
    code = "import sys; from zendnn_cffi.engine import openmp; print(openmp.torch_runtime(), 'torch' in sys.modules)"
    path, imported = run_python(code).stdout.split()
    assert os.path.basename(path).startswith("libgomp.so")
    assert imported == "False"


def test_one_thread_computes_alone_and_others_as_before() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    seen: list[int | None] = []
    try:
        with openmp.single_threaded():
            other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            other.start()
            other.join()
            assert torch.get_num_threads() == openmp.thread_count() == 1
        assert seen == [2] and torch.get_num_threads() == 2
        with pytest.raises(KeyError), openmp.single_threaded():
            raise KeyError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


TEAMS = """
import os, threading
import torch
from zendnn_cffi.engine import openmp

def threads():
    return len(os.listdir("/proc/self/task"))

def ends_with(count):  # what ended may be listed for a moment
    return any(threads() == count or time.sleep(0.01) for _ in range(500))

import time
torch.set_num_threads(2)
before = threads()
openmp.make_team(2)
assert threads() == before + 1
openmp.release_team()
assert ends_with(before)
openmp.release_team()  # there is none
openmp.make_team(2)
other = threading.Thread(target=lambda: (openmp.make_team(2), openmp.release_team()))
other.start()
other.join()
assert ends_with(before + 1), "another thread's are left alone"
x = torch.randn(512, 512)
openmp.release_team()
assert torch.allclose(x @ x, (x.double() @ x.double()).float(), atol=1e-3) and threads() >= before + 1
print("done")
"""


def test_a_team_is_released_and_made_again(run_python) -> None:
    assert run_python(TEAMS).stdout == "done\n"


FORKED = """
import os, signal
import torch
from zendnn_cffi.engine import openmp
torch.set_num_threads(2)
openmp.make_team(2)
child = os.fork()
if not child:
    signal.alarm(20)
    openmp.release_team()
    print(torch.get_num_threads(), openmp.team_sleeps(torch.get_num_threads()), flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
openmp.release_team()
print("done")
"""


def test_a_forked_child_does_not_wait_for_threads_of_its_parent(run_python) -> None:
    assert run_python(FORKED).stdout.split() == ["1", "False", "done"]


def test_one_thread_needs_no_other_and_many_wait_for_cores() -> None:
    assert not openmp.team_sleeps(1)
    try:
        assert openmp.team_sleeps(8 * (os.cpu_count() or 1))
    finally:
        openmp.release_team()
