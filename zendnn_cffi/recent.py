"""What was made most recently, by its key: a bounded map that forgets what was not asked for the longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from zendnn_cffi.locks import new_lock

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """At most so many values, by their keys. Thread-safe.

    most  how many are kept
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, new_lock()
        self._found: OrderedDict[Hashable, Value] = OrderedDict()

    @property
    def most(self) -> int:
        """How many are kept; setting it forgets what is beyond."""
        return self._most

    @most.setter
    def most(self, most: int) -> None:
        with self._lock:
            self._most = most
            self._forget()

    def get(self, key: Hashable) -> Value | None:
        """The value of this key, None where there is none."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def keep(self, key: Hashable, value: Value) -> Value:
        """Keep a value, or return the one that another thread kept first."""
        with self._lock:
            value = self._found.setdefault(key, value)
            self._forget()
            return value

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._found.clear()

    def __len__(self) -> int:
        return len(self._found)

    def _forget(self) -> None:
        while len(self._found) > self._most:
            self._found.popitem(last=False)
