"""Post-ops: which readers are absorbed, and which must not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.fuse.post_ops import POST_OPS, fuse_post_ops
from fx_passes.pipeline import compile_graph
from tests.support.graphs import after, check, check_twice, count, image, model_of, post_ops
from tests.support.lowering import net, noise

# row -> models of one convolution `c` (3 -> 3 channels) that it matches, with the post-ops they get
EXAMPLES: dict[str, list[tuple[Callable[..., Any], tuple[str, ...]]]] = {
    "eltwise": [
        (lambda m, x: F.relu(m.c(x)), ("eltwise:relu",)),
        (lambda m, x: F.leaky_relu(m.c(x), 0.2), ("eltwise:relu",)),
        (lambda m, x: F.gelu(m.c(x), approximate="tanh"), ("eltwise:gelu_tanh",)),
        (lambda m, x: torch.sigmoid(m.c(x)).clamp(0.2, 0.8), ("eltwise:logistic", "eltwise:clip")),
    ],
    "scalar": [
        (lambda m, x: m.c(x) * 2 + 1, ("eltwise:linear", "eltwise:linear")),
        (lambda m, x: 3 - m.c(x), ("eltwise:linear",)),
        (lambda m, x: m.c(x) / 4 - 1, ("binary:div", "eltwise:linear")),
    ],
    "binary": [
        (lambda m, x: m.c(x) + x, ("binary:add",)),
        (lambda m, x: x + m.c(x), ("binary:add",)),
        (lambda m, x: x - m.c(x), ("eltwise:linear", "binary:add")),
        (lambda m, x: (m.c(x) - x).relu(), ("binary:sub", "eltwise:relu")),
        (lambda m, x: torch.maximum(x, m.c(x)) * x[:, :1], ("binary:max", "binary:mul")),
        (lambda m, x: m.c(x) / (x * x), ("binary:div",)),
    ],
    "prelu": [(lambda m, x: m.p(m.c(x)), ("prelu",))],
}


def test_every_row_has_an_example() -> None:
    assert EXAMPLES.keys() == {row.name for row in POST_OPS}


@pytest.mark.parametrize(("function", "expected"), [e for row in EXAMPLES.values() for e in row])
def test_absorbs(function: Callable[..., Any], expected: tuple[str, ...]) -> None:
    model = model_of(function, c=nn.Conv2d(3, 3, 3, padding=1), p=nn.PReLU(3))
    gm = check(model, image())
    assert post_ops(gm) == [expected]
    fused = after("fuse_post_ops", model)
    check_twice(fused, fuse_post_ops)


PRODUCERS = {
    "convolution": (nn.Conv1d(3, 3, 1), image(2, 3, 5)),
    "deconvolution": (nn.ConvTranspose2d(3, 3, 2), image()),
    "linear": (nn.Linear(7, 7), image()),
    "batch_norm": (nn.BatchNorm2d(3), image()),
}


@pytest.mark.parametrize("name", PRODUCERS)
def test_producers(name: str) -> None:
    module, x = PRODUCERS[name]
    gm = check(model_of(lambda m, x: m.p(x).relu().add(1), p=module), x)
    assert post_ops(gm) == [("eltwise:relu", "eltwise:linear")]


def test_matmul_takes_post_ops() -> None:
    gm = check(model_of(lambda m, x, y: (torch.matmul(x, y) * 0.5 + x).relu()), image(4, 4), image(4, 4, seed=1))
    assert post_ops(gm) == [("eltwise:linear", "binary:add", "eltwise:relu")]


def test_of_two_convolutions_the_later_absorbs_the_addition() -> None:
    model = model_of(lambda m, x: (m.a(x) + m.b(x)).relu(), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1))
    gm = check(model, image())
    assert post_ops(gm) == [(), ("binary:add", "eltwise:relu")]


def test_add_add_relu_is_one_chain() -> None:
    gm = check(model_of(lambda m, x: (m.c(x) + x + 1.5 + x).relu(), c=nn.Conv2d(3, 3, 1)), image())
    assert post_ops(gm) == [("binary:add", "eltwise:linear", "binary:add", "eltwise:relu")]


def _two_readers(m: Any, x: torch.Tensor) -> Any:
    y = m.c(x)
    return y.relu(), y


def _twice(m: Any, x: torch.Tensor) -> Any:
    y = m.c(x)
    return y + y


def _squared(m: Any, x: torch.Tensor) -> Any:
    y = m.c(x)
    return torch.mul(y, y).relu()


def _gate(m: Any, x: torch.Tensor) -> Any:
    return m.c(F.adaptive_avg_pool2d(x, 1)).sigmoid() * x


REFUSED = {
    "a second reader": (_two_readers, 1),
    "both operands of an addition": (_twice, 1),
    "both operands of a product": (_squared, 1),
    "alpha other than 1": (lambda m, x: torch.add(m.c(x), x, alpha=2), 1),
    "a tensor-valued alpha": (lambda m, x: torch.sub(x, m.c(x), alpha=3), 1),
    "number divided by the result": (lambda m, x: 1 / m.c(x), 1),
    "tensor divided by the result": (lambda m, x: x / m.c(x), 1),
    "min greater than max": (lambda m, x: torch.clamp(m.c(x), 1, -1), 1),
    "the small side of a gate": (_gate, 1),
    "a result that leaves first": (lambda m, x: [m.c(x), m.c(x).relu()], 2),
    "a rounding mode": (lambda m, x: torch.div(m.c(x), 2, rounding_mode="floor"), 1),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refuses(why: str) -> None:
    function, convolutions = REFUSED[why]
    gm = check(model_of(function, c=nn.Conv2d(3, 3, 1)), image())
    assert count(gm)["convolution"] == convolutions
    assert not any("binary" in p for chain in post_ops(gm) for p in chain)
    assert any(not chain or chain == ("eltwise:logistic",) for chain in post_ops(gm))


def test_slope_that_is_computed_stays_outside() -> None:
    gm = check(model_of(lambda m, x: F.prelu(m.c(x), x.mean((0, 2, 3))), c=nn.Conv2d(3, 3, 1)), image())
    assert post_ops(gm) == [()]


def test_residual_that_depends_on_the_result_is_not_fused_in_a_circle() -> None:
    gm = check(model_of(lambda m, x: (y := m.c(x)) * y.mean((2, 3), keepdim=True), c=nn.Conv2d(3, 3, 1)), image())
    assert post_ops(gm) == [()]


def test_long_chains_stop_at_what_the_library_holds() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.c(x)
        for _ in range(40):
            x = x.tanh()
        return x

    gm = check(model_of(forward, c=nn.Conv2d(3, 3, 1)), image())
    assert [len(chain) for chain in post_ops(gm)] == [31]
    assert count(gm)["eltwise"] == 9


@pytest.mark.parametrize("kind", ("add", "mul", "max", "min"))
@pytest.mark.parametrize("first", (False, True))
def test_results_have_the_first_operands_strides(first: bool, kind: str) -> None:
    """x + linear(y) lies as x does, linear(y) + x as a new tensor."""
    function = {"add": torch.add, "mul": torch.mul, "max": torch.maximum, "min": torch.minimum}[kind]
    model = net(
        lambda m, x: function(x, m[0](x.contiguous())) if first else function(m[0](x.contiguous()), x), nn.Linear(8, 8)
    )
    x = noise(2, 3, 8).transpose(0, 1)
    with torch.no_grad():
        expected = model(x)
        gm: Any = compile_graph(model)
        ours, lowered = gm(x), zendnn_cffi.optimize(model, tune="off")(x)
    region: Any = gm.get_submodule("zen_region_0")
    (linear,) = region.graph.find_nodes(op="call_function", target=ops.linear)
    assert [entry[1] for entry in linear.kwargs["post_ops"]] == [kind]
    assert ours.stride() == lowered.stride() == expected.stride()
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(lowered, expected, atol=1e-5, rtol=1e-5)


INTEGERS: dict[str, Callable[..., Any]] = {
    "sum": lambda m, a, b: torch.matmul(a, b) + 1,
    "sum with a float": lambda m, a, b: torch.matmul(a, b) + 0.0,
    "product": lambda m, a, b: torch.matmul(a, b) * 2,
    "product with a float": lambda m, a, b: torch.matmul(a, b) * 2.0,
    "difference": lambda m, a, b: 1 - torch.matmul(a, b),
    "difference from the right": lambda m, a, b: torch.matmul(a, b) - 1,
    "difference of tensors": lambda m, a, b: b - torch.matmul(a, b),
    "scaled in addmm": lambda m, a, b: torch.addmm(b, a, b, alpha=2),
}


@pytest.mark.parametrize("case", INTEGERS)
def test_integers_keep_their_dtype(case: str) -> None:
    numbers = torch.arange(9, dtype=torch.int64, device="cpu").reshape(3, 3)
    gm = check(model_of(INTEGERS[case]), numbers, numbers.mT.contiguous())
    assert count(gm) == {"matmul": 1}
