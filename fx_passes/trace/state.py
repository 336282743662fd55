"""Noticing what a forward changes beside its result: attributes, buffers, lists, what its class or its file holds.

A graph computes results. What forward assigns while it is traced (self.n += 1, self.past.append(x)) would be done once,
and never again.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import fx, nn

from fx_passes.trace.instructions import names_in

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, range,
          slice)  # fmt: skip
# Compared by identity alone.
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, property)
_SEQUENCES = (list, tuple, collections.deque)
_SETS = (set, frozenset)
_LARGE = 4096  # entries of a container beyond which its size alone is compared
_KEPT_NUMBERS = 1 << 16  # elements of a tensor in a global or cell that are put back after tracing
_MAX_DEPTH = 6
_MAX_CALLS = 2  # how deep functions are followed that forward calls
_OF_TRACING = "_tensor_constant"  # torch.fx puts tensors that forward makes on the root


class Kept(list[Any]):
    """What must stay alive while descriptions are compared.

    in_place  whether a tensor that was written to has another description
    """

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.in_place = in_place


def describe(value: Any, keep: Kept, seen: dict[int, Any] | None = None, depth: int = 0) -> Any:
    """Return something that differs once value, or what it holds, is changed.

    keep  gets what must stay alive for that
    seen  objects met already, which count by their identity alone
    """
    seen = {} if seen is None else seen
    if isinstance(value, _ATOMS):
        return type(value), value if value == value else repr(value)  # a NaN differs from itself
    keep.append(value)
    if isinstance(value, torch.Tensor):
        return id(value), _version(value) if keep.in_place else 0
    if isinstance(value, (fx.Proxy, nn.Module, *_CODE)) or id(value) in seen or depth > _MAX_DEPTH:
        return id(value)
    seen[id(value)] = None

    def inner(item: Any) -> Any:
        return describe(item, keep, seen, depth + 1)

    if isinstance(value, dict | types.MappingProxyType):
        items = [(inner(k), inner(v)) for k, v in value.items()] if len(value) <= _LARGE else []
        return type(value), len(value), items, _attributes(value, inner)
    if isinstance(value, _SEQUENCES):
        return type(value), len(value), [*map(inner, value)] if len(value) <= _LARGE else [], _attributes(value, inner)
    if isinstance(value, numpy.ndarray):
        return id(value), value.shape, value.tobytes() if value.size <= _LARGE else value.size
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return id(value), frame and (frame.f_lasti, inner(frame.f_locals))
    if isinstance(value, _SETS):
        return type(value), {id(x) if isinstance(x, torch.Tensor | fx.Proxy) else x for x in value}
    return id(value), _hidden(value), _attributes(value, inner)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _hidden(value: Any) -> Any:
    """State that is in no attribute: of counters, and of what draws random numbers."""
    if isinstance(value, torch.Generator):
        return value.get_state().sum().item()
    if isinstance(value, random.Random):
        return hash(value.getstate())
    return repr(value) if type(value).__module__ == "itertools" else None


def _attributes(value: Any, inner: Callable[[Any], Any]) -> dict[str, Any]:
    """The attributes of an object, slots included."""
    found = dict(getattr(value, "__dict__", None) or {}) if type(value).__module__ != "logging" else {}
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return {str(name): inner(item) for name, item in found.items()}


def is_torch_s(module: nn.Module) -> bool:
    """Whether the module's class is PyTorch's own; such keep nothing from call to call but caches (_flat_weights)."""
    return type(module).__module__.startswith("torch.nn")


def attributes_of(module: nn.Module, keep: Kept, seen: dict[int, Any] | None = None) -> dict[str, Any]:
    """What a module itself holds, by attribute: parameters, buffers and submodules by name."""
    found: dict[str, Any] = {}
    for name, value in module.__dict__.items():
        if name in ("_parameters", "_buffers", "_modules"):
            found |= {str(inner): describe(item, keep) for inner, item in value.items()}
        elif not name.startswith(_OF_TRACING) and not (name.startswith("_") and is_torch_s(module)):
            found[name] = describe(value, keep, seen)
    return found


class Snapshot:
    """What the modules of a tree hold at one moment, and what their classes and their functions' globals hold.

    in_place  whether a tensor that was written to counts as changed
    """

    def __init__(self, root: nn.Module, *, in_place: bool = True) -> None:
        self._root = root
        self._keep = Kept(in_place)
        self._found = self._look()
        self._places = list(_shared_places(root))
        self._shared = [describe(place.get(), self._keep) for place in self._places]
        self._saved = [(place.get(), list(_held_by(place.get()))) for place in self._places]

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
        for place, before, (value, held) in zip(self._places, self._shared, self._saved, strict=True):
            if describe(place.get(), self._keep) == before:
                continue
            place.set(copy.copy(held[0][1]) if type(value).__module__ == "itertools" and held else value)
            for each, content in held:
                _put_back(each, content)


@dataclass(frozen=True)
class _Place:
    """Where something lies that several modules, or calls, may share."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    readers: tuple[str, ...]


_KEPT_IN_PLACES = (bool, int, float, complex, str, bytes, type(None), list, dict, set, collections.deque, torch.Tensor,
                   numpy.ndarray, types.GeneratorType, torch.Generator, random.Random)  # fmt: skip
# Objects of these are left out; they keep what does not change a result.
_NOT_THEIRS = frozenset(("torch", "numpy", *sys.stdlib_module_names)) - {"__main__", "itertools"}


def _is_kept(value: Any) -> bool:
    """Whether a value may be changed by a forward that reads it from a global, a cell or a class."""
    if isinstance(value, _KEPT_IN_PLACES):
        return True
    cls = type(value)
    return cls.__module__.partition(".")[0] not in _NOT_THEIRS and not isinstance(value, (nn.Module, *_CODE))


def _shallow(value: Any) -> Any:
    """What value itself holds, to be put back; None where there is no way."""
    if isinstance(value, list | dict | set | collections.deque | numpy.ndarray):
        return value.copy()
    if isinstance(value, torch.Tensor):
        is_plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_inference()
        return (value._version, value.detach().clone()) if is_plain and value.numel() <= _KEPT_NUMBERS else None
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if type(value).__module__ == "itertools":
        with contextlib.suppress(TypeError):
            return copy.copy(value)
    return None


def _held_by(value: Any, seen: set[int] | None = None, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """What may be changed in value, and in what it holds -> what each of them holds now."""
    seen = set() if seen is None else seen
    if isinstance(value, (*_ATOMS, *_CODE, nn.Module, fx.Proxy)) or id(value) in seen or depth > _MAX_DEPTH:
        return
    seen.add(id(value))
    content = _shallow(value)
    if content is not None:
        yield value, content
    if isinstance(value, torch.Tensor | numpy.ndarray) or type(value).__module__ in ("logging", "itertools"):
        return
    items = list(value.values() if isinstance(value, dict) else value if isinstance(value, _SEQUENCES) else ())
    for item in items if len(items) <= _LARGE else ():
        yield from _held_by(item, seen, depth + 1)
    if isinstance(attributes := getattr(value, "__dict__", None), dict):
        yield from _held_by(attributes, seen, depth + 1)


def _put_back(value: Any, content: Any) -> None:
    """Let value hold what it held."""
    if isinstance(value, list | dict | set | collections.deque):
        value.clear()
        (value.update if isinstance(value, dict | set) else value.extend)(content)
    elif isinstance(value, numpy.ndarray):
        value[...] = content
    elif isinstance(value, random.Random):
        value.setstate(content)
    elif isinstance(value, torch.Generator):
        value.set_state(content)
    elif isinstance(value, torch.Tensor) and value._version != content[0]:
        with torch.no_grad():
            value.copy_(content[1])


def _shared_places(root: nn.Module) -> Iterator[_Place]:
    """Attributes of the modules' classes, and globals and cells that their functions read; torch's own are left out."""
    readers: dict[type, list[str]] = {}
    for path, module in root.named_modules():
        for cls in type(module).__mro__:
            if cls.__module__.partition(".")[0] not in ("torch", "builtins"):
                readers.setdefault(cls, []).append(path)
    seen: set[tuple[int, str]] = set()
    for cls, paths in readers.items():
        yield from _places_of_class(cls, tuple(paths), seen)
    for path, module in root.named_modules():
        for value in module.__dict__.values():
            if isinstance(value, types.FunctionType):
                yield from _places_of(value, (path,), seen)


def _places_of_class(cls: type, readers: tuple[str, ...], seen: set[tuple[int, str]]) -> Iterator[_Place]:
    for name, value in list(vars(cls).items()):
        if isinstance(value, types.FunctionType):
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
        if not isinstance(default, _ATOMS) and _is_kept(default):
            yield _Place(f"a default of {name}()", lambda default=default: default, lambda value: None, readers)  # type: ignore[misc]
    space = function.__globals__
    for name in dict.fromkeys(names_in(function.__code__)):
        if (id(space), name) in seen or name not in space:
            continue
        seen.add((id(space), name))
        value = space[name]
        is_theirs = getattr(value, "__module__", "torch").partition(".")[0] != "torch"
        if isinstance(value, types.FunctionType) and is_theirs and depth < _MAX_CALLS:
            yield from _places_of(value, readers, seen, depth + 1)
        elif isinstance(value, type) and issubclass(value, nn.Module) and is_theirs:
            yield from _places_of_class(value, readers, seen)
        if not _is_kept(value):
            continue
        yield _Place(
            f"the global {name}",
            lambda name=name: space.get(name),  # type: ignore[misc]
            lambda value, name=name: space.__setitem__(name, value),  # type: ignore[misc]
            readers,
        )
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            held = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(held, types.FunctionType) and depth < _MAX_CALLS:
            yield from _places_of(held, readers, seen, depth + 1)
        if _is_kept(held):
            yield _Place(
                f"the enclosing function's {name}",
                lambda cell=cell: cell.cell_contents,  # type: ignore[misc]
                lambda value, cell=cell: setattr(cell, "cell_contents", value),  # type: ignore[misc]
                readers,
            )
