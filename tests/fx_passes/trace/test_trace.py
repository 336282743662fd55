"""From modules to graphs: the copy of the tree, what stays whole, which arguments the graph is for."""

from __future__ import annotations

import collections
import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import fx, nn

import zendnn_cffi
from fx_passes.pipeline import compile_graph
from fx_passes.trace.seeding import refuse_seeding
from fx_passes.trace.skeleton import TraceError, skeleton
from fx_passes.trace.trace import WHOLE
from tests.support.graphs import check, check_equal, count, image, model_of, outside, post_ops


def test_skeleton_shares_storage_and_nothing_else() -> None:
    model = model_of(lambda m, x: m.c(x), c=nn.Conv2d(3, 3, 1), n=nn.BatchNorm2d(3))
    copied = skeleton(model)
    for (name, mine), (other, theirs) in zip(copied.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == other and mine.data_ptr() == theirs.data_ptr()
    assert not {id(m) for m in copied.modules()} & {id(m) for m in model.modules()}
    assert not {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}


def test_skeleton_keeps_ties_and_buffers_that_are_not_saved() -> None:
    shared = nn.Linear(3, 3)
    model = model_of(lambda m, x: m.b(m.a(x)), a=shared, b=shared, c=nn.Linear(3, 3))
    model.c.weight = shared.weight
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    copied: Any = skeleton(model)
    assert copied.a is copied.b and copied.c.weight is copied.a.weight
    assert list(copied.state_dict()) == list(model.state_dict()) and "scratch" in dict(copied.named_buffers())


def test_the_model_is_not_touched() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.last = m.c(x)
        m.calls = getattr(m, "calls", 0) + 1
        return m.last.relu()

    model = model_of(forward, c=nn.Conv2d(3, 3, 1))
    attributes, state = set(model.__dict__), copy.deepcopy(model.state_dict())
    gm = compile_graph(model)
    gm(image())
    gm.half()
    gm.c.register_forward_hook(print)
    assert set(model.__dict__) == attributes and not model.c._forward_hooks
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]) and value.dtype == torch.float64


def test_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        compile_graph(nn.Conv2d(3, 3, 1))


def test_lazy_modules_are_refused_with_the_remedy() -> None:
    with pytest.raises(TraceError, match="call the model once"):
        compile_graph(nn.Sequential(nn.LazyLinear(3)).eval())


class Branches(nn.Module):
    """Control flow on values, which no graph can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum() > 0 else self.inner(-x)


def test_a_submodule_that_cannot_be_traced_stays_whole() -> None:
    model = model_of(lambda m, x: m.c(m.b(m.c(x))).relu(), b=Branches(), c=nn.Conv2d(3, 3, 1))
    gm = check(model, image())
    check_equal(model, gm, -image())
    assert outside(gm) == {"b": 1} and count(gm)["convolution"] == 2
    assert "control flow" in gm.leaves["b"]


def test_a_model_that_cannot_be_traced_runs_as_it_is() -> None:
    def forward(m: Any, x: torch.Tensor, *more: Any, scale: int = 1, **named: Any) -> Any:
        y = m.c(x) if x.sum() > 0 else x
        return {"y": y * scale, "more": more, "named": named}

    model = model_of(forward, c=nn.Conv2d(3, 3, 1))
    gm = check(model, image())
    assert WHOLE in gm.leaves
    check_equal(model, gm, image(), 3, "z", scale=2, other=1)
    check_equal(model, copy.deepcopy(gm), -image())


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
    return (x[:, None] if x.ndim == 2 else x), x.ndim


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x + x if x.ndim == 2 else x


torch.fx.wrap("_with_rank")
torch.fx.wrap("_doubled")


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
    assert [len(region.lowered) for region in gm.regions().values()] == ([2] if given else [2, 2])
    assert any(node.target is _with_rank for node in gm.graph.nodes) != given


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


def _options(m: Any, x: torch.Tensor, mask: Any = None, flag: bool = False, scale: float = 2.0) -> Any:
    y = m.c(x) * scale
    if mask is not None:
        y = y * mask
    return y.relu() if flag else y


def test_default_arguments() -> None:
    model = model_of(_options, c=nn.Conv2d(3, 3, 1))
    gm = check(model, image())
    mask = image(7)
    assert count(gm)["convolution"] == 1
    for args, kwargs in [
        ((image(), mask), {}),
        ((image(),), {"mask": mask, "scale": 3.0}),
        ((image(), None, True), {}),
        ((), {"x": image(), "flag": False}),
    ]:
        check_equal(model, gm, *args, **kwargs)


def test_example_inputs_say_which_options_are_given() -> None:
    model = model_of(_options, c=nn.Conv2d(3, 3, 1))
    check_equal(model, compile_graph(model, (image(), None, True)), image(), None, True)
    for example in [(image(), image(7)), {"x": image(), "mask": image(7)}]:
        gm = compile_graph(model, example)
        assert post_ops(gm) == [("binary:mul", "binary:mul")]
        check_equal(model, gm, image(), image(7))
        check_equal(model, gm, image())


Pair = collections.namedtuple("Pair", "first second")

OUTPUTS = {
    "dict": lambda y: {"a": y, "b": [y.relu(), {"c": y * 2}]},
    "namedtuple": lambda y: Pair(y, y.tanh()),
    "nothing in it": lambda y: (y, None, 3, "text"),
    "the same twice": lambda y: (y, y),
    "list": lambda y: [y, y.flatten(1)],
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_keep_their_structure(kind: str) -> None:
    model = model_of(lambda m, x: OUTPUTS[kind](m.c(x)), c=nn.Conv2d(3, 3, 1))
    gm = check(model, image())
    assert type(gm(image())) is type(model(image()))


def test_an_input_that_is_returned_is_the_input() -> None:
    gm = check(model_of(lambda m, x: (x, x.flatten(1), m.c(x)), c=nn.Conv2d(3, 3, 1)), image())
    x = image()
    same, view, _ = gm(x)
    assert same is x and view.data_ptr() == x.data_ptr()


class Shapes(nn.Module):
    """Control flow on sizes: torch.export follows it, and states what it relied on."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(3, 4, 3, padding=1)
        self.n = nn.BatchNorm2d(4)
        self.r = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.r(self.n(self.c(x))) if x.shape[2] > 4 else self.c(x)
        return {"y": y.mean((2, 3)).reshape(x.shape[0], -1), "pair": (y, y + 1)}


@pytest.fixture(scope="module")
def exported() -> tuple[nn.Module, Any]:
    model = Shapes().eval().double()
    return model, compile_graph(model, (image(2, 3, 8, 8),))


def test_export_follows_sizes(exported: tuple[nn.Module, Any]) -> None:
    model, gm = exported
    assert not gm.leaves and not outside(gm) and count(gm)["convolution"] == 1
    check_equal(model, gm, image(2, 3, 8, 8))
    check_equal(model, gm, image(5, 3, 9, 6))


def test_other_sizes_than_the_exported_graph_is_for_run_the_model(exported: tuple[nn.Module, Any]) -> None:
    model, gm = exported
    check_equal(model, gm, image(2, 3, 3, 8))
    check_equal(model, gm, x=image(2, 3, 8, 8))


def test_export_of_a_model_with_constants_inside_a_submodule() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.tensor([1.0, 2.0, 3.0]) if x.shape[0] > 1 else x

    model = model_of(lambda m, x: m.i(m.l(x)), i=Inner(), l=nn.Linear(7, 3))
    gm = compile_graph(model, (image(),))
    assert not gm.leaves
    check_equal(model, gm, image())


class Detector(nn.Module):
    """As torchvision's: how many boxes there are depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 4, 3)

    def forward(self, images: list[torch.Tensor]) -> list[torch.Tensor]:
        return [self.postprocess_detections(self.backbone(image[None])) for image in images]

    def postprocess_detections(self, scores: torch.Tensor) -> torch.Tensor:
        return scores[scores > 0.1]


def test_a_detector_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("torch.export would follow it for minutes")

    monkeypatch.setattr("fx_passes.trace.trace.export", refuse)
    model, images = Detector().eval(), [torch.randn(3, 8, 9), torch.randn(3, 9, 8)]
    fast = zendnn_cffi.optimize(model, (images,))
    assert "a detector" in fast.leaves[""]
    for ours, eager in zip(fast(images), model(images), strict=True):
        torch.testing.assert_close(ours, eager)
