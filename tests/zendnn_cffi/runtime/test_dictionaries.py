"""Changes of dictionaries, read where CPython counts them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from zendnn_cffi.runtime import dictionaries
from zendnn_cffi.runtime.dictionaries import Dictionaries, find_place

WAYS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another value": lambda d: d.__setitem__("a", 2),
    "a key more": lambda d: d.__setitem__("new", 2),
    "a key less": lambda d: d.__delitem__("a"),
    "nothing left": lambda d: d.clear(),
    "popped": lambda d: d.popitem(),
    "updated": lambda d: d.update(a=3),
    "another order": lambda d: d.__setitem__("a", d.pop("a")),
    "by default": lambda d: d.setdefault("new", 1),
    "joined": lambda d: d.__ior__({"b": 5}),
}


def test_the_place_is_found() -> None:
    """Up to Python 3.13 there is one."""
    assert (dictionaries.PLACE is not None) == (sys.version_info < (3, 14))
    assert find_place() == dictionaries.PLACE


@pytest.mark.parametrize("certain", [True, False], ids=["gathered", "asked"])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("way", WAYS)
def test_every_change_is_seen(way: str, number: int, certain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not certain:
        monkeypatch.setattr(dictionaries, "PLACE", None)
    held: list[dict[str, Any]] = [{"a": 1, "b": object()}, {"a": 1, "c": 2}, {"a": 1} | {str(i): i for i in range(100)}]
    wanted = [list(d.items()) for d in held]
    asked = []

    def is_same() -> bool:
        asked.append(True)
        return [list(d.items()) for d in held] == wanted

    found = Dictionaries(held, is_same)
    assert found.unchanged() and found.unchanged() and len(asked) == (0 if certain else 2)
    WAYS[way](held[number])
    assert not found.unchanged() and not found.unchanged(), "it stays changed"
    assert Dictionaries(held, lambda: False).unchanged() == certain


@pytest.mark.parametrize("times", [1, 200])
def test_attributes_of_a_module_are_seen(times: int) -> None:
    module, answers = nn.Linear(2, 2), [False]
    found = Dictionaries([module.__dict__, module._parameters], lambda: answers[0])
    for number in range(times):  # the interpreter turns to a faster way of assigning
        assert found.unchanged()
        module.label = number  # type: ignore[assignment]
        answers[0] = False
        assert not found.unchanged()
        answers[0] = True
        assert found.unchanged(), "nothing that matters was changed"
        answers[0] = False
    assert found.unchanged(), "and it is not asked again"
    module.bias = None
    assert not found.unchanged()
