"""Linears of one input as one wider linear: which are, and what whoever reads the results can see of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.fuse.projections import fuse_projections
from tests.fx_passes.lower.products.test_dynamic import dynamic
from tests.fx_passes.lower.products.test_dynamic_rows import by_token
from tests.support.graphs import check, count, model_of, traced
from tests.support.lowering import noise
from tests.support.quantized import RANGES, Integers, Weight, ran, through
from tests.tolerance import assert_close


def heads(x: Tensor) -> Tensor:
    return x.view(2, 6, 4, 8).transpose(1, 2)


READERS: dict[str, Callable[[Tensor], Any]] = {
    "leaves as heads": heads,
    "leaves transposed": lambda k: k.transpose(0, 1),
    "leaves in parts": lambda k: k.chunk(2, -1)[1],
    "leaves, and is read inside": lambda k: (heads(k), heads(k) @ heads(k).transpose(-1, -2)),
    "memory is addressed": lambda k: heads(k).reshape(8, 6, 8).as_strided((8, 2, 4, 8), (8, 64, 32, 1)),
    "is viewed by what nobody knows": lambda k: torch.view_as_complex(k.view(2, 6, 16, 2)).real,
}


@pytest.mark.parametrize("entry", ("traced", "exported", "compiled"))
@pytest.mark.parametrize("reader", READERS)
def test_strides_are_those_of_a_tensor_of_its_own(reader: str, entry: str) -> None:
    """A slice of the wider result has gaps: as_strided would read between, a cache take three times the memory."""

    def forward(m: Any, x: Tensor) -> Any:
        keys, queries, values = m.k(x), m.q(x), m.v(x)
        return READERS[reader](keys), heads(queries) @ heads(values).transpose(-1, -2)

    eager = model_of(forward, k=nn.Linear(64, 32), q=nn.Linear(64, 32), v=nn.Linear(64, 32)).float()
    x = torch.randn(2, 6, 64)
    if entry == "compiled":
        torch._dynamo.reset()
        fast: Any = torch.compile(eager, backend="zendnn", options={"tune": "off"})
    else:
        fast = zendnn_cffi.optimize(eager, (x,) if entry == "exported" else None, tune="off")
    with torch.inference_mode():
        ours, theirs = (torch.utils._pytree.tree_leaves(module(x)) for module in (fast, eager))
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine, other, k=64)
        assert mine.stride() == other.stride()
        assert mine.untyped_storage().nbytes() <= other.untyped_storage().nbytes()
    if entry != "compiled":
        assert [n.became for n in zendnn_cffi.explain(fast).nodes].count("inner_product") == 1


@pytest.mark.parametrize(("wrote", "products"), (("between", 2), ("before", 1), ("after", 1)))
def test_writes_to_what_they_read(wrote: str, products: int) -> None:
    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(x)
        if wrote == "before":
            h[..., 0] = 7.0
        query = m.q(h).view(2, 6, 2, 4).transpose(1, 2)
        if wrote == "between":
            h[..., 0] = 7.0
        key = m.k(h).view(2, 6, 2, 4).transpose(1, 2)
        if wrote == "after":
            h[..., 0] = 7.0
        return query @ key.transpose(-1, -2), h

    assert (
        count(check(model_of(forward, q=nn.Linear(8, 8), k=nn.Linear(8, 8)), noise(2, 6, 8).double()))["linear"]
        == products
    )


class Projections(nn.Module):
    def __init__(self, bias: tuple[bool, bool, bool]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, n, bias=b) for n, b in zip((8, 4, 4), bias, strict=True))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(f(x).view(2, 3, -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v))


def test_projections_of_one_input_become_one_linear() -> None:
    x = torch.randn(2, 3, 8)
    for bias in ((True, True, True), (True, False, True), (False, False, False)):
        model = Projections(bias).eval()
        gm = fuse_projections(traced(model, x))
        assert count(gm)["linear"] == 1
        assert set(gm.state_dict()) == set(model.state_dict())
        for actual, expected in zip(gm(x), model(x), strict=True):
            torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("shape", [(1,), (2, 5, 8), (5, 8)], ids=str)
def test_biases_that_are_broadcast_are_not_joined(shape: tuple[int, ...]) -> None:
    """One number for all outputs, or one for each row, are not as many as there are outputs."""
    model = model_of(lambda m, x: (F.linear(x, m.a, m.b).reshape(80), F.linear(x, m.c).reshape(80)))
    model.a, model.b, model.c = (nn.Parameter(noise(*sizes)) for sizes in ((8, 7), shape, (8, 7)))
    gm = check(model, noise(2, 5, 7))
    assert count(gm)["linear"] == 2


def test_projections_that_absorb_something_stay_apart() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.silu(self.gate(x)) * self.up(x)

    gm = fuse_projections(traced(Gated().eval(), torch.randn(2, 8)))
    assert count(gm)["linear"] == 2


QUANTIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "constant scale": lambda x: through(x, 0.03, 128),
    "scale of the call": dynamic,
    "scales of rows": by_token,
    "scales of rows, zero points": lambda x: by_token(x, "choose_qparams_per_token_asymmetric"),
}


def projections_of_integers(w: Any, x: Tensor, how: Callable[[Tensor], Tensor], moved: bool = True) -> Any:
    """Each layer quantizes its input itself, as torchao's graphs have it."""
    parts = [nn.functional.linear(how(x), weight(), weight.bias) for weight in w]
    return tuple(part.view(2, 3, -1, 4).transpose(1, 2) for part in parts) if moved else sum(parts)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("bias", [(True, False, True), (False, False, False)])
@pytest.mark.parametrize("how", QUANTIZED)
def test_projections_of_integers_become_one_product(how: str, bias: tuple[bool, ...]) -> None:
    weights = [Weight(n, 16, bias=b) for n, b in zip((8, 4, 12), bias, strict=True)]
    model = Integers(lambda w, x: projections_of_integers(w, x, QUANTIZED[how]), *weights)
    x = noise(2, 3, 16)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        for mine, other in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-3, rtol=1e-4)
    products = [dtype for kind, dtype, name in ran(fast) if kind in ("inner_product", "matmul") and name != "torch"]
    assert len(products) == 1 and products[0] in RANGES


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("how", QUANTIZED)
def test_projections_of_integers_that_are_added_stay_apart(how: str) -> None:
    model = Integers(lambda w, x: projections_of_integers(w, x, QUANTIZED[how], False), Weight(8, 16), Weight(8, 16))
    fast = zendnn_cffi.optimize(model, (noise(2, 3, 16),), tune="off")
    fast(noise(2, 3, 16))
    assert [dtype in RANGES for kind, dtype, name in ran(fast) if kind != "binary" and name != "torch"].count(True) == 2


def test_weights_with_other_zero_points_stay_apart() -> None:
    one, other = Weight(8, 16), Weight(8, 16)
    other.zero_points += 3
    model = Integers(lambda w, x: projections_of_integers(w, x, QUANTIZED["constant scale"]), one, other)
    fast = zendnn_cffi.optimize(model, (noise(2, 3, 16),), tune="off")
    x = noise(2, 3, 16)
    with torch.no_grad():
        for mine, expected in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(mine, expected, atol=1e-3, rtol=1e-4)
    assert [kind for kind, _, _ in ran(fast)].count("matmul") == 2
