"""Tensors within tensors: one of a subclass may compute from plain ones in its attributes (torchao's Int8Tensor).

A graph reads such a part by a name of one more step: `layer.weight.qdata`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def is_plain(value: torch.Tensor) -> bool:
    """Whether the numbers of a tensor lie in its own memory, and functions of PyTorch compute with them."""
    return type(value) in _PLAIN


def parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The plain tensors that a tensor is made of, by name below it; none where it is plain itself, or says nothing."""
    if is_plain(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        return {}
    found: dict[str, torch.Tensor] = {}
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name)
        found |= {name: part} if is_plain(part) else {f"{name}.{below}": each for below, each in parts(part).items()}
    return found


def plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose memory has the numbers: its parts, or itself."""
    return list(parts(tensor).values()) or [tensor]


def find(root: nn.Module, name: str) -> tuple[nn.Module, str, str]:
    """The module that holds what a get_attr node names, the attribute there, and the name of a part below that or "".

    Raises AttributeError.
    """
    owner, steps = root, name.split(".")
    for i, step in enumerate(steps[:-1]):
        below: Any = owner.get_submodule(step) if step in owner._modules else getattr(owner, step)
        if not isinstance(below, nn.Module):
            return owner, step, ".".join(steps[i + 1 :])
        owner = below
    return owner, steps[-1], ""


def value_of(owner: nn.Module, attribute: str, part: str) -> Any:
    """What find() found. Raises AttributeError."""
    value = getattr(owner, attribute)
    return operator.attrgetter(part)(value) if part else value
