"""What was measured, kept between processes: one SQLite file per CPU model, library version and thread count.

SQLite's locks make concurrent writers safe; a file that is damaged is set aside and begun anew. Reading writes nothing,
so a file may come with a read-only image. Where nothing can be written (a read-only home, say) results live as long as
the process. ZENDNN_CFFI_CACHE names another folder; empty means no file.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from zendnn_cffi.engine.folders import CACHE_VARIABLE, cache_folder
from zendnn_cffi.locks import new_lock

__all__ = ["CACHE_VARIABLE", "Database", "Result", "cache_folder"]

log = logging.getLogger("zendnn_cffi.search")

CHECKED = "checked "  # before a candidate's key: its numbers were compared, the time is of one run or doubtful
FORMAT = 3  # part of the file's name: raise it when the meaning of keys or values changes
_BUSY_SECONDS = 5.0
STEPS, LEAST = 1400.0, -10.0  # per doubling; the binary logarithm of the shortest time, ns (reorders: per byte)


def kept_ns(time_ns: float) -> float:
    """A time as files keep it: whoever reads one decides exactly as the process that measured."""
    return time_of(step_of(time_ns)) if 0 < time_ns < math.inf else time_ns


def step_of(time_ns: float) -> int:
    """The step nearest to a time, 0 for the shortest that is kept."""
    return max(0, round(STEPS * (math.log2(max(time_ns, 2.0**LEAST)) - LEAST)))


def time_of(step: int) -> float:
    """The time of a step, ns."""
    return float(2.0 ** (step / STEPS + LEAST))


@dataclass(frozen=True, slots=True)
class Result:
    """One candidate on this machine: its time, and whether its numbers were right."""

    time_ns: float
    error: float
    right: bool


class Source(Protocol):
    """Results that are given."""

    def get(self, key: str) -> Result | None:
        """What is known of a candidate."""


class Database:
    """Results by key. Never raises: what cannot be stored is remembered by this process alone.

    shipped  results that count as measured here (None: there are none)
    hints    results of other machines, nearest first
    """

    def __init__(
        self, machine: str, folder: Path | None, shipped: Source | None = None, hints: Sequence[Source] = ()
    ) -> None:
        self._shipped, self._hints = shipped, hints
        self._results: dict[str, Result] = {}
        self._lock = new_lock()
        self._new: dict[str, int] = {}  # not in the file yet; when each was put
        self._puts = 0
        self._verdicts: set[str] = set()
        self._stamp = 0
        digest = hashlib.sha256(machine.encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"measured-{FORMAT}-{digest}.sqlite"
        self._machine = machine
        self._load()

    def get(self, key: str) -> Result | None:
        """What is known of a candidate."""
        with self._lock:
            found = self._results.get(key)
        return found if found is not None or self._shipped is None else self._shipped.get(key)

    @property
    def has_hints(self) -> bool:
        """Whether anything is known of machines like this one."""
        return self._shipped is not None or bool(self._hints)

    @property
    def has_shipped(self) -> bool:
        """Whether results are at hand that count as measured here."""
        return self._shipped is not None

    def ships(self, key: str) -> bool:
        """Whether it is among the results that count as measured here."""
        return self._shipped is not None and self._shipped.get(key) is not None

    def hint_ns(self, key: str) -> float | None:
        """The time on a machine as near to this one as any that is known; None where none has it right."""
        for source in (self._shipped, *self._hints):
            if source is not None and (found := source.get(key)) is not None:
                return found.time_ns if found.right else None
        return None

    def verdict(self, key: str) -> Result | None:
        """What is known of whether a candidate's numbers are right, where no time is known, too."""
        return self.get(key) or self.get(CHECKED + key)

    def put(self, key: str, result: Result, *, is_verdict: bool = False) -> None:
        """Remember; `save` writes it. is_verdict: numbers were compared, so a doubtful time leaves `verdict` behind."""
        with self._lock:
            if is_verdict:
                self._verdicts.add(key)
            self._put(key, result)

    def _put(self, key: str, result: Result) -> None:
        self._results[key] = result
        self._new[key] = self._puts
        self._puts += 1

    def mark(self) -> int:
        """Return a place in time, for `doubt`."""
        with self._lock:
            return self._puts

    def doubt(self, mark: int) -> int:
        """Keep times put since `mark` out of the file, as if they were measured by this process alone; return how many.

        Numbers are as right or as wrong on a busy machine: verdicts stay.
        """
        with self._lock:
            fresh = [key for key, since in self._new.items() if since >= mark and not key.startswith(CHECKED)]
            doubtful = [key for key in fresh if self._results[key].right]
            for key in doubtful:
                del self._new[key]
                if key in self._verdicts:
                    self._put(CHECKED + key, self._results[key])
            return len(doubtful)

    def keep_out(self, keys: Iterable[str]) -> None:
        """Keep these out of the file: this process alone knows them."""
        with self._lock:
            for key in keys:
                self._new.pop(key, None)

    def measured(self) -> dict[str, Result]:
        """All that was measured on this machine, by key."""
        with self._lock:
            return dict(self._results)

    def __len__(self) -> int:
        with self._lock:
            return len(self._results)

    def save(self) -> None:
        """Write what is new."""
        with self._lock:
            waiting, self._new = self._new, {}
            new = {key: self._results[key] for key in waiting}
        if not new or self.path is None:
            return
        rows = [(key, r.time_ns, r.error, int(r.right)) for key, r in new.items()]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._connect() as connection:
                self._make_tables(connection)
                connection.executemany("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?)", rows)
        except (sqlite3.Error, OSError) as error:
            log.info("results are not kept: %s: %s", self.path, error)
            if _is_locked(error):
                with self._lock:
                    self._new = waiting | self._new  # for the next time

    def clear(self) -> None:
        """Forget everything, the file included."""
        with self._lock:
            self._results.clear()
            self._new.clear()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def reload(self) -> bool:
        """Take over what others found since the file was read; what this process knows stays. Whether times came."""
        if self._stamp == self._written():
            return False
        other = self.as_kept()
        with self._lock:
            self._stamp = other._stamp
            came = other._results.keys() - self._results.keys()
            self._results = other._results | self._results
            return any(not key.startswith(CHECKED) for key in came)

    def as_kept(self) -> Database:
        """What the file holds just now."""
        other = Database(self._machine, None)
        other.path = self.path
        other._load()
        return other

    def _written(self) -> int:
        """When the file was last written to, 0 where there is none."""
        try:
            return 0 if self.path is None else self.path.stat().st_mtime_ns
        except OSError:
            return 0

    def _load(self) -> None:
        self._stamp = self._written()
        if self.path is None or not self.path.is_file():
            return
        try:
            with self._connect() as connection:
                for key, time_ns, error, right in connection.execute(_ALL) if _has_results(connection) else ():
                    known = math.nan if error is None else float(error)  # SQLite keeps no NaN
                    self._results[str(key)] = Result(float(time_ns), known, bool(right))
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            self._results.clear()
            if _is_sound(error):
                self._stamp = 0  # others write to it for long, or a disk does not answer: reload() looks again
                log.info("results are not read: %s: %s", self.path, error)
            else:
                self._set_aside(error)
        except OSError as error:
            log.info("results are not read: %s", error)

    def _set_aside(self, error: Exception) -> None:
        """Move a damaged file out of the way."""
        assert self.path is not None
        log.warning("%s cannot be read (%s): measuring again", self.path, error)
        try:
            os.replace(self.path, self.path.with_suffix(".damaged"))
        except OSError:
            self.path = None

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """A transaction, which takes no lock before something is read or written."""
        assert self.path is not None
        with closing(sqlite3.connect(self.path, timeout=_BUSY_SECONDS)) as connection, connection:
            yield connection

    def _make_tables(self, connection: sqlite3.Connection) -> None:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, time_ns REAL, error REAL, right INTEGER)"
        )
        connection.execute("CREATE TABLE IF NOT EXISTS machine (description TEXT PRIMARY KEY)")
        connection.execute("INSERT OR IGNORE INTO machine VALUES (?)", (self._machine,))


_ALL = "SELECT * FROM results"


def _has_results(connection: sqlite3.Connection) -> bool:
    """Whether there is a table: another process may have begun the file just now."""
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'results'").fetchone() is not None


def _is_locked(error: Exception) -> bool:
    """Whether others write to the file for long: as on a machine that hardly gets on."""
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def _is_sound(error: Exception) -> bool:
    """Whether the file may be sound, and it is locked, or the disk or a permission that kept it from being read."""
    return isinstance(error, sqlite3.OperationalError) and any(said in str(error) for said in _OF_SOUND_FILES)


# SQLite's words for a lock, permissions (also where a writer died and its journal cannot be rolled back), and disks.
_OF_SOUND_FILES = ("locked", "readonly", "unable to open", "disk I/O", "is full", "permission")
