"""Globals, and attributes of classes and other objects, that a forward names: a graph has what they were for good.

    return self.linear(x) * SCALE        each call asks whether SCALE is what it was while this was traced

Installed libraries are left out. A dictionary that nobody wrote to since holds what it did, so mostly one comparison of
memory tells of all globals (zendnn_cffi.runtime.dictionaries).
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fx_passes.trace.instructions import with_inner, without_caches
from fx_passes.trace.reached import Reached
from fx_passes.trace.state import is_near
from zendnn_cffi.runtime.dictionaries import Dictionaries

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_COMPARED = (*_PLAIN, tuple, torch.Tensor, types.FunctionType, list, dict)
_GLOBAL, _ATTRIBUTE, _LOCAL = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD"), "LOAD_FAST"
_MOST = 64  # entries of a list or dictionary
_GONE = object()


class Named:
    """What stood under these names.

    rows     dictionary, name, value
    classes  class, name, value: their dictionaries are not to be had
    """

    def __init__(self, rows: Iterable[tuple[Any, str, Any]], classes: Iterable[tuple[Any, str, Any]]) -> None:
        self._rows, self._classes = list(rows), list(classes)
        self._copies = [(value, value.copy()) for _, _, value in (*self._rows, *self._classes) if _is_small(value)]
        self._dictionaries = Dictionaries([held for held, _, _ in self._rows], self._holds_the_same)

    @classmethod
    def of(cls, root: nn.Module, reached: Reached) -> Named | None:
        """What forward of root names now; None where that is nothing of the user's."""
        near = [function for function in reached.functions if is_near(function.__module__ or "")]
        rows, classes, attributes = list[Any](), list[Any](), set[str]()
        for function in near:
            for held, name, value in _named_by(function, attributes):
                if isinstance(value, _COMPARED):
                    (classes if isinstance(held, type) else rows).append((held, name, value))
        for kind in {base for module in root.modules() for base in type(module).__mro__ if is_near(base.__module__)}:
            for name in attributes & vars(kind).keys():
                if isinstance(value := vars(kind)[name], _COMPARED) and not isinstance(value, types.FunctionType):
                    classes.append((kind, name, value))
        return cls(rows, classes) if rows or classes else None

    def unchanged(self) -> bool:
        """Whether all is what it was."""
        return (
            self._dictionaries.unchanged()
            and all(_is_same(vars(kind).get(name, _GONE), value) for kind, name, value in self._classes)
            and all(value == copy for value, copy in self._copies)
        )

    def _holds_the_same(self) -> bool:
        return all(_is_same(held.get(name, _GONE), value) for held, name, value in self._rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> Named:
        return self


def _named_by(function: types.FunctionType, attributes: set[str]) -> Iterator[tuple[Any, str, Any]]:
    """Dictionary or class, name and value of what a function names; attributes: names of attributes of its own values.

    a.b.c is looked up from a global on, where a module of the user's, an object or a class holds the next.
    """
    for code in with_inner(function.__code__):
        held: Any = None
        for row in without_caches(code):
            if row.opname in _GLOBAL:
                held = function.__globals__
            elif row.opname not in _ATTRIBUTE:
                held = attributes if row.opname.startswith(_LOCAL) else None
                continue
            if held is attributes:
                attributes.add(row.argval)
                held = None
            elif held is not None:
                names = vars(held) if isinstance(held, type) else held
                value = names.get(row.argval, _GONE)
                if value is not _GONE:
                    yield held, row.argval, value
                held = _space_of(value)


def _space_of(value: Any) -> Any:
    """Where attributes of a module of the user's, an object, or a class of the user's lie."""
    if isinstance(value, type):
        return value if is_near(value.__module__) else None
    if isinstance(value, types.ModuleType):
        return vars(value) if is_near(value.__name__) else None
    if isinstance(value, nn.Module | torch.Tensor | types.FunctionType):
        return None
    return getattr(value, "__dict__", None)


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and isinstance(value, _PLAIN) and value == other)


def _is_small(value: Any) -> bool:
    """Whether it is a list or dictionary of few plain values: what is in it may change."""
    if type(value) not in (list, dict) or len(value) > _MOST:
        return False
    return all(isinstance(entry, _PLAIN) for entry in (value.values() if isinstance(value, dict) else value))
