"""What models write out and a row recognises, in every spelling seen; and what only looks like it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fx_passes import ops
from fx_passes.fold.casts import fold_casts
from fx_passes.fuse.patterns import GATES, ROWS, fuse_patterns
from fx_passes.pipeline import compile_graph
from tests.support.graphs import calls, check, check_twice, image, model_of, post_ops, traced

Written = Callable[..., Any]


def _rms(x: Tensor, dim: int = -1, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps)


def _second(x: Tensor, start: int) -> Tensor:
    result: Tensor = torch.ops.aten.slice.Tensor(x, 3, start, 2**63 - 1, 2)
    return result


def _halves(x: Tensor, half: int = 4) -> Tensor:
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _pairs(x: Tensor) -> Tensor:
    """Of pairs [..., N, 2] in one row [..., 2N] each: minus the second, the first."""
    first, second = x.unbind(-1)
    return torch.stack((-second, first), -1).flatten(-2)


def _turned(turn: Written) -> Written:
    """x * cos + turn(x) * sin."""
    return lambda x, cos, sin: x * cos + turn(x) * sin


def _gelu(x: Tensor, cubic: float = 0.044715, root: float = math.sqrt(2 / math.pi)) -> Tensor:
    """As GPT-2 has it."""
    return 0.5 * x * (1.0 + torch.tanh(root * (x + cubic * torch.pow(x, 3.0))))


def _read_twice(x: Tensor, value: Tensor) -> Tensor:
    return x * value + value


# Functions of a float64 tensor [2, 4, 4, 8], and for rotary embedding of the angles' cos and sin [4, 8].
EXAMPLES: dict[str, dict[str, Written]] = {
    "rms_norm": {
        "plain": _rms,
        "factors and summands swapped": lambda x: torch.rsqrt(1e-6 + x.square().mean(-1, keepdim=True)) * x,
        "converted": lambda x: _rms(x.to(torch.float64)).to(x.dtype),
        "of what was converted": lambda x: _rms(x.to(torch.bfloat16).to(torch.float32)),
        "scaled elsewhere": lambda x: _rms(x) * x.mean(),
    },
    "l2_normalize": {
        "method": lambda y: y / y.norm(p=2, dim=-1, keepdim=True),
        "method by position": lambda y: y / y.norm(2, -1, True),
        "Frobenius": lambda y: y / y.norm(dim=-1, keepdim=True),
        "function": lambda y: y / torch.norm(y, dim=1, keepdim=True),
        "linalg": lambda y: y / torch.linalg.vector_norm(y, dim=(-1,), keepdim=True),
        "tensor by keyword": lambda y: y / torch.linalg.vector_norm(x=y, dim=-1, keepdim=True),
        "powers": lambda y: y / torch.pow(torch.sum(torch.pow(y, 2), dim=-1, keepdim=True), 0.5),
        "root": lambda y: y / (y * y).sum(-1, keepdim=True).sqrt(),
        "at least": lambda y: y / torch.ops.aten.clamp_min.default(y.norm(2, -1, True), 0.7),
        "as exported": lambda y: y / torch.ops.aten.expand_as.default(
            torch.ops.aten.clamp_min.default(torch.ops.aten.linalg_vector_norm.default(y, 2, [1], True), 1e-12), y
        ),
    },
    "rotary": {
        "halves": _turned(_halves),
        "halves, swapped": lambda x, cos, sin: sin * _halves(x) + cos * x,
        "flatten": _turned(lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)),
        "each dimension is named": _turned(
            lambda x: torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), dim=-1).flatten(-2)
        ),
        "reshape_as": _turned(lambda x: torch.stack((-x[..., 1::2], x[..., 0::2]), -1).reshape_as(x)),
        "pairs": _turned(lambda x: _pairs(x.view(2, x.shape[1], x.shape[2], -1, 2))),
        "pairs of one dimension made two": _turned(lambda x: _pairs(x.unflatten(-1, (-1, 2)))),
        "pairs by number": _turned(
            lambda x: torch.stack((-(y := x.reshape(2, 4, 4, 4, 2))[..., 1], y[..., 0]), -1).flatten(-2)
        ),
        "aten": _turned(lambda x: torch.ops.aten.stack.default([-_second(x, 1), _second(x, 0)], -1).flatten(-2)),
    },
    "gated": {
        "logistic": lambda x: x * torch.sigmoid(x),
        "hardsigmoid": lambda x: F.hardsigmoid(x) * x,
    },
    "quick_gelu": {
        "CLIP": lambda x: x * torch.sigmoid(1.702 * x),
        "swapped": lambda x: torch.sigmoid(x * 2) * x,
    },
    "gelu_tanh": {
        "GPT-2": _gelu,
        "products": lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
        "cube as a product": lambda x: x * (0.5 * (1 + torch.tanh(0.7978845608 * (x + x * x * x * 0.044715)))),
    },
    "gelu_erf": {
        "ESM": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        "half of the share": lambda x: x * (0.5 * (torch.erf(x * 0.7071067811865476) + 1)),
        "half of the whole": lambda x: (x * (1 + torch.special.erf(x / 1.4142135623730951))) / 2,
    },
}  # fmt: skip

MISSES: dict[str, dict[str, Written]] = {
    "rms_norm": {
        "another dimension": lambda x: _rms(x, dim=1),
        "without the dimension": lambda x: x.mT * torch.rsqrt(x.pow(2).mean(-1) + 1e-6).unsqueeze(-2),
        "an eps that is computed": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + x.abs().amin()),
        "of another value": lambda x: (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        "read twice": lambda x: _read_twice(x, torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    },
    "l2_normalize": {
        "another norm": lambda y: y / y.norm(1, -1, True),
        "no dimension": lambda y: y / y.norm(),
        "two dimensions": lambda y: y / y.norm(2, (-2, -1), True),
        "without the dimension": lambda y: (y.mT / y.norm(dim=-1).unsqueeze(-2)).mT,
        "of something else": lambda y: y / (y + 1).norm(dim=-1, keepdim=True),
        "another root": lambda y: y / torch.pow(torch.sum(torch.pow(y, 2), dim=-1, keepdim=True), 0.25),
        "read twice": lambda y: _read_twice(1 / y, y.norm(dim=-1, keepdim=True)),
        "turned over": lambda y: y.norm(dim=-1, keepdim=True) / y,
    },
    "rotary": {
        "unequal parts": _turned(lambda x: _halves(x, 3)),
        "another sign": _turned(lambda x: torch.cat((x[..., 4:], x[..., :4]), -1)),
        "rows": _turned(lambda x: torch.cat((-x[:, :, 2:], x[:, :, :2]), 2)),
        "of another value": lambda x, cos, sin: x * cos + _halves(x + 1) * sin,
        "signs": _turned(lambda x: torch.stack((x[..., 1::2], x[..., ::2]), -1).flatten(-2)),
        "order": _turned(lambda x: torch.stack((-x[..., ::2], x[..., 1::2]), -1).flatten(-2)),
        "side by side": _turned(lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -2).flatten(-2)),
        "third ones": _turned(lambda x: torch.stack((-x[..., 1:7:2], x[..., 0:6:2]), -1).flatten(-2).mean()),
        "another tensor's shape": _turned(
            lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -1).reshape_as(x.flip(0))
        ),
        "every second row of the last but one": _turned(
            lambda x: torch.stack((-x[:, :, 1::2], x[:, :, ::2]), -1).reshape(x.shape)
        ),
        "fewer rows": _turned(
            lambda x: torch.stack((-x[:, :, :1, 1::2], x[:, :, :1, ::2]), -1).flatten(-2).expand_as(x)
        ),
        "pairs, the wrong way": _turned(lambda x: -_pairs(x.unflatten(-1, (-1, 2)))),
        "pairs of halves": _turned(lambda x: _pairs(x.unflatten(-1, (2, -1)).transpose(-1, -2))),
        "every second row": _turned(lambda x: torch.stack((-x[:, 1::2], x[:, ::2]), -1).reshape(x.shape)),
        "a difference": lambda x, cos, sin: x * cos - _halves(x) * sin,
    },
    "gated": {
        "another value": lambda x: x * torch.sigmoid(x + 1),
        "another function": lambda x: x * torch.tanh(x),
        "read twice": lambda x: _read_twice(x, torch.sigmoid(x)),
        "a sum": lambda x: x + torch.sigmoid(x),
    },
    "quick_gelu": {
        "another value": lambda x: x * torch.sigmoid(1.702 * (x + 1)),
        "a factor that is computed": lambda x: x * torch.sigmoid(x.mean() * x),
        "read twice": lambda x: _read_twice(x, torch.sigmoid(1.702 * x)),
        "another function": lambda x: x * torch.tanh(1.702 * x),
    },
    "gelu_tanh": {
        "another cubic term": lambda x: _gelu(x, cubic=0.05),
        "another root": lambda x: _gelu(x, root=0.8),
        "of another value": lambda x: (
            0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * (x + 1).pow(3))))
        ),
        "integers": lambda x: _gelu((x * 3).to(torch.int64)),
    },
    "gelu_erf": {
        "another root": lambda x: x * 0.5 * (1 + torch.erf(x / 1.4)),
        "of another value": lambda x: (x + 1) * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "without half": lambda x: x * (1 + torch.erf(x / math.sqrt(2))),
        "another function": lambda x: x * 0.5 * (1 + torch.tanh(x / math.sqrt(2))),
        "integers": lambda x: (y := (x * 3).to(torch.int64)) * 0.5 * (1 + torch.erf(y / math.sqrt(2))),
    },
}  # fmt: skip
MADE = {"rms_norm": ops.rms_norm, "l2_normalize": ops.l2_normalize, "rotary": ops.rotary}
KINDS = {
    "gated": {kind for kind, _ in GATES.values()},
    "quick_gelu": {"swish"},
    "gelu_tanh": {"gelu_tanh"},
    "gelu_erf": {"gelu_erf"},
}


def _fused(written: Written, *inputs: Tensor) -> Any:
    class Model(nn.Module):
        """Takes as many inputs as `written`."""

        forward = (lambda m, x, cos, sin: written(x, cos, sin)) if len(inputs) > 1 else (lambda m, x: written(x))

    gm = fold_casts(traced(Model(), *inputs))
    check_twice(gm, fuse_patterns)
    torch.testing.assert_close(gm(*inputs), written(*inputs))
    return gm


def _inputs(row: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 4, 8), (4, 8), (4, 8))[: 3 if row == "rotary" else 1]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _made(gm: Any, row: str) -> int:
    if row in MADE:
        return sum(node.target is MADE[row] for node in calls(gm))
    return sum(node.args[1] in KINDS[row] for node in calls(gm) if node.target is ops.eltwise)


def test_every_row_has_examples_and_misses() -> None:
    assert EXAMPLES.keys() == MISSES.keys() == {row.name for row in ROWS} == BETWEEN.keys() == {*MADE, *KINDS}
    assert EXAMPLES["gated"].keys() == GATES.keys()


def test_every_row_is_documented() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "passes.md").read_text()
    assert all(f"\n| {row.name} | " in page for row in ROWS)


@pytest.mark.parametrize(("row", "example"), [(row, name) for row in EXAMPLES for name in EXAMPLES[row]])
def test_recognised(row: str, example: str) -> None:
    gm = _fused(EXAMPLES[row][example], *_inputs(row))
    assert _made(gm, row) == 1
    others = 2 if example in ("scaled elsewhere", "of what was converted") else 0
    assert len(list(calls(gm))) == 1 + others, "parts are left"


@pytest.mark.parametrize("example", EXAMPLES["l2_normalize"])
def test_norms_of_complex_numbers(example: str) -> None:
    """Squares of these are complex, and magnitudes are not."""
    x = torch.complex(*_inputs("rotary")[1:])
    _fused(EXAMPLES["l2_normalize"][example], x)


@pytest.mark.parametrize(("row", "miss"), [(row, name) for row in MISSES for name in MISSES[row]])
def test_not_taken_for_it(row: str, miss: str) -> None:
    assert not _made(_fused(MISSES[row][miss], *_inputs(row)), row)


def _write(value: Tensor) -> Tensor:
    value.select(-1, 0).fill_(5.0)
    return value


# Each takes the value, and what is done to a value behind its first reader.
BETWEEN: dict[str, dict[str, Written]] = {
    "rms_norm": {
        "the value": lambda x, then: (r := torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), then(x) * r)[1],
        "the squares": lambda x, then: (
            x * torch.rsqrt((s := x.square(), then(s).mean(-1, keepdim=True))[1] + 1e-6)
        ),
    },
    "l2_normalize": {
        "the value": lambda x, then: (n := x.norm(2, -1, True), then(x) / n)[1],
    },
    "rotary": {
        "the angles": lambda x, then, cos, sin: (c := cos + 1, t := x * c, then(c), t + _halves(x) * sin)[3],
    },
    "gated": {
        "the value": lambda x, then: (g := torch.sigmoid(x), then(x) * g)[1],
    },
    "quick_gelu": {
        "the value": lambda x, then: (g := torch.sigmoid(1.702 * x), then(x) * g)[1],
    },
    "gelu_tanh": {
        "the value": lambda x, then: (
            t := torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))), 0.5 * then(x) * (1.0 + t)
        )[1],
        "the cube": lambda x, then: (
            c := torch.pow(x, 3.0), 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * then(c))))
        )[1],
    },
    "gelu_erf": {
        "the value": lambda x, then: (e := torch.erf(x / math.sqrt(2)), 0.5 * then(x) * (1.0 + e))[1],
    },
}  # fmt: skip


@pytest.mark.parametrize(("row", "written"), [(row, name) for row in BETWEEN for name in BETWEEN[row]])
def test_writes_between_the_parts(row: str, written: str) -> None:
    """What the first parts read has changed where the last one stands; a write before all parts changes nothing.

    Slices of memory that is written to are no operations of the vocabulary, so a rotary embedding of it is never one.
    """

    def between(x: Tensor, *angles: Tensor) -> Any:
        return BETWEEN[row][written](x + 0.5, _write, *angles)

    def before(x: Tensor, *angles: Tensor) -> Any:
        y = x + 0.5
        return BETWEEN[row][written](y if row == "rotary" else _write(y), lambda value: value, *angles)

    assert _made(_fused(between, *_inputs(row)), row) == 0
    assert _made(_fused(before, *_inputs(row)), row) == 1


@pytest.mark.parametrize("gate", GATES)
def test_activations_become_post_ops(gate: str) -> None:
    model = model_of(lambda m, x: EXAMPLES["gated"][gate](m.c(x)), c=nn.Conv2d(3, 3, 1))
    assert post_ops(check(model, image())) == [(f"eltwise:{GATES[gate][0]}",)]


class Norm(nn.Module):
    """Computed in float32, as models do, with a weight behind the conversion back."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * _rms(x.to(torch.float32)).to(x.dtype)


@pytest.mark.parametrize("weight", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_a_weight_of_the_same_dtype_belongs_to_it(dtype: torch.dtype, weight: torch.dtype) -> None:
    model, x = Norm(weight).eval(), torch.randn(2, 3, 8).to(dtype)
    gm = fuse_patterns(fold_casts(traced(model, x)))
    torch.testing.assert_close(gm(x), model(x))
    (norm,) = gm.graph.find_nodes(op="call_function", target=ops.rms_norm)
    absorbed = torch.promote_types(dtype, weight) == dtype
    assert [node.target for node in norm.all_input_nodes] == ["x", *["weight"] * absorbed]
    assert [node.target for node in norm.users] == (["output"] if absorbed else [ops.binary])


# Of x in bf16 or longer and a weight: as Gemma, OLMo 2 and T5 write them.
ROUNDED: dict[str, Written] = {
    "behind the weight, as another": lambda x, w: ((1.0 + w.float()) * _rms(x.float())).type_as(x),
    "behind the weight": lambda x, w: (w * _rms(x.to(torch.float32))).to(x.dtype),
    "squares alone are longer": lambda x, w: w * _rms_of_longer_squares(x).to(x.dtype),
}


def _rms_of_longer_squares(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("written", ROUNDED)
def test_conversions_around_it_belong_to_it(written: str) -> None:
    """They were left outside: each normalization of a model in bf16 was a region of its own between two of them."""
    weight = nn.Parameter(torch.linspace(-0.5, 0.5, 8, dtype=torch.bfloat16))
    model = model_of(lambda m, x: ROUNDED[written](x, m.norm.weight), norm=nn.LayerNorm(8)).bfloat16()
    model.norm.weight = weight
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    gm = fuse_patterns(fold_casts(traced(model, x)))
    (norm,) = gm.graph.find_nodes(op="call_function", target=ops.rms_norm)
    assert norm.args[0].target == "x" and [node.op for node in norm.users] == ["output"]
    result = gm(x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, model(x), atol=0, rtol=2**-7)  # a unit in the last place: sums may differ


@pytest.mark.parametrize(
    "written",
    (
        lambda x, w: ((1.0 + w.float()) * _rms(x.float())).half(),
        lambda x, w: w.float() * _rms_of_longer_squares(x),
        lambda x, w: _rms_of_longer_squares(x.double()).to(torch.float32),
    ),
    ids=("to another dtype", "not rounded", "shorter squares"),
)
def test_conversions_that_do_not_belong_to_it(written: Written) -> None:
    model = model_of(lambda m, x: written(x, m.norm.weight), norm=nn.LayerNorm(8)).bfloat16()
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    gm = compile_graph(model, (x,))
    result, expected = gm(x), model(x)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, atol=0, rtol=1e-3 if expected.dtype == torch.float16 else 1e-6)


@pytest.mark.parametrize("weight", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize(
    "dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool), ids=str
)
def test_a_graph_without_dtypes_is_right_for_each(dtype: torch.dtype, weight: torch.dtype) -> None:
    """The conversion back was left out behind a weight: bf16 became float32, and integers were not rounded."""
    model, generator = Norm(weight).eval(), torch.Generator().manual_seed(0)
    x = (torch.randn(2, 3, 8, generator=generator) * 3).to(dtype)
    gm = compile_graph(model)
    (norm,) = gm.zen_region_0.graph.find_nodes(op="call_function", target=ops.rms_norm)
    assert [node.target for node in norm.all_input_nodes] == ["x", "weight"]
    torch.testing.assert_close(gm(x), model(x))


CONVERSIONS: dict[str, Written] = {
    "type_as": lambda x: _rms(x.float()).type_as(x),
    "to another": lambda x: _rms(x.float()).to(x),
    "to integers": lambda x: _rms(x.float()).to(torch.int64),
    "to a shorter dtype": lambda x: _rms(x.float()).half(),
    "back from a longer dtype": lambda x: _rms(x.double()).to(x.dtype),
}


@pytest.mark.parametrize("has_dtypes", (False, True))
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_a_weight_behind_a_conversion(conversion: str, has_dtypes: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * CONVERSIONS[conversion](x)

    model = Model().eval()
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)) * 3
    gm = fuse_patterns(fold_casts(traced(model, x))) if has_dtypes else compile_graph(model)
    torch.testing.assert_close(gm(x), model(x))


@pytest.mark.parametrize("dtype", (torch.int64, torch.complex64), ids=str)
def test_what_is_no_floating_point_number_is_pytorch_s(dtype: torch.dtype) -> None:
    """PyTorch takes no mean of integers; squares of complex numbers are complex."""
    model = model_of(lambda m, x: _rms(x))
    x = torch.randn(2, 3, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    gm = compile_graph(model)
    if dtype.is_complex:
        torch.testing.assert_close(gm(x), model(x))
    else:
        with pytest.raises(RuntimeError, match=r"mean\(\)"):
            gm(x.real.to(dtype))
