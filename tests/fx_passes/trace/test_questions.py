"""Forwards that ask what a value is (its type, its attributes, whether it is None) go the way that they go in eager."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fx_passes.pipeline import compile_graph
from fx_passes.trace.traced import WHOLE
from tests.support.graphs import image, model_of

is_tensor = torch.is_tensor
HANDLERS: Mapping[type, Callable[[Any], Any]] = MappingProxyType({Tensor: lambda y: y * 3})


class Split(nn.Module):
    """Two results; kinds: what holds them."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x), x)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


class Chooses(nn.Module):
    """Control flow on values: it stays whole, and nobody knows of which type its result is."""

    def __init__(self, wrap: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.linear(x) if x.sum() > 1000 else self.linear(x) + 1)


@functools.singledispatch
def dispatched(y: Any) -> Any:
    return y * 5


@dispatched.register
def _(y: Tensor) -> Any:
    return y * 7


def helper(y: Any) -> Any:
    return y if isinstance(y, Tensor) else -y


def deeper(y: Any) -> Any:
    return helper_of_type(y)


def helper_of_type(y: Any) -> Any:
    return y if type(y) is Tensor else -y


def match_class(m: Any, x: Any) -> Any:
    match m.a(x):
        case Tensor() as y:
            return y
        case y:
            return -y


def match_sequence(m: Any, x: Any) -> Any:
    match m.a(x).relu():
        case [y, *_]:
            return y
        case y:
            return -y


def raises_type_error(m: Any, x: Any) -> Any:
    y = m.a(x)
    try:
        n = int(y.sum() * 0 + 2)
    except TypeError:
        n = 5
    return y * n


def raises_on_bool(m: Any, x: Any) -> Any:
    y = m.a(x)
    try:
        return y if y.sum() * 0 == 0 else -y
    except Exception:
        return y * 5


def raises_on_len(m: Any, x: Any) -> Any:
    y = m.a(x)
    try:
        return y * len(y)
    except RuntimeError:
        return y * 50


def raises_on_iteration(m: Any, x: Any) -> Any:
    y = m.a(x)
    try:
        return torch.stack([row * i for i, row in enumerate(y)])
    except (TypeError, ValueError):
        return y * 50


def raises_attribute_error(m: Any, x: Any) -> Any:
    y = m.a(x)
    try:
        return y.logits
    except AttributeError:
        return y * 3


def by_numpy(m: Any, x: Any) -> Any:
    y = m.a(x)
    try:
        import numpy

        return y * float(numpy.asarray(y.detach()).max())
    except Exception:
        return y * 50


def writes_format(m: Any, x: Any) -> Any:
    y = m.a(x)
    return y * {"Proxy": 5}.get(f"{y.dim()}"[:5], 3)


def asks_string(m: Any, x: Any) -> Any:
    y = m.a(x)
    return y * (3 if str(y.dtype) == "torch.float64" else 5)


def asks_in_a_loop(m: Any, x: Any) -> Any:
    found = [m.a(x), (m.a(x), x), {"y": m.a(x)}, [x]]
    total = 0
    for item in found:
        if isinstance(item, Tensor):
            total = total + item
        elif isinstance(item, dict):
            total = total + 2 * item["y"]
        elif isinstance(item, tuple | list):
            total = total + 3 * item[0]
    return total


def asks_comprehension(m: Any, x: Any) -> Any:
    return sum(y * (i + 1) for i, y in enumerate([m.a(x), m.a(x).relu(), None]) if isinstance(y, Tensor))


def asks_with_a_choice(m: Any, x: Any) -> Any:
    y = m.a(x)
    return y if isinstance(y, Tensor if m.a else (list if m.a else tuple)) else -y


def is_dtype(m: Any, x: Any) -> Any:
    y = m.a(x)
    dtype = y.dtype
    return y if dtype is torch.float64 else -y


def pair(m: Any, x: Any) -> Any:
    y = m.p(x)
    return y.first if isinstance(y, Pair) else y[1] if isinstance(y, tuple) else y


def has_key(m: Any, x: Any) -> Any:
    y = m.p(x)
    return y["second"] if "second" in y else y["first"]


def views_where_it_can(m: Any, x: Any) -> Any:
    try:
        return m.a(x).view(6, 2, 2)
    except RuntimeError:
        return -m.a(x)


def copies(m: Any, x: Any) -> Any:
    y = copy.deepcopy(x)
    y += 1
    return m.a(y) + x


def gives_dictionary(y: Tensor, x: Tensor) -> Any:
    return {"first": y, "second": x}


def gives_output(y: Tensor, x: Tensor) -> Any:
    return Output(y, x)


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "isinstance Tensor": lambda m, x: y if isinstance(y := m.a(x), torch.Tensor) else -y,
    "isinstance of an input": lambda m, x: m.a(x) if isinstance(x, torch.Tensor) else m.a(x[0]),
    "isinstance tuple": lambda m, x: y[0] if isinstance(y := m.a(x), (tuple, list)) else y,
    "isinstance union": lambda m, x: y if isinstance(y := m.a(x), Tensor | list) else -y,
    "isinstance Parameter": lambda m, x: y if isinstance(y := m.a(x), nn.Parameter) else -y,
    "isinstance of a parameter": lambda m, x: m.a(x) if isinstance(m.a.weight, nn.Parameter) else -m.a(x),
    "isinstance of a sum": lambda m, x: y if isinstance(y := m.a(x) + x, Tensor) else -y,
    "isinstance of a method's": lambda m, x: y if isinstance(y := m.a(x).relu(), Tensor) else -y,
    "isinstance of a function's": lambda m, x: y if isinstance(y := torch.relu(m.a(x)), Tensor) else -y,
    "isinstance in a helper": lambda m, x: helper(m.a(x)),
    "isinstance in a comprehension": asks_comprehension,
    "isinstance in a loop": asks_in_a_loop,
    "isinstance of one of two classes": asks_with_a_choice,
    "isinstance with stars": lambda m, x: y if isinstance(*[y := m.a(x), Tensor]) else -y,
    "isinstance by another name": lambda m, x, ask=isinstance: y if ask(y := m.a(x), Tensor) else -y,
    "isinstance by map": lambda m, x: y if all(map(isinstance, [y := m.a(x)], [Tensor])) else -y,
    "isinstance Size": lambda m, x: m.a(x) if isinstance(x.shape, torch.Size) else -m.a(x),
    "isinstance tuple of a size": lambda m, x: m.a(x) if isinstance(x.size(), tuple) else -m.a(x),
    "isinstance int": lambda m, x: m.a(x) if isinstance(x.shape[0], int) else -m.a(x),
    "isinstance int of a sum": lambda m, x: m.a(x) if isinstance(x.size(0) * 2 + 1, int) else -m.a(x),
    "isinstance float": lambda m, x: m.a(x) if isinstance(x.size(0) / 2, float) else -m.a(x),
    "isinstance dtype": lambda m, x: m.a(x) if isinstance(x.dtype, torch.dtype) else -m.a(x),
    "isinstance of split's": lambda m, x: m.a(y[0] if isinstance(y := x.split(2), tuple) else x),
    "isinstance of max's": lambda m, x: m.a(x) * (2 if isinstance(y := x.max(1, keepdim=True), tuple) else y),
    "isinstance of max's number": lambda m, x: m.a(x) * (y if isinstance(y := x.max(), Tensor) else 2),
    "isinstance of item": lambda m, x: m.a(x) * (2 if isinstance(x.sum().item(), float) else 3),
    "isinstance Module": lambda m, x: m.a(x) if isinstance(m.a, nn.Linear) else -m.a(x),
    "issubclass": lambda m, x: m.a(x) if issubclass(type(x), Tensor) else -m.a(x),
    "is_tensor": lambda m, x: y if torch.is_tensor(y := m.a(x)) else -y,
    "is_tensor by name": lambda m, x: y if is_tensor(y := m.a(x)) else -y,
    "type is": lambda m, x: y if type(y := m.a(x)) is torch.Tensor else -y,
    "type ==": lambda m, x: y if type(y := m.a(x)) == torch.Tensor else -y,  # noqa: E721
    "type in": lambda m, x: y if type(y := m.a(x)) in (torch.Tensor, nn.Parameter) else -y,
    "type of what is none": lambda m, x: m.a(x) if type(m.a) is nn.Linear else -m.a(x),
    "type as a class": lambda m, x: m.a(x) if isinstance(Tensor, type) and issubclass(type(Tensor), type) else -m.a(x),
    "type's name": lambda m, x: y if type(y := m.a(x)).__name__ == "Tensor" else -y,
    "type in a helper": lambda m, x: helper_of_type(m.a(x)),
    "type in a helper's helper": lambda m, x: deeper(m.a(x)),
    "type as a key": lambda m, x: HANDLERS.get(type(y := m.a(x)), operator.neg)(y),
    "__class__": lambda m, x: y if (y := m.a(x)).__class__ is torch.Tensor else -y,
    "singledispatch": lambda m, x: dispatched(m.a(x)),
    "match class": match_class,
    "match sequence": match_sequence,
    "hasattr": lambda m, x: y.logits if hasattr(y := m.a(x), "logits") else y,
    "hasattr shape": lambda m, x: y if hasattr(y := m.a(x), "shape") else -y,
    "hasattr of an input": lambda m, x: m.a(x.data_of if hasattr(x, "data_of") else x),
    "getattr": lambda m, x: y if getattr(y := m.a(x), "logits", None) is None else y.logits,
    "getattr mark": lambda m, x: -y if getattr(y := m.a(x), "_marked", False) else y,
    "AttributeError": raises_attribute_error,
    "callable": lambda m, x: -y if callable(y := m.a(x)) else y,
    "iterable": lambda m, x: y if isinstance(y := m.a(x), Sequence) else -y,
    "None": lambda m, x: -y if (y := m.a(x)) is None else y,
    "grad": lambda m, x: m.a(x) if x.grad is None else -m.a(x),
    "torch.is_floating_point": lambda m, x: y if torch.is_floating_point(y := m.a(x)) else -y,
    "is_floating_point": lambda m, x: y if (y := m.a(x)).is_floating_point() else -y,
    "is_floating_point is": lambda m, x: y if (y := m.a(x)).is_floating_point() is True else -y,
    "dtype ==": lambda m, x: y if (y := m.a(x)).dtype == torch.float64 else -y,
    "dtype is": lambda m, x: y if (y := m.a(x)).dtype is torch.float64 else -y,
    "dtype is, by name": is_dtype,
    "dtype in a tuple": lambda m, x: y if (y := m.a(x)).dtype in (torch.float64, torch.float16) else -y,
    "dtype in a set": lambda m, x: y if (y := m.a(x)).dtype in {torch.float64, torch.float16} else -y,
    "dtype as a key": lambda m, x: (y := m.a(x)) * {torch.float64: 3}.get(y.dtype, 5),
    "requires_grad": lambda m, x: -y if (y := m.a(x)).requires_grad else y,
    "requires_grad is": lambda m, x: y if (y := m.a(x)).requires_grad is False else -y,
    "is_cuda": lambda m, x: -y if (y := m.a(x)).is_cuda else y,
    "device type": lambda m, x: y if (y := m.a(x)).device.type == "cpu" else -y,
    "device type in a set": lambda m, x: y if (y := m.a(x)).device.type in {"cpu", "xla"} else -y,
    "is_contiguous": lambda m, x: y if (y := m.a(x)).is_contiguous() else -y,
    "len": lambda m, x: m.a(x) * len(x),
    "dim": lambda m, x: m.a(x) if x.dim() == 2 else -m.a(x),
    "dim in a set": lambda m, x: m.a(x) if x.dim() in {2, 3} else -m.a(x),
    "size in a set": lambda m, x: m.a(x) if x.shape[1] in {4} else -m.a(x),
    "bool of a size": lambda m, x: m.a(x) if bool(x.shape[0] > 3) else -m.a(x),
    "TypeError": raises_type_error,
    "error of bool": raises_on_bool,
    "error of len": raises_on_len,
    "error of iteration": raises_on_iteration,
    "numpy": by_numpy,
    "format": writes_format,
    "str": asks_string,
    "torch.jit.is_tracing": lambda m, x: -m.a(x) if torch.jit.is_tracing() else m.a(x),
    "is_scripting": lambda m, x: -m.a(x) if torch.jit.is_scripting() else m.a(x),
    "error of a size": views_where_it_can,
    "deep copy": copies,
    "gradients": lambda m, x: -m.a(x) if torch.is_grad_enabled() else m.a(x),
    "in a list": lambda m, x: m.a(x) if any(v is x for v in [m, x]) else -m.a(x),
    "named tuple": pair,
    "tuple of a module": lambda m, x: y[0] if isinstance(y := m.p(x), tuple) else y,
    "tuple's length": lambda m, x: y[0] * len(y) if isinstance(y := m.p(x), tuple) else y,
    "part of a tuple": lambda m, x: y[0] if isinstance((y := m.p(x))[0], Tensor) else y[1],
    "unknown result": lambda m, x: y if isinstance(y := m.c(x), Tensor) else y[0],
    "unknown result's type": lambda m, x: y if type(y := m.c(x)) is Tensor else y[0],
    "unknown result's attribute": lambda m, x: y.logits if hasattr(y := m.c(x), "logits") else y,
    "unknown result's part": lambda m, x: (y := m.q(x))[0] + (0 if y[1] is None else 1),
    "unknown result's attribute is None": lambda m, x: (y := m.o(x)).logits + (0 if y.hidden is None else 1),
    "unknown mapping's value": lambda m, x: (y := m.d(x))["first"] + (0 if y.get("other") is None else 1),
}


# Those that only a call can answer, or that are asked in ways which cannot be told from operations.
STAY_PLAIN = frozenset(
    ("isinstance of one of two classes", "isinstance with stars", "isinstance by another name", "isinstance by map",
     "isinstance of item", "grad", "torch.is_floating_point", "is_floating_point", "is_floating_point is",
     "dtype ==", "dtype is", "dtype is, by name", "dtype in a tuple", "dtype in a set", "dtype as a key",
     "requires_grad", "requires_grad is", "is_cuda", "device type", "device type in a set", "is_contiguous", "len",
     "dim", "dim in a set", "size in a set", "bool of a size", "TypeError", "error of bool", "error of len",
     "error of iteration", "numpy", "error of a size", "deep copy", "gradients", "format", "str",
     "match sequence", "AttributeError", "in a list")
)  # fmt: skip


def model_for(name: str) -> nn.Module:
    torch.manual_seed(0)
    make = Pair if name == "named tuple" else lambda y, x: (y, x)
    children = {"a": nn.Linear(4, 4), "p": Split(make), "c": Chooses(), "q": Chooses(lambda y: (y, None)),
                "o": Chooses(Output), "d": Chooses(lambda y: {"first": y})}  # fmt: skip
    return model_of(CASES[name], **children)


def compare(fast: nn.Module, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(fast(*args, **kwargs), model(*args, **kwargs))


@pytest.mark.parametrize("with_example", (False, True), ids=["without example", "with example"])
@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(name: str, with_example: bool) -> None:
    model = model_for(name)
    fast = compile_graph(model, (image(6, 4),) if with_example else None)
    if not with_example:
        assert (WHOLE in fast.leaves) == (name in STAY_PLAIN or name.startswith("unknown")), fast.leaves
    for size in (6, 3, 6):
        compare(fast, model, image(size, 4, seed=size))


# TorchDynamo itself goes another way there than eager, with every backend.
DYNAMO_DIFFERS = frozenset(("AttributeError", "error of a size"))


@pytest.mark.parametrize("name", sorted(CASES.keys() - DYNAMO_DIFFERS)[::5])
def test_as_in_eager_through_torch_compile(name: str) -> None:
    torch._dynamo.reset()
    model = model_for(name)
    fast = torch.compile(model, backend="zendnn")
    for size in (6, 3, 6):
        compare(fast, model, image(size, 4, seed=size))


def test_a_message_of_an_assertion_writes_values_out() -> None:
    def forward(m: Any, x: Any) -> Any:
        torch._assert(x.shape[1] == 4, f"{x.shape} is no [N, 4]")
        return m.a(x)

    fast = compile_graph(model_of(forward, a=nn.Linear(4, 4)))
    assert not fast.leaves


@pytest.mark.parametrize("ask", (lambda x: isinstance(x, Tensor), lambda x: type(x) is Tensor, torch.is_tensor))
@pytest.mark.parametrize("with_example", (False, True), ids=["without example", "with example"])
def test_an_argument_of_another_kind(ask: Callable[[Any], bool], with_example: bool) -> None:
    """The graph is for tensors: lists take the way that the model has for them."""
    model = model_of(lambda m, x: m.a(x) if ask(x) else m.b(x[0]) + m.a(x[1]), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    fast = compile_graph(model, (image(6, 4),) if with_example else None)
    compare(fast, model, image(3, 4))
    compare(fast, model, [image(3, 4), image(3, 4, seed=2)])
    compare(fast, model, image(5, 4))


def test_an_example_that_is_no_tensor() -> None:
    def forward(m: Any, x: Any) -> Any:
        first = x["first"] if isinstance(x, dict) else x
        return m.a(first) if x.get("other") is None else m.a(x["other"])

    model = model_of(forward, a=nn.Linear(4, 4))
    one, two = image(3, 4), image(3, 4, seed=2)
    for example in ({"first": one}, {"first": one, "other": two}, {"first": one, "other": None}):
        fast = compile_graph(model, (example,))
        for arguments in ({"first": one}, {"first": one, "other": two}, {"first": two, "other": None}):
            compare(fast, model, arguments)


def test_an_argument_that_is_none_after_all() -> None:
    """A required argument that forward compares with None, and that a call leaves out by None."""
    model = model_of(lambda m, x, y: m.a(x) if y is None else m.a(x) + y, a=nn.Linear(4, 4))
    for example in (None, (image(3, 4), image(3, 4)), (image(3, 4), None)):
        fast = compile_graph(model, example)
        compare(fast, model, image(3, 4), image(3, 4, seed=2))
        compare(fast, model, image(3, 4), None)


def test_defaults_that_no_code_can_write() -> None:
    def forward(m: Any, x: Any, activation: Any = torch.relu, scale: Any = torch.ones(4).double()) -> Any:  # noqa: B008
        return activation(m.a(x)) * scale

    model = model_of(forward, a=nn.Linear(4, 4))
    for example in (None, (image(3, 4),)):
        fast = compile_graph(model, example)
        compare(fast, model, image(3, 4))
        compare(fast, model, image(3, 4), torch.tanh)
        compare(fast, model, image(3, 4), torch.tanh, torch.full((4,), 3.0).double())


def test_python_has_its_own_names_back() -> None:
    before = dict(globals())
    compile_graph(model_for("type is"))
    assert {name: globals().get(name) for name in before} == before and "type" not in globals()


def test_classes_are_made_as_before_while_one_traces() -> None:
    def forward(m: Any, x: Any) -> Any:
        class Meta(type):
            pass

        class Of(metaclass=Meta):
            pass

        named, number = type("Named", (), {}), int("3")
        assert named.__module__ == __name__ and type(named).__name__ == "type" and Meta.__bases__[0].__name__ == "type"
        assert isinstance(Of, type) and isinstance(Of, Meta)
        assert type(number) is int and callable(len) and not callable(3)
        return m.a(x) if type(x) is Tensor else -m.a(x)

    model = model_of(forward, a=nn.Linear(4, 4))
    fast = compile_graph(model)
    assert not fast.leaves
    compare(fast, model, image(3, 4))


EXPORTED: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "isinstance int": lambda m, x: m.t(x) if isinstance(x.shape[0], int) else -m.t(x),
        "isinstance of either": lambda m, x: m.t(x) if isinstance(x.shape[0], (tuple, int)) else -m.t(x),
        "isinstance tuple": lambda m, x: -m.t(x) if isinstance(x.shape[0], tuple) else m.t(x),
        "isinstance float": lambda m, x: m.t(x) if isinstance(x.shape[0] / 2, float) else -m.t(x),
        "type": lambda m, x: m.t(x) if type(x.shape[0]) is int else -m.t(x),
        "Tensor": lambda m, x: m.t(x) if isinstance(x, Tensor) and type(x) is Tensor else -m.t(x),
    }
)


@pytest.mark.parametrize("name", EXPORTED)
def test_as_in_eager_of_sizes_that_torch_export_keeps_free(name: str) -> None:
    model = model_of(EXPORTED[name], t=nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)).double().eval()
    fast = compile_graph(model, (image(2, 6, 4),))
    assert not fast.leaves
    for sizes in ((2, 6, 4), (3, 5, 4)):
        compare(fast, model, image(*sizes))


@pytest.mark.parametrize("with_example", (False, True), ids=["without example", "with example"])
def test_code_that_asks_for_gradients(with_example: bool) -> None:
    model, x = model_for("gradients"), image(6, 4)
    own = torch.is_grad_enabled
    fast = compile_graph(model, (x,) if with_example else None)
    assert torch.is_grad_enabled is own
    for enabled in (True, False, True):
        with torch.set_grad_enabled(enabled):
            torch.testing.assert_close(fast(x).detach(), model(x).detach())


class OfArrays(nn.Module):
    """The class has an array, which compares number by number."""

    MEAN = np.array([0.1, 0.2, 0.3, 0.4])

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_class_may_have_an_array() -> None:
    model = OfArrays().double().eval()
    fast = compile_graph(model)
    assert not fast.leaves
    compare(fast, model, image(6, 4))
