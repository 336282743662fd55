"""Models return objects of the same classes as before, by every way to a graph."""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from transformers.utils import ModelOutput

import zendnn_cffi
from fx_passes.pipeline import compile_graph
from tests.support.exported import needs_export
from tests.support.lowering import noise
from tests.tolerance import assert_close
from zendnn_cffi import backend


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Record:
    first: Tensor
    second: Tensor | None = None
    names: list[str] = dataclasses.field(default_factory=list, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    first: Tensor
    scale: float = 2.0


@dataclasses.dataclass
class Output(ModelOutput):
    logits: Tensor | None = None
    hidden: Tensor | None = None


class Named(dict[str, Any]):
    """A dictionary with an attribute."""

    def __init__(self, name: str, **items: Any) -> None:
        super().__init__(items)
        self.name = name


class Many(list[Any]):
    """A list with a class of its own."""


class Ordered(OrderedDict[str, Any]):
    """An OrderedDict with a class of its own."""


def _record(y: Tensor) -> Record:
    record = Record(y)
    record.names = ["set", "later"]
    return record


CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "OrderedDict": lambda y: OrderedDict(out=y, aux=y + 1.0),
    "OrderedDict in a tuple": lambda y: (y, {"all": [OrderedDict(b=y, a=3)]}),
    "of an OrderedDict": lambda y: Ordered(b=y, a=y + 1.0),
    "defaultdict": lambda y: defaultdict(list, {"a": y}),
    "dict with an attribute": lambda y: Named("text", a=y),
    "list of its own class": lambda y: Many([y, (y + 1.0,)]),
    "deque": lambda y: deque([y, y + 1.0], maxlen=3),
    "dict with keys of classes": lambda y: {Color.RED: y, torch.float32: 1, (1, "a"): y + 1.0, 2: None},
    "named tuple of PyTorch's": lambda y: torch.return_types.max((y, y + 1.0)),  # type: ignore[attr-defined]
    "named tuple": lambda y: Pair(y, y + 1.0),
    "dataclass": _record,
    "dataclass with slots": lambda y: Slotted(y),
    "enumeration in a dataclass": lambda y: Record(y, second=Color.RED),  # type: ignore[arg-type]
    "ModelOutput": lambda y: Output(logits=y),
    "ModelOutput in a dataclass": lambda y: Record(y, second=Output(y, y + 1.0)),  # type: ignore[arg-type]
}


class Model(nn.Module):
    def __init__(self, arrange: Callable[[Tensor], Any], *, branches: bool) -> None:
        super().__init__()
        self.linear, self.arrange, self.branches = nn.Linear(8, 8), arrange, branches

    def forward(self, x: Tensor) -> Any:
        if self.branches:
            assert needs_export(x)  # symbolic tracing ends here
        return self.arrange(self.linear(x))


def opened(value: Any) -> Any:
    """value as (class, what it holds), tensors left out."""
    if isinstance(value, Tensor):
        return Tensor
    held: list[Any] = [type(value)]
    if isinstance(value, dict):
        held += [(key, opened(item)) for key, item in value.items()]
    elif isinstance(value, list | tuple | deque):
        held += [opened(item) for item in value]
    elif not dataclasses.is_dataclass(value):
        held.append(value)
    if dataclasses.is_dataclass(value):
        held += [(field.name, opened(getattr(value, field.name))) for field in dataclasses.fields(value)]
    held += [getattr(value, "name", None), getattr(value, "maxlen", None), getattr(value, "default_factory", None)]
    return held


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, list | tuple | deque):
        for item in value:
            yield from tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name))


def check(module: Any, model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        actual, expected = module(x), model(x)
    assert opened(actual) == opened(expected)
    pairs = list(zip(tensors(actual), tensors(expected), strict=True))
    assert pairs
    for mine, theirs in pairs:
        assert_close(mine, theirs, k=8)


@pytest.mark.parametrize("branches", [False, True], ids=["symbolic", "exported"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_keep_their_class(name: str, branches: bool) -> None:
    model = Model(CONTAINERS[name], branches=branches).eval()
    gm = compile_graph(model, (noise(3, 8),) if branches else None)
    assert not gm.leaves
    for module in (gm, copy.deepcopy(gm)):
        for rows in (3, 5):
            check(module, model, noise(rows, 8))
    assert gm(noise(3, 8)) is not gm(noise(3, 8))


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_through_torch_compile(name: str) -> None:
    backend.register()
    torch._dynamo.reset()
    model = Model(CONTAINERS[name], branches=False).eval()
    module = torch.compile(model, backend="zendnn", options={"tune": "off"})
    for rows in (3, 5):
        check(module, model, noise(rows, 8))
    torch._dynamo.reset()


class Result(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return OrderedDict(out=torch.relu_(self.conv(x)), size=x.shape[-2:])


def test_a_container_writes_to_nothing() -> None:
    """The in-place relu before it becomes the convolution's post-op, and explain() says what the node is."""
    gm = zendnn_cffi.optimize(Result().eval(), tune="off")
    x = noise(1, 3, 4, 4)
    assert list(gm(x)) == ["out", "size"]
    explanation = zendnn_cffi.explain(gm)
    assert [node.became for node in explanation.nodes if "OrderedDict" in node.source] == ["container"]
    assert [node.post_ops for node in explanation.nodes if node.became == "convolution"] == [("relu",)]


class Levels(nn.Module):
    """Returns each level, and goes on from it; in place, as torchvision's backbones."""

    def __init__(self, together: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)])
        self.act, self.together = nn.Hardswish(inplace=True), together

    def forward(self, x: Tensor) -> Any:
        first = self.act(self.convs[0](x))
        second = self.convs[1](first)
        return self.together(first, second)


def _shown(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Any]:
    return lambda first, second: OrderedDict(first=first, view=second.flatten(1), second=act(second))


LEVELS: dict[str, tuple[Callable[[Tensor, Tensor], Any], int]] = {
    "levels": (lambda a, b: OrderedDict(a=a, b=F.hardswish(b, True)), 0),
    "one level twice": (lambda a, b: OrderedDict(a=a, b=b, c=F.hardswish(b, True)), 0),
    "a view that the write reaches": (_shown(lambda b: F.hardswish(b, True)), 2),
}


@pytest.mark.parametrize("case", LEVELS)
def test_values_that_are_returned_together_share_no_memory(case: str) -> None:
    """Each is computed out of place, in one region; not where a view of it sees the write."""
    together, outside = LEVELS[case]
    model = Levels(together).eval()
    gm = zendnn_cffi.optimize(model, tune="off")
    x = noise(1, 3, 4, 4)
    with torch.no_grad():
        ours, eager = gm(x), model(x)
    assert [*ours] == [*eager]
    for name, value in eager.items():
        assert_close(ours[name], value, k=4)
    left = [node for node in zendnn_cffi.explain(gm).nodes if node.computes and not node.region]
    assert len(left) == outside and len(gm.regions()) == 1


def test_containers_are_pickled() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm = pickle.loads(pickle.dumps(compile_graph(Result().eval())))
    assert type(gm(noise(1, 3, 4, 4))) is OrderedDict


def test_what_cannot_be_made_again_stays_whole() -> None:
    model = Model(lambda y: Named("text", y=y, f=lambda: y), branches=False).eval()
    gm = compile_graph(model)
    assert "in the output" in gm.leaves[""]
    assert type(gm(noise(3, 8))) is Named


@pytest.mark.parametrize("branches", [False, True], ids=["symbolic", "exported"])
def test_a_parameter_that_forward_makes_is_one(branches: bool) -> None:
    model = Model(lambda y: nn.Parameter(y, requires_grad=False), branches=branches).eval()
    gm = compile_graph(model, (noise(3, 8),) if branches else None)
    assert type(gm(noise(3, 8))) is nn.Parameter
    check(gm, model, noise(5, 8))


@pytest.mark.parametrize("branches", [False, True], ids=["symbolic", "exported"])
def test_a_model_that_returns_itself(branches: bool) -> None:
    model = Model(lambda y: None, branches=branches).eval()
    model.arrange = lambda y: (y, model)
    gm = compile_graph(model, (noise(3, 8),) if branches else None)
    first, second = gm(noise(3, 8))
    assert_close(first, model(noise(3, 8))[0], k=8)
    assert isinstance(second, Model)


def test_a_container_that_looks_at_what_it_gets() -> None:
    model = Model(lambda y: y, branches=False).eval()
    model.forward = lambda p: PackedSequence(model.linear(p.data), p.batch_sizes)  # type: ignore[method-assign]
    packed = pack_padded_sequence(noise(2, 5, 8), torch.tensor([5, 3]), batch_first=True)
    check(compile_graph(model, (packed,)), model, packed)  # type: ignore[arg-type]


class Detached(nn.Module):
    """torch.export has to trace it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        if needs_export(x) and len(x) > 9:
            return x
        y = self.layer(x)
        return x.detach(), y, y.detach(), torch.relu(y.detach())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_detached_result_is_another_object(dtype: torch.dtype | None) -> None:
    model, x = Detached().eval(), torch.randn(2, 4)
    fast: Any = zendnn_cffi.optimize(model, (x.clone(),), tune="off", dtype=dtype)
    with torch.no_grad():
        got, expected = fast(x), model(x)
    assert got[0] is not x and got[2] is not got[1]
    assert [got[0].data_ptr(), got[2].data_ptr()] == [x.data_ptr(), got[1].data_ptr()]
    for mine, theirs in zip(got, expected, strict=True):
        assert_close(mine, theirs, k=4, dtype=dtype or torch.float32)
    assert len(fast.regions()) == 1
