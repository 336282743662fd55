"""Symbolic tracing: what it follows, what it refuses, and other threads meanwhile."""

from __future__ import annotations

import copy
import functools
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import zendnn_cffi
from fx_passes import ops
from fx_passes.graph.graph import is_call
from fx_passes.pipeline import compile_graph
from fx_passes.trace.seeding import refuse_seeding
from fx_passes.trace.trace import trace
from tests.support.exported import needs_export
from tests.support.graphs import check, image, model_of, outside


def test_random_numbers_are_not_frozen() -> None:
    gm = compile_graph(model_of(lambda m, x: m.c(x) + torch.rand(1), c=nn.Conv2d(3, 3, 1)))
    assert not torch.equal(gm(image()), gm(image()))


def _seeded(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return m.c(x) + torch.rand_like(x)


@pytest.mark.parametrize("example", (None, (image(),)), ids=("symbolic", "export"))
def test_a_forward_that_seeds_the_generator_stays_plain(example: Any) -> None:
    """Twelve operators of PyTorch's database are such: a graph without the seed drew other numbers."""
    model = model_of(lambda m, x: m.inner(x).relu(), inner=model_of(_seeded, c=nn.Conv2d(3, 3, 1)))
    generator, state = torch.random.default_generator, torch.get_rng_state()
    gm = compile_graph(model, example)
    assert "inner" in gm.leaves and torch.random.default_generator is generator
    assert torch.equal(state, torch.get_rng_state())
    for _ in range(2):
        torch.testing.assert_close(gm(image()), model(image()))
        torch.rand(1)


def test_other_threads_may_seed_while_one_traces() -> None:
    seeds: list[int] = []
    thread = threading.Thread(target=lambda: seeds.append(torch.manual_seed(7).initial_seed()))
    with refuse_seeding():
        with pytest.raises(RuntimeError, match="forward seeds"):
            torch.manual_seed(7)
        thread.start()
        thread.join()
    assert seeds == [7]


def test_other_threads_may_call_modules_while_one_traces() -> None:
    """torch.fx takes the place of nn.Module.__call__ for all threads."""
    called = model_of(lambda m, x: m.c(x).relu(), c=nn.Conv2d(3, 3, 1))
    fast, results = compile_graph(called), []
    begun, ended = threading.Event(), threading.Event()

    def other() -> None:
        begun.wait()
        results.extend((called(image()), fast(image())))
        ended.set()

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert ended.wait(20)
        return m.c(x)

    thread = threading.Thread(target=other)
    thread.start()
    gm = compile_graph(model_of(forward, c=nn.Conv2d(3, 3, 1)))
    thread.join()
    assert not gm.leaves and len(results) == 2
    torch.testing.assert_close(results[0], results[1])


def _with_rank(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Several results: torch.fx.wrap keeps the graph from seeing what they are."""
    return (x[:, None] if needs_export(x) and x.ndim == 2 else x), x.ndim


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x + x if needs_export(x) and x.ndim == 2 else x


def _in_windows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A layer inside, in windows of four rows; torch.fx cannot follow it."""
    pad = -x.shape[-2] % 4 if needs_export(x) else 0
    x = F.pad(x, (0, 0, 0, pad)) if pad else x
    windows = F.linear(x.unflatten(-2, (x.shape[-2] // 4, 4)), weight).softmax(-2)
    return windows.flatten(-3, -2)[..., : windows.shape[-3] * 4 - pad, :]


torch.fx.wrap("_with_rank")
torch.fx.wrap("_doubled")
torch.fx.wrap("_in_windows")


@pytest.mark.parametrize("given", [False, True])
def test_functions_of_several_results_that_are_hidden_are_looked_into_by_export(given: bool) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x, rank = _with_rank(m.a(x))
        return m.b(x.transpose(1, 2)[..., 0] * rank)

    torch.manual_seed(0)
    model = model_of(forward, a=nn.Linear(8, 16), b=nn.Linear(16, 4)).float()
    x = torch.randn(3, 8)
    gm = zendnn_cffi.optimize(model, (x,) if given else None, tune="off")
    with torch.no_grad():
        for value in (x, torch.randn(5, 8)):
            torch.testing.assert_close(gm(value), model(value), rtol=1e-5, atol=1e-5)
    assert [len(region.lowered) for region in gm.regions().values()] == [2]
    assert not any(node.target is _with_rank for node in gm.graph.nodes)


def _with_windows() -> nn.Module:
    torch.manual_seed(0)
    return model_of(lambda m, x: m.b(_in_windows(m.a(x), m.b.weight)), a=nn.Linear(8, 8), b=nn.Linear(8, 8)).float()


def _looked_into(gm: Any) -> list[bool]:
    """Whether each graph of a module shows what _in_windows() does: its own, and further ones."""
    graphs = [gm.graph, *(module.graph for module in gm.call_kinds.modules)]
    return [not any(node.target is _in_windows for node in graph.nodes) for graph in graphs]


@pytest.mark.parametrize("given", [False, True])
def test_functions_that_hide_layers_are_looked_into_by_export(given: bool) -> None:
    """Other sizes have the graph of symbolic tracing."""
    model, x = _with_windows(), torch.randn(2, 10, 8)
    gm: Any = zendnn_cffi.optimize(model, (x,) if given else None, tune="off")
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x), rtol=1e-5, atol=1e-5)
    (region,) = gm.regions().values()
    assert sum(is_call(node, ops.linear) for node in region.graph.nodes) == 3 and _looked_into(gm) == [True]
    copied = copy.deepcopy(gm)
    for each in (gm, copied, copy.deepcopy(gm)):
        for batch, rows in ((5, 10), (2, 12), (1, 7), (2, 12)):
            value = torch.randn(batch, rows, 8)
            with torch.no_grad():
                torch.testing.assert_close(each(value), model(value), rtol=1e-5, atol=1e-5)
        assert _looked_into(each) == [True, False] and each._calls_of_others == 0
        assert "_in_windows()): others have a graph that sees less" in str(zendnn_cffi.explain(each))


def test_a_file_holds_what_is_seen_of_hidden_functions(tmp_path: Path) -> None:
    model, x = _with_windows(), torch.randn(2, 10, 8)
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        gm(x)
        gm(torch.randn(2, 12, 8))
        with pytest.warns(UserWarning, match="_in_windows"):
            zendnn_cffi.save(gm, tmp_path / "m.safetensors")
        loaded = zendnn_cffi.load(tmp_path / "m.safetensors")
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-5)
        with pytest.raises(ValueError):
            loaded(torch.randn(2, 12, 8))


def test_released_weights_leave_one_graph_for_all_sizes() -> None:
    model, x = _with_windows(), torch.randn(2, 10, 8)
    gm: Any = zendnn_cffi.optimize(_with_windows(), tune="off", release_weights=True)
    with torch.no_grad():
        for value in (x, torch.randn(5, 12, 8), torch.randn(1, 7, 8)):
            torch.testing.assert_close(gm(value), model(value), rtol=1e-5, atol=1e-5)
    assert gm.is_released and _looked_into(gm) == [False]


def test_all_sizes_are_the_examples_where_that_is_asked_for() -> None:
    model, x = _with_windows(), torch.randn(2, 10, 8)
    gm: Any = zendnn_cffi.optimize(model, (x,), tune="off", dynamic=False)
    with torch.no_grad():
        for value in (x, torch.randn(5, 10, 8)):
            torch.testing.assert_close(gm(value), model(value), rtol=1e-5, atol=1e-5)
    assert "dynamic=False" in gm._source[0].sizes.note


def test_hidden_functions_of_one_result_leave_the_graph_as_it_is() -> None:
    model = model_of(lambda m, x: m.b(_doubled(m.a(x))), a=nn.Linear(8, 16), b=nn.Linear(16, 4)).float()
    x = torch.randn(1, 8)
    gm = zendnn_cffi.optimize(model, (x,), tune="off")
    assert any(node.target is _doubled for node in gm.graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(gm(torch.randn(5, 8) * 0 + x), model(x.expand(5, 8)), rtol=1e-5, atol=1e-5)


def test_two_threads_may_trace_at_once() -> None:
    """Whoever ends first must not leave the other's replacements behind."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02 if isinstance(x, fx.Proxy) else 0)  # another thread's turn
        return m.c(x).relu() * 2

    call, models = nn.Module.__call__, [model_of(forward, c=nn.Conv2d(3, 3, 1)) for _ in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(compile_graph, models))
    assert nn.Module.__call__ is call and all(not gm.leaves for gm in found)
    for gm, model in zip(found, models, strict=True):
        torch.testing.assert_close(gm(image()), model(image()))


def test_tensors_made_by_forward() -> None:
    gm = check(model_of(lambda m, x: m.c(x) * torch.arange(7) + torch.ones(3, 1, 1), c=nn.Conv2d(3, 3, 1)), image())
    assert not outside(gm)


@pytest.mark.parametrize("where", ["inner", "root"])
def test_hooks_run(where: str) -> None:
    model = model_of(lambda m, x: m.c(x).relu(), c=nn.Conv2d(3, 3, 1))
    seen: list[Any] = []
    (model.c if where == "inner" else model).register_forward_hook(lambda *a: seen.append(a[2].shape) or a[2] * 2)
    gm = compile_graph(model)
    torch.testing.assert_close(gm(image()), model(image()))
    assert len(seen) == 2 and seen[0] == seen[1]


def _scaled(self: Any, x: Tensor) -> Tensor:
    return type(self).forward(self, x) * self.factor


def _decorated(forward: Any) -> Any:
    @functools.wraps(forward)
    def decorated(x: Tensor) -> Any:
        return forward(x) * 3

    return decorated


def _with_forward(form: Any) -> Any:
    """A model with that in place of its class's forward."""
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    model.factor = 3.0
    model.forward = form(model)
    return model


_FORMS = {
    "method": lambda m: types.MethodType(_scaled, m),
    "partial": lambda m: functools.partial(_scaled, m),
    "function": lambda m: _decorated(m.forward),
}


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("form", _FORMS.values(), ids=_FORMS)
def test_a_forward_in_place_of_the_class_s_computes(form: Any, given: bool) -> None:
    """torch.fx traces that of the class: what accelerate's hooks or `model.forward = ...` add was left out."""
    model = _with_forward(form)
    gm = zendnn_cffi.optimize(model, (torch.randn(3, 8),) if given else None, tune="off")
    for rows in (3, 1, 5):
        x = torch.randn(rows, 8)
        torch.testing.assert_close(gm(x), model(x))
        torch.testing.assert_close(copy.deepcopy(gm)(x), model(x))


@pytest.mark.parametrize("form", ["method", "partial"])
def test_a_forward_in_place_of_the_class_s_is_offloaded(form: str) -> None:
    gm = zendnn_cffi.optimize(_with_forward(_FORMS[form]), tune="off")
    gm(torch.randn(3, 8))
    assert not outside(gm)


class _Scaling:
    """An object that is called as a forward."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.more = module, 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return _scaled(self.module, x) + self.more


@pytest.mark.parametrize("form", [_FORMS["method"], _FORMS["partial"], _Scaling])
@pytest.mark.parametrize("where", ["inner", "root"])
def test_attributes_that_such_a_forward_reads_are_watched(where: str, form: Any) -> None:
    inner = _with_forward(form)
    model = inner if where == "root" else nn.Sequential(inner, nn.ReLU()).eval()
    gm: Any = zendnn_cffi.optimize(model, (torch.randn(3, 8),), tune="off")
    for factor in (3.0, 5.0, 5.0):
        own = gm if where == "root" else gm.get_submodule("0")
        inner.factor = own.factor = factor
        if form is _Scaling and where == "inner":
            inner.forward.more = own.forward.more = 2 * factor
        x = torch.randn(3, 8)
        torch.testing.assert_close(gm(x), model(x))


def test_the_kind_of_a_layer_s_result_with_another_forward_is_not_known() -> None:
    """Its class has an annotation, which was taken for its own."""
    model = model_of(lambda m, x: m.c(x)[0] if isinstance(m.c(x), tuple) else m.c(x), c=nn.Conv2d(3, 3, 1))
    model.c.forward = lambda x: (x * 2, x)  # type: ignore[method-assign]
    check(model, image())


def test_weights_that_hooks_of_the_model_compute_are_computed_in_the_graph() -> None:
    """The graph had the weight as it was while tracing."""
    model = nn.utils.weight_norm(nn.Linear(8, 8)).eval()
    graph = trace(model).graph
    assert graph is not None
    assert {node.target for node in graph.find_nodes(op="get_attr")} == {"weight_g", "weight_v", "bias"}
    assert type(model.weight) is Tensor


def _calls_functions(m: Any, x: Tensor) -> Tensor:
    y = F.silu(F.pad(m.c(x), (1, 1)), inplace=False)
    y = torch.cat([y, torch.sigmoid(y)], 1).add(F.max_pool2d(x, 1).mean())
    return F.gelu(torch.stack((y, y.neg())), approximate="tanh") + torch.abs(input=y) * y.shape[0]


def test_functions_are_recorded_as_torch_fx_has_them() -> None:
    """Whether they are methods is told without its list of all that tensors have."""
    model = model_of(_calls_functions, c=nn.Conv2d(3, 3, 1))
    graph = trace(model).graph
    assert graph is not None
    expected = fx.symbolic_trace(model).graph
    rows = [[(n.op, n.name, n.target, str(n.args), str(n.kwargs)) for n in each.nodes] for each in (graph, expected)]
    assert rows[0] == rows[1]
