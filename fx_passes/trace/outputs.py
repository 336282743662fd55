"""Objects in what a model returns, such as a key-value cache, taken apart: graphs know tuples, lists and dictionaries.

CausalLMOutputWithPast(logits, past_key_values=DynamicCache)       what the model returns
-> tensors and sizes, which the graph computes, and a Recipe       TakenApart, a container of torch's pytree
-> a new DynamicCache with the same attributes, at each call       what the graph's caller gets

torch.export puts results together itself. In a graph of torch.fx, which makes a dict of an OrderedDict, a node does:

Before: return {"out": x}        After: made = make_OrderedDict(x); return made
"""

from __future__ import annotations

import enum
import functools
import pickle
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes.trace.quiet import structures_copied
from zendnn_cffi.values import dataclass

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, type(None), type,
              enum.Enum)  # fmt: skip
_BASES = (OrderedDict, dict, list, object)  # of classes whose objects are made again
_MAX_DEPTH = 8


class NotTakenApart(TypeError):
    """An object whose attributes are not all there is to it."""


@dataclass(frozen=True)
class Recipe:
    """How to make an object again: its class, the structure of what is in it, and those parts that are constants."""

    cls: type
    structure: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]

    def make(self, values: list[Any]) -> Any:
        """A new object that holds what values, in order, and the constants say."""
        leaves, remaining, constants = [], iter(values), dict(self.constants)
        for i in range(self.structure.num_leaves):
            leaves.append(constants[i] if i in constants else next(remaining))
        attributes, slots, items = pytree.tree_unflatten(leaves, self.structure)
        base = _base(self.cls)
        made = base.__new__(self.cls)
        if base is list:
            list.extend(made, items)
        elif base is not object:
            for key, item in items.items():
                base.__setitem__(made, key, item)
        if attributes:
            made.__dict__.update(attributes)
        for name, value in slots.items():
            object.__setattr__(made, name, value)
        return made


class TakenApart:
    """An object in the form of its recipe and of the values that belong into it."""

    def __init__(self, recipe: Recipe, values: list[Any]) -> None:
        self.recipe = recipe
        self.values = values


class Remake:
    """The function of a graph that makes one container or object again, of the values in it."""

    puts_together = True  # for fx_passes.aliasing: it does nothing else

    def __init__(self, name: str, structure: pytree.TreeSpec) -> None:
        self.__name__ = f"make_{name}"
        self.structure = structure

    def __call__(self, *values: Any) -> Any:
        return pytree.tree_unflatten(values, self.structure)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.__name__.removeprefix("make_"), pickle.dumps(self.structure))


def _unpickled(name: str, structure: bytes) -> Remake:
    with structures_copied():
        return Remake(name, pickle.loads(structure))


def needs_remaking(value: Any) -> bool:
    """Whether torch.fx would make another class of value, or call its class with what its __init__ may not take."""
    if type(value) is dict and not all(map(is_plain, value)):
        return True  # generated code cannot write the keys
    if isinstance(value, tuple) and type(value).__module__ == torch.return_types.__name__:
        return True
    if isinstance(value, dict | list | deque):
        return type(value) not in (dict, list) and not type(value).__module__.startswith(fx.__name__)
    return is_dataclass(value) and not isinstance(value, type) and not hasattr(value, "__fx_create_arg__")


def is_plain(value: Any) -> bool:
    """Whether generated code can write a value, and == tells all about it."""
    if type(value) in (tuple, list):
        return all(map(is_plain, value))
    return type(value) in _PLAIN


def remake(value: Any) -> tuple[Remake, list[Any]]:
    """Return a function that makes value, and the values in it, for which the function takes others.

    Raises NotTakenApart as take_apart does.
    """
    values, structure = pytree.tree_flatten(take_apart(value))
    return Remake(type(value).__name__, structure), values


def take_apart(value: Any, depth: int = 0, seen: set[int] | None = None) -> Any:
    """Return value with every object in it, nested ones included, replaced by a TakenApart.

    Raises NotTakenApart for modules, functions, objects with slots that are no dataclasses, and one object in two
    places.
    """
    seen = set() if seen is None else seen

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, (torch.Tensor, fx.Proxy, torch.SymInt, torch.SymFloat, torch.SymBool, *_CONSTANTS)):
            return leaf
        parts = None if isinstance(leaf, nn.Module) or callable(leaf) or id(leaf) in seen else _parts(leaf)
        if parts is None:
            raise NotTakenApart(f"a {type(leaf).__name__} in the output")
        if depth == _MAX_DEPTH:
            raise NotTakenApart(f"a {type(leaf).__name__} too deep in the output")
        seen.add(id(leaf))
        leaves, structure = pytree.tree_flatten(take_apart(parts, depth + 1, seen))
        constants = tuple((i, x) for i, x in enumerate(leaves) if isinstance(x, _CONSTANTS))
        recipe = Recipe(type(leaf), structure, constants)
        return TakenApart(recipe, [x for x in leaves if not isinstance(x, _CONSTANTS)])

    return pytree.tree_map(replace, value)


def _base(cls: type) -> Any:
    """The class of Python's own that cls is made of."""
    return next(c for c in cls.__mro__ if c.__module__ in ("builtins", "collections"))


def _parts(leaf: Any) -> tuple[dict[str, Any], dict[str, Any], Any] | None:
    """Attributes, slots of a dataclass, and items of a list or dictionary; None where there may be more to leaf."""
    base = _base(type(leaf))
    slots = {name for cls in type(leaf).__mro__ for name in _slots(cls)}
    known = {field.name for field in fields(leaf)} if is_dataclass(leaf) else set()
    if base not in _BASES or not slots <= known or not (hasattr(leaf, "__dict__") or known):
        return None
    items = None if base is object else list(leaf) if base is list else dict(leaf)
    filled = {name: getattr(leaf, name) for name in slots if hasattr(leaf, name)}
    return dict(getattr(leaf, "__dict__", {})), filled, items


def _slots(cls: type) -> tuple[str, ...]:
    names = cls.__dict__.get("__slots__", ())
    return () if cls.__module__ in ("builtins", "collections") else (names,) if isinstance(names, str) else tuple(names)


def take_outputs_apart(root: nn.Module) -> None:
    """Let root return objects taken apart; root is the copy of a model that is exported and then thrown away."""
    forward: Callable[..., Any] = root.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        own = {id(parameter) for parameter in root.parameters()}
        if any(isinstance(x, nn.Parameter) and id(x) not in own for x in pytree.tree_leaves(result)):
            raise NotTakenApart("a parameter that its forward makes")
        return take_apart(result)

    root.forward = wrapped


# What the graph's own code makes of a TakenApart is the object.
pytree.register_pytree_node(
    TakenApart,
    lambda apart: (list(apart.values), apart.recipe),
    lambda values, recipe: recipe.make(list(values)),
    serialized_type_name="fx_passes.trace.outputs.TakenApart",
)
