"""Of a model that is no graph, the submodules that are graphs are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.pipeline import compile_graph
from fx_passes.trace import submodules
from fx_passes.trace.compared import copy_of_example
from fx_passes.trace.reached import Reached
from fx_passes.trace.submodules import Observed, find_submodules
from tests.support.answers import offloaded
from tests.support.detector import Detector


def found(model: nn.Module, example: Any = None, refused: tuple[str, ...] = ()) -> dict[str, Any]:
    """Path -> the example that a submodule is traced with."""
    paths = {id(module): path for path, module in model.named_modules()}
    calls: Any = None if example is None else ((example,), {})
    observed = Observed(model, calls, Reached(model))
    return find_submodules(model, observed, lambda m, call: None if paths[id(m)] in refused else (call or ()))


def test_the_outermost_ones_with_what_they_are_called_with() -> None:
    images = [torch.randn(3, 8, 9)]
    model = Detector().eval()
    calls = found(model, images)
    assert [*calls] == ["backbone", "head"]
    ((features,), named) = calls["head"]
    assert not named and [f.shape for f in features] == [(1, 4, 6, 7), (1, 4, 4, 5)]


def test_those_within_one_that_is_no_graph() -> None:
    assert [*found(Detector().eval(), [torch.randn(3, 8, 9)], ("head",))] == ["backbone", "head.towers.0"]


class Layers(nn.Module):
    """No graph: data decides. Layers alone, of many weights and few."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many, self.last = nn.Linear(8, 16), nn.Linear(16, 96), nn.Linear(96, 32)
        self.own, self.block = OwnLinear(8, 96), nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y = self.many(self.few(self.block(-x if float(x.sum()) > 0 else x)))
        return self.last(input=y) + self.own(x)[:, :1]


class OwnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize(
    "rows, threads, layers", ((2, 1, []), (3, 1, ["last"]), (6, 1, ["last", "many"]), (6, 2, ["last"]), (6, 4, []))
)
def test_layers_of_many_weights_that_compute_for_long(
    monkeypatch: pytest.MonkeyPatch, rows: int, threads: int, layers: list[str]
) -> None:
    monkeypatch.setattr(submodules, "_LEAST_WEIGHTS", 16 * 96)
    monkeypatch.setattr(submodules, "_LEAST_PRODUCTS", 3 * 96 * 32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    model, x = Layers().eval(), torch.randn(rows, 8)
    calls = found(model, x)
    assert sorted(calls) == sorted(["block", *layers])
    assert not layers or list(calls["last"][1]) == ["input"]
    assert [*found(model)] == ["block"], "without an example nothing tells how long"


@torch.no_grad()
def test_a_layer_alone_computes_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submodules, "_LEAST_WEIGHTS", 16 * 96)
    monkeypatch.setattr(submodules, "_LEAST_PRODUCTS", 0)
    model, x = Layers().eval(), torch.randn(5, 8)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    for rows in (5, 2, 9):
        torch.testing.assert_close(fast(x[:1].expand(rows, 8)), model(x[:1].expand(rows, 8)))
    assert sorted(fast.optimized_submodules) == ["block", "last", "many"]
    ran, computing, regions = offloaded(fast.optimized_submodules.values())
    assert ran == computing and regions == 3


@pytest.mark.parametrize("most_bytes, calls", ((1 << 20, 1), (0, 2)))
def test_the_model_is_called_once_unless_arguments_are_large(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, calls: int
) -> None:
    given: list[Any] = []

    def counted(example: Any) -> Any:
        given.append(example)
        return copy_of_example(example)

    monkeypatch.setattr(submodules, "_HELD_BYTES", most_bytes)
    monkeypatch.setattr(submodules, "copy_of_example", counted)
    images = [torch.randn(3, 8, 9)]
    made = found(Detector().eval(), images, ("head",))
    assert [*made] == ["backbone", "head.towers.0"] and len(given) == calls
    ((features,), named) = made["head.towers.0"]
    assert not named and features.shape == (1, 4, 6, 7)


@pytest.mark.parametrize("example", (None, [torch.randn(3, 8, 9)]))
def test_heads_of_single_boxes_and_what_is_not_called_are_left_out(example: Any) -> None:
    calls = found(Detector().eval(), example, ("head",))
    assert not any(path.startswith("boxes") for path in calls)
    assert ("spare" in calls) is (example is None)


def test_a_model_that_refuses_its_example_has_none() -> None:
    assert not found(Detector().eval(), 3)


def test_what_was_called_before_an_error_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torchvision's own operators do not load."""

    def missing(*_: Any) -> None:
        raise RuntimeError("no such operator")

    model = Detector().eval()
    monkeypatch.setattr(type(model.boxes), "postprocess_detections", missing)
    assert [*found(model, [torch.randn(3, 8, 9)])] == ["backbone", "head"]


class Counting(nn.Module):
    """Counts its calls, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.inner = 0, nn.Sequential(nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x + torch.rand(2))


def test_the_call_that_finds_them_leaves_no_trace() -> None:
    model, state = Counting().eval(), torch.get_rng_state()
    assert [*found(model, torch.ones(1, 2))] == ["inner"]
    assert model.calls == 0 and torch.equal(state, torch.get_rng_state())
    assert not model.inner._forward_pre_hooks


class Writes(nn.Module):
    """A model that is no graph, and writes to what it, or its convolutions, hold in each call."""

    def __init__(self, write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.scale = nn.Parameter(torch.ones(4))
        self.tied = self.scale
        self.register_buffer("calls", torch.zeros(4))
        self.kept = [torch.zeros(2)]
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return -x
        self.write(self, x)
        return self.convs(x) * self.scale[:, None, None] + self.calls[0] + self.kept[0][0] + self.tied[0]

    def held(self) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in (*self.state_dict().values(), *self.kept)]


@torch.no_grad()
def in_place(m: Any, x: Tensor) -> None:
    m.scale.add_(1)


def by_data(m: Any, x: Tensor) -> None:
    m.scale.data[0] += 1


def by_numpy(m: Any, x: Tensor) -> None:
    m.scale.detach().numpy()[0] += 1


def to_buffer(m: Any, x: Tensor) -> None:
    m.calls.add_(1)


def to_list(m: Any, x: Tensor) -> None:
    m.kept[0].numpy()[0] += 1


def to_submodule(m: Any, x: Tensor) -> None:
    m.convs[0].weight.data.mul_(1.5)


def to_input(m: Any, x: Tensor) -> None:
    x.add_(1)


WRITES = (in_place, by_data, by_numpy, to_buffer, to_list, to_submodule, to_input)


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_models_that_write_to_what_they_hold_are_left_as_they_are(write: Any) -> None:
    model, oracle = Writes(write).eval(), Writes(write).eval()
    before, x = model.held(), torch.randn(1, 4, 5, 5)
    given = x.clone()
    fast: Any = zendnn_cffi.optimize(model, (x,), tune="off")
    assert torch.equal(x, given)
    assert bool(fast.optimized_submodules) is (write is not to_submodule)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x.clone()), oracle(x.clone()), rtol=1e-4, atol=1e-4)
    assert all(map(torch.equal, model.held(), before))
    assert fast.get_parameter("tied") is fast.get_parameter("scale")


def test_without_an_example_what_no_counter_tells_of_keeps_submodules_plain() -> None:
    for write in (to_submodule, to_input):
        model, oracle, x = Writes(write).eval(), Writes(write).eval(), torch.randn(1, 4, 5, 5)
        fast: Any = compile_graph(model)
        assert bool(fast.optimized_submodules) is (write is to_input)
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(fast(x.clone()), oracle(x.clone()), rtol=1e-4, atol=1e-4)


def test_buffers_can_be_resized_after_they_were_looked_at() -> None:
    """PyTorch refuses to resize what a numpy array was made of."""
    model = Writes(lambda m, x: m.calls.resize_(8)).eval()
    fast: Any = zendnn_cffi.optimize(model, (torch.randn(1, 4, 5, 5),), tune="off")
    fast(torch.randn(1, 4, 5, 5))
