"""A process that answers calls of a saved module on cores of its own, as its parent sees it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zendnn_cffi.serving.wire import UNDER_WAY, Area, Channel, Ended

_START_SECONDS = 120.0
# Python puts the current folder before all others, whose files would take the place of libraries.
_PROGRAM = "import sys; sys.path[:] = {!r}; from zendnn_cffi.serving.worker import main; main({!r}, {!r}, {!r})"


class Worker:
    """One process on some cores. Not thread-safe.

    Raises  what load() raises there; RuntimeError where it does not start
    """

    def __init__(self, path: str, cores: Sequence[int]) -> None:
        self.path, self.cores = path, tuple(cores)
        end, other = socket.socketpair()
        areas = Area.made(directions=2)  # all or none: what one end puts there, the other one has to find
        self._channel = Channel(end, areas[:UNDER_WAY], areas[UNDER_WAY:])
        with other:
            descriptors = [other.fileno(), *(area.descriptor for area in areas)]
            command = [sys.executable, "-c", _PROGRAM.format(_import_paths(), descriptors, list(self.cores), path)]
            try:
                self.process = subprocess.Popen(
                    command, pass_fds=descriptors, env=_environment(len(cores)), stdin=subprocess.DEVNULL
                )
            except BaseException:  # no memory, say: nothing of it stays open
                self._channel.close()
                raise
        try:
            end.settimeout(_START_SECONDS)
            right, answer = self._channel.receive()
            end.settimeout(None)
        except (Ended, OSError) as error:
            self.close()
            raise RuntimeError(
                f"a worker did not start (it ended with status {self.process.returncode}): {error}. Its own messages"
                " are on stderr"
            ) from error
        if not right:
            self.close()
            raise answer

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BaseException | None:
        """Give it a call; return what pickle raised where it does not take that. Raises Ended: the process is gone."""
        try:
            self._channel.send((args, kwargs))
        except Ended:
            raise
        except BaseException as error:
            return error
        return None

    def answer(self) -> tuple[bool, Any]:
        """Return (True, result) or (False, error) of the first call without an answer. Raises Ended as above."""
        try:
            answer: tuple[bool, Any] = self._channel.receive()
        except Ended:
            raise
        except BaseException as error:  # a result that is nothing here
            return False, error
        return answer

    def close(self) -> None:
        """End the process: a call that runs is given up."""
        self._channel.close()
        self.process.kill()
        self.process.wait()


def _import_paths() -> list[str]:
    """Where this process finds modules: classes of arguments and results are found there, too."""
    own = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]  # "" is the current folder
    return list(dict.fromkeys([*own, str(Path(__file__).resolve().parents[2])]))


def _environment(threads: int) -> dict[str, str]:
    """This process's environment with so many threads."""
    return os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def started(path: str, groups: Sequence[Sequence[int]]) -> list[Worker]:
    """A worker for each group of cores; they start at the same time."""
    found: list[Any] = [None] * len(groups)

    def start(number: int) -> None:
        try:
            found[number] = Worker(path, groups[number])
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=start, args=(number,)) for number in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [each for each in found if not isinstance(each, Worker)]
    if failed:
        for worker in found:
            if isinstance(worker, Worker):
                worker.close()
        raise failed[0]
    return found
