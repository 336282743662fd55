"""Sizes of exported graphs that are the example's: by optimize(dynamic=False), and where free ones take too long."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace import export
from tests.tolerance import assert_close

SAME, OTHERS = (2, 5, 8), ((3, 5, 8), (2, 6, 8), (1, 1, 8))


class Branching(nn.Module):
    """torch.fx cannot trace it: it asks for a size in a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, L, 8]; returns [N, L, 4]."""
        if x.shape[1] > 1000:
            raise ValueError("too long")
        result: Tensor = self.b(self.a(x).relu())
        return result


class Plain(nn.Module):
    """torch.fx traces it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, L, 8]; returns [N, L, 4]."""
        result: Tensor = self.b(self.a(x).relu())
        return result


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def serves(gm: Any, x: Tensor) -> bool:
    """Whether the graph, and not the model's own forward, computes this call."""
    return gm._source[0].arrange((x,), {}) is not None


def check(gm: Any, model: nn.Module, served: dict[tuple[int, ...], bool]) -> None:
    with torch.no_grad():
        for shape, by_graph in served.items():
            x = noise(*shape)
            assert serves(gm, x) == by_graph, shape
            assert_close(gm(x), copy.deepcopy(model).double()(x.double()), k=16)


@pytest.mark.parametrize("dynamic", (True, False))
def test_sizes_of_the_example(dynamic: bool) -> None:
    model = Branching().eval()
    gm = zendnn_cffi.optimize(model, noise(*SAME), dynamic=dynamic, tune="off")
    check(gm, model, {SAME: True, **dict.fromkeys(OTHERS, dynamic)})
    assert ("dynamic=False" in str(zendnn_cffi.explain(gm))) != dynamic


def test_one_export_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, export = [], torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["dynamic_shapes"])
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    zendnn_cffi.optimize(Branching().eval(), noise(*SAME), dynamic=False)
    assert asked == [None]


@pytest.mark.parametrize("again", (copy.copy, copy.deepcopy, lambda gm: pickle.loads(pickle.dumps(gm))))
def test_copies_have_it_as_well(again: Any) -> None:
    model = Branching().eval()
    gm = again(zendnn_cffi.optimize(model, noise(*SAME), dynamic=False, tune="off"))
    check(gm, model, {SAME: True, **dict.fromkeys(OTHERS, False)})


def test_a_changed_layer_is_traced_with_the_same_sizes() -> None:
    model = Branching().eval()
    gm: Any = zendnn_cffi.optimize(model, noise(*SAME), dynamic=False, tune="off")
    gm.b = nn.Linear(16, 4)
    model.b = gm.b
    for _ in range(3):
        check(gm, model, {SAME: True, **dict.fromkeys(OTHERS, False)})


def test_a_file_serves_these_sizes_alone(tmp_path: Path) -> None:
    model = Branching().eval()
    gm = zendnn_cffi.optimize(model, noise(*SAME), dynamic=False, tune="off")
    with torch.no_grad():
        gm(noise(*SAME))
    zendnn_cffi.save(gm, tmp_path / "model.zen")
    loaded = zendnn_cffi.load(tmp_path / "model.zen")
    with torch.no_grad():
        assert torch.equal(loaded(noise(*SAME)), gm(noise(*SAME)))
        for shape in OTHERS:
            with pytest.raises(ValueError, match="optimize the original for them"):
                loaded(noise(*shape))


def test_symbolic_tracing_leaves_sizes_free() -> None:
    model = Plain().eval()
    gm = zendnn_cffi.optimize(model, noise(*SAME), dynamic=False, tune="off")
    check(gm, model, dict.fromkeys((SAME, *OTHERS), True))
    assert "dynamic=False" not in str(zendnn_cffi.explain(gm))


def test_submodules_have_it_as_well() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Branching()

        def forward(self, x: Tensor) -> list[float]:
            return [float(each) for each in self.inner(x).flatten()]

    model = Outer().eval()
    gm: Any = zendnn_cffi.optimize(model, noise(*SAME), dynamic=False, tune="off")
    [inner] = gm.optimized_submodules.values()
    check(inner, model.inner, {SAME: True, **dict.fromkeys(OTHERS, False)})


@pytest.mark.parametrize("value", ("no", 0, None))
def test_is_a_flag(value: Any) -> None:
    with pytest.raises(TypeError, match="dynamic must be True or False"):
        zendnn_cffi.optimize(Plain().eval(), dynamic=value)


def test_sizes_are_the_examples_where_following_them_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "FREE_SECONDS", 0.0)
    model = Branching().eval()
    gm = zendnn_cffi.optimize(model, noise(*SAME), tune="off")
    check(gm, model, {SAME: True, **dict.fromkeys(OTHERS, False)})
    assert "following free ones takes more than 0 s" in str(zendnn_cffi.explain(gm))
    assert "inner_product" in {kind for kind, _ in zendnn_cffi.explain(gm).counts()}


def test_a_forward_that_catches_exceptions_does_not_see_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Catching(Branching):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except Exception:
                return x[..., :4]

    monkeypatch.setattr(export, "FREE_SECONDS", 0.0)
    graph, guards = export.export(Catching().eval(), (noise(*SAME),), {})
    assert "takes more than 0 s" in guards.fixed_because
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)) == 2
