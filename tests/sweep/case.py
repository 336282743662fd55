"""A model with one call of it, and where models come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

MOST_PARAMETERS = 60_000_000


class NotRun(Exception):
    """Why a model is not part of the sweep."""


@dataclass
class Case:
    """A model in evaluation mode and the arguments of a call."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A library of models.

    names   of all its models by family: a family's first model is the one that stands for it
    build   returns a model by name; raises NotRun
    """

    names: Callable[[], dict[str, list[str]]]
    build: Callable[[str], Case]

    def in_turns(self) -> list[str]:
        """All names: the first of every family, then the second of every family that has one, and so on."""
        return in_turns(list(self.names().values()))


def in_turns(families: Sequence[Sequence[str]]) -> list[str]:
    """Return the first of each sequence, the second of each, and so on."""
    longest = max(map(len, families), default=0)
    return [family[i] for i in range(longest) for family in families if i < len(family)]


def parameters_of(build: Callable[[], nn.Module], most: int = MOST_PARAMETERS) -> int:
    """How many parameters the model has, built without memory for them; raises NotRun where there are too many."""
    with torch.device("meta"):
        count = sum(p.numel() for p in build().parameters())
    if count > most:
        raise NotRun(f"{count / 1e6:.0f}M parameters")
    return count
