"""What memoised modules remember: so many combinations each, and so many bytes all together, the oldest go first."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from fx_passes.memoize.masks import known_of, remember
from zendnn_cffi.locks import new_lock

LIMIT_BYTES = 256 << 20  # of all that is remembered
_LEFT = 0.75  # of the limit, where that is passed: so most calls count nothing
_WITH_ADDITIVE = 5  # times the bytes of a boolean mask, of which a float32 one may be made
_LARGEST_BYTES = LIMIT_BYTES // 2  # of one combination: it would leave room for none else


@dataclass(frozen=True)
class Combination:
    """Results, with what they were computed from.

    room    the bytes that it may take in the end
    number  in the order in which combinations were remembered
    """

    held: tuple[object, ...]
    results: tuple[Tensor, ...]
    room: int
    number: int

    @property
    def nbytes(self) -> int:
        """Of the results, and of what was made of them when they were asked for what kind of mask they are."""
        made = (each for result in self.results for each in known_of(result) if isinstance(each, Tensor))
        return sum(map(_bytes, (*self.results, *made)))


class Combinations:
    """The combinations of one module."""

    def __init__(self, most: int, most_bytes: int = _LARGEST_BYTES) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._combinations: dict[Hashable, Combination] = {}
        self._forgotten = 0  # how often: what was computed before is not kept after
        with _lock:
            _all.add(self)

    def get(self, key: Hashable) -> Combination | None:
        """What is remembered of a key."""
        return self._combinations.get(key)

    @property
    def state(self) -> int:
        """Another one after clear()."""
        return self._forgotten

    def keep(self, key: Hashable, held: tuple[object, ...], results: tuple[Tensor, ...], state: int) -> bool:
        """Remember results that were computed in a state, and forget older ones. False if it is not remembered."""
        if sum(map(_bytes, results)) > self.most_bytes:
            return False
        for result in results:
            remember(result)
        with _lock:
            if state != self._forgotten:  # another thread saw a change meanwhile
                return False
            self._combinations.pop(key, None)
            if len(self._combinations) == self.most:
                self._combinations.pop(next(iter(self._combinations)))
            room = sum(map(_most_bytes, results))
            self._combinations[key] = Combination(held, results, room, next(_numbers))
            _make_room(room)
        return True

    def clear(self) -> None:
        """Forget everything, and what is computed now, too."""
        with _lock:
            self._forgotten += 1
            self._combinations = {}

    def __len__(self) -> int:
        return len(self._combinations)

    @property
    def nbytes(self) -> int:
        """Of all results."""
        return sum(each.nbytes for each in tuple(self._combinations.values()))


def _make_room(room: int) -> None:
    """Forget the oldest where all passes the limit, after one came that may take so many bytes.

    They are added up, and counted anew where they pass the limit alone, as modules may be gone.
    """
    global _most
    _most += room
    if _most <= LIMIT_BYTES:
        return
    every = [(each, of, key) for of in _all for key, each in of._combinations.items()]
    _most = sum(each.room for each, *_ in every)
    if _most <= LIMIT_BYTES:
        return
    for each, of, key in sorted(every, key=lambda row: row[0].number):
        del of._combinations[key]
        _most -= each.room
        if _most <= _LEFT * LIMIT_BYTES:
            break


def remembered_bytes() -> int:
    """Of the results that all modules remember."""
    with _lock:
        return sum(each.nbytes for each in _all)


def forget_all() -> None:
    """Let every module compute anew."""
    with _lock:
        for each in _all:
            each.clear()


def _bytes(result: Tensor) -> int:
    """Of a view of a large constant, what it shows; of an expanded tensor, what there is."""
    return min(result.numel() * result.element_size(), result.untyped_storage().nbytes())


def _most_bytes(result: Tensor) -> int:
    return _bytes(result) * (_WITH_ADDITIVE if result.dtype is torch.bool else 1)


_all: weakref.WeakSet[Combinations] = weakref.WeakSet()
_lock = new_lock()
_numbers = itertools.count()
_most = 0  # bytes that all that is remembered takes, or fewer
