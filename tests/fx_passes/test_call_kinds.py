"""Further graphs of a module: each kind of call that comes is served, and what is true of one graph is of several."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from fx_passes import call_kinds
from fx_passes.trace import trace as tracing
from zendnn_cffi.api.cache import cache_info


class Attending(nn.Module):
    """torch.export alone gives graphs of it: the loop is over a size."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 24), nn.Linear(24, 8)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, both: bool = False, parts: Any = ()
    ) -> dict[str, Tensor]:
        _, *rest = x.shape
        assert rest
        hidden = F.relu(self.first(x)) * torch.tensor([scale, 2.0 * scale] * 12)
        for part in parts:
            hidden = hidden + part
        out = {"out": self.last(hidden if mask is None else hidden * mask)}
        return {**out, "hidden": hidden} if both else out


class Optional(nn.Module):
    """torch.fx gives graphs of it, for either branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.relu(self.first(x)) if mask is None else F.relu(self.first(x)) * mask


class Counting(Attending):
    """Writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        self.calls.add_(1)
        return {**super().forward(x, mask), "calls": self.calls.clone()}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def optimized(model: nn.Module, **options: Any) -> Any:
    return zendnn_cffi.optimize(model.eval(), tune="off", **options)


X, MASK = torch.randn(3, 16), torch.rand(3, 24)
KINDS: tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] = (
    ((X,), {}),
    ((X, MASK), {}),
    ((X,), {"both": True}),
    ((torch.randn(2, 3, 16),), {}),
    ((X,), {"parts": (torch.randn(24),)}),
    ((X,), {"parts": (torch.randn(24), torch.randn(3, 24))}),
)


def check(fast: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(fast(*args, **kwargs), model(*args, **kwargs), atol=1e-5, rtol=1e-5)


def runs(fast: Any, *args: Any, **kwargs: Any) -> int:
    """How many programs of regions one call runs."""
    ran: list[Any] = []

    def run(region: Any, program: Any, inputs: Any) -> Any:
        ran.append(region)
        return program(inputs)

    regions = list(fast.regions().values())
    for region in regions:
        region.on_run = run
    with torch.no_grad():
        fast(*args, **kwargs)
    for region in regions:
        region.on_run = None
    return len(ran)


def served(model: Attending | None = None, **options: Any) -> tuple[Any, Attending]:
    """A module with a graph for each of KINDS, and its model."""
    model = model or Attending()
    fast = optimized(model, **options)
    for args, kwargs in KINDS:
        check(fast, model, *args, **kwargs)
    assert len(fast.call_kinds.modules) == len(KINDS) - 1
    return fast, model


def all_run(fast: Any, model: nn.Module) -> None:
    """Each kind is right, and runs on the engine."""
    before = fast._calls_of_others
    for args, kwargs in KINDS:
        check(fast, model, *args, **kwargs)
        assert runs(fast, *args, **kwargs) == 1
    assert fast._calls_of_others == before


def test_each_kind_is_served_after_its_first_call() -> None:
    fast, model = served()
    all_run(fast, model)
    assert fast._calls_of_others == 0
    for rows in (1, 5):
        check(fast, model, torch.randn(rows, 16), torch.rand(rows, 24))
        assert runs(fast, torch.randn(rows, 16), mask=torch.rand(rows, 24)) == 1, "other sizes, and by name"
    said = str(zendnn_cffi.explain(fast))
    assert "kind_2: mask: float32 of 2 dimensions, x: float32 of 2 dimensions" in said and "kind_6" in said
    assert len(zendnn_cffi.explain(fast).nodes) > len(zendnn_cffi.explain(fast.call_kinds.modules[0]).nodes)


def test_what_torch_fx_traces_has_further_graphs_too() -> None:
    model = Optional()
    fast = optimized(model)
    for _ in range(2):
        check(fast, model, X)
        check(fast, model, X, MASK)
    assert runs(fast, X) == runs(fast, X, MASK) == 1 and len(fast.call_kinds.modules) == 1


def test_an_example_is_one_kind_and_others_are_served() -> None:
    model = Attending()
    fast = optimized(model, example_inputs=(X, MASK))
    for _ in range(2):
        check(fast, model, X)
    assert runs(fast, X) == runs(fast, X, MASK) == 1


def test_a_model_without_a_graph_for_its_first_call_has_one_for_others() -> None:
    class Data(Attending):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            if mask is None and float(x.sum()) > 0:
                return self.last(self.first(-x))
            return self.last(self.first(x))

    model = Data()
    for fast in (optimized(model), optimized(model, example_inputs=(X,))):
        for _ in range(3):
            check(fast, model, X)
        for _ in range(2):
            check(fast, model, X, MASK)
        assert runs(fast, X, MASK) == 1 and runs(fast, X) == 0
        assert len(fast.call_kinds.modules) == 1


def test_what_gives_no_graph_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(Attending):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            _, *rest = x.shape
            assert rest
            if mask is not None and float(mask.sum()) > 0:
                return self.last(self.first(-x))
            return self.last(self.first(x))

    model, tried = Half(), list[Any]()
    trace = tracing.trace_kind
    monkeypatch.setattr(tracing, "trace_kind", lambda *args: tried.append(args) or trace(*args))
    fast = optimized(model)
    check(fast, model, X)
    for _ in range(4):
        check(fast, model, X, MASK)
    assert len(tried) == 1 and not fast.call_kinds.modules and fast._calls_of_others == 3
    told = str(zendnn_cffi.explain(fast))
    assert "no graph for mask: float32 of 2 dimensions" in told and "(3 calls)" in told
    assert "than the graph of such calls is for" not in told


def test_a_call_that_stays_plain_is_taken_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small model that took longer than the call itself."""

    class Data(Attending):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return self.last(self.first(-x if float(x.sum()) > 0 else x))

    asked, kind_of = list[Any](), call_kinds.kind_of
    monkeypatch.setattr(call_kinds, "kind_of", lambda *call: asked.append(call) or kind_of(*call))
    model = Data()
    fast = optimized(model, example_inputs=(X,))
    for x in (X, -X, X[:2], X, X[:2], X):
        check(fast, model, x)
    assert len(asked) == 2 and fast._calls_of_others == 6


def test_a_number_alone_is_traced_by_its_second_call() -> None:
    model = Attending()
    fast = optimized(model)
    for step in range(20):
        check(fast, model, X, scale=float(step))
    assert len(fast.call_kinds.modules) == 0
    check(fast, model, X, scale=3.0)
    assert runs(fast, X, scale=3.0) == 1 and len(fast.call_kinds.modules) == 1
    check(fast, model, X, scale=3.0)  # its own numbers, not those of the first graph
    check(fast, model, X, scale=0.0)


def test_kinds_are_bounded() -> None:
    model = Attending()
    fast = optimized(model)
    for count in range(12):
        for _ in range(2):
            check(fast, model, X, parts=[torch.randn(24)] * count)
    assert len(fast.call_kinds.modules) == call_kinds.MOST_KINDS - 1 and fast._calls_of_others == 8
    assert "8 kinds of calls came before" in str(zendnn_cffi.explain(fast))


def test_a_call_that_raises_is_no_example() -> None:
    model = Attending()
    fast = optimized(model)
    check(fast, model, X)
    with pytest.raises(RuntimeError):
        fast(X, torch.rand(3, 25))
    assert not fast.call_kinds.modules and fast._calls_of_others == 0
    check(fast, model, X, MASK)
    assert runs(fast, X, MASK) == 1


def test_fixed_sizes_stay_fixed() -> None:
    model = Attending()
    fast = optimized(model, dynamic=False)
    for rows in (3, 5, 5, 1):
        check(fast, model, X[:1].expand(rows, 16))
    assert not fast.call_kinds.modules and fast._calls_of_others == 3


class Branching(Attending):
    """As models that interpolate positions where an image is none of their size, or pad it to whole windows."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        rest = list(x.shape)[1:]
        assert rest
        return self.last(F.relu(self.first(x))) if x.shape[0] == 3 else self.last(torch.tanh(self.first(x)))


def test_sizes_that_the_model_branches_on_have_a_graph_from_the_second_call_on() -> None:
    model = Branching()
    fast = optimized(model)
    for rows in (3, 5, 6, 7, 3, 5, 8):
        check(fast, model, torch.randn(rows, 16))
    assert len(fast.call_kinds.modules) == 1 and fast._calls_of_others == 1
    assert all(runs(fast, torch.randn(rows, 16)) == 1 for rows in (3, 4, 9))


def test_few_graphs_are_made_where_each_is_for_one_size() -> None:
    class Fixed(Attending):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return self.last(self.first(x) * int(x.shape[0]))

    model = Fixed()
    fast = optimized(model, example_inputs=(X,))
    for rows in (3, 4, 5, 6, 7, 8, 9, 10):
        check(fast, model, torch.randn(rows, 16))
    assert len(fast.call_kinds.modules) <= 2


def test_one_row_that_the_model_treats_by_itself() -> None:
    class Rows(Attending):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            _, *rest = x.shape
            assert rest
            return self.last(self.first(x) + 1.0) if x.shape[0] == 1 else self.last(self.first(x))

    model = Rows()
    for order in ((3, 1), (1, 3)):
        fast = optimized(model)
        for rows in order * 2:
            check(fast, model, X[:rows])
        assert runs(fast, X) == runs(fast, X[:1]) == runs(fast, X[:2]) == 1


@pytest.mark.parametrize("how", ("deepcopy", "copy", "pickle"))
def test_copies_have_all_graphs(how: str) -> None:
    fast, model = served()
    again = pickle.loads(pickle.dumps(fast)) if how == "pickle" else getattr(copy, how)(fast)
    assert len(again.call_kinds.modules) == len(KINDS) - 1
    all_run(again, model)
    with torch.no_grad():
        again.first.weight.mul_(2.0)
    for _ in range(3):
        check(fast, model, X, MASK) if how != "copy" else None
        check(again, again.root, X, MASK)
    assert runs(again, X, MASK) == 1


def test_weights_written_afterwards_count_in_each() -> None:
    fast, model = served()
    all_run(fast, model)
    with torch.no_grad():
        model.first.weight.mul_(-2.0)
    for _ in range(2):
        for args, kwargs in KINDS:
            check(fast, model, *args, **kwargs)
    all_run(fast, model)
    model.last.weight.data.numpy()[:] += 1.0
    fast.invalidate()
    all_run(fast, model)


def test_layers_and_hooks_put_there_afterwards_count_in_each() -> None:
    fast, model = served()
    fast.last = model.last = nn.Linear(24, 8)
    for _ in range(3):
        for args, kwargs in KINDS:
            check(fast, model, *args, **kwargs)
    all_run(fast, model)
    for module in (fast, model):
        module.last.register_forward_hook(lambda module, args, output: output + 1.0)
    for _ in range(3):
        for args, kwargs in KINDS:
            check(fast, model, *args, **kwargs)
    assert runs(fast, X, MASK) == 0, "a graph would not run the hook"


def test_state_dict_conversion_and_functional_call() -> None:
    fast, model = served()
    assert list(fast.state_dict()) == list(model.state_dict())
    others = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert not torch.func.functional_call(fast, others, (X, MASK))["out"].any()
    all_run(fast, model)
    with torch.no_grad():
        fast.load_state_dict({name: 2.0 * value for name, value in model.state_dict().items()})
        model.load_state_dict(fast.state_dict())
    for _ in range(2):
        for args, kwargs in KINDS:
            check(fast, model, *args, **kwargs)
    all_run(fast, model)
    for module in (fast, model):
        module.double()
    for _ in range(3):
        check(fast, model, X.double(), MASK.double())


def test_hooks_of_the_whole_run_once() -> None:
    fast, _ = served()
    calls: list[Any] = []
    fast.register_forward_hook(lambda module, args, output: calls.append(module))
    for args, kwargs in KINDS:
        fast(*args, **kwargs)
    assert calls == [fast] * len(KINDS)


def test_inside_another_model() -> None:
    fast, model = served()
    whole = nn.ModuleDict({"inner": fast})
    check(whole["inner"], model, X, MASK)
    assert [*whole.state_dict()] == [f"inner.{name}" for name in model.state_dict()]


def test_what_a_forward_writes_to_is_one_for_all_graphs() -> None:
    model = Counting()
    fast = optimized(model)
    counted = [int(fast(*args)["calls"]) for _ in range(3) for args in ((X,), (X, MASK))]
    assert counted == [1, 2, 3, 4, 5, 6] and not model.calls.any()


def test_a_further_graph_leaves_memory_where_it_is() -> None:
    fast = optimized(Counting())
    fast(X)
    held = fast.get_buffer("calls")
    assert [int(fast(X, MASK)["calls"]) for _ in range(2)] == [2, 3]
    assert fast.get_buffer("calls") is held and int(held) == 3


def test_gradients_ask_for_plain_pytorch() -> None:
    fast, model = served()
    x = X.clone().requires_grad_()
    fast(x, MASK)["out"].sum().backward()
    assert x.grad is not None and fast._calls_of_others == 1
    check(fast, model, X, MASK)


def test_outputs_of_each_kind_carry_no_gradient_from_its_first_call_on() -> None:
    fast = optimized(Attending())
    for args in ((X,), (X, MASK), (X, MASK), (X, None, 2.0), (X, None, 2.0), (X, None, 2.0)):
        assert not fast(*args)["out"].requires_grad
    assert len(fast.call_kinds.modules) == 2


def test_released_weights_allow_one_kind() -> None:
    model = Attending()
    fast = optimized(model, release_weights=True)
    check(fast, model, X)
    assert fast.is_released
    with pytest.raises(RuntimeError, match="release_weights"):
        fast(X, MASK)


def test_calls_with_a_graph_go_on_while_one_is_made_and_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Attending()
    fast = optimized(model)
    check(fast, model, X)
    inside, go_on = threading.Event(), threading.Event()
    trace, traced = tracing.trace_kind, list[Any]()

    def slow(*args: Any) -> Any:
        traced.append(args)
        inside.set()
        assert go_on.wait(30)
        return trace(*args)

    monkeypatch.setattr(tracing, "trace_kind", slow)
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(fast(X, MASK))) for _ in range(3)]
    threads[0].start()
    assert inside.wait(30)
    check(fast, model, X)
    assert runs(fast, X) == 1 and not answers
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        for answer in answers:
            torch.testing.assert_close(answer, model(X, MASK), atol=1e-5, rtol=1e-5)
    assert len(answers) == 3 and len(traced) == 1
    assert runs(fast, X, MASK) == 1 and len(fast.call_kinds.modules) == 1


def test_no_forward_of_another_thread_disturbs_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' forwards set a global for a moment: what was traced beside them stayed plain PyTorch for good."""
    model = Attending()
    fast = optimized(model)
    with torch.no_grad():
        expected = [model(*args, **kwargs) for args, kwargs in KINDS]
    beside, errors = list[int](), list[Any]()
    trace = tracing.trace_kind

    def watching(*args: Any) -> Any:
        running = fast.call_kinds.plain_calls._running
        beside.append(len(running.keys() - {threading.get_ident()}))
        found = trace(*args)
        beside.append(len(running.keys() - {threading.get_ident()}))
        return found

    def call(first: int) -> None:
        for number in range(first, first + 3 * len(KINDS)):
            args, kwargs = KINDS[number % len(KINDS)]
            with torch.no_grad():
                answer = fast(*args, **kwargs)
            if not torch.allclose(answer["out"], expected[number % len(KINDS)]["out"], atol=1e-5):
                errors.append(number)

    monkeypatch.setattr(tracing, "trace_kind", watching)
    threads = [threading.Thread(target=call, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(beside) == 2 * (len(KINDS) - 1) and not any(beside)
    all_run(fast, model)


def test_packed_weights_are_kept_once() -> None:
    class Wide(Attending):
        def __init__(self) -> None:
            super().__init__(512)
            self.first, self.last = nn.Linear(512, 24 * 32), nn.Linear(24 * 32, 512)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            _, *rest = x.shape
            assert rest
            hidden = F.relu(self.first(x))
            return self.last(hidden if mask is None else hidden * mask)

    model = Wide()
    fast = optimized(model)
    x, mask = torch.randn(64, 512), torch.rand(64, 768)
    check(fast, model, x)
    alone = zendnn_cffi.explain(fast).weights.packed_bytes
    assert alone >= 2 * 512 * 768 * 4
    for _ in range(2):
        check(fast, model, x, mask)
    assert runs(fast, x, mask) >= 1
    assert zendnn_cffi.explain(fast).weights.packed_bytes < 1.1 * alone
    assert cache_info().packed_weights_bytes >= alone
    with torch.no_grad():
        model.first.weight.mul_(2.0)
    for _ in range(3):
        check(fast, model, x)
        check(fast, model, x, mask)
    assert zendnn_cffi.explain(fast).weights.packed_bytes < 1.1 * alone
