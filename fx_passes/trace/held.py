"""State that objects hold, compared and put back. One table has a row for each sort of object.

told  a description that differs once the object, or what it holds, is changed
kept  what the object itself holds now, so that it can be put back; objects in it have rows of their own
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import copy
import ctypes
import enum
import functools
import itertools
import operator
import os
import random
import sys
import threading
import types
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import fx, nn

from zendnn_cffi.values import dataclass

ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, range,
         slice)  # fmt: skip
# Compared by identity alone.
CODE = (type, types.FunctionType, types.ModuleType, property)
_PLAIN_CONTAINERS = frozenset((dict, list, collections.OrderedDict))
_LARGE = 4096  # entries of a container beyond which its size alone is compared
_KEPT_NUMBERS = 1 << 22  # elements of a tensor that are put back
_COMPARED_NUMBERS = 1 << 16  # elements of a tensor that are compared by their numbers, too
_COMPARED_BYTES = 1 << 26  # of an array; of larger ones parts, evenly spaced
_MAX_DEPTH = 6

Inner = Callable[[Any], Any]


class Kept(list[Any]):
    """What must stay alive while descriptions are compared.

    in_place    whether a tensor that was written to has another description
    holds_once  whether an iterator was met that cannot be copied
    """

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.in_place = in_place
        self.holds_once = False


@dataclass(frozen=True)
class Row:
    """How objects of some types are told, kept and put back.

    told      (object, what tells an object in it) -> description
    kept      object -> what it holds; None where there is no way, and it is not put back
    put_back  (object, what it held)
    within    object -> the objects in it
    """

    types: tuple[Any, ...]
    told: Callable[[Any, Inner], Any]
    kept: Callable[[Any], Any] = lambda value: None
    put_back: Callable[[Any, Any], None] = lambda value, content: None
    within: Callable[[Any], Iterable[Any]] = lambda value: ()


def _fill(value: Any, content: Any) -> None:
    value.clear()
    (value.extend if isinstance(value, list | collections.deque) else value.update)(content)


def _assign(value: Any, content: Any) -> None:
    value[...] = content


def _exchange(value: Any, content: Any) -> None:
    value[:] = content


def _told_items(value: Any, inner: Inner) -> Any:
    items = elements(value)
    if len(items) > _LARGE:
        return type(value), len(items)
    if isinstance(value, dict | types.MappingProxyType):
        return type(value), [(inner(k), inner(v)) for k, v in value.items()]
    return type(value), [*map(inner, items)]


def elements(value: Any) -> Any:
    """A container; of a tuple or list what it holds, as methods of its own class may say otherwise, or raise.

    e3nn's irreducible representations are tuples without a length.
    """
    if isinstance(value, tuple):
        return tuple.__getitem__(value, slice(None))
    return list.__getitem__(value, slice(None)) if isinstance(value, list) else value


def _told_set(value: Any, inner: Inner) -> Any:
    return type(value), {id(x) if isinstance(x, torch.Tensor | fx.Proxy) else x for x in value}


def _items_of(value: Any) -> Iterable[Any]:
    items = value.values() if isinstance(value, dict | types.MappingProxyType) else elements(value)
    return list(items) if len(items) <= _LARGE else ()


def _told_array(value: numpy.ndarray, inner: Inner) -> Any:
    if value.dtype.hasobject:
        return value.shape, [*map(inner, value.reshape(-1)[:_LARGE])]
    step = -(-value.nbytes // _COMPARED_BYTES)
    part = value if step <= 1 else value.reshape(-1)[::step]
    return value.shape, value.dtype.str, zlib.crc32(numpy.ascontiguousarray(part).reshape(-1).view(numpy.uint8).data)


def numbers_of(tensor: torch.Tensor) -> int | None:
    """A sum over the bytes of a tensor that is not large; None where there is no way to them."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.numel() > _COMPARED_NUMBERS or not _is_plain(tensor):
        return None
    return zlib.crc32(bytes_of(tensor).data) if tensor.numel() and tensor.untyped_storage().nbytes() else 0


def bytes_of(tensor: torch.Tensor) -> numpy.ndarray:
    """The bytes of the numbers of a strided CPU tensor that has some, one after the other.

    Not by tensor.numpy(): after that PyTorch refuses to resize what lies in that memory.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    memory = (ctypes.c_uint8 * flat.nbytes).from_address(flat.data_ptr())
    memory.tensor = flat  # which keeps the memory
    return numpy.frombuffer(memory, numpy.uint8)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized


def _kept_tensor(value: torch.Tensor) -> Any:
    if not _is_plain(value) or value.is_inference() or value.numel() > _KEPT_NUMBERS or type(value) not in _TENSORS:
        return None
    return value._version, numbers_of(value), value.detach().clone()


def _put_back_tensor(value: torch.Tensor, content: Any) -> None:
    version, numbers, held = content
    if value._version != version or numbers_of(value) != numbers:
        with torch.no_grad():
            value.copy_(held)


_TENSORS = (torch.Tensor, nn.Parameter)
_UNSET = object()


def _put_back_variable(value: contextvars.ContextVar[Any], content: tuple[Any]) -> None:
    if content[0] is not _UNSET:
        value.set(content[0])


def _told_generator(value: types.GeneratorType[Any, Any, Any], inner: Inner) -> Any:
    frame = value.gi_frame
    return frame and (frame.f_lasti, inner(frame.f_locals))


def _put_back_environment(value: Any, content: dict[str, str]) -> None:
    for name in [name for name in value if name not in content]:
        del value[name]
    value.update({name: text for name, text in content.items() if value.get(name) != text})


_COPIED = (itertools.count, itertools.repeat,
           *map(type, (iter([]), iter(()), iter(""), iter(range(0)), iter({}), iter(set()), reversed([]))))  # fmt: skip
_ELSEWHERE = (map, zip, filter, enumerate)  # take values from an iterator
METHODS = (types.MethodType, types.BuiltinMethodType)
_STORED = (types.MappingProxyType, dict, list, tuple, collections.deque, set, frozenset)  # as good as equal ones

ROWS = (
    Row((dict, list, collections.deque), _told_items, copy.copy, _fill, _items_of),
    Row((tuple, types.MappingProxyType), _told_items, within=_items_of),
    Row((set,), _told_set, copy.copy, _fill),
    Row((frozenset,), _told_set),
    Row((numpy.ndarray,), _told_array, numpy.ndarray.copy, _assign),
    Row((bytearray, array.array), lambda value, inner: (len(value), zlib.crc32(value)), lambda value: value[:],
        _exchange),
    Row((torch.Tensor,), lambda value, inner: numbers_of(value), _kept_tensor, _put_back_tensor),
    Row((random.Random,), lambda value, inner: value.getstate(), random.Random.getstate, random.Random.setstate),
    Row((torch.Generator,), lambda value, inner: value.get_state().numpy().tobytes(), torch.Generator.get_state,
        torch.Generator.set_state),
    Row((contextvars.ContextVar,), lambda value, inner: inner(value.get(None)), lambda value: (value.get(_UNSET),),
        _put_back_variable, lambda value: (value.get(None),)),
    Row((threading.local,), lambda value, inner: inner(value.__dict__), lambda value: dict(value.__dict__),
        lambda value, content: _fill(value.__dict__, content), lambda value: [*value.__dict__.values()]),
    Row((type(os.environ),), lambda value, inner: dict(value), dict, _put_back_environment),
    Row((types.GeneratorType,), _told_generator),
    Row(_ELSEWHERE, lambda value, inner: operator.length_hint(value, -1)),
    Row(_COPIED, lambda value, inner: (repr(value), operator.length_hint(value, -1))),
    Row(METHODS, lambda value, inner: inner(value.__self__) if _is_told(value.__self__) else None,
        within=lambda value: (value.__self__,) if _is_told(value.__self__) else ()),
    Row((functools.partial,), lambda value, inner: inner((value.func, value.args, value.keywords)),
        within=lambda value: (value.func, value.args, value.keywords)),
)  # fmt: skip
_OTHER = Row((object,), lambda value, inner: repr(value) if type(value).__module__ == "itertools" else None)


@functools.cache
def _all_rows(with_random: bool) -> tuple[Row, ...]:
    if not with_random:
        return ROWS
    generator, state = numpy.random.Generator, numpy.random.RandomState
    return (
        *ROWS,
        Row((generator,), lambda value, inner: repr(value.bit_generator.state), lambda value: value.bit_generator.state,
            lambda value, content: setattr(value.bit_generator, "state", content)),
        Row((state,), lambda value, inner: repr(value.get_state()), state.get_state, state.set_state),
    )  # fmt: skip


def _rows() -> tuple[Row, ...]:
    """All rows. Importing numpy.random takes 6 ms: where nobody did, there are no objects of it."""
    return _all_rows("numpy.random" in sys.modules)


def is_stateful(value: Any) -> bool:
    """Whether a row names its type, one whose objects can be changed."""
    return isinstance(value, _stateful("numpy.random" in sys.modules))


@functools.cache
def _stateful(with_random: bool) -> tuple[Any, ...]:
    kinds = (kind for row in _all_rows(with_random) for kind in row.types)
    return tuple(kind for kind in kinds if kind not in (tuple, types.MappingProxyType, frozenset))


def _is_told(value: Any) -> bool:
    """Whether the object of a method counts: those of Python's own classes that no row names are caches, and locks."""
    return row_of(value) is not _OTHER or type(value).__module__.partition(".")[0] not in sys.stdlib_module_names


def gives_once(value: Any) -> bool:
    """Whether it is an iterator of Python's that cannot be copied: it takes values from elsewhere."""
    if isinstance(value, _COPIED):
        return copy_of_iterator(value) is None
    return isinstance(value, (types.GeneratorType, *_ELSEWHERE)) or type(value).__module__ == "itertools"


def copy_of_iterator(value: Any) -> Any:
    """An iterator that goes on where value is now; None where there is none."""
    if not isinstance(value, _COPIED):
        return None
    with warnings.catch_warnings(), contextlib.suppress(TypeError):  # Python 3.14 does not copy those of itertools
        warnings.simplefilter("ignore", DeprecationWarning)
        return copy.copy(value)
    return None


def function_in(value: Any) -> types.FunctionType | None:
    """The function behind a function, a method of an object, or a partial call; None where there is none in Python."""
    while isinstance(value, functools.partial | types.MethodType):
        value = value.func if isinstance(value, functools.partial) else value.__func__
    return value if isinstance(value, types.FunctionType) else None


def row_of(value: Any) -> Row:
    """The row for an object; of one that no row names, its attributes tell."""
    cls: Any = type(value)
    return _row_of_type(cls)


@functools.lru_cache(4096)
def _row_of_type(cls: type) -> Row:
    return next((row for row in _rows() if issubclass(cls, row.types)), _OTHER)


def _is_ours(value: Any) -> bool:
    """Whether it is an object of this package, as an optimized module keeps them: some read memory of others."""
    return type(value).__module__.startswith(("fx_passes.", "zendnn_cffi."))


def describe(value: Any, keep: Kept, seen: dict[int, Any] | None = None, depth: int = 0) -> Any:
    """Return something that differs once value, or what it holds, is changed.

    keep  gets what must stay alive for that
    seen  objects met already, which count by their identity alone
    """
    seen = {} if seen is None else seen
    if isinstance(value, ATOMS):
        return type(value), value if value == value else repr(value)  # a NaN differs from itself
    if type(value) in _PLAIN_CONTAINERS and not value and not getattr(value, "__dict__", None):
        return type(value), []  # as most dictionaries of a module are
    keep.append(value)
    if isinstance(value, torch.Tensor):
        return (id(value), version_of(value), row_of(value).told(value, id)) if keep.in_place else (id(value), 0)
    if isinstance(value, (fx.Proxy, nn.Module, *CODE)) or id(value) in seen or depth > _MAX_DEPTH or _is_ours(value):
        return id(value)
    seen[id(value)] = None
    keep.holds_once = keep.holds_once or gives_once(value)

    def inner(item: Any) -> Any:
        return describe(item, keep, seen, depth + 1)

    row = row_of(value)
    found = row.told(value, inner), {name: inner(item) for name, item in attributes(value).items()}
    return found if isinstance(value, _STORED) else (id(value), *found)


def version_of(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, slots included; none of what Python's own objects have."""
    if isinstance(value, (threading.local, type(os.environ))) or type(value).__module__ == "logging":
        return {}
    return {**(getattr(value, "__dict__", None) or {}), **_slots(value)}


def _slots(value: Any) -> dict[str, Any]:
    cls: Any = type(value)
    return {name: getattr(value, name) for name in slot_names(cls) if hasattr(value, name)}


@functools.lru_cache(4096)
def slot_names(cls: type) -> tuple[str, ...]:
    """Attributes for which a class and those that it is derived from have places of their own, by __slots__."""
    every = [base.__dict__.get("__slots__", ()) for base in cls.__mro__]
    names = (name for slots in every for name in ((slots,) if isinstance(slots, str) else slots))
    return tuple(name for name in names if not name.startswith("__"))


def within(value: Any, seen: set[int] | None = None, depth: int = 0) -> Iterator[Any]:
    """Yield value and what it holds, each object once."""
    seen = set() if seen is None else seen
    if isinstance(value, (*ATOMS, *CODE, nn.Module, fx.Proxy)) or id(value) in seen or depth > _MAX_DEPTH:
        return
    if _is_ours(value):
        return
    seen.add(id(value))
    yield value
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return
    held = attributes(value)
    items = [*row_of(value).within(value), *held.values()]
    for item in items if len(items) <= _LARGE else ():
        yield from within(item, seen, depth + 1)


class Held:
    """What an object, and the objects in it, hold at one moment."""

    def __init__(self, value: Any) -> None:
        self._contents: list[tuple[Any, Row, Any]] = []
        self._attributes: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        for each in within(value):
            row = row_of(each)
            if (content := row.kept(each)) is not None:
                self._contents.append((each, row, content))
            named = getattr(each, "__dict__", None) if attributes(each) else None
            self._attributes.append((each, dict(named) if isinstance(named, dict) else {}, _slots(each)))

    def put_back(self) -> None:
        """Let them hold it again."""
        for each, row, content in self._contents:
            row.put_back(each, content)
        for each, named, slots in self._attributes:
            held = getattr(each, "__dict__", None) if named or attributes(each) else None
            if isinstance(held, dict) and [*map(id, held.values())] != [*map(id, named.values())]:
                _fill(held, named)
            for name, item in slots.items():
                if getattr(each, name, None) is not item:
                    object.__setattr__(each, name, item)
