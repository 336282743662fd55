"""Arguments as wide as an error says that a layer takes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# What PyTorch says where the last dimension of what comes is not the one of a layer's weight.
_PRODUCT = re.compile(r"mat1 and mat2 shapes cannot be multiplied \(\d+x(?P<given>\d+) and (?P<taken>\d+)x\d+\)")
_NORM = re.compile(r"expected input with shape \[\*, (?P<taken>\d+)\], but got input of size\[.*?(?P<given>\d+)\]")
# Sides of images that a model names itself.
_SIDES = re.compile(r"mage size \((?P<given>\d+\*\d+)\) doesn't match model \((?P<taken>\d+\*\d+)\)")


def as_wide_as_asked(kwargs: Mapping[str, Any], error: Exception) -> dict[str, Any] | None:
    """The arguments with those of the width that the error names made anew; None: it names no width of theirs."""
    given: tuple[int, ...]
    taken: tuple[int, ...]
    said = " ".join(str(error).split())
    if match := _PRODUCT.search(said) or _NORM.search(said):
        given, taken = (int(match["given"]),), (int(match["taken"]),)
    elif match := _SIDES.search(said):
        given, taken = _sides(match["given"]), _sides(match["taken"])
    else:
        return None
    wrong = [
        name
        for name, value in kwargs.items()
        if isinstance(value, Tensor) and value.is_floating_point() and tuple(value.shape[-len(given) :]) == given
    ]
    if given == taken or not wrong:
        return None
    return {**kwargs, **{name: _anew(kwargs[name], taken) for name in wrong}}


def _sides(said: str) -> tuple[int, ...]:
    return tuple(map(int, said.split("*")))


def _anew(value: Tensor, last: tuple[int, ...]) -> Tensor:
    """Noise of the same shape but for its last dimensions."""
    shape = (*value.shape[: -len(last)], *last)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
