"""Models whose forward changes more than its result: attributes, lists, buffers, classes and globals."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace.traced import WHOLE
from tests.support.exported import needs_export
from tests.support.lowering import noise
from tests.tolerance import assert_close

COUNTED: list[int] = []
TIMES = 0


class Stateful(nn.Module):
    """change(module, y) -> result is done between two linear layers."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.change = change
        self.h = torch.zeros(8)
        self.n, self.is_first, self.table = 0, True, None
        self.past: list[Any] = []
        self.seen: dict[str, Any] = {"sum": torch.zeros(())}
        self.queue: collections.deque[Any] = collections.deque(maxlen=3)
        self.counter = itertools.count(1)
        self.inner = Holder()
        self.register_buffer("buffer", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.change(self, self.first(x)))
        return y


class Holder:
    total: Any = 0.0


class Counting(nn.Module):
    """Counts its calls in its class."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return x * type(self).calls


def decay(m: Any, y: Tensor) -> Tensor:
    m.h = m.h * 0.5 + y.mean(0)
    return y + m.h


def count(m: Any, y: Tensor) -> Tensor:
    m.n += 1
    return y * m.n


def append(m: Any, y: Tensor) -> Tensor:
    m.past.append(y.mean(0))
    return y + sum(m.past)


def once(m: Any, y: Tensor) -> Tensor:
    if m.is_first:
        m.is_first = False
        return y * 2
    return y


def feature(m: Any, y: Tensor) -> Tensor:
    m.feat = y
    return y.relu()


def entry(m: Any, y: Tensor) -> Tensor:
    m.seen["sum"] = m.seen["sum"] + y.sum()
    return y + m.seen["sum"]


def deque(m: Any, y: Tensor) -> Tensor:
    m.queue.append(y.mean(0))
    return y + torch.stack(list(m.queue)).sum(0)


def iterator(m: Any, y: Tensor) -> Tensor:
    return y * next(m.counter)


def of_an_object(m: Any, y: Tensor) -> Tensor:
    m.inner.total = m.inner.total + y.mean()
    return y + m.inner.total


def in_place(m: Any, y: Tensor) -> Tensor:
    m.h.mul_(0.5)
    m.h += 1
    return y + m.h


def buffer(m: Any, y: Tensor) -> Tensor:
    m.buffer = m.buffer + y.mean(0)
    return y + m.buffer


def buffer_in_place(m: Any, y: Tensor) -> Tensor:
    m.buffer.add_(y.mean(0))
    return y + m.buffer


def view_of_buffer(m: Any, y: Tensor) -> Tensor:
    m.buffer[:4] += y.mean(0)[:4]
    return y + m.buffer


def new_buffer(m: Any, y: Tensor) -> Tensor:
    m.register_buffer("last", y.detach().mean(0) + m.n)
    return y + m.last


def parameter(m: Any, y: Tensor) -> Tensor:
    m.second.weight = nn.Parameter(m.second.weight.detach() * 0.5)
    return y


def lazily(m: Any, y: Tensor) -> Tensor:
    if m.table is None:
        m.table = torch.arange(8.0)
    return y + m.table


def in_a_global_list(m: Any, y: Tensor) -> Tensor:
    COUNTED.append(1)
    return y * len(COUNTED)


def in_a_global(m: Any, y: Tensor) -> Tensor:
    global TIMES
    TIMES += 1
    return y * TIMES


def in_a_class(m: Any, y: Tensor) -> Tensor:
    Counting.calls += 1
    return y * Counting.calls


def in_a_closure() -> Callable[[Any, Tensor], Tensor]:
    calls = [0]

    def change(m: Any, y: Tensor) -> Tensor:
        calls[0] += 1
        return y * calls[0]

    return change


CHANGES = (decay, count, append, once, feature, entry, deque, iterator, of_an_object, in_place, buffer, buffer_in_place,
           view_of_buffer, new_buffer, parameter, lazily)  # fmt: skip


def nested(change: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Stateful(change), nn.Linear(8, 8)).eval()


def branching(x: Tensor) -> Tensor:
    """What torch.fx cannot trace, and torch.export can."""
    return x + 1 if needs_export(x) and x.shape[0] > 100 else x


class Branching(nn.Module):
    """Which torch.fx cannot trace, and torch.export can."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Stateful(change)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x + 1 if needs_export(x) and x.shape[0] > 100 else x)
        return y


X = [noise(3, 8, seed=seed) for seed in range(4)]
IN_GRAPH = (buffer_in_place, view_of_buffer)  # what a graph can say: a call writes to a buffer


def held(module: nn.Module) -> dict[str, Any]:
    """What a module's state is, in a form that compares."""
    found = {**module.__dict__, **module._buffers, **module._parameters}
    found["inner"], found["counter"] = found["inner"].total, repr(found["counter"])
    return {k: v for k, v in found.items() if not k.startswith("_") and k != "change"}


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    mine, other = held(ours), held(theirs)
    assert mine.keys() == other.keys()
    for name, value in other.items():
        for a, b in zip(*map(torch.utils._pytree.tree_leaves, (mine[name], value)), strict=True):
            if isinstance(b, Tensor):
                assert_close(a.detach(), b.detach(), k=8)
            else:
                assert a == b, name


def check_calls(fast: Any, oracle: nn.Module) -> None:
    """The same results as eager in each call, not in the first alone."""
    with torch.no_grad():
        for x in X:
            assert_close(fast(x), oracle(x), k=64)


@pytest.mark.parametrize("example", (None, X[0]), ids=("symbolic", "example"))
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_submodule_with_state_stays_plain(change: Any, example: Any) -> None:
    model, oracle, fresh = (nested(change) for _ in range(3))
    fast: Any = zendnn_cffi.optimize(model, example, tune="off")
    check_calls(fast, oracle)
    assert_same_state(fast.get_submodule("2"), oracle.get_submodule("2"))
    assert_same_state(model.get_submodule("2"), fresh.get_submodule("2"))  # the user's model is as it was
    assert list(fast.leaves) == ([] if change in IN_GRAPH else ["2"])
    assert any(row.offloaded for row in zendnn_cffi.explain(fast).nodes)
    if fast.leaves:
        reasons = ("changes self.", "TypeError", "makes a parameter")
        assert any(reason in fast.leaves["2"] for reason in reasons)
        assert fast.leaves["2"] in str(zendnn_cffi.explain(fast))


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_model_with_state_stays_plain(change: Any) -> None:
    torch.manual_seed(0)
    model, oracle = Stateful(change).eval(), Stateful(change).eval()
    oracle.load_state_dict(model.state_dict())
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    check_calls(fast, oracle)
    assert list(fast.leaves) == ([] if change in IN_GRAPH else [WHOLE])
    for name in ("n", "is_first", "h"):
        assert torch.equal(torch.as_tensor(getattr(fast, name)), torch.as_tensor(getattr(oracle, name)))
    assert hasattr(fast, "feat") == hasattr(oracle, "feat")


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_where_torch_export_is_needed(change: Any) -> None:
    torch.manual_seed(0)
    model, oracle = Branching(change).eval(), Branching(change).eval()
    oracle.load_state_dict(model.state_dict())
    fast: Any = zendnn_cffi.optimize(model, X[0], tune="off")
    check_calls(fast, oracle)
    assert_same_state(fast.inner, oracle.inner)


class Globals(nn.Module):
    """Changes something that is no attribute of it."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(8, 8), change

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.change(self, x))
        return y


@pytest.mark.parametrize("example", (None, X[0]), ids=("symbolic", "example"))
@pytest.mark.parametrize("change", (in_a_global_list, in_a_global, in_a_class, in_a_closure()))
def test_state_in_classes_globals_and_closures(change: Any, example: Any) -> None:
    def start() -> None:
        global TIMES
        TIMES, Counting.calls = 0, 0
        COUNTED.clear()
        if change.__closure__:
            change.__closure__[0].cell_contents[0] = 0

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Globals(change)).eval()
    start()
    with torch.no_grad():
        expected = [model(x) for x in X]
    start()
    fast: Any = zendnn_cffi.optimize(model, example, tune="off")
    assert list(fast.leaves) == ["1"]
    for x, result in zip(X, expected, strict=True):  # tracing itself has counted nothing
        assert_close(fast(x), result, k=64)


class Plain:
    """An object that is no module."""

    def __init__(self) -> None:
        self.n, self.h, self.past = 0, torch.zeros(8), [1]


def attribute_of_a_function(m: Any, y: Tensor) -> Tensor:
    function: Any = attribute_of_a_function
    function.n = getattr(function, "n", 0) + 1
    return y * function.n


def elsewhere(kind: str) -> Callable[[Any, Tensor], Tensor]:
    """A change of what the function itself holds: an object, an array, an iterator, tensors, defaults."""
    held, array, counter, tensors = Plain(), numpy.zeros(1), itertools.count(1), [torch.ones(8)]
    table, drawn = {"h": torch.ones(8)}, random.Random(3)

    def count_in_an_object(m: Any, y: Tensor) -> Tensor:
        held.n += 1
        return y * held.n

    def tensor_of_an_object(m: Any, y: Tensor) -> Tensor:
        held.h = held.h * 0.5 + y.mean(0)
        return y + held.h

    def tensor_of_an_object_in_place(m: Any, y: Tensor) -> Tensor:
        held.h.add_(1)
        return y + held.h

    def list_of_an_object(m: Any, y: Tensor) -> Tensor:
        held.past.append(1)
        return y * len(held.past)

    def count_in_an_array(m: Any, y: Tensor) -> Tensor:
        array[0] += 1
        return y * float(array[0])

    def iterator(m: Any, y: Tensor) -> Tensor:
        return y * next(counter)

    def tensor_in_a_list(m: Any, y: Tensor) -> Tensor:
        tensors[0].mul_(0.5).add_(y.mean(0))
        return y + tensors[0]

    def tensor_in_a_mapping(m: Any, y: Tensor) -> Tensor:
        table["h"].mul_(0.5)
        return y + table["h"]

    def default(m: Any, y: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(1)
        return y * len(seen)

    def default_by_name(m: Any, y: Tensor, *, seen: Any = Plain()) -> Tensor:  # noqa: B008
        seen.n += 1
        return y * seen.n

    def numbers_that_are_drawn(m: Any, y: Tensor) -> Tensor:
        return y * drawn.random()

    found: Callable[[Any, Tensor], Tensor] = locals()[kind]
    return found


@pytest.mark.parametrize("example", (None, X[0]), ids=("symbolic", "example"))
@pytest.mark.parametrize(
    "kind",
    ("count_in_an_object", "tensor_of_an_object", "tensor_of_an_object_in_place", "list_of_an_object",
     "count_in_an_array", "iterator", "tensor_in_a_list", "tensor_in_a_mapping", "default", "default_by_name",
     "numbers_that_are_drawn"),
)  # fmt: skip
def test_state_that_a_function_holds(kind: str, example: Any) -> None:
    torch.manual_seed(0)
    oracle = nn.Sequential(nn.Linear(8, 8), Globals(elsewhere(kind))).eval()
    model = nn.Sequential(nn.Linear(8, 8), Globals(elsewhere(kind))).eval()
    model.load_state_dict(oracle.state_dict())
    fast: Any = zendnn_cffi.optimize(model, example, tune="off")
    assert list(fast.leaves) == ["1"]
    check_calls(fast, oracle)  # tracing itself has changed nothing


def test_state_in_a_function_s_attributes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Globals(attribute_of_a_function)).eval()
    with torch.no_grad():
        expected = [model(x) for x in X]
    attribute_of_a_function.__dict__.clear()
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    assert list(fast.leaves) == ["1"] and not attribute_of_a_function.__dict__
    for x, result in zip(X, expected, strict=True):
        assert_close(fast(x), result, k=64)


def test_objects_that_are_read_alone_are_no_state() -> None:
    held = Plain()
    model = nn.Sequential(nn.Linear(8, 8), Globals(lambda m, y: y + held.h + len(held.past))).eval()
    assert not zendnn_cffi.optimize(model, tune="off").leaves


def test_a_class_that_counts() -> None:
    Counting.calls = 0
    fast: Any = zendnn_cffi.optimize(nn.Sequential(nn.Linear(8, 8), Counting(), nn.Linear(8, 8)).eval(), tune="off")
    assert Counting.calls == 0 and list(fast.leaves) == ["1"]
    fast(X[0])
    assert Counting.calls == 1


def test_a_parent_that_writes_to_its_child() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Linear(8, 8)
            self.child.times = 0  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            self.child.times += 1  # type: ignore[operator, assignment]
            y: Tensor = self.child(x) * self.child.times
            return y

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Parent()).eval()
    with torch.no_grad():
        expected = [model(x) for x in X]
    model.get_submodule("1.child").times = 0  # type: ignore[assignment]
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    assert list(fast.leaves) == ["1"]
    for x, result in zip(X, expected, strict=True):
        assert_close(fast(x), result, k=64)


def generated(place: str, values: Any) -> nn.Module:
    """A module that takes a value from an iterator in each call: of a closure, a global, an attribute or a default."""
    if place == "closure":
        return Globals(lambda m, y: y * next(values))
    if place == "global":
        globals()["VALUES"] = values
        return Globals(lambda m, y: y * next(VALUES))  # type: ignore[name-defined] # noqa: F821
    if place == "in a list":
        globals()["VALUES"] = [{"of": values}]
        return Globals(lambda m, y: y * next(VALUES[0]["of"]))  # type: ignore[name-defined] # noqa: F821
    if place == "default":
        return Globals(lambda m, y, values=values: y * next(values))
    model: Any = Globals(lambda m, y: y * next(m.values))
    model.values = values
    return model


@pytest.mark.parametrize("example", (None, X[0]), ids=("symbolic", "example"))
@pytest.mark.parametrize("place", ("closure", "global", "in a list", "default", "attribute"))
@pytest.mark.parametrize(
    "values",
    (lambda: (float(i) for i in range(1, 9)), lambda: map(float, range(1, 9)), lambda: itertools.cycle([1.0, 2.0])),
    ids=("generator", "map", "cycle"),
)
def test_an_iterator_that_gives_each_value_once_is_left_alone(values: Any, place: str, example: Any) -> None:
    """It cannot be copied, so what tracing takes would be lost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), generated(place, values())).eval()
    with torch.no_grad():
        expected = [model(x) for x in X]
    again = nn.Sequential(model[0], generated(place, values())).eval()
    again.load_state_dict(model.state_dict())
    fast: Any = zendnn_cffi.optimize(again, example, tune="off")
    assert list(fast.leaves) == ["1"] and "gives each once" in fast.leaves["1"]
    assert fast.leaves["1"] in str(zendnn_cffi.explain(fast))
    with torch.no_grad():
        for x, result in zip(X, expected, strict=True):
            assert_close(fast(x), result, k=64)


def test_a_whole_model_that_takes_from_an_iterator() -> None:
    values = (float(i) for i in range(1, 9))
    fast: Any = zendnn_cffi.optimize(Globals(lambda m, y: y * next(values)).eval(), X[0], tune="off")
    assert list(fast.leaves) == [WHOLE] and next(values) == 1


def twice(m: Any, y: Tensor) -> Tensor:
    m.layer.register_forward_hook(lambda module, args, result: result * 2)
    return y


def within_the_call(m: Any, y: Tensor) -> Tensor:
    handle = m.layer.register_forward_hook(lambda module, args, result: result * 2)
    y = m.layer(y)
    handle.remove()
    return y


@pytest.mark.parametrize("example", (None, X[0]), ids=("symbolic", "example"))
@pytest.mark.parametrize("change", (twice, within_the_call))
def test_hooks_that_forward_registers(change: Any, example: Any) -> None:
    torch.manual_seed(0)
    model, oracle = (nn.Sequential(nn.Linear(8, 8), Globals(change)).eval() for _ in range(2))
    oracle.load_state_dict(model.state_dict())
    check_calls(zendnn_cffi.optimize(model, example, tune="off"), oracle)


def data_in_place(m: Any, y: Tensor) -> Tensor:
    m.h.data.add_(1)
    return y + m.h


def data_assigned(m: Any, y: Tensor) -> Tensor:
    m.buffer.data = m.buffer + 1
    return y + m.buffer


def array_of_a_tensor(m: Any, y: Tensor) -> Tensor:
    array = m.h.numpy()
    array += 1
    return y + m.h


def array_of_a_buffer(m: Any, y: Tensor) -> Tensor:
    array = m.buffer.numpy()
    array += 1
    return y + m.buffer


def bytes_of_its_own(m: Any, y: Tensor) -> Tensor:
    m.__dict__.setdefault("bytes", bytearray(1))[0] += 1
    return y * m.bytes[0]


@pytest.mark.parametrize("example", (None, X[0]), ids=("symbolic", "example"))
@pytest.mark.parametrize(
    "change", (data_in_place, data_assigned, array_of_a_tensor, array_of_a_buffer, bytes_of_its_own)
)
def test_state_that_no_version_counter_tells(change: Any, example: Any) -> None:
    model, oracle, fresh = (nested(change) for _ in range(3))
    fast: Any = zendnn_cffi.optimize(model, example, tune="off")
    check_calls(fast, oracle)
    assert_same_state(model.get_submodule("2"), fresh.get_submodule("2"))


def test_a_cached_function_is_no_state() -> None:
    @functools.lru_cache
    def table(n: int) -> Tensor:
        return torch.arange(float(n))

    model = nn.Sequential(nn.Linear(8, 8), Globals(lambda m, y: y + table(8))).eval()
    assert not zendnn_cffi.optimize(model, tune="off").leaves


def test_what_cannot_be_copied_is_shared() -> None:
    import threading

    model: Any = nested(count)
    model.get_submodule("2").lock = threading.Lock()
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    check_calls(fast, nested(count))
    assert fast.get_submodule("2").lock is model.get_submodule("2").lock


class Pair(tuple):  # type: ignore[type-arg]
    """As e3nn's irreducible representations: a tuple that does not say how long it is."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_whose_class_has_no_length() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.kinds = nn.Linear(4, 4), Pair([(2, "0e"), (1, "1o")])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            return y if self.kinds is not None else -y

    model, x = Model().eval(), torch.randn(3, 4)
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        fast.kinds = Pair([(3, "0e")])
        torch.testing.assert_close(fast(x), model(x))
    assert [node.became for node in zendnn_cffi.explain(fast).nodes] == ["inner_product"]


def test_a_nested_tensor_that_forward_does_not_read() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.seen = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
            self.table = numpy.ones(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            return y

    model, x = Model().eval(), torch.randn(3, 4)
    with torch.no_grad():
        for examples in (None, (x,)):
            fast: Any = zendnn_cffi.optimize(model, examples, tune="off")
            torch.testing.assert_close(fast(x), model(x))
            assert [node.became for node in zendnn_cffi.explain(fast).nodes] == ["inner_product"]
