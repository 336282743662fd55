"""Globals, variables of enclosing functions, and attributes of classes and objects, that a forward names.

    return self.linear(x) * SCALE        each call asks whether SCALE is what it was while this was traced

Installed libraries are left out. A dictionary that nobody wrote to since holds what it did, so mostly one comparison of
memory tells of all globals (zendnn_cffi.runtime.dictionaries).
"""

from __future__ import annotations

import collections
import copy
import math
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import nn

from fx_passes.trace.attributes import Attributes
from fx_passes.trace.held import elements
from fx_passes.trace.instructions import with_inner, without_caches
from fx_passes.trace.reached import Reached
from fx_passes.trace.state import is_near
from fx_passes.trace.theirs import holds_fields
from zendnn_cffi.runtime.dictionaries import Dictionaries

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_LOOKED_INTO = (set, collections.deque, numpy.ndarray)
_GLOBAL, _ATTRIBUTE, _LOCAL = ("LOAD_GLOBAL", "LOAD_NAME"), ("LOAD_ATTR", "LOAD_METHOD"), "LOAD_FAST"
_OUTER = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_ALL = frozenset(("globals", "eval", "exec"))  # builtins by which code may read any global
_MOST = 64  # values in a list or dictionary, and in those that it holds
_DEEPEST = 8  # of these in one another
_GONE = object()


class Named:
    """What stood under these names.

    rows     dictionary, name, value
    others   class or cell, name, value: these have no dictionary to be had
    kinds    classes of modules whose forwards name them
    near     functions that do; a module is made before, so that its __init__ reads nothing
    """

    def __init__(
        self,
        rows: Iterable[tuple[Any, str, Any]],
        others: Iterable[tuple[Any, str, Any]],
        kinds: Iterable[type] = (),
        near: Iterable[types.FunctionType] = (),
    ) -> None:
        self._rows, self._others = list(rows), list(others)
        self._fields = _fields(((name, value) for _, name, value in (*self._rows, *self._others)), kinds, near)
        values = [value for _, _, value in (*self._rows, *self._others) if isinstance(value, list | dict | tuple)]
        self._copies = [(value, copy.deepcopy(value)) for value in values if _count(value) <= _MOST]
        self._is_other = False  # whether it is known not to be what the graph was made with
        self._dictionaries = Dictionaries([held for held, _, _ in self._rows], self._holds_the_same)
        inner = () if self._fields is None else self._fields.dictionaries
        self._inner = Dictionaries(inner, lambda: self._fields is None or self._fields.unchanged())

    @classmethod
    def of(cls, root: nn.Module, reached: Reached) -> Named | None:
        """What forward of root names now; None where that is nothing of the user's."""
        near = [function for function in reached.functions if is_near(function.__module__ or "")]
        found, attributes = dict[Any, tuple[Any, str, Any]](), set[str]()
        for function in near:
            for held, name, value in _named_by(function, attributes):
                if not isinstance(value, types.ModuleType) and name != "__class__":  # the class that super() asks for
                    found[id(held), name] = held, name, value
        kinds = {type(module) for module in root.modules()}
        for kind in {base for each in kinds for base in each.__mro__ if is_near(base.__module__)}:
            for name in attributes & vars(kind).keys():
                if not isinstance(value := vars(kind)[name], types.FunctionType):
                    found[id(kind), name] = kind, name, value
        rows = [row for row in found.values() if isinstance(row[0], dict)]
        others = [row for row in found.values() if not isinstance(row[0], dict)]
        return cls(rows, others, kinds, [each for each in near if each.__name__ != "__init__"]) if found else None

    def unchanged(self) -> bool:
        """Whether all is what it was."""
        return (
            not self._is_other
            and self._dictionaries.unchanged()
            and (not self._others or all(_is_same(_held_by(held, name), value) for held, name, value in self._others))
            and (not self._copies or all(_is_equal(value, copy) for value, copy in self._copies))
            and (self._fields is None or self._fields_unchanged(self._fields))
        )

    def _fields_unchanged(self, fields: Attributes) -> bool:
        inner = not fields.dictionaries or self._inner.unchanged()
        return inner and (fields.looks_unchanged() or fields.unchanged())

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Tensors under these names, also in lists, tuples and dictionaries."""
        every = ((name, each) for _, name, value in (*self._rows, *self._others) for each in _in_containers(value))
        found = [(name, each) for name, each in every if isinstance(each, torch.Tensor)]
        return [(f"{name} {number}", each) for number, (name, each) in enumerate(found)]

    def values(self) -> dict[str, set[str]]:
        """Names, and the values of these that another process can compare."""
        found: dict[str, set[str]] = {}
        for _, name, value in (*self._rows, *self._others):
            if _count(value) <= _MOST:
                found.setdefault(name, set()).add(repr(value))
        return found

    @classmethod
    def read_again(cls, root: nn.Module, values: dict[str, set[str]], *, is_new: bool) -> Named | None:
        """What forward names in this process, where its graph may come from another one.

        is_new  whether the graph was made here; else it counts for nothing where a name has another value
        """
        named = cls.of(root, Reached(root))
        if named is not None and not is_new:
            now = named.values()
            named._is_other = any(now.get(name, known) != known for name, known in values.items())
        return named

    def _holds_the_same(self) -> bool:
        return all(_is_same(held.get(name, _GONE), value) for held, name, value in self._rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> Named:
        return self


def _named_by(function: types.FunctionType, attributes: set[str]) -> Iterator[tuple[Any, str, Any]]:
    """Dictionary, class or cell, name and value of what a function names.

    a.b.c is looked up from a global or a variable of an enclosing function on, where a module of the user's, an object
    or a class holds the next.

    attributes  names of attributes of its own values, added to
    """
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    for code in with_inner(function.__code__):
        held: Any = None
        for row in without_caches(code):
            if row.opname in _GLOBAL:
                held = function.__globals__
            elif row.opname in _OUTER and row.argval in cells:
                held = cells[row.argval]
            elif row.opname not in _ATTRIBUTE:
                held = attributes if row.opname.startswith(_LOCAL) else None
                continue
            if held is function.__globals__ and row.argval in _ALL and row.argval not in held:
                yield from ((held, name, value) for name, value in tuple(held.items()))
                held = None
            elif held is attributes:
                attributes.add(row.argval)
                held = None
            elif held is not None:
                value = _held_by(held, row.argval)
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


def _fields(
    values: Iterable[tuple[str, Any]], kinds: Iterable[type], near: Iterable[types.FunctionType]
) -> Attributes | None:
    """What objects hold that are among these values, or in lists and dictionaries there; None where there are none.

    A forward may come to them by a variable of its own, and by arguments of the functions that it calls.
    """
    every = ((name, each) for name, value in values for each in _in_containers(value))
    holders = [(name, each) for name, each in every if isinstance(each, _LOOKED_INTO) or holds_fields(each)]
    return Attributes((), holders, kinds, near) if holders else None


def _in_containers(value: Any) -> Iterable[Any]:
    """An object, or those that a small list, tuple or dictionary holds."""
    if isinstance(value, dict | list | tuple) and len(items := elements(value)) <= _MOST:
        return [*(items.values() if isinstance(items, dict) else items)]
    return (value,)


def _is_equal(value: Any, other: Any) -> bool:
    """Whether plain values are equal, and the entries of dictionaries in the same order."""
    if value != other:
        return False
    if isinstance(value, dict):
        return [*value] == [*other] and all(map(_is_equal, value.values(), other.values()))
    return not isinstance(value, list | tuple) or all(map(_is_equal, value, other))


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    is_equal = type(value) is type(other) and isinstance(value, _PLAIN) and value == other
    return is_equal and (not isinstance(value, float | complex) or repr(value) == repr(other))  # 0.0 is not -0.0


def _held_by(holder: Any, name: str) -> Any:
    """A value of a dictionary, a class or a cell; _GONE where it has none."""
    if isinstance(holder, types.CellType):
        try:
            return holder.cell_contents
        except ValueError:
            return _GONE
    return (vars(holder) if isinstance(holder, type) else holder).get(name, _GONE)


def _count(value: Any, depth: int = _DEEPEST) -> float:
    """How many plain values lists, dictionaries and tuples hold; infinity for many, and for other ones."""
    if isinstance(value, _PLAIN):
        return 1
    if type(value) not in (list, dict, collections.OrderedDict, tuple) or len(value) > _MOST or not depth:
        return math.inf
    total = 0.0
    for entry in value.values() if isinstance(value, dict) else value:
        total += _count(entry, depth - 1)
        if total > _MOST:
            return math.inf
    return total
