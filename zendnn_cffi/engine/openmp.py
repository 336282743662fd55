"""One OpenMP runtime in the process: the libgomp torch ships, the system's where torch is absent.

Two copies of libgomp mean two thread pools fighting for the cores. The engine asks the loader for "libgomp.so.1"; a
copy already mapped under that name answers. So the right one is mapped before the engine is, whichever of torch and
the engine comes first.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path

from zendnn_cffi.errors import LibraryError

SONAME = "libgomp.so.1"
_PAUSE_HARD = 2  # omp_pause_hard
_LOOPS, _WAKING_NS = 21, 10_000


def mapped_runtimes() -> list[str]:
    """Return the file of every OpenMP runtime mapped into this process, GNU, LLVM and Intel."""
    names = ("libgomp", "libomp", "libiomp5")
    found: dict[str, None] = {}
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    for line in lines:
        path = line.split(maxsplit=5)[5] if line.count("/") else ""
        base = os.path.basename(path)
        if ".so" in base and base.startswith(names):
            found[path] = None
    return list(found)


def torch_runtime() -> str | None:
    """Return the libgomp inside the installed torch, without importing torch; None where it has none."""
    module = sys.modules.get("torch")
    origin = getattr(module, "__file__", None)
    if origin is None:
        try:
            spec = importlib.util.find_spec("torch")
        except (ImportError, ValueError):
            spec = None
        origin = spec.origin if spec else None
    if origin is None:
        return None
    package = Path(origin).parent
    # auditwheel-style builds keep it in torch.libs; torch's own wheels keep it in torch/lib under its plain name
    return next((str(p) for p in sorted((package / "lib").glob(f"{SONAME}*"))), None)


def ensure_runtime() -> str:
    """Map the one libgomp the engine shall share, and return its path ("libgomp.so.1" where the system's is taken).

    Raises   LibraryError if there is none.
    """
    mapped = [path for path in mapped_runtimes() if os.path.basename(path).startswith("libgomp.so")]
    if mapped:
        return mapped[0]  # an absolute path to another copy would map a second one
    for candidate in (torch_runtime(), SONAME):
        if candidate is None:
            continue
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return candidate
    raise LibraryError(f"no {SONAME}: the engine needs GNU OpenMP. Install torch, or the system's libgomp1 package.")


_forked_with_threads = False
_has_parents_team = False  # a forked child has it on its books, but no such threads


def _look_at_threads() -> None:
    """Before a fork: note whether this process has threads that Python did not start, as OpenMP's are."""
    global _forked_with_threads
    try:
        _forked_with_threads = len(os.listdir("/proc/self/task")) > threading.active_count()
    except OSError:
        _forked_with_threads = True


def _one_thread_in_child() -> None:
    """Let a forked child compute with one thread, where its parent computed with several.

    GNU OpenMP goes on to count on the parent's threads, and the child would wait for them for ever: in PyTorch's own
    operations, too. No level of parallel regions is left to the thread that forked: whatever asks for threads gets one.
    ZenDNN's implementation `zendnn` sets levels itself; zendnn_cffi.primitives.known_problems passes over it there.
    """
    global _has_parents_team
    _has_parents_team = _has_parents_team or _forked_with_threads
    torch = sys.modules.get("torch")
    if _forked_with_threads and torch is not None:
        if torch.get_num_threads() > 1:
            torch.set_num_threads(1)
        if mapped_runtimes():
            _runtime().omp_set_max_active_levels(0)


def has_parents_team() -> bool:
    """Whether this is a forked child whose parent computed with several threads."""
    return _has_parents_team


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_look_at_threads, after_in_child=_one_thread_in_child)


def thread_count() -> int | None:
    """Return how many threads the next OpenMP region of the calling thread gets; None before a runtime is mapped."""
    mapped = [path for path in mapped_runtimes() if os.path.basename(path).startswith("libgomp.so")]
    return int(ctypes.CDLL(mapped[0]).omp_get_max_threads()) if mapped else None


def single_threaded() -> AbstractContextManager[None]:
    """Let the calling thread compute alone: for many short operations on a machine that is overloaded."""
    return computing_with(1)


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Let the calling thread compute with so many: no other thread's count changes, and torch's functions obey.

    Fewer than there are cores suit a machine that is overloaded: what is shared waits for a thread that has no core.
    """
    runtime = _runtime()
    before = runtime.omp_get_max_threads()
    try:
        runtime.omp_set_num_threads(threads)
        yield
    finally:
        runtime.omp_set_num_threads(before)


def functions_of_count() -> tuple[int, int]:
    """Return the addresses of `void omp_set_num_threads(int)` and `int omp_get_max_threads(void)`."""
    runtime = _runtime()
    found = (ctypes.cast(f, ctypes.c_void_p).value for f in (runtime.omp_set_num_threads, runtime.omp_get_max_threads))
    setter, getter = (address or 0 for address in found)
    return setter, getter


def make_team(size: int) -> None:
    """Let the calling thread have so many threads of its own, itself among them; they sleep, and end with it."""
    runtime = _runtime()
    runtime.GOMP_parallel(ctypes.cast(runtime.omp_get_thread_num, ctypes.c_void_p), None, size, 0)


def release_team() -> None:
    """End the threads that the calling thread's loops had; its next loop makes new ones, which takes 0.1 ms.

    Each thread that computes has threads of its own. While all of them together are more than there are cores, GNU
    OpenMP lets them sleep as soon as they wait, and wakes them for each loop: 50 us in a virtual machine, 1 else. BERT
    (4 layers, 32 tokens, float32, 2 threads, an Intel Xeon with AVX-512) takes 13.8 ms then in place of 10.4.
    """
    if _has_parents_team:
        return  # it would wait for the end of threads that are not there
    if (pause := getattr(_runtime(), "omp_pause_resource_all", None)) is not None:
        pause(_PAUSE_HARD)


def release_main_team() -> None:
    """Have the main thread do so, as soon as it runs Python code."""
    ctypes.pythonapi.Py_AddPendingCall(_release_in_main, None)


def _release_if_main(_: object) -> int:
    if threading.current_thread() is threading.main_thread():
        release_team()
    return 0


_release_in_main = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_release_if_main)


def team_sleeps(threads: int) -> bool:
    """Whether the calling thread's threads sleep between its loops, so that each loop waits until they are awake."""
    if threads < 2:
        return False
    runtime = _runtime()
    nothing = ctypes.cast(runtime.omp_get_thread_num, ctypes.c_void_p)
    times = []
    for _ in range(_LOOPS):
        begun = time.perf_counter_ns()
        runtime.GOMP_parallel(nothing, None, threads, 0)
        times.append(time.perf_counter_ns() - begun)
    return sorted(times)[_LOOPS // 2] > _WAKING_NS


@lru_cache(maxsize=1)
def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL(ensure_runtime())
