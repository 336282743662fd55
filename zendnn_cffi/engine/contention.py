"""Other work on this machine's cores, as the kernel tells of it."""

from __future__ import annotations

import os
from pathlib import Path

from zendnn_cffi.engine.host import usable_cpus

try:
    import resource
except ImportError:  # no library runs there either
    resource = None  # type: ignore[assignment]


def involuntary_switches() -> int:
    """Return how often a thread of this process was pushed off its core so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource is not None else 0


def waited_ns() -> dict[str, int]:
    """Return how long each thread of this process was ready to run so far and had no core, by its number.

    Empty where the kernel does not tell (no /proc/self/task/*/schedstat).
    """
    waited = {}
    try:
        for task in os.listdir("/proc/self/task"):
            try:
                waited[task] = _ran_and_waited_ns(f"self/task/{task}")[1]
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile, or the kernel has none
                continue
    except (OSError, ValueError):
        return {}
    return waited


def thread_waited_ns() -> int:
    """Return how long the calling thread was ready to run so far and had no core; 0 where the kernel does not tell."""
    return thread_ran_and_waited_ns()[1]


def thread_ran_and_waited_ns() -> tuple[int, int]:
    """Return how long the calling thread had a core so far, and how long it was ready to run and had none.

    Zeros where the kernel does not tell.
    """
    try:
        return _ran_and_waited_ns("thread-self")
    except (OSError, ValueError):
        return 0, 0


def _ran_and_waited_ns(thread: str) -> tuple[int, int]:
    """Of a thread's folder in /proc; OSError or ValueError where the kernel does not tell."""
    with open(f"/proc/{thread}/schedstat", "rb") as file:
        ran, waited = file.read().split()[:2]
    return int(ran), int(waited)


def threads_left(threads: int) -> int:
    """Return how many of so many threads find a core of their own beside other work: 1 to threads - 1."""
    return max(1, min(threads - 1, usable_cpus() - runnable_elsewhere()))


def runnable_elsewhere() -> int:
    """How many threads of other processes compute, or would if they had a core; 0 where it cannot be read."""
    try:
        runnable = int(Path("/proc/loadavg").read_text(encoding="utf-8").split()[3].split("/")[0])
        own = sum(_is_runnable(Path("/proc/self/task", task, "stat")) for task in os.listdir("/proc/self/task"))
    except (OSError, ValueError, IndexError):
        return 0
    return max(0, runnable - own)


def _is_runnable(stat: Path) -> bool:
    try:
        return stat.read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].startswith("R")
    except OSError:  # the thread ended meanwhile
        return False
