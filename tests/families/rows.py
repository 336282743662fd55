"""The models of the family table: of each family one or more, with random weights; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.answers import TOLERANCE

Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Row:
    """One model of the table.

    family     the row's family, as the page says it
    name       a word for the command line
    what       the model's size and its input, for the page
    build      makes the model in evaluation mode; the same weights each time, once torch.manual_seed(0) was called
    inputs     the arguments of a call: by position (a tuple) or by name (a mapping)
    remark     why something stays PyTorch, if much does
    tolerance  of the answers, relative to the largest of each output
    recurrent  whether TorchDynamo must be told to take recurrent networks; Inductor would unroll some and is left out
    """

    family: str
    name: str
    what: str
    build: Build
    inputs: Callable[[], tuple[Any, ...] | Mapping[str, Any]]
    remark: str = ""
    tolerance: float = TOLERANCE
    recurrent: bool = False

    def made(self) -> nn.Module:
        """The model."""
        torch.manual_seed(0)
        return self.build().eval()

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one call."""
        torch.manual_seed(1)
        given = self.inputs()
        return (given, {}) if isinstance(given, tuple) else ((), dict(given))


class Step(nn.Module):
    """A model of which a method or a part of its output is called, as a loop around it does."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *args: Tensor) -> Any:
        return self.call(self.model, *args)


def table() -> dict[str, Row]:
    """All rows by name, those of a family together."""
    from tests.families import hugging_face, images, pytorch, written

    rows = [row for module in (pytorch, images, written, hugging_face) for row in module.rows()]
    families = [*dict.fromkeys(row.family for row in rows)]
    return {row.name: row for row in sorted(rows, key=lambda row: families.index(row.family))}
