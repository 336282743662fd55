"""Which calls are of one kind: names, dtypes, dimensions and numbers make it; tensors' contents do not.

Of sizes it counts which are 1: torch.export makes another graph of these, and models treat a batch of one by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

_TOLD_APART = (bool, str, type(None))


@dataclass(frozen=True)
class Kind:
    """What a call has in common with others that one graph may be for.

    structure  names, and containers in arguments
    leaves     of each tensor (dtype, dimensions, whether it is a parameter), of else its class and what it is
    ones       of each tensor which sizes are 1
    text       for people
    """

    structure: str
    leaves: tuple[tuple[Any, ...], ...]
    ones: tuple[tuple[bool, ...], ...] = ()
    text: str = field(default="", compare=False)

    @classmethod
    def described(cls, text: str) -> Kind:
        """A kind of which the text alone is known, as of a graph from a file."""
        return cls(text, (), (), text)

    def differs_by_number(self, other: Kind) -> bool:
        """Whether whole numbers or fractions alone are others."""
        if self == other or (self.structure, self.ones) != (other.structure, other.ones):
            return False
        return self._but_numbers() == other._but_numbers()

    def differs_by_sizes(self, other: Kind) -> bool:
        """Whether sizes of 1 alone are elsewhere."""
        return self != other and (self.structure, self.leaves) == (other.structure, other.leaves)

    @property
    def ways(self) -> tuple[Any, ...]:
        """What of it forwards branch on: numbers, and objects of one class, are not told apart."""
        return self.structure, *map(_way, self.leaves)

    def _but_numbers(self) -> list[tuple[Any, ...]]:
        return [leaf[:1] if leaf[0] in (int, float) else leaf for leaf in self.leaves]


def kind_of(parameters: Iterable[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kind:
    """The kind of a call; by position and by name is the same. parameters  names of forward's, in order"""
    given, leaves, structure = _taken_apart(parameters, args, kwargs)
    text = ", ".join(f"{name}{_text(value)}" for name, value in given.items())
    ones = tuple(_ones(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
    return Kind(structure, tuple(map(_leaf, leaves)), ones, text)


def form_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What tells a call's kind, its sizes and whether it may be an example, found in a moment.

    None for calls with other arguments than dense tensors and simple numbers.
    """
    rows: list[tuple[Any, ...]] = []
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is torch.Tensor and value.layout is torch.strided and not value.is_nested:
            rows.append((value.dtype, value.shape, value.requires_grad, value.device))
        elif kind is int or kind in _TOLD_APART:
            rows.append((kind, value))
        else:
            return None
    return len(args), tuple(kwargs), *rows


def ways_of(parameters: Iterable[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Kind.ways of a call, whose arguments may be any objects."""
    _, leaves, structure = _taken_apart(parameters, args, kwargs)
    return structure, *(_way(_leaf(leaf)) for leaf in leaves)


def _taken_apart(
    parameters: Iterable[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], list[Any], str]:
    """Arguments by name, what is in them, and how they hold it."""
    names = list(parameters)
    by_name = {**dict(zip(names, args, strict=False)), **kwargs}
    given = {name: by_name[name] for name in sorted(by_name)}
    leaves, spec = pytree.tree_flatten((given, args[len(names) :]))
    return given, leaves, str(spec)


def _way(leaf: tuple[Any, ...]) -> tuple[Any, ...]:
    return leaf if isinstance(leaf[0], torch.dtype) or leaf[0] in _TOLD_APART else leaf[:1]


def _ones(tensor: torch.Tensor) -> tuple[bool, ...]:
    """Which sizes are 1; of a nested tensor, which has no shape, none is told."""
    return () if tensor.is_nested else tuple(size == 1 for size in tensor.shape)


def _leaf(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.ndim, type(value) is torch.nn.Parameter
    return type(value), repr(value) if isinstance(value, float | complex) else value  # NaN equals itself, -0.0 not 0.0


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f": {str(value.dtype).removeprefix('torch.')} of {value.ndim} dimensions"
    if isinstance(value, tuple | list | dict):
        return f": a {type(value).__name__} of {len(value)}"
    return f"={value!r}"
