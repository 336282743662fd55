"""Times that ship with the package, measured on common networks: a file for a kind of CPU and a number of threads.

    {"machine": ..., "cpu": ..., "threads": ..., "count": ..., "networks": [...]}     a line of JSON
    digests of keys, in order, 8 bytes each
    logarithms of times, 2 bytes each

Where the CPU is of that kind, they stand for measurements. On other kinds they are estimates, better than arithmetic.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fx_passes.search.database import FORMAT, Result, step_of, time_of
from zendnn_cffi.engine.library import PACKAGE
from zendnn_cffi.primitives.verification.records import machine

log = logging.getLogger("zendnn_cffi.search")

FOLDER = PACKAGE / "measured"
VARIABLE = "ZENDNN_CFFI_SHIPPED_TIMES"  # empty: as if there were none
_WRONG, _NEVER = 0, 0xFFFF


class Shipped:
    """The times of one file."""

    def __init__(self, about: Mapping[str, Any], digests: array[int], codes: array[int]) -> None:
        self.about, self._digests, self._codes = about, digests, codes

    def __len__(self) -> int:
        return len(self._digests)

    def get(self, key: str) -> Result | None:
        """What was measured under a key."""
        digest = digest_of(key)
        place = bisect_left(self._digests, digest)
        if place == len(self._digests) or self._digests[place] != digest:
            return None
        code = self._codes[place]
        if code == _WRONG:
            return Result(math.inf, math.nan, False)
        return Result(math.inf if code == _NEVER else time_of(code - 1), 0.0, True)


def digest_of(key: str) -> int:
    """The 8 bytes that stand for a key."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")


def path_of(name: str, threads: int) -> Path:
    """The file of a kind of CPU, as `machine()` names it."""
    return FOLDER / f"{name}-{threads}-{FORMAT}.times"


def write(path: Path, results: Mapping[str, Result], about: Mapping[str, Any], beside: Shipped | None = None) -> None:
    """Write a file: the same bytes for the same results.

    beside  what else the file is to hold, where results do not have it
    """
    known = {} if beside is None else dict(zip(beside._digests, beside._codes, strict=True))
    rows = sorted((known | {digest_of(key): _code(result) for key, result in results.items()}).items())
    head = json.dumps({**about, "count": len(rows)}, sort_keys=True)
    digests, codes = array("Q", [digest for digest, _ in rows]), array("H", [code for _, code in rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head.encode() + b"\n" + digests.tobytes() + codes.tobytes())
    read.cache_clear()


def _code(result: Result) -> int:
    if not result.right:
        return _WRONG
    if math.isinf(result.time_ns):
        return _NEVER
    return min(_NEVER - 1, 1 + step_of(result.time_ns))


@lru_cache(maxsize=16)
def read(path: Path) -> Shipped | None:
    """Read a file; None where there is none, or none that is whole."""
    try:
        head, _, body = path.read_bytes().partition(b"\n")
        about = json.loads(head)
        digests, codes, count = array("Q"), array("H"), int(about["count"])
        if len(body) != 10 * count:
            raise ValueError(f"{len(body)} bytes for {count} times")
        digests.frombytes(body[: 8 * count])
        codes.frombytes(body[8 * count :])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read: %s", path, error)
        return None
    return Shipped(about, digests, codes)


def times_for(threads: int) -> Shipped | None:
    """The times of this kind of CPU with so many threads."""
    return None if is_off() else read(path_of(machine(), threads))


def hints_for(threads: int) -> Sequence[Shipped]:
    """The times of other numbers of threads and kinds of CPU, nearest first: they say which of several is faster."""
    version, own = machine().partition("-")[0], path_of(machine(), threads)
    others = [path for path in nearest_first(f"{version}-*-{FORMAT}.times", threads) if path != own]
    return [found for path in others if (found := read(path)) is not None]


def nearest_first(pattern: str, threads: int) -> list[Path]:
    """The shipped files whose names match: of this kind of CPU first, then of the nearest number of threads."""

    def distance(path: Path) -> tuple[bool, float]:
        name, count, _ = path.name.rsplit("-", 2)
        return name != machine(), abs(math.log(int(count) / threads))

    return [] if is_off() else sorted(sorted(FOLDER.glob(pattern)), key=distance)


def is_off() -> bool:
    return os.environ.get(VARIABLE) == ""
