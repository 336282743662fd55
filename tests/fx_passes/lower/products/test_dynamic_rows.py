"""Linear layers of rows that are quantized by scales of the call: on integers, and right; near misses in float."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchao.quantization.quant_primitives  # noqa: F401 - registers the operators
from torch import Tensor

import zendnn_cffi
from fx_passes import ops
from fx_passes.lower.products import row_blocks, scales
from tests.fx_passes.lower.products.test_dynamic import POST_OPS, choices, optimized, products
from tests.support.lowering import noise
from tests.support.quantized import RANGES, Integers, Weight, decomposed, ran

U8, S8 = torch.uint8, torch.int8


def by_token(x: Tensor, form: str = "choose_qparams_per_token", low: int = -128) -> Tensor:
    scales, zero_points = getattr(decomposed, form)(x, S8)
    kept = decomposed.quantize_per_token(x, scales, zero_points, low, 127, S8)
    return decomposed.dequantize_per_token(kept, scales, zero_points, low, 127, S8, torch.float32)


def by_block(x: Tensor, mapping: str, sizes: list[int], dtype: torch.dtype = S8, **options: Any) -> Tensor:
    scale, zero_point = torch.ops.torchao.choose_qparams_affine(x, mapping, sizes, dtype, **options)
    kept = torch.ops.torchao.quantize_affine(x, sizes, scale, zero_point, dtype)
    return torch.ops.torchao.dequantize_affine(kept, sizes, scale, zero_point, dtype)


def by_row(mapping: str, dtype: torch.dtype = S8, **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: by_block(x, mapping, [1, K], dtype, **options)


K = 16
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "per token": by_token,
    "per token, symmetric": lambda x: by_token(x, low=-127),
    "per token, asymmetric": lambda x: by_token(x, "choose_qparams_per_token_asymmetric"),
    "affine, symmetric": by_row("SYMMETRIC"),
    "affine, asymmetric": by_row("ASYMMETRIC", eps=1e-5),
    "affine, asymmetric, u8": by_row("ASYMMETRIC", U8, scale_dtype=torch.float64),
    "affine, dimensions kept": by_row("SYMMETRIC", keepdim=True, zero_point_dtype=S8),
}


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("post_op", "bias"), [*((name, True) for name in POST_OPS), ("none", False), ("gelu", False)])
def test_computes_on_integers(post_op: str, bias: bool, form: str) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        return POST_OPS[post_op](F.linear(FORMS[form](x), w[0](), w[0].bias))

    x = noise(13, K) * torch.linspace(0.01, 3, 13)[:, None]  # rows of different scales
    fast = optimized(Integers(forward, Weight(17, K, bias=bias)), x, least_db=45)
    ((source, implementation),) = products(fast)
    assert source in RANGES and not implementation.startswith("ref")
    assert [kind for kind, _, _ in ran(fast)].count("eltwise") == 0


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [99, 5000])
def test_at_most_a_step_from_eager(tokens: int, form: str) -> None:
    """With weights that are the identity, results are the rounded values themselves."""
    weight = Weight(K, K, bias=False)
    weight.integers.copy_(torch.eye(K))
    weight.scales.fill_(1.0)
    model = Integers(lambda w, x: F.linear(FORMS[form](x), w[0]()), weight)
    x = noise(tokens, K)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        apart = (fast(x) - model(x)).abs() / ((x.amax(1) - x.amin(1)) / 255)[:, None]
    assert len(products(fast)) == 1
    assert apart.max() <= 1.01 and (apart > 0.5).double().mean() < 0.005


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("form", ["per token", "per token, asymmetric", "affine, asymmetric, u8"])
def test_all_of_it_runs_in_primitives(form: str) -> None:
    model = Integers(lambda w, x: F.linear(FORMS[form](x), w[0](), w[0].bias), Weight(19, K))
    fast = optimized(model, noise(70, K), least_db=45)
    assert not {name for _, _, name in ran(fast)} & {"torch", "ref:any"}


@pytest.mark.needs("vnni")
def test_zero_points_of_more_than_a_cache_holds_are_added_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And scales of the weight behind that."""
    form = FORMS["per token, asymmetric"]
    model = Integers(lambda w, x: F.linear(form(x), w[0](), w[0].bias), Weight(19, K))
    monkeypatch.setattr(row_blocks, "CACHE_BYTES", 70 * 19 * 4 - 1)
    assert [name for _, _, name in ran(optimized(model, noise(70, K), least_db=45))].count("torch") == 2


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("form", ["per token", "per token, asymmetric"])
@pytest.mark.parametrize("shape", [(1, 16), (1, 1, 16), (2, 5, 16), (3, 2, 5, 16)])
def test_shapes(shape: tuple[int, ...], form: str) -> None:
    model = Integers(lambda w, x: F.linear(FORMS[form](x), w[0](), w[0].bias), Weight(8, 16))
    assert len(products(optimized(model, noise(*shape), least_db=45))) == 1


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("form", ["per token", "affine, symmetric"])
@pytest.mark.parametrize(("post_op", "bias"), [*((name, True) for name in POST_OPS), ("none", False), ("gelu", False)])
def test_one_row_is_one_product_with_post_ops(post_op: str, bias: bool, form: str) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        return POST_OPS[post_op](F.linear(FORMS[form](x), w[0](), w[0].bias))

    fast = optimized(Integers(forward, Weight(33, K, bias=bias)), noise(1, K), least_db=40)
    kinds = [kind for kind, _, _ in ran(fast)]
    assert (kinds.count("choose_scale"), kinds.count("binary"), len(products(fast))) == (4, 1, 1)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("rows", [1, 2])
def test_a_residual_behind_few_rows(rows: int) -> None:
    """Of one row the product itself adds it, and multiplies by a gate."""

    def forward(w: Any, x: Tensor) -> Tensor:
        gate = F.silu(F.linear(by_token(x), w[0](), w[0].bias))
        return F.linear(by_token(x), w[1](), w[1].bias) * gate + x

    fast = optimized(Integers(forward, Weight(K, K, seed=1), Weight(K, K, seed=2)), noise(rows, K), least_db=40)
    assert len(products(fast)) == 2
    assert [kind for kind, _, _ in ran(fast)].count("binary") == (1 if rows == 1 else 3)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("form", ["per token", "affine, symmetric", "affine, asymmetric"])
def test_one_row_that_is_not_finite(form: str, number: float) -> None:
    model = Integers(lambda w, x: F.linear(FORMS[form](x), w[0](), w[0].bias), Weight(8, 16))
    x = noise(1, 16)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    wrong = x.index_fill(1, torch.tensor([3]), number)
    with torch.no_grad():
        assert fast(wrong).isnan().all() and model(wrong).isnan().all()
        torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)
    assert len(products(fast)) == 1


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("form", ["per token", "per token, asymmetric", "affine, asymmetric", "affine, asymmetric, u8"])
@pytest.mark.parametrize("tokens", [1, 2, 120])
def test_one_primitive_quantizes_with_zero_points_and_without(tokens: int, form: str) -> None:
    model = Integers(lambda w, x: F.linear(FORMS[form](x), w[0]()), Weight(17, K))
    fast = optimized(model, noise(tokens, K), least_db=45)
    shifts = "asymmetric" in form  # what zero points take away is another, and so are scales of more rows than one
    found = [name for kind, _, name in ran(fast) if kind == "binary"]
    assert found == ["jit:uni"] * (1 + shifts + (shifts or tokens > 1))


@pytest.fixture
def reduced_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scales, "ways_of", lambda rows: (True,))


def _chosen_by(fast: Any) -> set[str]:
    return {name for kind, _, name in ran(fast) if kind == "choose_scale"}


@pytest.mark.needs("vnni")
@pytest.mark.usefixtures("reduced_by_torch")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 13, 70])
def test_pytorch_reduces(tokens: int, form: str) -> None:
    model = Integers(lambda w, x: F.linear(FORMS[form](x), w[0](), w[0].bias), Weight(17, K))
    fast = optimized(model, noise(tokens, K) * torch.linspace(0.01, 3, tokens)[:, None], least_db=45)
    assert "torch" in _chosen_by(fast) and len(products(fast)) == 1
    with torch.no_grad():
        for source in (noise(tokens, K).abs(), -noise(tokens, K).abs(), torch.zeros(tokens, K)):
            torch.testing.assert_close(fast(source), model(source), atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("reduced_by_torch")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_pytorch_reduces_rows_that_are_not_finite(number: float, form: str) -> None:
    model = Integers(lambda w, x: F.linear(FORMS[form](x), w[0](), w[0].bias), Weight(8, K))
    x = noise(5, K)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    wrong, others = x.clone(), [0, 1, 3, 4]
    wrong[2, 3] = number
    with torch.no_grad():
        ours, theirs = fast(wrong), model(wrong)
    assert "torch" in _chosen_by(fast) and ours[2].isnan().all() and theirs[2].isnan().all()
    torch.testing.assert_close(ours[others], theirs[others], atol=1e-4, rtol=1e-4)


@pytest.mark.needs("vnni")
def test_rows_that_are_no_rows_in_memory() -> None:
    model = Integers(lambda w, x: F.linear(by_token(x.transpose(0, 1)), w[0](), w[0].bias), Weight(8, 16))
    assert len(products(optimized(model, noise(5, 3, 16), least_db=45))) == 1


@pytest.mark.needs("vnni")
def test_layers_of_one_value_share_its_integers() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        real = by_token(x)
        return F.linear(real, w[0](), w[0].bias) + F.linear(real, w[1](), w[1].bias)

    fast = optimized(Integers(forward, Weight(16, 24, seed=1), Weight(16, 24, seed=2)), noise(6, 24), least_db=45)
    assert len(products(fast)) == 2 and choices(fast) == 1


@pytest.mark.needs("vnni")
def test_a_residual_is_added_by_the_last_primitive() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        y = F.linear(by_token(x), w[0](), w[0].bias)
        return F.linear(by_token(F.gelu(y)), w[1](), w[1].bias) + y

    fast = optimized(Integers(forward, Weight(32, 24), Weight(32, 32)), noise(6, 24), least_db=40)
    kinds = [kind for kind, _, _ in ran(fast)]
    assert len(products(fast)) == 2
    assert kinds.count("binary") == 4  # two that quantize, two that scale


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC"])
@pytest.mark.parametrize("eps", [1e-7, None])
def test_all_values_at_once_by_affine(mapping: str, eps: float | None) -> None:
    model = Integers(lambda w, x: F.linear(by_block(x, mapping, [5, 16], eps=eps), w[0](), w[0].bias), Weight(8, 16))
    exported = torch.export.export(model, (noise(5, 16),))  # has shapes
    fast = optimized(exported.module(), noise(5, 16), least_db=45)
    fused = [
        node for region in fast.regions().values() for node in region.graph.nodes if node.target is ops.dynamic_linear
    ]
    assert len(fused) == len(products(fast)) == (eps is not None)  # the smallest scale of None would be 1e-38


def _read_elsewhere(w: Any, x: Tensor) -> Tensor:
    real = by_token(x)
    return F.linear(real, w[0](), w[0].bias) + real.sum()


def _scales_of_another(w: Any, x: Tensor) -> Tensor:
    scales, zero_points = decomposed.choose_qparams_per_token(x + 1, S8)
    kept = decomposed.quantize_per_token(x, scales, zero_points, -128, 127, S8)
    return F.linear(
        decomposed.dequantize_per_token(kept, scales, zero_points, -128, 127, S8, torch.float32), w[0](), w[0].bias
    )


def _seven_bits(w: Any, x: Tensor) -> Tensor:
    scales, zero_points = decomposed.choose_qparams_per_token(x, S8)
    kept = decomposed.quantize_per_token(x, scales, zero_points, -64, 63, S8)
    return F.linear(
        decomposed.dequantize_per_token(kept, scales, zero_points, -64, 63, S8, torch.float32), w[0](), w[0].bias
    )


def _groups_of_a_row(w: Any, x: Tensor) -> Tensor:
    return F.linear(by_block(x, "SYMMETRIC", [1, 8]), w[0](), w[0].bias)


def _no_clipping(w: Any, x: Tensor) -> Tensor:
    return F.linear(by_block(x, "SYMMETRIC_NO_CLIPPING_ERR", [1, 16]), w[0](), w[0].bias)


@pytest.mark.needs("vnni")
def test_fewer_integers_are_bounded() -> None:
    fast = optimized(Integers(_seven_bits, Weight(8, 16)), noise(5, 16), least_db=45)
    assert not [kind for kind, _, name in ran(fast) if name == "torch"] and len(products(fast)) == 1


@pytest.mark.parametrize("forward", [_read_elsewhere, _scales_of_another, _groups_of_a_row, _no_clipping])
def test_near_misses_stay_in_float(forward: Callable[..., Any]) -> None:
    assert not products(optimized(Integers(forward, Weight(8, 16)), noise(5, 16)))


class Groups(Weight):
    """A scale for each eight weights of a row, and four bits each."""

    def __init__(self) -> None:
        super().__init__(8, 16)
        self.integers.clamp_(-8, 7)
        self.register_buffer("groups", torch.rand(8, 2) / 8 + 0.01)

    def forward(self) -> Tensor:
        return torch.ops.torchao.dequantize_affine(self.integers, [1, 8], self.groups, None, S8, -8, 7)


def test_weights_in_groups_stay_in_float_and_are_dequantized_once() -> None:
    fast = optimized(Integers(lambda w, x: F.linear(by_token(x), w[0](), w[0].bias), Groups()), noise(5, 16))
    assert not products(fast)
    assert any(name in ("matmul", "inner_product") for name, dtype, _ in ran(fast) if dtype == torch.float32)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("form", ["per token", "affine, asymmetric"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_so_and_others_do_not_become_so(number: float, form: str) -> None:
    model = Integers(lambda w, x: F.linear(FORMS[form](x), w[0](), w[0].bias), Weight(8, 16))
    x = noise(5, 16)
    fast = zendnn_cffi.optimize(model, (noise(5, 16),), tune="off")
    x[2, 3] = number
    with torch.no_grad():
        ours, theirs = fast(x), model(x)
    assert ours[2].isnan().all() and theirs[2].isnan().all() and len(products(fast)) == 1
    others = [0, 1, 3, 4]
    torch.testing.assert_close(ours[others], theirs[others], atol=1e-4, rtol=1e-4)


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("form", ["per token", "affine, asymmetric"])
def test_bfloat16_elsewhere(form: str) -> None:
    model = Integers(lambda w, x: F.linear(FORMS[form](F.gelu(x)), w[0](), w[0].bias), Weight(32, K))
    fast = optimized(model, noise(5, K), least_db=25, dtype=torch.bfloat16)
    assert len(products(fast)) == 1


@pytest.mark.parametrize("form", ["per token", "affine, asymmetric"])
def test_saved_copied_released_and_measured(tmp_path: Path, form: str) -> None:
    x = noise(5, 16)
    model = Integers(lambda w, x: F.linear(FORMS[form](x), w[0](), w[0].bias), Weight(8, 16))
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    expected = fast(x)
    zendnn_cffi.save(fast, tmp_path / "rows.safetensors")
    again = zendnn_cffi.load(tmp_path / "rows.safetensors")
    assert torch.equal(again(x), expected) and torch.equal(copy.deepcopy(fast)(x), expected)
    released = zendnn_cffi.optimize(copy.deepcopy(model), (x,), tune="off", release_weights=True)
    assert torch.equal(released(x), expected) and torch.equal(released(x), expected)
    measured = zendnn_cffi.optimize(model, (x,), tune="full")
    torch.testing.assert_close(measured(x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("form", ["per token", "per token, asymmetric", "affine, symmetric"])
def test_layers_that_quantize_one_value_alike_share_its_integers(form: str) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        y, z = FORMS[form](x), FORMS[form](x)
        return F.linear(y, w[0](), w[0].bias) * F.linear(z, w[1](), w[1].bias) + F.linear(by_token(-x), w[0]())

    fast = optimized(Integers(forward, Weight(16, K, seed=1), Weight(16, K, seed=2)), noise(6, K), least_db=40)
    assert len(products(fast)) == 3 and choices(fast) == 2


def test_saved_as_pytorch_reduces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = noise(40, 16)
    model = Integers(lambda w, x: F.linear(by_token(x), w[0](), w[0].bias), Weight(8, 16))
    with monkeypatch.context() as patched:
        patched.setattr(scales, "ways_of", lambda rows: (True,))
        fast = zendnn_cffi.optimize(model, (x,), tune="off")
        expected = fast(x)
        zendnn_cffi.save(fast, tmp_path / "rows.safetensors")
    again = zendnn_cffi.load(tmp_path / "rows.safetensors")
    assert torch.equal(again(x), expected) and "torch" in _chosen_by(again)
