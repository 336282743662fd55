"""Locks that neither finalizers, signal handlers nor forks turn into a deadlock: the only kind this package uses.

Python may run code of others at nearly any point: a finalizer that the garbage collector calls, a weakref callback, a
signal handler. Where such code calls into the package in a thread that holds one of its locks, a plain lock would wait
for itself. So locks are re-entrant, and whoever holds one keeps what it guards usable by its own thread.

A forked child has only the thread that forked. Locks that others held are free there. Locks that are not ours stay
held: the library's, Python's import locks. So a fork waits until no thread is making a program or a kernel.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PATIENCE_SECONDS = 60.0  # of a fork

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> Any:
    """Return a re-entrant lock (a context manager), free in a forked child unless the forking thread holds it."""
    lock: Any = threading.RLock()
    _locks.add(lock)
    return lock


def adopt_lock(lock: Any) -> Any:
    """Return a re-entrant lock of others, which is free in a forked child from now on, as ours are."""
    _locks.add(lock)
    return lock


_making = new_lock()
_queue: list[None] = []  # a thread each that waits to make something
_fork_waits = _waited = False


@contextmanager
def making() -> Iterator[None]:
    """While a graph, a program or a kernel is made: by one thread at a time, and by none while the process forks."""
    while _fork_waits and not _making._is_owned():
        time.sleep(0.001)  # the lock is not fair: who makes one after the other would have it again at once
    if not _making.acquire(blocking=False):
        _queue.append(None)
        try:
            _making.acquire()
        finally:
            _queue.pop()
    try:
        yield
    finally:
        _making.release()


class OneForEachProcess:
    """What a forked child has anew: its state is what _begin_anew makes."""

    def __init__(self) -> None:
        self._begin_anew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        raise NotImplementedError


def begun(run: Callable[..., None], name: str, *args: Any) -> threading.Thread | None:
    """A thread for work that may be left undone: it runs, and does not keep Python from ending.

    None where none can be had: the system has too many, or Python is ending (from 3.12 on it begins no more then, and
    functions of atexit still call models).
    """
    thread = threading.Thread(target=run, args=args, name=f"zendnn_cffi {name}", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def is_awaited() -> bool:
    """Whether a thread, or a fork, waits until nothing is made: who has no hurry lets it."""
    return _fork_waits or bool(_queue)


def makes_elsewhere() -> bool:
    """Whether another thread makes something just now: who can do without making() need not wait then."""
    if not _making.acquire(blocking=False):
        return True
    _making.release()
    return False


def _wait_for_makers() -> None:
    global _fork_waits, _waited
    _fork_waits = True
    _waited = _making.acquire(timeout=_PATIENCE_SECONDS)


def _go_on_in_parent() -> None:
    global _fork_waits
    _fork_waits = False
    if _waited:
        _making.release()


def _go_on_in_child() -> None:
    _go_on_in_parent()
    _queue.clear()
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_makers, after_in_parent=_go_on_in_parent, after_in_child=_go_on_in_child)
