"""Linear layers whose input is quantized by a scale of the call: on integers, and right; near misses in float."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zendnn_cffi
from fx_passes import ops
from tests.support.lowering import check_regions, noise
from tests.support.quantized import RANGES, Integers, Weight, decomposed, ran

U8, S8 = torch.uint8, torch.int8
EPS = 2.0**-12
POST_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
}


def dynamic(x: Tensor, dtype: torch.dtype = U8, form: str = "choose_qparams") -> Tensor:
    """x, rounded to integers of a scale that is chosen for it."""
    low, high = RANGES[dtype]
    scale, zero_point = getattr(decomposed, form).tensor(x, low, high, EPS, dtype)
    kept = decomposed.quantize_per_tensor.tensor(x, scale, zero_point, low, high, dtype)
    return decomposed.dequantize_per_tensor.tensor(kept, scale, zero_point, low, high, dtype)


def optimized(model: Integers, x: Tensor, least_db: float = 60.0, **options: Any) -> Any:
    """model through optimize, compared with eager on x, on larger numbers, and on negative ones alone."""
    fast = zendnn_cffi.optimize(model, (x,), **{"tune": "off", **options})
    with torch.no_grad():
        for source in (x, 7 * x, -x.abs() - 1, x.abs() + 1, 0 * x):
            ours, theirs = fast(source), model(source)
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            # numbers midway between two integers may become either: such steps are few
            apart = (ours.double() - theirs.double()).pow(2).sum()
            assert apart <= theirs.double().pow(2).sum() * 10 ** (-least_db / 10)
            assert torch.equal(ours, fast(source))
    check_regions(fast)
    return fast


def choices(fast: Any) -> int:
    """How often scales are chosen, by primitives alone."""
    nodes = [node for region in fast.regions().values() for node in region.graph.nodes]
    assert not [name for kind, _, name in ran(fast) if kind == "choose_scale" and name == "torch"]
    return len([node for node in nodes if node.target in (ops.choose_scale, ops.choose_row_scales)])


def products(fast: Any) -> list[tuple[torch.dtype, str]]:
    """(dtype of the source, implementation) of the products on integers."""
    return [(dtype, name) for kind, dtype, name in ran(fast) if kind == "inner_product" and dtype in RANGES]


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("form", ["choose_qparams", "choose_qparams_symmetric"])
@pytest.mark.parametrize("dtype", [U8, S8])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("post_op", POST_OPS)
def test_computes_on_integers(post_op: str, bias: bool, dtype: torch.dtype, form: str) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        return POST_OPS[post_op](F.linear(dynamic(x, dtype, form), w[0](), w[0].bias))

    fast = optimized(Integers(forward, Weight(17, 33, bias=bias)), noise(13, 33), least_db=45)
    ((source, implementation),) = products(fast)
    assert source == dtype and not implementation.startswith("ref")


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("shape", [(1, 16), (1, 1, 16), (2, 5, 16), (3, 2, 5, 16)])
def test_shapes(shape: tuple[int, ...]) -> None:
    fast = optimized(Integers(lambda w, x: F.linear(dynamic(x), w[0](), w[0].bias), Weight(8, 16)), noise(*shape))
    assert len(products(fast)) == 1


@pytest.mark.needs("vnni")
def test_layers_of_one_value_share_its_integers() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        real = dynamic(x)
        return F.linear(real, w[0](), w[0].bias) + F.linear(real, w[1](), w[1].bias)

    fast = optimized(Integers(forward, Weight(16, 24, seed=1), Weight(16, 24, seed=2)), noise(6, 24))
    assert len(products(fast)) == 2 and choices(fast) == 1


@pytest.mark.needs("vnni")
def test_a_residual_is_added_by_the_product() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        y = F.linear(dynamic(x), w[0](), w[0].bias)
        return F.linear(dynamic(F.gelu(y)), w[1](), w[1].bias) + y

    fast = optimized(Integers(forward, Weight(32, 24), Weight(32, 32)), noise(6, 24), least_db=40)
    assert [kind for kind, _, _ in ran(fast)].count("binary") == 0 and len(products(fast)) == 2


def test_near_misses_stay_in_float() -> None:
    def read_elsewhere(w: Any, x: Tensor) -> Tensor:
        real = dynamic(x)
        return F.linear(real, w[0](), w[0].bias) + real.sum()

    def a_scale_of_another(w: Any, x: Tensor) -> Tensor:
        low, high = RANGES[U8]
        scale, _ = decomposed.choose_qparams.tensor(x, low, high, EPS, U8)
        _, zero_point = decomposed.choose_qparams.tensor(x + 1, low, high, EPS, U8)
        kept = decomposed.quantize_per_tensor.tensor(x, scale, zero_point, low, high, U8)
        real = decomposed.dequantize_per_tensor.tensor(kept, scale, zero_point, low, high, U8)
        return F.linear(real, w[0](), w[0].bias)

    for forward in (read_elsewhere, a_scale_of_another):
        fast = optimized(Integers(forward, Weight(8, 16)), noise(5, 16))
        assert not products(fast)


def test_weights_with_zero_points_stay_in_float() -> None:
    weight = Weight(8, 16)
    weight.zero_points += 3
    fast = optimized(Integers(lambda w, x: F.linear(dynamic(x), w[0](), w[0].bias), weight), noise(5, 16))
    assert not products(fast)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(number: float) -> None:
    model = Integers(lambda w, x: F.linear(dynamic(x), w[0](), w[0].bias), Weight(8, 16))
    fast = zendnn_cffi.optimize(model, (noise(5, 16),), tune="off")
    x = noise(5, 16)
    x[2, 3] = number
    with torch.no_grad():
        assert model(x).isnan().all() and fast(x).isnan().all()
    assert len(products(fast)) == 1


@pytest.mark.needs("bf16")
def test_bfloat16_elsewhere() -> None:
    model = Integers(lambda w, x: F.linear(dynamic(F.gelu(x)), w[0](), w[0].bias), Weight(32, 64))
    fast = optimized(model, noise(5, 64), least_db=25, dtype=torch.bfloat16)
    assert len(products(fast)) == 1


def test_saved_copied_and_released(tmp_path: Path) -> None:
    x = noise(5, 16)
    model = Integers(lambda w, x: F.linear(dynamic(x), w[0](), w[0].bias), Weight(8, 16))
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    expected = fast(x)
    zendnn_cffi.save(fast, tmp_path / "dynamic.safetensors")
    again = zendnn_cffi.load(tmp_path / "dynamic.safetensors")
    assert torch.equal(again(x), expected) and torch.equal(copy.deepcopy(fast)(x), expected)
    released = zendnn_cffi.optimize(copy.deepcopy(model), (x,), tune="off", release_weights=True)
    assert torch.equal(released(x), expected) and torch.equal(released(x), expected)
