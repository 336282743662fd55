"""explain() and profile() of what torch.compile made, and of models that hold optimized modules."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.report.compiled import behind, compiled_modules, is_compiled

X = torch.ones(3, 8)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    zendnn_cffi.backend.register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Mlp().eval()


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="zendnn", options={"tune": "off"})


class Broken(nn.Module):
    """TorchDynamo makes two graphs of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).relu()


class Around(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) + 1
        return result


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="zendnn", options={"tune": "off"})
    return model


def by_forward(model: Any) -> nn.Module:
    model.forward = compiled(model.forward)
    return model  # type: ignore[no-any-return]


WAYS: list[Callable[[nn.Module], Any]] = [
    compiled,
    in_place,
    by_forward,
    lambda model: Around(compiled(model)),
    lambda model: Around(zendnn_cffi.optimize(model, tune="off")),
]


@pytest.mark.parametrize("way", WAYS, ids=["module", "in place", "forward", "within", "optimized within"])
def test_the_model_s_own_graph_is_explained(way: Callable[[nn.Module], Any]) -> None:
    with torch.no_grad():
        other, run = compiled(mlp(5)), way(mlp())
        other(torch.ones(2, 8))
        run(X)
    found = zendnn_cffi.explain(run)
    assert [(node.became, node.offloaded) for node in found.nodes if node.became == "inner_product"] == [
        ("inner_product", True)
    ] * 2
    assert {node.signature for node in found.nodes if node.region} == {"3x8"}  # not the other's
    assert "<svg" in found.draw().svg
    profile = zendnn_cffi.profile(run, X, runs=1)
    assert zendnn_cffi.explain(run).profile is profile
    assert zendnn_cffi.explain(run).share_basis == "call"


def test_a_function_has_no_tensors_of_its_own_so_all_graphs_are_its() -> None:
    model = mlp()
    with torch.no_grad():
        run = compiled(lambda x: model(x))
        run(X)
    assert behind(run) == compiled_modules()
    assert compiled_modules()[-1:] == behind(Around(model).requires_grad_(False))


def test_several_graphs_are_told_apart() -> None:
    with torch.no_grad():
        run = compiled(Broken().eval())
        run(X)
    found = zendnn_cffi.explain(run)
    names = [node.name for node in found.nodes if node.became == "inner_product"]
    assert [name.partition(".")[0] for name in names] == ["graph_0", "graph_0", "graph_1"]
    assert "2 optimized modules: graph_0, graph_1" in str(found)
    parts = [zendnn_cffi.explain(module) for module in behind(run)]
    assert found.weights.packed_bytes == sum(part.weights.packed_bytes for part in parts)
    with pytest.raises(ValueError, match="compiled_modules"):
        found.draw()


def test_what_has_no_graph_is_refused() -> None:
    run = compiled(mlp())
    assert is_compiled(run) and not is_compiled(mlp()) and not is_compiled(len)
    with pytest.raises(TypeError, match="call it once under torch.no_grad"):
        zendnn_cffi.explain(run)
    for other in (mlp(), len, None):
        with pytest.raises(TypeError, match=f"got {type(other).__name__}"):
            zendnn_cffi.explain(other)


def test_modules_are_known_while_they_live() -> None:
    before = compiled_modules()
    with torch.no_grad():
        run = compiled(mlp())
        run(X)
    assert compiled_modules()[len(before) :] == behind(run) == zendnn_cffi.backend.compiled_modules()[len(before) :]
    del run
    torch._dynamo.reset()
    gc.collect()
    assert compiled_modules() == before
