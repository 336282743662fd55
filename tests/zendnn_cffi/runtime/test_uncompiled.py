"""What TorchDynamo runs as it is, and compiles afterwards as if nothing had been."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

import zendnn_cffi
from fx_passes.trace.aside import writes_aside
from zendnn_cffi.runtime.uncompiled import nothing_compiled


def compiled(made: list[Any]) -> Any:
    """A function that torch.compile compiles, each time with an entry in made."""

    def backend(gm: Any, example: Any) -> Any:
        made.append(gm)
        return gm.forward

    def wave(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos()

    return torch.compile(wave, backend=backend)


def test_a_function_that_ran_uncompiled_is_compiled_later() -> None:
    made: list[Any] = []
    wave, x = compiled(made), torch.ones(3)
    with nothing_compiled():
        torch.testing.assert_close(wave(x), x.sin().cos())
    assert not made
    with writes_aside(nn.Linear(2, 2)):
        torch.testing.assert_close(wave(x), x.sin().cos())
    assert not made
    torch.testing.assert_close(wave(x), x.sin().cos())
    assert len(made) == 1


def test_blocks_may_be_in_each_other() -> None:
    made: list[Any] = []
    wave, x = compiled(made), torch.ones(3)
    with nothing_compiled():
        with nothing_compiled():
            wave(x)
        wave(x)
    assert not made
    wave(x)
    assert len(made) == 1


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda a: self.linear(a).relu(), lambda a: self.linear(a) - 1, (x,))


@torch.no_grad()
def test_branches_of_cond_are_compiled_after_optimize() -> None:
    model, x = Chooses().eval(), torch.ones(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # TorchDynamo tells of modes around the forward
        fast = zendnn_cffi.optimize(model, x, tune="off")
    for given in (x, -x):  # the model itself raised
        torch.testing.assert_close(fast(given), model(given))
