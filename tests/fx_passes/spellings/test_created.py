"""Tensors made of numbers are known to write nothing, and may be made once; what a call decides is made in each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fx_passes.memoize.memoised import Memoised
from tests.fx_passes.spellings.test_int8_linear import optimized


class Positions(nn.Module):
    """A table is looked up at numbers that the forward makes."""

    def __init__(self, numbers: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(64, 16), nn.Linear(16, 16)
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.table(self.numbers(x.shape[1]) + 1))


RANGES: dict[str, Callable[[int], Tensor]] = {
    "end": torch.arange,
    "start": lambda n: torch.arange(3, n + 3),
    "step": lambda n: torch.arange(0, 2 * n, 2, device="cpu"),
    "dtype": lambda n: torch.arange(n, dtype=torch.int32, device=torch.device("cpu")),
}


@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
@pytest.mark.parametrize("form", RANGES)
def test_positions(form: str, entry: str) -> None:
    """They are made once in graphs of torch.compile, which say what each value is."""
    model, x = Positions(RANGES[form]).eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        fast, behind = optimized(model, entry, x)
        for source in (x, torch.randn(2, 5, 16), torch.randn(2, 7, 16)):
            torch.testing.assert_close(fast(source), model(source))
    assert behind.regions()
    if entry == "torch.compile":
        assert [m for m in behind.modules() if isinstance(m, Memoised) and m.kept]
        assert not [node for node in behind.graph.nodes if "arange" in str(node.target)]


@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
def test_what_is_written_to_is_made_in_each_call(entry: str) -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            numbers = torch.arange(3)
            numbers += 1
            return self.linear(x), numbers

    model, x = Written().eval(), torch.randn(2, 16)
    with torch.no_grad():
        fast, _ = optimized(model, entry, x)
        for _ in range(3):
            _, numbers = fast(x)
            assert numbers.tolist() == [1, 2, 3]
            numbers += 5  # the caller's own


@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
def test_floats_have_the_default_dtype_of_the_call(entry: str) -> None:
    class Floats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), torch.arange(0.0, 1.0, 0.25) * 2

    model, x = Floats().eval(), torch.randn(2, 16)
    with torch.no_grad():
        fast, _ = optimized(model, entry, x)
        before = torch.get_default_dtype()
        try:
            for default in (torch.float32, torch.float64, torch.float32):
                torch.set_default_dtype(default)
                ours, theirs = fast(x)[1], model(x)[1]
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        finally:
            torch.set_default_dtype(before)
