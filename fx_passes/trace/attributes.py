"""Attributes of modules that are no parameters, buffers or submodules: a graph keeps what they were.

    conv.stride = (2, 2), block.scale = 0.5, model.config.output_attentions = True, head.sizes[0] = 7

Where one was set is told by the number that CPython counts for a dictionary (zendnn_cffi.runtime.dictionaries). Lists,
sets and arrays have no such number: what they hold is compared. Names that no code of a forward has do not count:
trainers write such.
"""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn

from fx_passes.graph.hooks import HOOK_ATTRIBUTES, computed_weights, has_own_forward
from fx_passes.trace.held import ATOMS, CODE, elements, slot_names
from fx_passes.trace.instructions import names_in
from fx_passes.trace.skeleton import OF_MODULES
from fx_passes.trace.state import OF_TRACING, is_torch_s
from fx_passes.trace.theirs import fields_of, holds_fields
from zendnn_cffi.runtime.words import Words

_ANY = ""  # any name may stand for it
_MOST, _MOST_COUNTED = 256, 4096  # entries of a container beyond which it is not looked into; of a dictionary
_MOST_BYTES = 1 << 16  # of an array that is compared
_TYPE = object.__basicsize__ - 8  # where an object's class stands: the last word of what all objects have
_DEEPEST = 4  # objects and containers in one another
_MOST_PLACES = 4096
_MOST_FUNCTIONS = 4096
# What others of this package look at, and what PyTorch counts for itself.
_OTHERS = (*OF_MODULES, "training", "forward", "_non_persistent_buffers_set", "_is_full_backward_hook",
           "_compiled_call_impl")  # fmt: skip
_READ_ANY = frozenset(("getattr", "vars", "__dict__", "eval", "exec", "globals", "attrgetter"))
_GONE = object()


class Attributes:
    """What modules hold, and objects, dictionaries and lists there, as it is now.

    dictionaries  where it stands: each of these changes where an attribute is set
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        others: Iterable[tuple[str, Any]] = (),
        kinds: Iterable[type] | None = None,
        functions: Iterable[Any] = (),
    ) -> None:
        """Take down what they hold now.

        others     names and values that belong to no module, and that a forward reaches by its globals and the like
        kinds      classes of modules whose forwards read all that; None for those of these modules
        functions  further ones that do
        """
        self._modules = list(modules)
        own_forwards = [module.__dict__["forward"] for module in self._modules if has_own_forward(module)]
        self._others = [*others, *(("forward", own) for own in own_forwards)]
        kinds = {type(module) for module in self._modules} if kinds is None else set(kinds)
        functions = [*functions, *own_forwards]
        self._names, known = names_read(kinds, (), functions), set[type]()
        while not self._look() <= known and self._names is not None:  # methods of objects there may read further names
            known |= self._classes
            if (names := names_read(kinds, known, functions)) == self._names:
                break
            self._names = names
        self.dictionaries = [space.held for space in self._spaces]
        self._kinds = list(map(type, self._modules))
        self._types = Words([id(module) + _TYPE for module in self._modules], 8)

    def _look(self) -> set[type]:
        """Take down what modules hold; return the classes of objects there."""
        self._spaces: list[_Space] = []
        self._lists: list[tuple[Collection[Any], str, list[Any]]] = []
        self._arrays: list[tuple[numpy.ndarray, str, bytes]] = []
        self._classes: set[type] = set()
        self._inner: set[int] = set()  # what is in a list, tuple or dictionary
        seen: set[int] = set()
        for module in self._modules:
            self._spaces.append(space := _Space(module.__dict__, None, module))
            for name, value in space.known.items():
                if is_torch_s(module) or self._is_read(name):
                    self._look_into(value, name, _DEEPEST, seen)
        for name, value in self._others:
            self._look_into(value, name, _DEEPEST, seen)
        return self._classes

    def looks_unchanged(self) -> bool:
        """Whether modules have the same classes, lists and sets the same objects, and arrays the same numbers."""
        return (
            (not self._modules or self._types.unchanged())
            and all(len(now) == len(known) and all(map(operator.is_, now, known)) for now, _, known in self._lists)
            and all(array.tobytes() == known for array, _, known in self._arrays)
        )

    def unchanged(self) -> bool:
        """Whether all that a forward may read is as it was."""
        if list(map(type, self._modules)) != self._kinds:
            return False
        replaced: list[_Replaced] = []
        changed = set(self._changed(replaced))
        if any(map(self._is_read, changed)) or self._are_of_torch_s(changed):
            return False
        if replaced:
            self._follow(replaced)
        return True

    def _changed(self, replaced: list[_Replaced]) -> Iterator[str]:
        """Names under which something else is now; lists in place of equal ones are added to replaced."""
        items = {id(held): known for held, _, known in self._lists if type(held) is list}
        for space in self._spaces:
            for key, name in space.changed():
                before, now = space.known.get(key), space.held.get(key)
                known = items.get(id(before))
                if type(now) is list and known is not None and _are_equal_atoms(now, known):
                    replaced.append(_Replaced(space, key, before, now))
                else:
                    yield name
        for held, name, earlier in self._lists:
            if len(held) != len(earlier) or not all(map(is_same, held, earlier)):
                yield name
        for array, name, numbers in self._arrays:
            if array.tobytes() != numbers:
                yield name

    def _follow(self, replaced: Sequence[_Replaced]) -> None:
        """Look at lists that were put in place of equal ones from now on, as PEFT sets the same adapters anew."""
        records, former = {id(held): (held, name, known) for held, name, known in self._lists}, set[int]()
        for space, key, before, now in replaced:
            if (record := records.get(id(before))) is None:  # another thread did it
                continue
            former.add(id(before))
            space.known[key], records[id(now)] = now, (now, *record[1:])
        former -= {*self._inner, *(id(value) for space in self._spaces for value in space.known.values())}
        self._lists = [record for place, record in records.items() if place not in former]

    def _is_read(self, name: str) -> bool:
        """Whether a forward may read an attribute of this name."""
        return name == _ANY or self._names is None or name in self._names

    def _are_of_torch_s(self, names: set[str]) -> bool:
        """Whether one of PyTorch's modules has such an attribute: all of these count."""
        return any(is_torch_s(module) and not names.isdisjoint(vars(module)) for module in self._modules)

    def _look_into(self, value: Any, name: str, depth: int, seen: set[int]) -> None:
        if isinstance(value, (*ATOMS, *CODE, nn.Module, torch.Tensor)) or id(value) in seen or not depth:
            return
        seen.add(id(value))
        if len(seen) > _MOST_PLACES:
            return
        if isinstance(value, dict):
            if len(value) <= _MOST_COUNTED:
                self._spaces.append(_Space(value, name))
                if isinstance(value, collections.OrderedDict):  # whose order can change without a count
                    self._lists.append((value, name, list(value)))
                self._look_into_each(value.values(), name, depth, seen)
        elif isinstance(value, numpy.ndarray):
            if value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
                self._arrays.append((value, name, value.tobytes()))
        elif isinstance(value, list | tuple | set | collections.deque):
            items = elements(value)
            if len(items) <= _MOST:
                if not isinstance(value, tuple):
                    self._lists.append((value, name, list(items)))
                self._look_into_each(items, name, depth, seen)
        elif holds_fields(value):
            self._look_into_fields(value, depth, seen)

    def _look_into_fields(self, value: Any, depth: int, seen: set[int]) -> None:
        kind: Any = type(value)
        fields, slots = fields_of(value), slot_names(kind)
        if not fields and not slots:
            return
        self._classes.add(kind)
        answers = kind.__getattribute__ is not object.__getattribute__ or hasattr(kind, "__getattr__")
        if fields:
            self._spaces.append(_Space(fields, _ANY if answers else None))
        read = [name for name in slots if answers or self._is_read(name)]
        if read:
            self._lists.append((_Slots(value, read), _ANY, [*_Slots(value, read)]))
        for key, inner in [*fields.items(), *zip(read, _Slots(value, read), strict=True)]:
            if answers or self._is_read(key):
                self._look_into(inner, _ANY if answers else key, depth - 1, seen)

    def _look_into_each(self, values: Iterable[Any], name: str, depth: int, seen: set[int]) -> None:
        for value in [*values]:
            self._inner.add(id(value))
            self._look_into(value, name, depth - 1, seen)


class _Slots(Collection[Any]):
    """The values that an object has in places of its own, by __slots__: they have no dictionary.

    names  of those that count
    """

    def __init__(self, value: Any, names: Sequence[str]) -> None:
        self._value, self._names = value, names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Any]:
        return iter([_in_slot(self._value, name) for name in self._names])

    def __contains__(self, value: object) -> bool:
        return value in [*self]


def _in_slot(value: Any, name: str) -> Any:
    """An attribute, without a call of the object's own __getattr__; _GONE where it is not set."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return _GONE


class _Space:
    """A dictionary, and what it held when this was made.

    name    the attribute that leads to it; None where its keys are attributes themselves
    module  the module whose attributes these are, if it is one
    """

    def __init__(self, held: dict[str, Any], name: str | None, module: nn.Module | None = None) -> None:
        self.held, self._name, self._module = held, name, module
        self.known = self._now()

    def changed(self) -> Iterator[tuple[str, str]]:
        """Keys under which there is something else now, and the attributes that lead to it."""
        now = self._now()
        for key in now.keys() | self.known.keys():
            if not is_same(now.get(key, _GONE), self.known.get(key, _GONE)):
                yield key, key if self._name is None else self._name
        if self._name is not None and now.keys() == self.known.keys():  # a forward may go through the entries
            yield from (
                (key, self._name) for key, other in zip(now, self.known, strict=True) if not is_same(key, other)
            )

    def _now(self) -> dict[str, Any]:
        module, held = self._module, self.held
        if module is None:
            return dict(held)
        others = {*module._parameters, *module._buffers, *computed_weights(module), *_OTHERS}
        leaves_out_own = is_torch_s(module)  # PyTorch's modules keep caches under such names
        return {
            name: value
            for name, value in held.items()
            if name not in others
            and not name.endswith(HOOK_ATTRIBUTES)
            and not name.startswith(OF_TRACING)
            and not (leaves_out_own and name.startswith("_"))
        }


class _Replaced(NamedTuple):
    """A list in place of an equal one, by the space that holds it and the key there."""

    space: _Space
    key: str
    before: Any
    now: list[Any]


def names_read(
    kinds: Iterable[type], others: Iterable[type] = (), functions: Iterable[Any] = ()
) -> frozenset[str] | None:
    """Names in the code that forwards of these classes may reach, as far as names tell; None where it may read any.

    others     classes of objects that it may reach
    functions  those known to be reached otherwise, or methods, partial objects and objects that are called as such
    """
    reach = _Reach()
    for function in functions:
        reach.add(function)
        reach.add_class(type(function), "__call__")
    for cls in {base for kind in kinds for base in kind.__mro__}:
        reach.add_class(cls, "forward")
    for cls in {base for kind in others for base in kind.__mro__}:
        reach.add_class(cls)
    return reach.names()


class _Reach:
    """Functions that code may reach: those of its globals' names, and of classes' where an attribute has the name."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._classes: set[type] = set()
        self._seen: set[types.CodeType] = set()
        self._pending: list[types.FunctionType] = []

    def add_class(self, kind: type, *begun: str) -> None:
        """Functions of this class may be called by their names; these first ones are."""
        if kind in self._classes or kind.__module__.partition(".")[0] == "torch" or kind is object:
            return
        self._classes.add(kind)
        for name in self._names.union(begun) & vars(kind).keys():
            self.add(vars(kind)[name])

    def names(self) -> frozenset[str] | None:
        while self._pending:
            function = self._pending.pop()
            new = set(names_in(function.__code__)) - self._names
            if not new.isdisjoint(_READ_ANY) or len(self._seen) > _MOST_FUNCTIONS:
                return None
            self._names |= new
            self._follow(function)
            for kind in [*self._classes]:
                for name in new & vars(kind).keys():
                    self.add(vars(kind)[name])
        return frozenset(self._names)

    def _follow(self, function: types.FunctionType) -> None:
        space = function.__globals__
        names = set(names_in(function.__code__))
        found = [space[name] for name in names if name in space]
        for value in [*found]:
            if isinstance(value, types.ModuleType):
                found += [vars(value)[name] for name in names if name in vars(value)]
        for cell in function.__closure__ or ():
            try:
                found.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        for value in found:
            if isinstance(value, type):
                self.add_class(value, "__init__", "__new__", "__call__", "__post_init__")
            else:
                self.add(value)

    def add(self, value: Any) -> None:
        """The function in this value may be called."""
        if isinstance(value, types.MethodType | classmethod | staticmethod):
            value = value.__func__
        elif isinstance(value, functools.partial | functools.partialmethod):
            value = value.func
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        while isinstance(value, types.FunctionType) and value.__code__ not in self._seen:
            if (value.__module__ or "").partition(".")[0] == "torch":
                return
            self._seen.add(value.__code__)
            self._pending.append(value)
            value = getattr(value, "__wrapped__", None)


def _are_equal_atoms(values: list[Any], others: list[Any]) -> bool:
    """Whether two lists hold the same, and nothing that holds something itself."""
    return (
        len(values) == len(others) and all(isinstance(v, ATOMS) for v in values) and all(map(is_same, values, others))
    )


def is_same(value: Any, other: Any) -> bool:
    """Whether two values are one object, or equal ones that nobody can change."""
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, tuple):
        held, held_now = elements(value), elements(other)
        return len(held) == len(held_now) and all(map(is_same, held, held_now))
    return isinstance(value, ATOMS) and bool(value == other)
