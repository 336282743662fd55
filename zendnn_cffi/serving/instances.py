"""instances(): workers with cores of their own, which answer calls of one saved module.

    submit(x) -> queue -> a thread per worker -> socket -> process: load(path), pinned -> Future
                          or the thread itself, pinned, calls the one module there is

Calls that wait are taken by whoever is free. The file is mapped, so that processes share the weights' memory.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from zendnn_cffi.engine.host import usable_cpus
from zendnn_cffi.locks import new_lock
from zendnn_cffi.log import get_logger
from zendnn_cffi.serving.process import started
from zendnn_cffi.serving.under_way import Calls, UnderWay, settle

log = get_logger(__name__)

PROCESSES, THREADS = "processes", "threads"
_MEASURED_SECONDS = 1.0  # per number of workers, with n="auto"
_AHEAD = 4  # calls for each worker that map() submits before it waits for a result


class Instances:
    """Workers that answer calls of one module; see instances(). A context manager."""

    def __init__(self, path: str, groups: Sequence[Sequence[int]], kind: str = PROCESSES, folder: Any = None) -> None:
        self._path, self._folder, self.kind = path, folder, kind
        self._pid = os.getpid()
        self._module: Any = None
        self._calls: Calls = queue.SimpleQueue()
        self._closed, self._lock = False, new_lock()
        self._ready = threading.Barrier(1 + len(groups))
        self._under_way: list[UnderWay] = []
        self._groups = [tuple(group) for group in groups]
        try:
            if kind == THREADS:
                from fx_passes.saved.files import load

                self._module = load(path)
            else:
                self._under_way += [UnderWay(self._calls, len(groups), worker) for worker in started(path, groups)]
        except BaseException:
            self.close()
            raise
        self._threads = [
            threading.Thread(target=self._serve, args=(number,), name=f"zendnn_cffi worker {number}", daemon=True)
            for number in range(len(groups))
        ]
        threads = torch.get_num_threads()
        for thread in self._threads:
            thread.start()
        if kind == THREADS:
            self._ready.wait()
            torch.set_num_threads(threads)  # theirs count for threads that begin later, too

    @property
    def n(self) -> int:
        """How many workers there are."""
        return len(self._groups)

    @property
    def cores(self) -> list[tuple[int, ...]]:
        """The cores of each worker."""
        return list(self._groups)

    @property
    def pids(self) -> list[int]:
        """The processes; none of threads."""
        return [pid for each in self._under_way if (pid := each.pid) is not None]

    @property
    def replaced(self) -> int:
        """How many processes ended and were replaced."""
        return sum(each.replaced for each in self._under_way)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the module with these arguments in some worker; the future holds its result, or what it raised.

        Raises  RuntimeError after close(), and in a forked child, where nobody would answer
        """
        if os.getpid() != self._pid:
            raise RuntimeError(f"these instances are those of process {self._pid}: make new ones after a fork")
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("these instances are closed: make new ones")
            self._calls.put((future, (args, kwargs)))
        return future

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module: wait for the result."""
        return self.submit(*args, **kwargs).result()

    def map(self, inputs: Iterable[Any]) -> Iterator[Any]:
        """Yield the result for each input, a tensor or a tuple of arguments, in their order.

        Inputs are taken as they are needed, a few ahead: there may be more of them than fit into memory.
        """
        waiting: deque[Future[Any]] = deque()
        for each in inputs:
            waiting.append(self.submit(*(each if isinstance(each, tuple) else (each,))))
            if len(waiting) >= _AHEAD * self.n:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _serve(self, number: int) -> None:
        if self.kind == THREADS:
            os.sched_setaffinity(0, self._groups[number])  # of this thread alone
            torch.set_num_threads(len(self._groups[number]))
            torch.get_num_threads()  # a thread takes the number of then when it first asks
            self._ready.wait()
            self._compute()
        else:
            self._under_way[number].serve()

    def _compute(self) -> None:
        """Answer calls in this thread."""
        while (taken := self._calls.get()) is not None:
            future, (args, kwargs) = taken
            if not future.set_running_or_notify_cancel():
                continue
            try:
                with torch.no_grad():  # results of inference mode could not be written to
                    result = self._module(*args, **kwargs)
            except BaseException as error:
                settle(future, False, error)
            else:
                settle(future, True, result)
                del result
            del taken, future, args, kwargs  # nothing is held while it waits

    def close(self) -> None:
        """Answer what was submitted, then end the workers. Closing twice is allowed, a forked child closes nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            for _ in getattr(self, "_threads", ()):
                self._calls.put(None)
        for thread in getattr(self, "_threads", ()):
            thread.join()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Instances:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Instances({self._path!r}, {self.n} {self.kind} of {len(self._groups[0])} cores)"


def instances(
    module: nn.Module | str | os.PathLike[str],
    n: int | str = "auto",
    cores: Sequence[int] | None = None,
    *,
    kind: str = PROCESSES,
    example_inputs: Sequence[Any] | torch.Tensor | None = None,
) -> Instances:
    """Start n workers that answer calls of one saved module, each pinned to its share of the cores.

    module          the path of a file of save(), or what optimize() returned, after a call: it is saved to a temporary
                    file, for as many threads as a worker has
    n               number of workers, at most one per core; each gets len(cores) // n. "auto": the one that answers
                    most calls with example_inputs, measured for a second each; without these, one per core
    cores           numbers of the CPUs (default: those that this process may run on, as many as its quota lets it)
    kind            "processes", or "threads" of this process: nothing is copied between these, which is faster where
                    calls are short, but what ends one ends all, and Python code of other threads holds them up
    example_inputs  a tensor, or the positional arguments of one call
    Returns         Instances: submit(x) returns a concurrent.futures.Future, calling it waits for the result, map()
                    keeps the order. A process that dies is replaced, and its call made once more; the second time
                    its future raises WorkerDied. Use it in a `with` statement, or close() it.
    Raises          ValueError (also for cores that this process may not run on), TypeError, OSError, RuntimeError where
                    workers do not start, and what load() raises
    """
    if cores is None:
        cores = sorted(os.sched_getaffinity(0))[: usable_cpus()]
    cores = [int(core) for core in cores]
    if not cores or len(set(cores)) != len(cores):
        raise ValueError(f"cores must name at least one CPU, and each once, got {cores}")
    if n != "auto" and (isinstance(n, bool) or not isinstance(n, int)):
        raise TypeError(f"n must be a number of workers or 'auto', got {n!r}")
    if n != "auto" and not 1 <= int(n) <= len(cores):
        raise ValueError(f"n must be between 1 and {len(cores)}, the number of cores, got {n}")
    if kind not in (PROCESSES, THREADS):
        raise ValueError(f"kind must be {PROCESSES!r} or {THREADS!r}, got {kind!r}")
    if missing := sorted(set(cores) - _allowed(cores)):
        raise ValueError(f"this process may not run on the CPUs {missing} of cores")
    inputs = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    counts = [int(n)] if n != "auto" else _candidates(len(cores)) if inputs is not None else [len(cores)]
    path, folder = _file_of(module, sorted({len(cores) // count for count in counts}))
    try:
        if len(counts) > 1:
            rates = {count: _rate(path, _groups(cores, count), kind, tuple(inputs or ())) for count in counts}
            log.info("calls per second by number of workers: %s", rates)
            counts = [max(rates, key=lambda count: rates[count])]
        return Instances(path, _groups(cores, counts[0]), kind, folder)
    except BaseException:
        if folder is not None:
            folder.cleanup()
        raise


def _allowed(cores: Sequence[int]) -> set[int]:
    """Those of these CPUs that there are, and that the system lets this process have."""
    found: set[int] = set()

    def ask() -> None:
        with contextlib.suppress(OSError, OverflowError, ValueError):  # none of them
            os.sched_setaffinity(0, cores)  # of this thread alone
            found.update(os.sched_getaffinity(0))

    asks = threading.Thread(target=ask)
    asks.start()
    asks.join()
    return found


class _Folder:
    """A temporary folder that goes with the process which made it: a forked child that ends leaves it alone."""

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp(prefix="zendnn_cffi-")
        self.cleanup = weakref.finalize(self, _remove, self.name, os.getpid())


def _remove(folder: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


def _candidates(cores: int) -> list[int]:
    """Numbers of workers worth trying: halves of the cores."""
    found = {cores}
    while cores > 1:
        cores //= 2
        found.add(cores)
    return sorted(found)


def _groups(cores: Sequence[int], n: int) -> list[Sequence[int]]:
    share = len(cores) // n
    return [cores[number * share : (number + 1) * share] for number in range(n)]


def _file_of(module: nn.Module | str | os.PathLike[str], threads: Sequence[int]) -> tuple[str, Any]:
    """The path of the saved module, and the temporary folder that it is in, if any."""
    from fx_passes.saved.container import read

    if isinstance(module, str | os.PathLike):
        path = Path(module).absolute()
        if not path.is_file():
            raise FileNotFoundError(f"no file at {str(path)!r}: zendnn_cffi.save writes such files")
        read(path, verify=False)  # else a worker would start first, and say so much later
        return str(path), None
    from fx_passes.saved.files import save

    folder = _Folder()
    try:
        path = Path(folder.name) / "module.safetensors"
        given: Any = module
        save(given, path, threads=threads)
    except BaseException:
        folder.cleanup()
        raise
    return str(path), folder


def _rate(path: str, groups: Sequence[Sequence[int]], kind: str, inputs: tuple[Any, ...]) -> float:
    """Calls per second of these workers."""
    with Instances(path, groups, kind) as made:
        for future in [made.submit(*inputs) for _ in range(2 * made.n)]:
            future.result()
        count, begun = 0, time.perf_counter()
        waiting = [made.submit(*inputs) for _ in range(3 * made.n)]
        while time.perf_counter() - begun < _MEASURED_SECONDS:
            waiting.pop(0).result()
            count += 1
            waiting.append(made.submit(*inputs))
        seconds = time.perf_counter() - begun
        for future in waiting:
            future.cancel()
        return count / seconds
