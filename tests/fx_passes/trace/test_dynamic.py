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
from fx_passes.pipeline import build
from fx_passes.region.options import RegionOptions
from fx_passes.region.region import RegionFactory
from fx_passes.trace import export, sizes
from fx_passes.trace.trace import retrace
from tests.support.exported import needs_export
from tests.tolerance import assert_close

SAME, OTHERS = (2, 5, 8), ((3, 5, 8), (2, 6, 8), (1, 1, 8))


class Branching(nn.Module):
    """torch.fx cannot trace it: it asks for a size in a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, L, 8]; returns [N, L, 4]."""
        if needs_export(x) and x.shape[1] > 1000:
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


def retraced(gm: Any) -> Any:
    """The optimized module, made of its source traced again."""
    return build(retrace(gm._source[0]), make_region=RegionFactory(RegionOptions(tune="off")))


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


def limit(monkeypatch: pytest.MonkeyPatch, longest: float = -1.0) -> None:
    """Let following free sizes take no time, where those of a tensor are longer than this on average."""
    monkeypatch.setattr(sizes, "SECONDS", 0.0)
    monkeypatch.setattr(sizes, "LONGEST", longest)


def test_sizes_are_the_examples_where_following_them_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch)
    model = Branching().eval()
    gm = zendnn_cffi.optimize(model, noise(*SAME), tune="off")
    check(gm, model, {SAME: True, **dict.fromkeys(OTHERS, False)})
    assert "Sizes are those of the example (following" in str(zendnn_cffi.explain(gm))
    assert "inner_product" in {kind for kind, _ in zendnn_cffi.explain(gm).counts()}


BATCHES = {SAME: True, (3, 5, 8): True, (2, 6, 8): False, (1, 1, 8): False, (1, 5, 8): True}
NOTE = "Sizes but the first of each argument are those of the example"


def test_the_batch_stays_free_where_other_sizes_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 1.2)
    model = Branching().eval()
    gm = zendnn_cffi.optimize(model, noise(*SAME), tune="off")
    check(gm, model, BATCHES)
    assert NOTE in str(zendnn_cffi.explain(gm))


@pytest.mark.parametrize("again", (copy.deepcopy, lambda gm: pickle.loads(pickle.dumps(gm)), retraced))
def test_what_took_too_long_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, again: Any) -> None:
    limit(monkeypatch, 1.2)
    model, asked = Branching().eval(), []
    gm = zendnn_cffi.optimize(model, noise(*SAME), tune="off")
    monkeypatch.undo()
    export = torch.export.export

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append([*kwargs["dynamic_shapes"]["x"]])
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", noted)
    gm = again(gm)
    check(gm, model, BATCHES)
    assert all(dims == [0] for dims in asked)
    assert NOTE in str(zendnn_cffi.explain(gm))


def test_a_file_says_which_sizes_are_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit(monkeypatch, 1.2)
    gm = zendnn_cffi.optimize(Branching().eval(), noise(*SAME), tune="off")
    with torch.no_grad():
        gm(noise(*SAME))
    zendnn_cffi.save(gm, tmp_path / "model.zen")
    assert NOTE in str(zendnn_cffi.explain(zendnn_cffi.load(tmp_path / "model.zen")))


def test_what_asks_for_numbers_in_tensors_is_exported_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asking(Branching):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum().item() > 1e9 else self.b(self.a(x))

    asked, export = [], torch.export.export

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["dynamic_shapes"] is None)
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", noted)
    zendnn_cffi.optimize(Asking().eval(), noise(*SAME), tune="off")
    assert asked[:2] == [False, True]


def test_a_forward_that_catches_exceptions_does_not_see_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Catching(Branching):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except Exception:
                return x[..., :4]

    limit(monkeypatch)
    graph, guards = export.export(Catching().eval(), (noise(*SAME),), {})
    assert guards.sizes.free is sizes.Free.NOTHING
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)) == 2
