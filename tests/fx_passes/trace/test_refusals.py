"""Calls that eager PyTorch refuses are refused, and those that it takes are computed: ranks, sizes, strides, dtypes."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace.refusals import Refusals
from tests.support.exported import needs_export
from tests.tolerance import assert_close

Case = Callable[..., Any]


def r(*shape: int) -> Tensor:
    return torch.randn(shape)


# operation -> an example of its arguments; "w" is a parameter
CASES: dict[str, tuple[Case, tuple[Tensor, ...], tuple[int, ...]]] = {
    "bmm": (lambda w, x: torch.bmm(x, w), (r(2, 4, 4),), (2, 4, 4)),
    "mm": (lambda w, x: (x * 2).mm(w), (r(4, 4),), (4, 4)),
    "addmm": (lambda w, b, x: torch.addmm(b, x, w), (r(4, 4), r(4, 4)), (4, 4)),
    "addmm_vector": (lambda w, b, x: torch.addmm(b, x, w), (r(4), r(4, 4)), (4, 4)),
    "addmm_beta": (lambda w, b, x: torch.addmm(b, x, w, beta=0), (r(4, 4), r(4, 4)), (4, 4)),
    "addmm_alpha": (lambda w, b, x: torch.addmm(b, x, w, alpha=2), (r(4, 4), r(4, 4)), (4, 4)),
    "baddbmm": (lambda w, b, x: torch.baddbmm(b, x, w), (r(2, 4, 4), r(2, 4, 4)), (2, 4, 4)),
    "einsum": (lambda w, x: torch.einsum("bij,bjk->bik", x, w), (r(2, 4, 4),), (2, 4, 4)),
    "einsum_linear": (lambda w, x: torch.einsum("bij,kj->bik", x, w), (r(2, 4, 4),), (4, 4)),
    "matmul": (lambda w, x: x @ w, (r(2, 4, 4),), (4, 4)),
    "linear": (lambda w, x: F.linear(x, w), (r(2, 4, 4),), (4, 4)),
    "view": (lambda w, x: x.view(2, -1) @ w, (r(4, 4),), (8, 3)),
    "view_as": (lambda w, x: x.view_as(w) * w, (r(4, 4),), (8, 2)),
    "expand_as": (lambda w, x: w * (x + 1).expand_as(w), (r(4, 1),), (4, 4)),
    "rms_norm": (lambda w, x: F.rms_norm(x, (4,), w), (r(2, 4, 4),), (4,)),
    "softmax": (lambda w, x: F.softmax(x * w, 1), (r(2, 4),), (4,)),
    "concat": (lambda w, x: torch.cat([x * w, x], 1) * 2, (r(2, 4),), (4,)),
    "chunk": (lambda w, x: (x * w).chunk(2, 1)[1] * 2, (r(2, 4),), (4,)),
    "pool": (lambda w, x: F.adaptive_avg_pool2d(x * w, 1), (r(2, 4, 4, 4),), (4,)),
}


class Model(nn.Module):
    def __init__(self, case: Case, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape), requires_grad=False)
        self.case = case


class One(Model):
    def forward(self, x: Tensor) -> Any:
        return self.case(self.w, x)


class Two(Model):
    def forward(self, b: Tensor, x: Tensor) -> Any:
        return self.case(self.w, b, x)


def others(like: Tensor) -> list[Tensor]:
    """Tensors of other ranks, sizes, strides, dtypes and layouts."""
    shape = tuple(like.shape)
    found = [r(*(2, 3, 4, 4, 4)[5 - n :]) for n in range(6)] + [like[None], like[:0]]
    for dim, size in enumerate(shape):
        found += [r(*shape[:dim], n, *shape[dim + 1 :]) for n in (0, 1, size + 1)]
    found += [like.to(dtype) for dtype in (torch.bfloat16, torch.float64, torch.int64, torch.bool)]
    if like.ndim > 1:
        found += [like.mT.contiguous().mT, like[..., :1].expand(shape), torch.cat([like] * 2, -1)[..., : shape[-1]]]
        found += [
            like.transpose(0, -1).contiguous().transpose(0, -1),
            torch.cat([like] * 2)[: shape[0]],
            like.to_sparse(),
        ]
    return found


def outcome(model: Any, args: tuple[Tensor, ...]) -> Any:
    try:
        return model(*args)
    except Exception as error:  # whatever PyTorch raises
        return error


def assert_as_eager(model: nn.Module, fast: Any, args: tuple[Tensor, ...]) -> None:
    expected, got = outcome(model, args), outcome(fast, args)
    what = [(tuple(a.shape), a.dtype, a.layout) for a in args]
    if isinstance(expected, Exception):
        assert type(got) is type(expected), f"{what}: eager raises {expected!r}, got {got!r}"
        return
    assert isinstance(got, Tensor), f"{what}: {got!r}"
    assert (got.dtype, got.shape, got.layout) == (expected.dtype, expected.shape, expected.layout), what
    assert_close(got.to_dense(), expected.to_dense(), k=8)
    if got.layout is torch.strided:
        assert got.is_contiguous() == expected.is_contiguous(), what


@pytest.mark.parametrize("name", CASES)
def test_other_arguments_than_the_example_are_eagers(name: str) -> None:
    case, example, shape = CASES[name]
    model = (One if len(inspect.signature(case).parameters) == 2 else Two)(case, shape).eval()
    fast = zendnn_cffi.optimize(model, tune="off")
    assert_as_eager(model, fast, example)
    assert fast.regions()
    for place, like in enumerate(example):
        for other in others(like):
            args = (*example[:place], other, *example[place + 1 :])
            for _ in range(2):
                assert_as_eager(model, fast, args)
    assert_as_eager(model, fast, example)


class Exported(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if needs_export(x) and x.shape[0] > 100:
            x = x + 1
        return torch.softmax((x * 2).view(-1, 6), -1) @ x.new_ones(6, 3)


def test_an_exported_view_refuses_odd_strides() -> None:
    """torch.export's guards are of sizes."""
    model = Exported().eval()
    fast = zendnn_cffi.optimize(model, (torch.randn(6, 6),), tune="off")
    assert fast.regions() and fast._source[0].guards is not None
    for x in (torch.randn(6, 6), torch.randn(6, 4, 6)[:, :1].squeeze(1), torch.randn(6, 6).T, torch.randn(6, 6)[::2]):
        assert_as_eager(model, fast, (x,))


@pytest.mark.parametrize("shape", [(4, 4, 4), (4, 4), (4,)], ids=str)
def test_torch_compile_refuses_what_fake_tensors_take(shape: tuple[int, ...]) -> None:
    """torch.addmm on fake tensors takes an input of more dimensions than the product has."""
    weight = torch.randn(4, 4)

    def model(bias: Tensor, x: Tensor) -> Tensor:
        return torch.addmm(bias, x, weight)

    fast = torch.compile(model, backend="zendnn", options={"tune": "off"})
    with torch.no_grad():
        expected, got = (outcome(f, (torch.zeros(shape), torch.ones(4, 4))) for f in (model, fast))
    assert isinstance(got, RuntimeError) == isinstance(expected, RuntimeError)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


def test_meta_tensors_are_for_the_models_own_forward() -> None:
    """Folded, the batch normalization no longer refuses them beside statistics on the CPU."""
    model, x = Normed().eval(), torch.randn(1, 3, 8, 8, device="meta")
    expected, got = (outcome(f, (x,)) for f in (model, zendnn_cffi.optimize(model, tune="off")))
    assert type(got) is type(expected), (got, expected)
    if isinstance(expected, Tensor):
        assert got.is_meta == expected.is_meta


@pytest.mark.parametrize(
    ("equation", "shape", "others"),
    (
        ("...rk,rkc->...rc", (2, 3, 16, 4), ((5, 16, 4), (16, 4), (2, 2, 3, 16, 4))),
        ("r...k,rkc->...rc", (16, 2, 3, 4), ((16, 5, 4), (16, 4))),
        ("...rk, rkc", (2, 16, 4), ((16, 4),)),
    ),
)
def test_labels_beside_dots(equation: str, shape: tuple[int, ...], others: tuple[tuple[int, ...], ...]) -> None:
    """The example, and other sizes in place of the dots, are computed by the graph; broadcasts are PyTorch's."""

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.weight = nn.Linear(4, 4), nn.Parameter(r(16, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum(equation, self.linear(x), self.weight)

    model = Rotated().eval()
    fast: Any = zendnn_cffi.optimize(model, (r(*shape),), tune="off")
    refusals, broadcast = fast._source[0].refusals, tuple(1 if n == 16 else n for n in shape)
    with torch.no_grad():
        for each in (shape, *others, broadcast):
            x = r(*each)
            assert_close(fast(x), model(x), k=16)
            assert refusals.allow({"x": x}) == (each is not broadcast)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls.add_(1)
        return torch.einsum("bij,bjk->bik", x, y)


def test_a_call_that_writes_is_not_run_twice() -> None:
    model = Counting().eval()
    fast = zendnn_cffi.optimize(model, tune="off")
    good, bad = torch.randn(2, 4, 4), torch.randn(2, 5, 4)
    for x in (good, bad, good):
        outcome(fast, (x, bad if x is bad else good))
    assert fast.calls.item() <= 3


def test_sizes_that_passed_are_remembered() -> None:
    case, example, shape = CASES["bmm"]
    refusals = zendnn_cffi.optimize(One(case, shape).eval())._source[0].refusals
    assert isinstance(refusals, Refusals)
    assert refusals.allow({"x": example[0]}) and len(refusals._passed) == 1
    assert refusals.allow({"x": example[0].clone()}) and len(refusals._passed) == 1
    assert not refusals.allow({"x": example[0][0]}) and len(refusals._passed) == 1
    refusals.forget()
    assert not refusals._passed


def test_calls_with_tensors_alone_are_remembered_by_position() -> None:
    case, example, shape = CASES["bmm"]
    refusals = zendnn_cffi.optimize(One(case, shape).eval())._source[0].refusals
    assert isinstance(refusals, Refusals)
    x = example[0]
    assert refusals.allow_call((x,), {}, ("x",)) and len(refusals._passed_by_position) == 1
    assert refusals.allow_call((x.clone(),), {}, ("x",)) and len(refusals._passed_by_position) == 1
    assert not refusals.allow_call((x[0],), {}, ("x",))
    refusals.allow_call((x.to_sparse(),), {}, ("x",))
    assert refusals.allow_call((), {"x": x}, ("x",)) and len(refusals._passed_by_position) == 1
    refusals.forget()
    assert not refusals._passed_by_position


def test_a_graph_without_strict_spellings_has_none() -> None:
    assert zendnn_cffi.optimize(nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval())._source[0].refusals is None


AUGMENTED: dict[str, Case] = {"+=": operator.iadd, "**=": operator.ipow, "//=": operator.ifloordiv}


@pytest.mark.parametrize("write", ["mul_", "sub_", "+=", "**=", "//=", "pow_"])
@pytest.mark.parametrize("of", ["parameter", "input"])
def test_writes_what_is_larger_in_place(write: str, of: str) -> None:
    """Eager PyTorch refuses it; the operation out of place has a larger result."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.rand(5, 4))

        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            y, operand = self.linear(x).sigmoid(), self.scale if of == "parameter" else other
            if write in AUGMENTED:
                return AUGMENTED[write](y, operand)
            return getattr(y, write)(operand)

    model = Writes().eval()
    fast = zendnn_cffi.optimize(model, tune="off")
    x, other = torch.rand(5, 4), torch.rand(5, 4)
    torch.testing.assert_close(fast(x, other), model(x, other))
    assert fast.regions()
    with pytest.raises(RuntimeError, match="broadcast"):
        model(torch.rand(1, 4), other)
    with pytest.raises(RuntimeError, match="broadcast"):
        fast(torch.rand(1, 4), other)


@pytest.mark.parametrize("write", AUGMENTED)
def test_numbers_that_an_assignment_augments_are_not_refused(write: str) -> None:
    class Augments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, n: int, m: int) -> Tensor:
            y: Tensor = torch.relu(self.linear(x)) * AUGMENTED[write](n, m)
            return y

    model, x = Augments().eval(), torch.rand(5, 4)
    fast = zendnn_cffi.optimize(model, tune="off")
    torch.testing.assert_close(fast(x, 5, 2), model(x, 5, 2))
    refusals = fast._source[0].refusals
    assert fast.regions() and (refusals is None or refusals.allow({"x": x, "n": 5, "m": 2}))


def test_looking_for_refusals_draws_no_random_numbers() -> None:
    """Sizes are looked at before a call; what that drew was missing in the model's own numbers."""
    case: Case = lambda w, x: (x * w + torch.randn(4, device="cpu")).view(2, -1)  # noqa: E731
    model = One(case, (4,)).eval()
    fast = zendnn_cffi.optimize(model, (r(2, 4),), tune="off")
    for x in (r(4, 2).t(), r(6, 4)[::3]):
        torch.manual_seed(0)
        ours = fast(x)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        assert_close(ours, model(x))
        assert torch.equal(state, torch.get_rng_state())
