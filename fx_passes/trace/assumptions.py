"""What a trace took for granted of a call's arguments: each call is compared with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

Path = tuple[tuple[str, Any], ...]  # ("item", key), ("get", key) or ("attr", name), from an argument inwards

EVERY = ""  # in place of an argument's name: what is assumed is so of all arguments
_MISSING = object()
# Attributes that PyTorch itself gives tensors: nn.Buffer, torch._dynamo.mark_dynamic.
_OF_PYTORCH = ("_dynamo_", "_has_dynamo_", "_specialize_on", "_is_param", "_is_buffer", "persistent")


class Bare:
    """In place of a class: the tensors there have no attributes of their own, as x.tag = 3 makes them."""


class Present:
    """In place of a class: there is something."""


class Assumption(NamedTuple):
    """What the trace took for granted of an argument, or of what is in it.

    kind  its class; Bare or Present; a number: it is a tensor of so many dimensions; None: it is anything but None
    """

    name: str
    path: Path
    kind: type | int | None

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether it is true of these arguments by name."""
        value = values if self.name == EVERY else values.get(self.name, _MISSING)
        if value is _MISSING:
            return False
        try:
            value = follow(value, self.path)
        except Exception:  # whatever a container of the user's raises
            return False
        if isinstance(self.kind, int):
            return isinstance(value, Tensor) and value.ndim == self.kind
        if self.kind is Bare:
            return not own_attributes(value)
        if self.kind is Present:
            return True
        return value is not None if self.kind is None else type(value) is self.kind


def follow(value: Any, path: Path) -> Any:
    """What is in value there."""
    for step, key in path:
        value = getattr(value, key) if step == "attr" else value.get(*key) if step == "get" else value[key]
    return value


def own_attributes(values: Any) -> list[str]:
    """The names of attributes that users gave the tensors among values, in containers too."""
    leaves: Iterable[Any] = (values,) if isinstance(values, Tensor) else pytree.tree_leaves(values)
    tensors = (value for value in leaves if isinstance(value, Tensor))
    return [name for each in tensors if each.__dict__ for name in each.__dict__ if not name.startswith(_OF_PYTORCH)]
