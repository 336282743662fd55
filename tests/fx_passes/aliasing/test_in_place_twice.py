"""Values that are written to more than once, by any name, and through views that schemas do not tell of."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.pipeline import compile_graph
from tests.support.exported import needs_export
from tests.support.graphs import check, check_equal, model_of

WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "div_": lambda v, x: v.div_(2),
    "relu_": lambda v, x: v.relu_(),
    "relu(inplace)": lambda v, x: F.relu(v, inplace=True),
    "add_": lambda v, x: v.add_(x),
    "elu_": lambda v, x: F.elu_(v),
    "clamp_": lambda v, x: v.clamp_(-0.5, 0.5),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout1d": lambda x: F.dropout1d(x, 0.5, False),
    "dropout2d": lambda x: F.dropout2d(x[None], 0.5, False)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, False),
    "type_as": lambda x: x.type_as(x),
    "to": lambda x: x.to(x.dtype),
    "atleast_1d": torch.atleast_1d,
    "atleast_2d": lambda x: torch.atleast_2d(x[0, 0]),
    "atleast_3d": lambda x: torch.atleast_3d(x[0]),
    "einsum": lambda x: torch.einsum("bij->bji", x),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[:1])[0],
}


@pytest.mark.parametrize("first", WRITES)
@pytest.mark.parametrize("second", WRITES)
@pytest.mark.parametrize("reads", ["the value", "the first result"])
def test_two_writes(first: str, second: str, reads: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        value = m.l(x)
        once = WRITES[first](value, x)
        WRITES[second](value, x)
        return m.n(value if reads == "the value" else once)

    check(model_of(forward, l=nn.Linear(8, 8), n=nn.LayerNorm(8)), torch.randn(4, 8, dtype=torch.float64))


class Written(nn.Module):
    """A value, or the input, that is written to through a view; torch.export has to trace it."""

    def __init__(self, view: Callable[[Tensor], Tensor], of_input: bool) -> None:
        super().__init__()
        self.linear, self.view, self.of_input = nn.Linear(8, 8), view, of_input
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        if needs_export(x) and len(x) > 9:
            return x
        h = x if self.of_input else self.linear(x)
        self.view(h).mul_(3)
        out: Tensor = self.linear(h + 1)
        return out


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("of_input", [False, True])
def test_writes_through_views(view: str, of_input: bool) -> None:
    model, x = Written(VIEWS[view], of_input), torch.randn(4, 8, 8, dtype=torch.float64)
    check_equal(model, compile_graph(model, (x.clone(),)), x)


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: F.linear(x, x),
    "normalized": lambda x: F.linear(x, F.normalize(x)),
    "relu": lambda x: F.linear(x, x.relu()),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_of_a_value_with_what_is_computed_from_it(product: str) -> None:
    model, x = model_of(lambda m, x: PRODUCTS[product](x)), torch.randn(5, 8)
    with torch.no_grad():
        torch.testing.assert_close(zendnn_cffi.optimize(model, tune="off")(x), PRODUCTS[product](x))


def test_idle_dropout_of_channels_cuts_no_exported_region() -> None:
    class Exported(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout2d(0.5), nn.Conv2d(8, 8, 1)).eval()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(x[:3] if len(x) > 3 else x)
            return out

    gm = compile_graph(Exported().eval(), (torch.randn(2, 3, 8, 8),))
    assert len(gm.regions()) == 1 and not any("dropout" in str(node.target) for node in gm.graph.nodes)


PROMOTING = {
    **{name: lambda y, t, name=name: getattr(y, name)(t)
       for name in ("add_", "sub_", "subtract_", "mul_", "multiply_", "div_", "divide_", "true_divide_", "pow_")},
    "**=": operator.ipow,
    "//=": operator.ifloordiv,
}  # fmt: skip


@pytest.mark.parametrize("write", PROMOTING)
@pytest.mark.parametrize("is_exported", [False, True])
def test_a_write_of_another_dtype_keeps_the_first(write: str, is_exported: bool) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            if is_exported and len(x) > 9:
                return x
            y: Tensor = PROMOTING[write](self.linear(x).exp(), other)
            return y

    model, args = Writes().eval(), (torch.rand(4, 8), torch.rand(4, 8, dtype=torch.float64))
    fast: Any = zendnn_cffi.optimize(model, args, tune="off")
    assert len(fast.regions()) == 1
    with torch.no_grad():
        torch.testing.assert_close(fast(*args), model(*args))


OF_INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "root": lambda numbers: numbers.sqrt(),
    "exponential": lambda numbers: torch.exp(numbers),
    "maximum": lambda numbers: numbers.amax(0, keepdim=True),
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_what_is_computed_of_integers_may_promote(name: str) -> None:
    """A root is float32, and so would be a product of bf16 with it, out of place."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, dtype=torch.bfloat16)
            self.register_buffer("numbers", torch.arange(8))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            y *= OF_INTEGERS[name](self.numbers)
            return y

    model, x = Writes().eval(), torch.rand(4, 8).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(compile_graph(model)(x), model(x))
