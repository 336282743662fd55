"""Objects in what a model returns, such as a key-value cache, taken apart for torch.export: it knows containers only.

CausalLMOutputWithPast(logits, past_key_values=DynamicCache)       what the model returns
-> tensors and sizes, which the graph computes, and a Recipe       TakenApart, a container of torch's pytree
-> a new DynamicCache with the same attributes, at each call       what the graph's caller gets
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout, type(None), type)
_MAX_DEPTH = 8


class NotTakenApart(TypeError):
    """An object whose attributes are not all there is to it."""


@dataclass(frozen=True)
class Recipe:
    """How to make an object again: its class, the structure of its attributes, and those that are constants."""

    cls: type
    structure: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]

    def make(self, values: list[Any]) -> Any:
        """A new object with the attributes that values, in order, and the constants say."""
        leaves, remaining, constants = [], iter(values), dict(self.constants)
        for i in range(self.structure.num_leaves):
            leaves.append(constants[i] if i in constants else next(remaining))
        made: Any = object.__new__(self.cls)
        made.__dict__.update(pytree.tree_unflatten(leaves, self.structure))
        return made


class TakenApart:
    """An object in the form of its recipe and of the values that belong into it."""

    def __init__(self, recipe: Recipe, values: list[Any]) -> None:
        self.recipe = recipe
        self.values = values


def take_apart(value: Any, depth: int = 0, seen: set[int] | None = None) -> Any:
    """Return value with every object in it, nested ones included, replaced by a TakenApart.

    Raises NotTakenApart for modules, functions, objects with slots, and one object in two places.
    """
    seen = set() if seen is None else seen

    def replace(leaf: Any) -> Any:
        if isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, *_CONSTANTS)):
            return leaf
        attributes = getattr(leaf, "__dict__", None)
        slots = any(getattr(cls, "__slots__", ()) for cls in type(leaf).__mro__)
        if attributes is None or slots or isinstance(leaf, nn.Module) or callable(leaf) or id(leaf) in seen:
            raise NotTakenApart(f"a {type(leaf).__name__} in the output")
        if depth == _MAX_DEPTH:
            raise NotTakenApart(f"a {type(leaf).__name__} too deep in the output")
        seen.add(id(leaf))
        leaves, structure = pytree.tree_flatten(take_apart(dict(attributes), depth + 1, seen))
        constants = tuple((i, x) for i, x in enumerate(leaves) if isinstance(x, _CONSTANTS))
        recipe = Recipe(type(leaf), structure, constants)
        return TakenApart(recipe, [x for x in leaves if not isinstance(x, _CONSTANTS)])

    return pytree.tree_map(replace, value)


def take_outputs_apart(root: nn.Module) -> None:
    """Let root return objects taken apart; root is the copy of a model that is exported and then thrown away."""
    forward: Callable[..., Any] = root.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return take_apart(forward(*args, **kwargs))

    root.forward = wrapped


# What the graph's own code makes of a TakenApart is the object.
pytree.register_pytree_node(
    TakenApart,
    lambda apart: (list(apart.values), apart.recipe),
    lambda values, recipe: recipe.make(list(values)),
    serialized_type_name="fx_passes.trace.outputs.TakenApart",
)
