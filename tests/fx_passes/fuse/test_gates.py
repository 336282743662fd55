"""Activations that are written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes.fuse.gates import GATES, fuse_gates
from tests.support.graphs import after, check, check_twice, count, image, model_of, post_ops

EXAMPLES: dict[str, Callable[..., Any]] = {
    "logistic": lambda m, x: (y := m.c(x)) * torch.sigmoid(y),
    "hardsigmoid": lambda m, x: F.hardsigmoid(y := m.c(x)) * y,
}


def test_every_gate_has_an_example() -> None:
    assert EXAMPLES.keys() == GATES.keys()


@pytest.mark.parametrize("gate", EXAMPLES)
def test_fuses(gate: str) -> None:
    model = model_of(EXAMPLES[gate], c=nn.Conv2d(3, 3, 1))
    assert post_ops(check(model, image())) == [(f"eltwise:{GATES[gate][0]}",)]
    check_twice(after("fuse_gates", model), fuse_gates)


def test_refuses_another_value_and_a_second_reader() -> None:
    gm = check(model_of(lambda m, x: x * torch.sigmoid(m.c(x)), c=nn.Conv2d(3, 3, 1)), image())
    assert post_ops(gm) == [("eltwise:logistic", "binary:mul")]

    def both(m: Any, x: torch.Tensor) -> Any:
        gate = torch.sigmoid(x)
        return x * gate, gate

    assert count(check(model_of(both), image())) == {"binary": 1, "eltwise": 1}
