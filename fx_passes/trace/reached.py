"""The code that a forward may come to, and what type() and callable() say of traced values there.

Neither asks the value: both read what Python keeps of its class. Nor does isinstance() of torch.export's numbers. So
while a forward is traced, modules of the user's whose functions name them have versions of their own in their globals.
These are as before for all other values.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fx_passes.trace.instructions import (
    catches_exceptions,
    compared_to_none,
    compared_to_objects,
    compares_values,
    matches_structure,
    names_in,
    with_inner,
)
from fx_passes.trace.proxies import RecordingAttribute, RecordingProxy
from fx_passes.trace.state import is_near
from fx_passes.trace.theirs import is_theirs

_PROXIES = (RecordingProxy, RecordingAttribute)
_LIBRARY = os.path.dirname(os.__file__) + os.sep  # Python's own
_UNCOUNTED = frozenset(("data", "numpy", "data_ptr", "untyped_storage", "from_dlpack", "set_"))
_DICTIONARIES = frozenset(("_parameters", "_buffers"))
_MOST = 3000  # functions that are looked at
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


# Numbers that torch.export keeps free, and such as they are in eager.
_FAKE = ("FakeTensor", "FunctionalTensor")  # and what tensors are there
_SYMBOLIC = {torch.SymInt: 2, torch.SymFloat: 2.0, torch.SymBool: True}


class _Type:
    """Python's `type`, but for traced values: class statements, isinstance() and comparisons take it for the same."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and type(args[0]) in _PROXIES and not kwargs:
            return args[0].own_class(sys._getframe(1))
        if len(args) == 1 and type(args[0]) in _SYMBOLIC and not kwargs:
            return type(_SYMBOLIC[type(args[0])])
        if len(args) == 1 and type(args[0]).__name__ in _FAKE and isinstance(args[0], torch.Tensor) and not kwargs:
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        if len(args) == 3:
            name = sys._getframe(1).f_globals.get("__name__")
            return type(args[0], args[1], {"__module__": name, **args[2]}, **kwargs)
        return type(*args, **kwargs)

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (type,)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(self, cls: Any) -> bool:
        return issubclass(cls, type)

    def __getattr__(self, name: str) -> Any:
        return getattr(type, name)

    def __getitem__(self, item: Any) -> Any:
        return type[item]

    def __or__(self, other: Any) -> Any:
        return type | other

    def __ror__(self, other: Any) -> Any:
        return other | type

    def __eq__(self, other: Any) -> bool:
        return other is self or other is type

    def __hash__(self) -> int:
        return hash(type)


def _callable(value: Any) -> bool:
    """As callable(), which takes every traced value for a function."""
    if type(value) in _PROXIES:
        return any("__call__" in vars(cls) for cls in value.own_class(sys._getframe(1)).__mro__)
    return callable(value)


def _isinstance(value: Any, classes: Any) -> bool:
    """As isinstance(), of which numbers that are kept free are numbers."""
    return isinstance(value, classes) or (type(value) in _SYMBOLIC and isinstance(_SYMBOLIC[type(value)], classes))


_ANSWERS = {"type": _Type(), "callable": _callable, "isinstance": _isinstance}


class Reached:
    """Functions of the user's that forward may call, as far as their names tell."""

    def __init__(self, root: nn.Module) -> None:
        self.functions: list[types.FunctionType] = []
        self.unclear: dict[type, str] = {}  # classes whose code no graph can follow, and why
        self._seen: set[Any] = set()
        rooms = {type(module).__module__ for module in root.modules()}
        self._files = {getattr(sys.modules.get(room), "__file__", None) for room in rooms}
        for module in root.modules():
            for cls in type(module).__mro__:
                if is_theirs(cls.__module__) and cls not in self._seen:
                    self._look_at_class(cls)
            for value in module.__dict__.values():
                if type(value) not in _PLAIN and callable(value):
                    self._look_at(value)

    def why_unclear(self, module: nn.Module) -> str | None:
        """Why no graph can follow module's forward."""
        for cls in type(module).__mro__:
            if cls in self.unclear:
                return self.unclear[cls]
            if "forward" in vars(cls):
                return None
        return None

    @property
    def spaces(self) -> list[dict[str, Any]]:
        """The globals of the functions."""
        return list({id(function.__globals__): function.__globals__ for function in self.functions}.values())

    @cached_property
    def has_near_code(self) -> bool:
        """Whether a function is of no installed library: such read clocks, files and what else changes by itself."""
        return any(is_near(function.__module__ or "") for function in self.functions)

    @property
    def may_write_uncounted(self) -> bool:
        """Whether code of no installed library names a way to write that no version counter tells of."""
        return self._names_one_of(_UNCOUNTED)

    @property
    def reads_dictionaries(self) -> bool:
        """Whether such code names the dictionaries in which modules keep parameters and buffers."""
        return self._names_one_of(_DICTIONARIES)

    def _names_one_of(self, names: frozenset[str]) -> bool:
        near = (function for function in self.functions if is_near(function.__module__ or ""))
        return any(not names.isdisjoint(names_in(function.__code__)) for function in near)

    @property
    def catches_exceptions(self) -> bool:
        """Whether a function of the user's, or one beside a module's class, has an `except`."""
        return any(catches_exceptions(function) for function in self._own_functions())

    @cached_property
    def comparing(self) -> frozenset[types.CodeType]:
        """Functions of the user's, or beside a module's class, that ask whether two values are one object."""
        codes = (inner for function in self._own_functions() for inner in with_inner(function.__code__))
        return frozenset(code for code in codes if compares_values(code))

    def _own_functions(self) -> Iterator[types.FunctionType]:
        for function in self.functions:
            code = function.__code__
            place = code.co_filename
            is_near = place in self._files or not ("site-packages" in place or place.startswith(_LIBRARY))
            if is_near and (not code.co_name.startswith("__") or code.co_name == "__call__"):
                yield function

    @contextlib.contextmanager
    def comparisons_told(self, asked: Callable[[str], None]) -> Iterator[None]:
        """Call asked(name of a function) where one of these was called, and had a traced value."""
        if not self.comparing:
            yield
            return

        def profile(frame: types.FrameType, event: str, arg: Any) -> None:
            if event != "return" or frame.f_code not in self.comparing:
                return
            if any(issubclass(type(value), (torch.Tensor, *_PROXIES)) for value in frame.f_locals.values()):
                asked(frame.f_code.co_name)

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(before)

    @property
    def compares_arguments_to_none(self) -> bool:
        """Whether one of the functions asks if an argument of its own is None."""
        codes = (function.__code__ for function in self.functions)
        return any(compared_to_none(code).intersection(code.co_varnames[: code.co_argcount]) for code in codes)

    def compared_arguments(self, forward: Any) -> set[str] | None:
        """Arguments of forward that may be compared by `is` with constants or globals; None where all may be."""
        own: set[str] = set()
        for code in (inner for function in self._own_functions() for inner in with_inner(function.__code__)):
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            names = compared_to_objects(code)
            if names and (code is not getattr(forward, "__code__", None) or not names.issubset(arguments)):
                return None
            own |= names
        return own

    def _look_at_class(self, cls: type) -> None:
        self._seen.add(cls)
        first = len(self.functions)
        forward = vars(cls).get("forward")
        is_theirs_alone = not hasattr(forward, "__wrapped__")
        if isinstance(forward, types.FunctionType) and is_theirs_alone and catches_exceptions(forward):
            self.unclear[cls] = "forward() catches exceptions, and a graph goes one way"
        for value in vars(cls).values():
            self._look_at(value)
        own = set(map(id, vars(cls).values()))  # arrays among them compare number by number
        for function in self.functions[first:]:
            if id(function) in own and matches_structure(function.__code__):
                self.unclear[cls] = f"{function.__name__}() matches by structure, which a traced value does not tell"

    def _look_at(self, value: Any) -> None:
        if isinstance(value, types.MethodType | classmethod | staticmethod):
            value = value.__func__
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, property):
            value = value.fget
        while isinstance(value, types.FunctionType) and len(self.functions) < _MOST:
            if value.__code__ in self._seen or not is_theirs(value.__module__ or ""):
                return
            self._seen.add(value.__code__)
            self.functions.append(value)
            self._follow(value)
            value = getattr(value, "__wrapped__", None)

    def _follow(self, function: types.FunctionType) -> None:
        space = function.__globals__
        names = set(names_in(function.__code__))
        found = [space[name] for name in names if name in space]
        for value in found:
            if isinstance(value, types.ModuleType) and is_theirs(value.__name__):
                found = [*found, *(vars(value)[name] for name in names if name in vars(value))]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not assigned yet
                found.append(cell.cell_contents)
        for value in found:
            if isinstance(value, type):
                if is_theirs(value.__module__) and value not in self._seen:
                    self._look_at_class(value)
            elif type(value) in (dict, list, tuple):  # those of other classes may import what is asked for
                for item in [*(value.values() if isinstance(value, dict) else value)][:64]:
                    self._look_at(item)
            else:
                self._look_at(value)

    @contextlib.contextmanager
    def answered(self, *names: str) -> Iterator[None]:
        """Let these functions of Python's tell of traced values, in the modules of the functions, while this lasts."""
        changed: list[tuple[dict[str, Any], str]] = []
        for function in self.functions:
            space = function.__globals__
            for name in names:
                if name not in space and name in names_in(function.__code__):
                    space[name] = _ANSWERS[name]
                    changed.append((space, name))
        try:
            yield
        finally:
            for space, name in changed:
                if space.get(name) is _ANSWERS[name]:
                    del space[name]
