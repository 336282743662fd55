"""Questions beside numbers: where a graph has another answer than a call, the call is the model's own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from fx_passes.trace.asked import arrangement, states_told
from tests.support.exported import needs_export


def parameter(x: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(x, requires_grad=False)


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.requires_grad_()


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_().sum().backward()
    return x


def inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


def written(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


# question -> the factor that it decides on, and inputs (made of a plain one) of which the answer is another
OF_TENSORS: dict[str, tuple[Callable[[torch.Tensor], Any], list[Callable[[torch.Tensor], torch.Tensor]]]] = {
    "is_contiguous": (
        lambda x: x.is_contiguous(),
        [lambda x: x.mT, lambda x: x.contiguous(memory_format=torch.channels_last), lambda x: x[:1].expand(2, 3, 4, 4)],
    ),
    "channels last": (
        lambda x: x.is_contiguous(memory_format=torch.channels_last),
        [lambda x: x.contiguous(memory_format=torch.channels_last)],
    ),
    "stride": (lambda x: x.stride()[-1] == 1, [lambda x: x.mT]),
    "stride of one": (lambda x: x.stride(2) == 4, [lambda x: torch.rand(2, 3, 4, 8)[..., :4]]),
    "dim_order": (lambda x: x.dim_order()[1] == 1, [lambda x: x.contiguous(memory_format=torch.channels_last)]),
    "storage_offset": (lambda x: x.storage_offset() == 0, [lambda x: torch.cat([x, x])[2:]]),
    "requires_grad": (lambda x: x.requires_grad, [leaf]),
    "is_leaf": (lambda x: x.is_leaf, [lambda x: leaf(x) * 1]),
    "grad_fn": (lambda x: x.grad_fn is None, [lambda x: leaf(x) * 1]),
    "grad": (lambda x: x.grad is None, [with_gradient]),
    "_version": (lambda x: x._version == 0, [written]),
    "is_inference": (lambda x: x.is_inference(), [inference]),
    "is_neg": (lambda x: x.is_neg(), [torch._neg_view]),
    "torch.is_neg": (lambda x: torch.is_neg(x), [torch._neg_view]),
    "_is_view": (lambda x: x._is_view(), [lambda x: x[:]]),
    "_base": (lambda x: x._base is None, [lambda x: x[:]]),
    "class": (lambda x: isinstance(x, nn.Parameter), [parameter]),
    "exact class": (lambda x: type(x) is nn.Parameter, [parameter]),
}


class Asking(nn.Module):
    """A network that doubles its result where the answer is yes; loops need torch.export."""

    def __init__(self, ask: Callable[[torch.Tensor], Any], loops: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.ask, self.loops = nn.Conv2d(3, 3, 1).requires_grad_(False), ask, loops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).relu()
        if self.loops and needs_export(x):
            for _ in range(int(x.shape[1])):
                y = y + 1
        return y * 2 if self.ask(x) else y


def optimized(model: nn.Module, x: torch.Tensor, with_example: bool) -> Any:
    return zendnn_cffi.optimize(model, (x,) if with_example else None, tune="off")


def same(fast: Any, model: nn.Module, x: torch.Tensor) -> None:
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["symbolic", "export"])
@pytest.mark.parametrize("name", OF_TENSORS)
def test_questions_about_tensors(name: str, way: str) -> None:
    ask, makers = OF_TENSORS[name]
    model, x = Asking(ask, way == "export").eval(), torch.rand(2, 3, 4, 4)
    fast = optimized(model, x, way != "symbolic")
    others = [make(torch.rand(2, 3, 4, 4)) for make in makers]
    assert all(bool(ask(other)) != bool(ask(x)) for other in others)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            for each in (x, *others, x):
                same(fast, model, each)


KEPT = ("is_contiguous", "channels last", "stride", "stride of one", "dim_order", "requires_grad", "is_leaf", "grad")


@pytest.mark.parametrize("name", KEPT)
def test_what_a_guard_compares_keeps_the_graph(name: str, tmp_path: Any) -> None:
    ask, makers = OF_TENSORS[name]
    model, x = Asking(ask, loops=True).eval(), torch.rand(2, 3, 4, 4)
    fast = optimized(model, x, with_example=True)
    assert not fast.leaves and fast.regions()
    others = [make(torch.rand(2, 3, 4, 4)) for make in makers]
    with torch.no_grad():
        same(fast, model, x)
        zendnn_cffi.save(fast, tmp_path / "model.pt2")
        loaded = zendnn_cffi.load(tmp_path / "model.pt2")
        arrange = loaded._source[0].arrange
        assert arrange((x,), {}) is not None
        for other in others:
            assert arrange((other,), {}) is None
            assert fast._source[0].arrange((other,), {}) is None
        same(loaded, model, x)


def test_questions_of_pytorch_itself_and_about_parameters_are_none() -> None:
    model = Asking(lambda x: nn.functional.layer_norm(x, (4,)).sum(dim=1, keepdim=True).shape[1] == 1, loops=True)
    model.ask = lambda x, conv=model.conv: conv.weight.is_contiguous()
    fast = optimized(model.eval(), x := torch.rand(2, 3, 4, 4), with_example=True)
    assert not fast.leaves
    assert fast._source[0].arrange((x.mT,), {}) is not None


@contextlib.contextmanager
def threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[], Any]]] = {
    "get_num_threads": (lambda x: torch.get_num_threads() == torch.get_num_threads() // 2 * 2, threads),
    "are_deterministic_algorithms_enabled": (lambda x: torch.are_deterministic_algorithms_enabled(), deterministic),
    "is_inference_mode_enabled": (lambda x: torch.is_inference_mode_enabled(), torch.inference_mode),
    "is_grad_enabled": (lambda x: torch.is_grad_enabled(), torch.no_grad),
    "is_anomaly_enabled": (lambda x: torch.is_anomaly_enabled(), torch.autograd.detect_anomaly),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("way", ["symbolic", "export"])
@pytest.mark.parametrize("name", STATES)
def test_questions_about_states(name: str, way: str) -> None:
    ask, state = STATES[name]
    model, x = Asking(ask, way == "export").eval(), torch.rand(2, 3, 4, 4)
    fast = optimized(model, x, way != "symbolic")
    same(fast, model, x)
    with state():
        same(fast, model, x)
    same(fast, model, x)
    if name != "is_grad_enabled":
        assert name in " ".join(fast.leaves.values())


@pytest.mark.parametrize("ask", [lambda: torch.compiler.is_compiling(), lambda: torch.compiler.is_exporting()])
@pytest.mark.parametrize("is_equal", [False, True])
def test_a_model_that_goes_another_way_where_it_is_compiled(ask: Any, is_equal: bool) -> None:
    """Equal numbers by both ways, as in most of transformers, keep the graph."""
    model, x = Asking(lambda x: ask() and not is_equal, loops=True).eval(), torch.rand(2, 3, 4, 4)
    fast = optimized(model, x, with_example=True)
    same(fast, model, x)
    assert bool(fast.leaves) != is_equal


def asked_by_a_library() -> Callable[[], bool]:
    """A function of an installed library that asks whether it is exported, as transformers has one."""
    space = {"__name__": "numpy", "torch": torch}
    exec("def is_asked():\n    return torch.compiler.is_exporting()", space)
    ask: Callable[[], bool] = space["is_asked"]  # type: ignore[assignment]
    return ask


def test_a_library_that_goes_another_way_where_it_is_exported() -> None:
    """PaliGemma without a mask attends to what comes later in eager, and not where it is exported."""
    ask = asked_by_a_library()
    model, x = Asking(lambda x: ask(), loops=True).eval(), torch.rand(2, 3, 4, 4)
    fast = optimized(model, x, with_example=True)
    same(fast, model, x)
    assert "is_exporting" in " ".join(fast.leaves.values())


class Masking(nn.Module):
    """Leaves out what a mask says, and does something else where it leaves nothing out, unless it is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.linear = asked_by_a_library(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not self.ask() and bool(mask.all()):
            return self.linear(x).relu()
        return self.linear(x) * mask.unsqueeze(-1)


def test_a_mask_that_leaves_something_out_stands_for_others() -> None:
    model, x, mask = Masking().eval(), torch.rand(2, 3, 4), torch.tensor([[1, 1, 1], [1, 1, 0]])
    fast = zendnn_cffi.optimize(model, (x, mask), tune="off")
    assert "is_exporting" in " ".join(fast.leaves.values())
    for each in (mask, torch.ones_like(mask)):
        with torch.no_grad():
            torch.testing.assert_close(fast(x, each), model(x, each))


class Triangular(nn.Module):
    """Solves a triangular system, and exported by substitution: as transformers' gated delta rule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if needs_export(x):
            x = x * 0.9
        if not torch.compiler.is_exporting():
            return torch.linalg.solve_triangular(x, x, upper=False, unitriangular=True).relu()
        solved = -x.tril(-1)
        for i in range(1, int(x.shape[-1])):
            row, above = solved[..., i, :i].clone(), solved[..., :i, :i].clone()
            solved[..., i, :i] = row + (row.unsqueeze(-1) * above).sum(-2)
        return ((solved + torch.eye(x.shape[-1])) @ x).relu()


def test_a_solver_is_not_written_out() -> None:
    """A graph that PyTorch itself runs needs no other way around torch.linalg than eager's."""
    model, x = Triangular().eval(), torch.rand(2, 5, 5)
    fast = optimized(model, x, with_example=True)
    same(fast, model, x)
    same(fast, model, torch.rand(3, 5, 5))
    targets = {str(node.target) for node in fast.graph.nodes}
    assert "aten.linalg_solve_triangular.default" in targets and "aten.copy_.default" not in targets


def test_other_threads_ask_for_themselves() -> None:
    asked: list[str] = []
    with states_told(asked.append):
        thread = threading.Thread(target=torch.is_grad_enabled)
        thread.start()
        thread.join()
        assert not asked
        torch.is_grad_enabled()
    torch.is_grad_enabled()
    assert asked == ["is_grad_enabled"]


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        (torch.rand(2, 3), torch.rand(4, 5), True),
        (torch.rand(2, 3), torch.rand(3, 2).t(), False),
        (torch.rand(2, 3, 4, 4), torch.rand(2, 1, 4, 4), False),  # in both formats
        (torch.rand(2, 6)[:, :3], torch.rand(2, 6)[:, 3:], True),
        (torch.rand(2, 6)[:, :3], torch.rand(2, 7)[:, :3], False),
        (torch.rand(2, 3), torch.rand(2, 3).to_sparse(), False),
        (torch.rand(1, 3), torch.rand(1, 3).as_strided((1, 3), (7, 1)), False),
        (torch.rand(0, 3), torch.rand(2, 3), True),
    ],
)
def test_arrangements(one: torch.Tensor, other: torch.Tensor, is_equal: bool) -> None:
    assert (arrangement(one) == arrangement(other)) == is_equal


class Assigns(nn.Module):
    def __init__(self, attribute: str) -> None:
        super().__init__()
        self.attribute, self.layer = attribute, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.layer(x))
        z = torch.zeros_like(y)
        setattr(z, self.attribute, y)
        out: torch.Tensor = self.layer(z if self.attribute == "data" else z.grad)
        return out


@pytest.mark.parametrize("attribute", ["data", "grad"])
@pytest.mark.parametrize("has_example", [True, False])
@pytest.mark.parametrize("path", ["", "1"])
def test_assignments_to_a_tensor_are_no_graph(attribute: str, has_example: bool, path: str) -> None:
    """torch.export says nothing, and leaves them out."""
    model: nn.Module = Assigns(attribute)
    if path:
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), model)
    model, x = model.eval(), torch.randn(2, 4)
    fast: Any = zendnn_cffi.optimize(model, (x,) if has_example else None, tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        torch.testing.assert_close(fast(x + 1), model(x + 1))
    assert f"its forward assigns to {attribute} of a tensor" in fast.leaves[path]
    assert len(fast.regions()) == bool(path)
