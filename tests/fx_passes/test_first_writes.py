"""Calls that no graph is for write to the optimized module's own buffers, as the model would to its."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes import first_writes
from fx_passes.trace.call_kind import ways_of
from fx_passes.trace.traced import Traced
from zendnn_cffi.locks import makes_elsewhere, making


def adds(m: Any) -> Any:
    m.state.add_(1)
    return m.state + 0


def twice_by_a_view(m: Any) -> Any:
    row = m.state[1]
    row.mul_(2)
    m.state[0] = 7
    return row + m.state[1]


def returns_views(m: Any) -> Any:
    early = m.state[1:]
    m.state.sub_(3)
    return early, m.state[0], m.state, [m.tied]


def reads_numbers(m: Any) -> Any:
    m.state.fill_(2)
    return m.state.tolist(), m.state.sum().item()


def a_parameter(m: Any) -> Any:
    with torch.no_grad():
        m.layer.weight.mul_(0.5)
    return m.layer(torch.ones(8))


def an_attribute(m: Any) -> Any:
    torch.add(m.held[0], 1, out=m.held[0])
    return m.held[0] + 0


WRITES: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {f.__name__: f for f in (adds, twice_by_a_view, returns_views, reads_numbers, a_parameter, an_attribute)}
)


class Model(nn.Module):
    """Writes where it is asked to, which the graph of other calls does not show."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(8, 8)
        self.register_buffer("state", torch.arange(12.0).view(3, 4))
        self.register_buffer("tied", self.state[2])
        self.register_buffer("other", torch.ones(3))
        self.held = [torch.zeros(2)]

    def forward(self, x: Tensor, write: bool = False, found: Any = None) -> Any:
        return (self.layer(x), WRITES[self.way](self)) if write else self.layer(x) + self.other[0]


def made(way: str) -> Any:
    torch.manual_seed(0)
    return Model(way).eval()


def state_of(model: Any) -> dict[str, Tensor]:
    every = {**dict(model.named_parameters()), **dict(model.named_buffers()), "held": model.held[0]}
    return {name: tensor.detach().clone() for name, tensor in every.items()}


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("found", (None, {1}), ids=("a kind", "no example"))
@pytest.mark.parametrize("has_example", (False, True))
@pytest.mark.parametrize("way", WRITES)
def test_the_model_keeps_its_values(way: str, has_example: bool, found: Any) -> None:
    """found: a set makes no example of a call, so that each stays plain PyTorch."""
    eager, original = made(way), made(way)
    before = state_of(original)
    with torch.no_grad():
        fast: Any = zendnn_cffi.optimize(original, (X,) if has_example else None, tune="off")
        for _ in range(3):
            assert_same(fast(X), eager(X))
            assert_same(fast(X, write=True, found=found), eager(X, write=True, found=found))
            assert_same(state_of(fast), state_of(eager))
    assert_same(state_of(original), before)
    assert fast.get_buffer("other").data_ptr() == original.other.data_ptr()


@pytest.mark.parametrize("way", WRITES)
def test_a_replaced_forward_writes_to_the_model(way: str) -> None:
    eager, model = made(way), made(way)
    zendnn_cffi.replace_forward(model, tune="off")
    with torch.no_grad():
        for write in (False, True, False, True, True, False, True):
            assert_same(model(X, write=write), eager(X, write=write))
            assert_same(state_of(model), state_of(eager))


def test_what_moved_stays_where_it_is() -> None:
    """The graph of the second kind is made after its first call, which has given a view."""
    fast: Any = zendnn_cffi.optimize(made("returns_views"), (X,), tune="off")
    with torch.no_grad():
        fast(X)
        _, (early, first, whole, _) = fast(X, write=True)
        buffer = fast.get_buffer("state")
        assert whole is buffer
        for _ in range(3):
            fast(X, write=True)
        assert fast.get_buffer("state") is buffer and torch.equal(early, buffer[1:]) and torch.equal(first, buffer[0])


def test_gradients_and_copies() -> None:
    eager, original = made("adds"), made("adds")
    before = state_of(original)
    fast: Any = zendnn_cffi.optimize(original, (X,), tune="off")
    for module in (fast, copy.copy(fast), copy.deepcopy(fast)):
        x = X.clone().requires_grad_()
        result, _ = module(x, write=True)
        result.sum().backward()
        assert x.grad is not None
    eager(X, write=True)
    eager(X, write=True)
    assert_same(state_of(original), before)
    assert_same(fast.get_buffer("state"), eager.state)  # the tree is the shallow copy's, too


@pytest.mark.parametrize("whose", ("its", "the model's", "a view"))
def test_arguments_are_written_where_they_are(whose: str) -> None:
    """Whoever gives a buffer as an argument reads there what was written."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("state", torch.ones(4, 8))
            self.register_buffer("other", torch.ones(8))

        def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
            if out is not None:
                out.add_(x)
                self.other += 1
            return self.layer(x) + self.state.sum() + self.other  # type: ignore[operator]

    torch.manual_seed(0)
    original, eager = Writing().eval(), Writing().eval()
    eager.load_state_dict(original.state_dict())
    with torch.no_grad():
        fast: Any = zendnn_cffi.optimize(original, (X,), tune="off")
        assert_same(fast(X), eager(X))
        for _ in range(3):
            given = (original if whose == "the model's" else fast).get_buffer("state")
            out = given[:] if whose == "a view" else given
            assert_same(fast(X, out), eager(X, eager.get_buffer("state")))
            assert_same(out, eager.state)
            assert_same(fast(X), eager(X))
    assert original.other.tolist() == [1] * 8


def test_inference_mode() -> None:
    eager, original = made("adds"), made("adds")
    fast: Any = zendnn_cffi.optimize(original, (X,), tune="off")
    with torch.inference_mode():
        for write in (False, True, True):
            assert_same(fast(X, write=write), eager(X, write=write))
    with torch.no_grad():
        assert_same(fast(X, write=True), eager(X, write=True))
    assert_same(fast.get_buffer("state"), eager.state)
    assert torch.equal(original.state, made("adds").state)


def test_running_statistics() -> None:
    """The schema of their operator does not say that it writes to them."""

    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor, norm: bool = False) -> Tensor:
            y: Tensor = self.layer(x)
            return self.norm(y) if norm else y  # type: ignore[no-any-return]

    torch.manual_seed(0)
    original = Normalized().eval()
    original.norm.train()
    eager, before = copy.deepcopy(original), copy.deepcopy(original.state_dict())
    with torch.no_grad():
        fast: Any = zendnn_cffi.optimize(original, (X,), tune="off")
        for norm in (False, True, True, True):
            assert_same(fast(X, norm=norm), eager(X, norm=norm))
    assert_same(dict(fast.named_buffers()), dict(eager.named_buffers()))
    assert_same(original.state_dict(), before)


class Whole(nn.Module):
    """No graph: its forward branches on numbers, and its layer writes where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.register_buffer("state", torch.zeros(2))

    def forward(self, x: Tensor, write: bool = False) -> Tensor:
        if write:
            self.state += 1
        y: Tensor = self.inner(x)
        return y + self.state[0] if y.sum() > 0 else -y


@pytest.mark.parametrize("has_example", (False, True))
def test_a_model_that_is_no_graph(has_example: bool) -> None:
    torch.manual_seed(0)
    original = Whole().eval()
    eager = copy.deepcopy(original)
    with torch.no_grad():
        fast: Any = zendnn_cffi.optimize(original, (X,) if has_example else None, tune="off")
        for write in (False, True, False, True, True):
            assert_same(fast(X, write=write), eager(X, write=write))
    assert not original.state.any() and fast.get_buffer("state").tolist() == [3, 3]
    assert list(fast.optimized_submodules) == ["inner"]


def test_it_waits_for_no_thread_that_makes_something() -> None:
    """TorchDynamo's stance is one for all threads: the call after is looked at."""
    import torch._dynamo  # noqa: F401

    fast: Any = zendnn_cffi.optimize(made("adds"), (X,), tune="off")
    begun, ended, results = threading.Event(), threading.Event(), []

    def make() -> None:
        with making():
            begun.set()
            ended.wait(60)

    maker = threading.Thread(target=make)
    maker.start()
    begun.wait()
    assert makes_elsewhere()
    caller = threading.Thread(target=lambda: results.append(fast(X, write=True, found={1})))
    caller.start()
    caller.join(30)
    assert results and not ended.is_set()
    ended.set()
    maker.join()
    assert not makes_elsewhere()
    place = fast.get_buffer("state").data_ptr()
    fast(X, write=True, found={1})
    assert fast.get_buffer("state").data_ptr() != place


def test_known_calls_of_plain_arguments_are_told_at_little_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(first_writes, "ways_of", lambda *args: asked.append(args) or ways_of(*args))
    runs = first_writes.FirstWrites(model := made("adds"), frozenset())
    traced = Traced(model, None, kind=None)
    for x in (X, X.double(), X[0], X[:2], X.double(), X[1], X, X.double(), X[0]):
        for write in (False, True):
            with torch.no_grad():
                assert runs.run(traced, lambda x, write: (x, write), (x,), {"write": write}) == (x, write)
    kinds = 3 * 2  # dtypes and ranks, and the flag
    assert len(asked) == 2 * kinds  # when it is met, and when it is known
    runs.run(traced, lambda x, write: x, (X.clone().requires_grad_(),), {"write": False})
    assert len(asked) == 2 * kinds + 1
