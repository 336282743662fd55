"""Whether many dictionaries were changed, without a look at what they hold.

CPython counts up a number of each dictionary with every change: another value, a key more or less. It is read where it
lies, of all dictionaries by one gather. No header promises the place (PEP 699 takes it from Python 3.14 on), so an
experiment tells, when this is imported. Where it fails, what they hold is compared each time.

    dict (Python): [reference count, type, length, number, ...]      the number at 8 * PLACE
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from zendnn_cffi.runtime.words import Words, words_at

_ROUNDS = 50  # after some, the interpreter assigns to attributes by a faster way


class Dictionaries:
    """These dictionaries, as they are; they are held.

    is_same  compares what they hold with what is wanted of them: asked where one was changed
    """

    def __init__(self, dictionaries: Iterable[dict[str, Any]], is_same: Callable[[], bool]) -> None:
        self._held = list({id(d): d for d in dictionaries}.values())
        self._is_same = is_same
        self._numbers = None if PLACE is None else Words([id(d) + 8 * PLACE for d in self._held], 8)
        self._known: Any = None if self._numbers is None else self._numbers.now()

    def unchanged(self) -> bool:
        """Whether they hold what is wanted of them. What else was changed in them is looked at once."""
        if self._numbers is None:
            return self._is_same()
        now = self._numbers.now()
        if now == self._known:
            return True
        if not self._is_same():
            return False
        self._known = now  # read before they were compared: whatever came since is looked at
        return True


class _Object:
    """Something with attributes."""

    value: object = None


def find_place() -> int | None:
    """Where a dictionary keeps its number, in words of 8 bytes: what each change changes, and nothing else does."""
    if dict.__basicsize__ % 8:
        return None
    places = set(range(dict.__basicsize__ // 8))
    thing = _Object()
    for held in ({str(i): i for i in range(3)}, thing.__dict__):
        for change in _CHANGES:
            places &= _differing(held, change)
        for look in _LOOKS:
            places -= _differing(held, look)
    for _ in range(_ROUNDS):
        places &= _differing(thing.__dict__, lambda _: setattr(thing, "value", object()))
        places &= _differing(thing.__dict__, lambda _: _assign(thing))
    return places.pop() if len(places) == 1 else None


def _put(held: dict[str, Any], name: str, value: object) -> None:
    held[name] = value


_Change = Callable[[dict[str, Any]], object]
_CHANGES: tuple[_Change, ...] = (
    lambda held: _put(held, "0", object()),
    lambda held: _put(held, "0", object()),
    lambda held: _put(held, "new", None),
    lambda held: _put(held, "0", held.pop("0")),  # in another place
    lambda held: held.pop("new"),
    lambda held: held.update({"0": object()}),
)
_LOOKS: tuple[_Change, ...] = (
    lambda held: _put(held, "0", held["0"]),
    lambda held: [*held.items(), held.get("0"), held == dict(held)],
)


def _assign(thing: _Object) -> None:
    thing.value = object()


def _differing(held: dict[str, Any], change: _Change) -> set[int]:
    """Positions of the words that a change changes."""
    count = dict.__basicsize__ // 8
    before = words_at(id(held), count)
    change(held)
    return {i for i, (old, new) in enumerate(zip(before, words_at(id(held), count), strict=True)) if old != new}


PLACE = find_place()
