"""Conversions that convert nothing, and those that do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.fold.casts import fold_casts
from fx_passes.normalize import normalize
from tests.support.graphs import count, image, model_of, traced

aten = torch.ops.aten


def test_casts_that_change_something_stay() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.float32).to(torch.bfloat16).float()

    x = torch.randn(4)
    gm = fold_casts(traced(Casts(), x))
    assert len(gm.graph.find_nodes(op="call_method", target="to")) == 1
    torch.testing.assert_close(gm(x), Casts()(x))


def test_casts_to_the_type_of_another_as_torch_export_writes_them() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
            return (x.float() * 2).type_as(x), x.type_as(narrow)

    x, narrow = torch.randn(4), torch.randn(4).bfloat16()
    gm = fold_casts(torch.export.export(Casts(), (x, narrow)).graph_module)
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.type_as.default)) == 1
    for found, expected in zip(gm(x, narrow), Casts()(x, narrow), strict=True):
        torch.testing.assert_close(found, expected)


class Chosen(nn.Module):
    """A piece of a concatenation whose length only the call tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.cat([y[y > 0], torch.zeros(3, dtype=y.dtype)])


def test_a_length_that_only_the_call_tells_is_not_asked_for() -> None:
    """optimize() raised torch.export's error about a condition on data."""
    model, x = Chosen().eval(), torch.randn(4, 8)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        for source in (x, -x, x[:2], 0 * x - 1):
            torch.testing.assert_close(fast(source), model(source))
    assert any(node.became == "inner_product" for node in zendnn_cffi.explain(fast).nodes)


def _written_source(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.relu(x)
    copied = aten._to_copy.default(y, dtype=torch.float64)
    y.select(-1, 0).fill_(5.0)
    return (copied * 2,)


def _written_copy(x: Tensor) -> tuple[Tensor, ...]:
    copied = aten._to_copy.default(x, dtype=torch.float64)
    copied.select(-1, 0).fill_(5.0)
    return (copied * 2,)


COPIES: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], int]] = {
    "its source is written to": (_written_source, 1),
    "it is written to": (_written_copy, 1),
    "it is returned": (lambda x: (aten._to_copy.default(x, dtype=torch.float64),), 1),
    "it is computed with": (lambda x: (aten._to_copy.default(x, dtype=torch.float64) * 2,), 0),
}


@pytest.mark.parametrize("case", COPIES)
def test_a_copy_of_an_equal_dtype_goes_where_nobody_can_tell(case: str) -> None:
    function, left = COPIES[case]
    x = image(2, 3)
    gm = fold_casts(traced(model_of(lambda m, x: function(x)), x.clone()))
    mine, theirs = x.clone(), x.clone()
    for ours, expected in zip(gm(mine), function(theirs), strict=True):
        torch.testing.assert_close(ours, expected)
        assert ours.data_ptr() != mine.data_ptr()
    assert torch.equal(mine, theirs)
    assert count(gm)["_to_copy.default"] == left


@pytest.mark.parametrize(("dtype", "pieces"), [(torch.float32, 2), (torch.bfloat16, 2), (torch.float64, 3)])
def test_empty_pieces_that_say_the_dtype_stay(dtype: torch.dtype, pieces: int) -> None:
    class Joined(nn.Module):
        def forward(self, empty: Tensor, x: Tensor) -> Tensor:
            return torch.cat((empty, x, x * 2))

    inputs = torch.zeros(0, dtype=dtype, device="cpu"), torch.randn(3, 4)
    gm = fold_casts(traced(Joined(), *inputs))
    (concat,) = gm.graph.find_nodes(op="call_function", target=ops.concat)
    assert len(concat.args[0]) == pieces
    torch.testing.assert_close(gm(*inputs), Joined()(*inputs))


def _method(x: Tensor) -> Tensor:
    return x.float()


CASTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "of its own": (lambda y: (y * 2).to(dtype=y.dtype), True),
    "by position": (lambda y: (y * 2).to(y.dtype), True),
    "of another": (lambda y: torch.stack((y, -y), -1).type_as(y), True),
    "by name": (_method, True),
    "constant": (lambda y: y.to(torch.float32), True),
    "wider": (lambda y: y.to(torch.float64), False),
    "narrower": (lambda y: y.bfloat16().float(), False),
    "as it was given": (lambda y: y.to(torch.float32, copy=True), False),
    "of integers": (lambda y: y.type_as(y.argmax(-1)), False),
    "of a sum with others": (lambda y: (y + y.double()).to(y.dtype), False),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_of_values_without_examples(name: str) -> None:
    """What torch.fx traces itself has no examples: the weights of layers say the dtype."""
    cast, goes = CASTS[name]

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return cast(self.linear(x))

    model, x = Casts().eval(), torch.randn(3, 4)
    gm = fold_casts(normalize(fx.symbolic_trace(model)))
    left = [node for node in gm.graph.nodes if node.op == "call_method"]
    assert bool(left) != goes, gm.code
    torch.testing.assert_close(gm(x), model(x))
