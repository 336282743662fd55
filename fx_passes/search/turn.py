"""Leave to measure: one process of a machine at a time, for a limited time, on CPUs that nobody else uses.

Measurements disturb each other, and serving. So whoever measures holds a lock on a file beside the results. Others wait
for it a little, as what they want is then mostly known; then they go by what is known and by estimates. A turn is taken
when something unknown is met, so a process that finds everything on record never asks.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from fx_passes.search.database import Database
from fx_passes.search.disturbance import Observed, measuring
from zendnn_cffi.engine.brief_waits import brief_waits
from zendnn_cffi.engine.host import usable_cpus
from zendnn_cffi.engine.openmp import team_sleeps

try:
    import fcntl
except ImportError:  # no library runs there either
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("zendnn_cffi.search")

LOCK_NAME = "measuring.lock"
PATIENCE_SECONDS = 10.0  # for another process: it measures for about a second, and lowers before and after
LONG_PATIENCE_SECONDS = 60.0
MOST_DISTURBED = 3  # so many measurements in a row: the machine is busy
_POLL_SECONDS = 0.02


class Turn:
    """Leave to measure; `with` gives it back.

    database   where the results go, and whose folder has the lock; read again after waiting for another process
    threads    that the measured code uses
    seconds    to measure in, from the first unknown on
    insists    on a busy machine, too; and waits a minute for another process
    interrupted  asked before each measurement: whether something else is more urgent now
    on_begin   called before the first measurement
    is_one_of_several  whether others came before for the same: then no longer than asked for, however long a run takes
    left_out   how often something was not measured
    reason     why nothing is measured any longer, "" while something may be
    """

    def __init__(
        self,
        database: Database,
        threads: int,
        seconds: float = math.inf,
        *,
        insists: bool = False,
        interrupted: Callable[[], bool] = bool,
    ) -> None:
        self.database, self.threads = database, threads
        self.left_out, self.reason, self.is_one_of_several = 0, "", False
        self.on_begin: Callable[[], None] = _nothing
        self._seconds, self.insists, self._interrupted = seconds, insists, interrupted
        self._begun = math.nan
        self._lock: int | None = None
        self._disturbed = 0
        self._is_beside_threads = False  # those of another thread of this process make ours sleep
        self._observed: Observed | None = None  # of the measurement at hand

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("it is over")

    def __del__(self) -> None:
        self.close("nobody has it any longer")

    def give_time(self, seconds: float) -> None:
        """Have at least so long, where there is a limit at all: what is measured takes longer than usual."""
        if self._seconds > 0 and not self.is_one_of_several:
            self._seconds = max(self._seconds, seconds)

    def leave_out(self) -> None:
        """Something would take too long, whatever time is left."""
        self.left_out += 1

    @property
    def is_limited(self) -> bool:
        """Whether there is no time for a second look at what is close."""
        return math.isfinite(self._seconds)

    def allows(self, share: float = 1.0, needed: float = 0.0) -> bool:
        """Whether one may measure now, taking `needed` seconds, within this share of the time; counts what may not.

        The first call takes the lock. Others may have measured what is wanted while it waited: look again.
        """
        if not self.reason and self._interrupted():
            self.close("a call came")
        if not self.reason and math.isnan(self._begun):
            self._begin()
        if self.reason or self.spent_seconds + needed > share * self._seconds:
            self.left_out += 1
            return False
        return True

    @contextlib.contextmanager
    def measuring(self) -> Iterator[Observed]:
        """Around a measurement: what other work disturbed stays out of the file; too often, and the turn ends.

        One inside another is part of that.
        """
        if self._observed is not None:
            yield self._observed
            return
        try:
            with measuring(self.database, self._is_beside_threads) as self._observed:
                observed = self._observed
                yield observed
        finally:
            self._observed = None
        self._disturbed = self._disturbed + 1 if observed.disturbed else 0
        if self._disturbed >= MOST_DISTURBED and not self.insists:
            self.close("the machine is busy")

    def close(self, reason: str) -> None:
        """End it: another process may measure."""
        if not self.reason:
            self.reason = reason
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def spent_seconds(self) -> float:
        """Since the first unknown: 0 where all is known."""
        return 0.0 if math.isnan(self._begun) else time.perf_counter() - self._begun

    def _begin(self) -> None:
        self._begun = time.perf_counter()
        if self._seconds <= 0:
            return self.close("no time is given")
        cpus = usable_cpus()
        if self.threads > cpus and not self.insists:
            return self.close(f"{self.threads} threads share {cpus} CPUs")
        self.on_begin()
        brief_waits.stop()  # kernels are measured as calls will run
        self._is_beside_threads = team_sleeps(self.threads)  # as this thread's calls will, but not those of others
        folder = None if self.database.path is None else self.database.path.parent
        if folder is None or fcntl is None:
            return None
        patience = LONG_PATIENCE_SECONDS if self.insists else PATIENCE_SECONDS
        self._lock, waited = _lock(folder / LOCK_NAME, patience)
        if waited:
            log.info("waited %.1f s for another process that measures", time.perf_counter() - self._begun)
            self.database.reload()
        if self._lock is None and waited and not self.insists:
            return self.close("another process measures")
        self._begun = time.perf_counter()
        return None


def _nothing() -> None:
    pass


def _lock(path: Path, patience: float) -> tuple[int | None, bool]:
    """An open file that is locked, None where that is not possible, or not in time; and whether it waited.

    The system takes the lock from a process that dies.
    """
    opened = _opened(path)
    if opened is None:
        return None, False
    until, waited = time.perf_counter() + patience, False
    while True:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
        except OSError:  # no locks on this file system
            os.close(opened)
            return None, False
        else:
            return opened, waited
        if time.perf_counter() >= until:
            os.close(opened)
            return None, True
        time.sleep(_POLL_SECONDS)


def _opened(path: Path) -> int | None:
    """A file to lock: where nothing can be written, the one that is there, or its folder; None where there is none."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    for there in (path, path.parent):
        with contextlib.suppress(OSError):
            return os.open(there, os.O_RDONLY | os.O_CLOEXEC)
    return None
