"""Noticing what a forward changes beside its result: attributes, buffers, lists, what its class or its file holds.

A graph computes results. What forward assigns while it is traced (self.n += 1, self.past.append(x)) would be done once,
and never again.
"""

from __future__ import annotations

import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn

from fx_passes.trace.held import (
    ATOMS,
    CODE,
    METHODS,
    Held,
    Kept,
    copy_of_iterator,
    describe,
    function_in,
    gives_once,
    is_stateful,
    within,
)
from fx_passes.trace.instructions import names_in
from zendnn_cffi.values import dataclass

_MAX_CALLS = 2  # how deep functions are followed that forward calls
OF_TRACING = "_tensor_constant"  # torch.fx puts tensors that forward makes on the root


def is_torch_s(module: nn.Module) -> bool:
    """Whether the module's class is PyTorch's own; such keep nothing from call to call but caches (_flat_weights)."""
    return type(module).__module__.startswith("torch.nn")


def attributes_of(module: nn.Module, keep: Kept, seen: dict[int, Any] | None = None) -> dict[str, Any]:
    """What a module itself holds, by attribute: parameters, buffers and submodules by name.

    A ScriptModule looks its methods up at their first call, and keeps them.
    """
    found: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        if name in ("_parameters", "_buffers", "_modules"):
            found |= {str(inner): describe(item, keep) for inner, item in value.items()}
        elif isinstance(value, torch.ScriptMethod) or name.startswith(OF_TRACING):
            continue
        elif not (name.startswith("_") and is_torch_s(module)):
            found[name] = describe(value, keep, seen)
    return found


class Snapshot:
    """What the modules of a tree hold at one moment, and what their classes and their functions' globals hold.

    in_place  whether a tensor that was written to counts as changed; False within a trace: nothing is put back there,
              as tensors have no numbers to keep
    """

    def __init__(self, root: nn.Module, *, in_place: bool = True) -> None:
        self._root = root
        self._keep = Kept(in_place)
        self._found = self._look()
        self._places = list(_shared_places(root))
        self._shared = [describe(place.get(), self._keep) for place in self._places]
        saved = self._places if in_place else []
        self._saved = [(value := place.get(), copy_of_iterator(value), Held(value)) for place in saved]

    def unrepeatable(self) -> dict[str, str]:
        """Return the paths of modules whose forward may take values from an iterator that cannot be copied -> which.

        A forward that is traced would take one, and the first call the next.
        """
        return unrepeatable(self._root) if self._keep.holds_once else {}

    def _look(self) -> dict[str, dict[str, Any]]:
        seen: dict[int, Any] = {}  # what modules share is told of the first that has it
        return {path: attributes_of(module, self._keep, seen) for path, module in self._root.named_modules()}

    def changed(self) -> dict[str, str]:
        """Return the paths of modules whose state is another now -> what of it."""
        now, found = self._look(), dict[str, str]()
        for path in {**self._found, **now}:
            before, after = self._found.get(path, {}), now.get(path, {})
            names = [n for n in {**before, **after} if n not in before or n not in after or before[n] != after[n]]
            if names and path in self._found:
                found[path] = f"its forward changes {', '.join(f'self.{n}' for n in names[:4])}"
        for place, before in zip(self._places, self._shared, strict=True):
            if describe(place.get(), self._keep) != before:
                for path in place.readers:
                    found.setdefault(path, f"its forward changes {place.name}")
        return found

    def restore_shared(self) -> None:
        """Put back what classes and globals held: they are the user's, not those of a copy."""
        for place, before, (value, again, held) in zip(self._places, self._shared, self._saved, strict=True):
            if describe(place.get(), self._keep) != before:
                place.set(value if again is None else again)
                held.put_back()


@dataclass(frozen=True)
class _Place:
    """Where something lies that several modules, or calls, may share."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    readers: tuple[str, ...]


_CLASS = "a class"  # no name of a global
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
# Objects of these are left out; they keep what does not change a result.
_NOT_THEIRS = frozenset(("torch", "numpy", *sys.stdlib_module_names)) - {"__main__", "itertools"}
# What modules of others keep that a forward may change through them: module, name in code -> where it is.
_OF_MODULES: dict[tuple[str, str], Callable[[], Any]] = {
    ("os", "environ"): lambda: os.environ,
    ("random", ""): lambda: random._inst,
    ("numpy", "random"): lambda: numpy.random.mtrand._rand,
    ("numpy.random", ""): lambda: numpy.random.mtrand._rand,
}


def _is_kept(value: Any) -> bool:
    """Whether a value may be changed by a forward that reads it from a global, a cell or a class."""
    value = getattr(value, "__self__", None) if isinstance(value, METHODS) else value
    if isinstance(value, _NUMBERS) or is_stateful(value):
        return True
    return type(value).__module__.partition(".")[0] not in _NOT_THEIRS and not isinstance(value, (nn.Module, *CODE))


def arrays_of(root: nn.Module) -> list[numpy.ndarray]:
    """Numpy arrays that a tree holds, or that its functions reach."""
    held = [value for module in root.modules() for value in module.__dict__.values() if not isinstance(value, ATOMS)]
    every = (each for value in (*held, *(place.get() for place in _shared_places(root))) for each in within(value))
    return [each for each in every if isinstance(each, numpy.ndarray)]


def is_near(module: str) -> bool:
    """Whether it is no installed library, in which caches and lists of warnings would count as state."""
    place = str(getattr(sys.modules.get(module), "__file__", None) or "")
    is_made = module.startswith("namedtuple_")  # what collections.namedtuple calls the place of its classes' methods
    return module.partition(".")[0] not in _NOT_THEIRS and "site-packages" not in place and not is_made


def unrepeatable(root: nn.Module) -> dict[str, str]:
    """The paths of modules whose forward may take values from an iterator that cannot be copied -> which."""
    found: dict[str, str] = {}
    of_class: dict[type, list[str]] = {}
    for path, module in root.named_modules():
        for name, value in module.__dict__.items():
            if not isinstance(value, (*ATOMS, *CODE)) and not is_torch_s(module) and _holds_once(value):
                found.setdefault(path, f"its forward takes values from self.{name}, which gives each once")
        for cls in type(module).__mro__:
            if not _is_python_s(cls):
                if cls not in of_class:
                    of_class[cls] = [p.name for p in _places_of_class(cls, (), set()) if _holds_once(p.get())]
                names = of_class[cls]
                if names:
                    found.setdefault(path, f"its forward takes values from {names[0]}, which gives each once")
        for place in _places_of_attributes(module, path, set()):
            if _holds_once(place.get()):
                found.setdefault(path, f"its forward takes values from {place.name}, which gives each once")
    return found


def _holds_once(value: Any) -> bool:
    return any(gives_once(each) for each in within(value))


def _is_python_s(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", "builtins")


def _shared_places(root: nn.Module) -> Iterator[_Place]:
    """Attributes of the modules' classes, and globals and cells that their functions read; torch's own are left out."""
    readers: dict[type, list[str]] = {}
    for path, module in root.named_modules():
        for cls in type(module).__mro__:
            if not _is_python_s(cls):
                readers.setdefault(cls, []).append(path)
    seen: set[tuple[int, str]] = set()
    for cls, paths in readers.items():
        yield from _places_of_class(cls, tuple(paths), seen)
    for path, module in root.named_modules():
        yield from _places_of_attributes(module, path, seen)


def _places_of_attributes(module: nn.Module, path: str, seen: set[tuple[int, str]]) -> Iterator[_Place]:
    """Those of functions that a module has in attributes; copies of it have the same methods of built-in objects."""
    for name, value in module.__dict__.items():
        if isinstance(value, types.BuiltinMethodType) and _is_kept(value):
            yield _Place(f"self.{name}", lambda value=value: value, lambda value: None, (path,))  # type: ignore[misc]
        if (function := function_in(value)) is not None:
            yield from _places_of(function, (path,), seen)


def _places_of_class(
    cls: type, readers: tuple[str, ...], seen: set[tuple[int, str]], functions: bool = True
) -> Iterator[_Place]:
    for name, value in list(vars(cls).items()):
        if isinstance(value, types.FunctionType):
            if functions:
                yield from _places_of(value, readers, seen)
        elif _is_kept(value) and not name.startswith("__") and (id(cls), name) not in seen:
            seen.add((id(cls), name))
            yield _Place(
                f"{cls.__name__}.{name}",
                lambda name=name: cls.__dict__.get(name),  # type: ignore[misc]
                lambda value, name=name: setattr(cls, name, value),  # type: ignore[misc]
                readers,
            )


def _places_of(
    function: types.FunctionType, readers: tuple[str, ...], seen: set[tuple[int, str]], depth: int = 0
) -> Iterator[_Place]:
    """Globals and cells that a function, and functions that it names, read; its attributes and defaults."""
    name = function.__name__
    yield _Place(f"attributes of {name}()", lambda: function.__dict__, lambda value: None, readers)
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        if not isinstance(default, ATOMS) and _is_kept(default):
            yield _Place(f"a default of {name}()", lambda default=default: default, lambda value: None, readers)  # type: ignore[misc]
    names = dict.fromkeys(names_in(function.__code__))
    is_ours = str(function.__globals__.get("__name__")).startswith("fx_passes.")  # what wraps a forward of the user's
    spaces = [] if is_ours else [("the global ", function.__globals__)]
    for prefix, space in spaces:
        for name in names:
            if (id(space), name) in seen or name not in space:
                continue
            seen.add((id(space), name))
            value = space[name]
            yield from _places_of_code(value, readers, seen, depth)
            if isinstance(value, types.ModuleType):
                yield from _places_of_library(value, names, readers)
                if prefix == "the global " and is_near(value.__name__):
                    spaces.append((f"{name}.", vars(value)))
            if _is_kept(value):
                yield _Place(
                    f"{prefix}{name}",
                    lambda space=space, name=name: space.get(name),  # type: ignore[misc]
                    lambda value, space=space, name=name: space.__setitem__(name, value),  # type: ignore[misc]
                    readers,
                )
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield from _places_of_code(held, readers, seen, depth)
        if _is_kept(held):
            yield _Place(
                f"the enclosing function's {name}",
                lambda cell=cell: cell.cell_contents,  # type: ignore[misc]
                lambda value, cell=cell: setattr(cell, "cell_contents", value),  # type: ignore[misc]
                readers,
            )


def _places_of_code(value: Any, readers: tuple[str, ...], seen: set[tuple[int, str]], depth: int) -> Iterator[_Place]:
    """Those of a function or class that a function names; of classes that are no modules the attributes alone."""
    if getattr(value, "__module__", None) is None or str(value.__module__).partition(".")[0] in _NOT_THEIRS:
        return
    if (function := function_in(value)) is not None and depth < _MAX_CALLS:
        yield from _places_of(function, readers, seen, depth + 1)
    elif isinstance(value, type) and depth < _MAX_CALLS and (id(value), _CLASS) not in seen:
        seen.add((id(value), _CLASS))
        if issubclass(value, nn.Module) or is_near(value.__module__):
            yield from _places_of_class(value, readers, seen, issubclass(value, nn.Module))


def _places_of_library(module: types.ModuleType, names: dict[str, Any], readers: tuple[str, ...]) -> Iterator[_Place]:
    for (library, name), get in _OF_MODULES.items():
        if module.__name__ == library and (not name or name in names):
            yield _Place(f"the state of {library}{'.' if name else ''}{name}", get, lambda value: None, readers)
