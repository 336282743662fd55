"""In-place operations: out of place where nobody can tell, left alone everywhere else."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import zendnn_cffi  # noqa: F401 - the backend
from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.aliasing.effects import aliases, writes
from fx_passes.pipeline import compile_graph
from tests.support.graphs import check, check_equal, count, image, model_of, outside, traced

aten = torch.ops.aten
CONV = nn.Conv2d(3, 3, 3, padding=1)


def _residual(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.c(x)
    y += x
    return y


def _old_name(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.c(x)
    F.relu(y, inplace=True)
    return y * 2


def _chain(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.c(x)
    y += x
    y = m.r(y).mul_(2)
    return y.add_(1)


def _augmented_sizes(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.c(x)
    n = y.size(0)
    n *= 3
    n += 0
    return y.reshape(n, -1)


def _view_made_after(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.c(x).relu_()
    z = y.flatten(1)
    return z.tanh_() if False else z


CONVERTED: dict[str, Callable[..., Any]] = {
    "nn.ReLU": lambda m, x: m.r(m.c(x)),
    "F.relu": lambda m, x: F.relu(m.c(x), inplace=True),
    "F.relu by position": lambda m, x: F.relu(m.c(x), True),
    "torch.relu_": lambda m, x: torch.relu_(m.c(x)),
    "method": lambda m, x: m.c(x).relu_(),
    "clamp_": lambda m, x: m.c(x).clamp_(-1, 1),
    "+= of a tensor": _residual,
    "readers of the old name": _old_name,
    "one after the other": _chain,
    "a view made afterwards": _view_made_after,
    "dropout in place does nothing": lambda m, x: F.dropout(m.c(x), 0.5, False, True),
    "numbers": _augmented_sizes,
    "leaky": lambda m, x: F.leaky_relu_(m.c(x), 0.1),
    "hardtanh": lambda m, x: F.hardtanh(m.c(x), -1.0, 1.0, True),
    "mul_ of a number": lambda m, x: m.c(x).mul_(3),
    "**= of a tensor": lambda m, x: operator.ipow(m.c(x), 2),
}


@pytest.mark.parametrize("case", CONVERTED)
def test_becomes_out_of_place(case: str) -> None:
    gm = check(model_of(CONVERTED[case], c=CONV, r=nn.ReLU(inplace=True)), image())
    assert not outside(gm), gm.graph


def _view_read_later(m: Any, x: torch.Tensor) -> Any:
    y = m.c(x)
    z = y.flatten(1)
    y.relu_()
    return z


def _written_through_a_view(m: Any, x: torch.Tensor) -> Any:
    y = m.c(x)
    y[:, 0].zero_()
    return y.relu()


def _setitem(m: Any, x: torch.Tensor) -> Any:
    y = m.c(x)
    y[:, 0] = 1.0
    return y.relu()


def _both_views(m: Any, x: torch.Tensor) -> Any:
    a, b = m.c(x).chunk(2, 0)
    a.relu_()
    return a, b


def _read_before_and_after(m: Any, x: torch.Tensor) -> Any:
    before = m.c(x)
    x.add_(1)
    return before, m.c(x)


def _buffer(m: Any, x: torch.Tensor) -> Any:
    m.steps.add_(1)
    return m.c(x) * m.steps


def _parameter(m: Any, x: torch.Tensor) -> Any:
    w = m.c.weight
    w.mul_(2)
    return F.conv2d(x, w)


def _unknown_dtype(m: Any, x: torch.Tensor) -> Any:
    y = x * 2
    y += m.other
    return y.relu()


def _foreign(x: torch.Tensor) -> torch.Tensor:
    x[0] = 7.0
    return x.sum()


torch.fx.wrap("_foreign")


def _somebody_elses_function(m: Any, x: torch.Tensor) -> Any:
    y = m.c(x)
    z = y.relu()
    s = _foreign(y)
    return z, y.relu(), s


def _augmented_input(m: Any, x: torch.Tensor) -> Any:
    x += 1
    return m.c(x)


def _augmented(alias: Callable[[torch.Tensor], Any], change: str = "+=") -> Callable[..., Any]:
    """A name for the same memory, changed and not read any more."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.c(x)
        z = alias(y)
        if change == "+=":
            z += 1
        elif change == "-=":
            z -= 1
        else:
            z *= 3
        return m.c(y)

    return forward


AUGMENTED: dict[str, Callable[..., Any]] = {
    "+= on a view": _augmented(lambda y: y.view(-1)),
    "-= on a part": _augmented(lambda y: y[0], "-="),
    "*= on a part": _augmented(lambda y: y[:, :1, 1:], "*="),
    "+= on detach()": _augmented(lambda y: y.detach()),
    "+= on .data": _augmented(lambda y: y.data),
    "+= on an array": _augmented(lambda y: y.detach().numpy()),
    "*= on a part of an array": _augmented(lambda y: y.detach().numpy()[0], "*="),
}


@pytest.mark.parametrize("entry", ("symbolic", "example", "compile"))
@pytest.mark.parametrize("case", AUGMENTED)
def test_augmented_assignment_to_another_name(case: str, entry: str) -> None:
    """Nobody reads the other name again; the memory is read."""
    eager = model_of(AUGMENTED[case], c=CONV)
    x = image()
    with torch.no_grad():
        expected = eager(x)
        if entry == "compile":
            torch._dynamo.reset()
            fast: Any = torch.compile(eager, backend="zendnn", options={"tune": "off"})
        else:
            fast = compile_graph(eager, (x,) if entry == "example" else None)
        for _ in range(2):
            torch.testing.assert_close(fast(x), expected)


LEFT: dict[str, Callable[..., Any]] = {
    "+= on a graph input": _augmented_input,
    "a graph input": lambda m, x: x.relu_(),
    "a view of a graph input": lambda m, x: (x.flatten(1).relu_(), x)[0],
    "a module on a graph input": lambda m, x: m.c(m.r(x)),
    "a view that is read later": _view_read_later,
    "through a view": _written_through_a_view,
    "setitem": _setitem,
    "one of two chunks": _both_views,
    "a graph input read before and after": _read_before_and_after,
    "a buffer": _buffer,
    "a parameter": _parameter,
    "an operand of unknown dtype": _unknown_dtype,
    "a function nobody knows": _somebody_elses_function,
}


@pytest.mark.parametrize("case", LEFT)
def test_stays_in_place(case: str) -> None:
    model = model_of(LEFT[case], c=CONV, r=nn.ReLU(inplace=True))
    model.register_buffer("steps", torch.zeros(1, dtype=torch.float64))
    model.register_buffer("other", torch.ones(7, dtype=torch.float32))
    gm = check(model, image())
    assert sum(outside(gm).values()) >= 1


def test_the_dtype_of_the_first_operand_is_kept() -> None:
    """out += residual in bfloat16 stays bfloat16, where bfloat16 + float64 would not."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m.c(x)
        z += y
        return z

    model = model_of(forward, c=nn.Conv2d(3, 3, 1)).float()
    gm = check(model, image().float(), image())
    assert gm(image().float(), image()).dtype == torch.float32


def test_buffers_that_are_counted_up_are_not_constants() -> None:
    model = model_of(_buffer, c=CONV)
    model.register_buffer("steps", torch.zeros(1, dtype=torch.float64))
    gm = compile_graph(model)
    x = image()
    torch.testing.assert_close(gm(x) * 2, gm(x))


def test_a_fusion_does_not_carry_a_read_past_a_write() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.c(x)
        x.zero_()
        return y.relu()

    gm = check(model_of(forward, c=CONV), image())
    assert count(gm)["convolution"] == 1


def test_sizes_are_no_memory() -> None:
    """Values that take their shape from one size share nothing: Twins was cut into 38 regions for it."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        n, channels, height, width = x.shape
        y = torch.ops.aten.view.default(m.c(x), [n, channels, height * width])
        z = torch.ops.aten.view.default(m.c(x * 2), [n, channels, height * width])
        return torch.ops.aten.add_.Tensor(y, z)

    gm = check(model_of(forward, c=nn.Conv2d(3, 3, 3, padding=1)), image())
    assert not set(outside(gm)) - {"size", "mul"}


def test_an_operator_shares_the_memory_its_schema_says() -> None:
    """The second operand of an addition in place is only read."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        y, z = m.c(x), m.c(x * 2)
        return torch.ops.aten.add_.Tensor(y, z), z.relu()

    assert not outside(check(model_of(forward, c=nn.Conv2d(3, 3, 1)), image()))


def test_a_router_shares_no_memory_with_what_it_looks_at() -> None:
    """As mixtures of experts: what is chosen, sorted and counted are new tensors, and so is what they index."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        flat = m.c(x).flatten(1)
        weights, chosen = torch.topk(m.r(flat), 2)
        weights /= weights.sum(-1, keepdim=True)
        order = torch.argsort(chosen.reshape(-1), stable=True)
        counts = torch.cumsum(torch.bincount(chosen.reshape(-1), minlength=4), 0)
        back = torch.empty_like(order)
        back.copy_(order // 2)
        return m.r(flat[back % 2]) * weights.reshape(-1, 1), counts

    gm = check(model_of(forward, c=nn.Conv2d(3, 3, 3, padding=1), r=nn.Linear(189, 4)), image())
    assert not {"flatten", "convolution", "linear"} & set(outside(gm))


FRESH: dict[str, Callable[..., Any]] = {  # a value made inside, written to in place: nobody can tell
    "views made afterwards": lambda m, x: (y := torch.cumsum(m.c(x), 0), y.add_(x), y[..., ::2] * y[..., 1::2])[2],
    "a piece of several results": lambda m, x: (
        t := torch.topk(m.c(x).flatten(1), 2), w := t[0], i := t[1], w.div_(w.sum(-1, keepdim=True)), w * i
    )[4],
    "indices of a table": lambda m, x: (
        i := torch.cumsum(torch.ones_like(x[0, 0], dtype=torch.int64), 0), i.add_(i), F.embedding(i % 3, m.e.weight)
    )[2],
}  # fmt: skip
SEEN: dict[str, Callable[..., Any]] = {
    "a view made before": lambda m, x: (y := torch.cumsum(m.c(x), 0), z := y[..., 1:], y.add_(x), z * 1)[3],
    "a view of a view made before": lambda m, x: (
        y := torch.cumsum(m.c(x), 0), z := y[0], y.add_(x), z[1] * y[1, 1]
    )[3],
    "the same piece taken out twice": lambda m, x: (
        t := torch.topk(m.c(x).flatten(1), 2), w := t[0], v := t[0], w.mul_(3), w + v
    )[4],
    "several results seen together": lambda m, x: (
        t := torch.topk(m.c(x).flatten(1), 2), w := t[0], w.mul_(3), torch.cat(t[:1], 0) + w
    )[3],
}  # fmt: skip


class Lambda(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.c, self.e = function, nn.Conv2d(3, 3, 3, padding=1), nn.Embedding(3, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def in_place(function: Callable[..., Any]) -> int:
    """How many nodes write, of a graph that has examples, when all that nobody can tell is out of place."""
    torch.manual_seed(0)
    model, x = Lambda(function).eval(), image(2, 3, 4, 4).float()
    gm = traced(model, x)
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x))
    return len(Aliasing(gm).writers)


@pytest.mark.parametrize("case", FRESH)
def test_writes_to_values_made_inside_are_out_of_place(case: str) -> None:
    assert in_place(FRESH[case]) == 0


@pytest.mark.parametrize("case", SEEN)
def test_writes_that_another_name_shows_stay(case: str) -> None:
    assert in_place(SEEN[case]) == 1


WIDE = torch.linspace(0, 1, 7, dtype=torch.float64)
OTHER_DTYPES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "clamp_": lambda y, wide: y.clamp_(min=wide),
    "clip_, the last limit": lambda y, wide: y.clip_(wide.float() - 1, wide),
    "clamp_, as an operator": lambda y, wide: aten.clamp_.Tensor(y, wide),
    "addcmul_, as an operator": lambda y, wide: aten.addcmul_.default(y, wide, wide),
    "lt_, as an operator": lambda y, wide: aten.lt_.Scalar(y, 0.5),
}


@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_what_is_written_to_keeps_its_dtype(name: str) -> None:
    """Out of place, the results would be float64, or answers."""

    def write(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(m.c(x))
        OTHER_DTYPES[name](y, m.wide)
        return y

    def write_alike(m: Any, x: torch.Tensor) -> torch.Tensor:
        return write(m, x) if name.startswith("lt_") else OTHER_DTYPES[name](torch.relu(m.c(x)), m.wide.float())

    for function, left in ((write, 1), (write_alike, name.startswith("lt_"))):
        model = model_of(function, c=nn.Linear(7, 7)).float()
        model.register_buffer("wide", WIDE)
        x = image(3, 7).float()
        gm = traced(model, x)
        with torch.no_grad():
            torch.testing.assert_close(gm(x), model(x))
        assert len(Aliasing(gm).writers) == left


def test_views_that_no_schema_names_share_memory() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.c(x)
        seen = (
            torch.atleast_1d(y),
            *torch.meshgrid(y[0, 0, 0], y[0, 0, 1], indexing="ij"),
            torch.einsum("abcd->dcba", y),
        )
        y.relu_()
        return seen

    check(model_of(forward, c=nn.Conv2d(3, 3, 3, padding=1)), image())


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "movedim": lambda y: y.movedim(1, -1),
    "moveaxis": lambda y: torch.moveaxis(y, 1, -1),
    "einsum": lambda y: torch.einsum("abcd->dcba", y),
    "einsum, operands in a list": lambda y: torch.einsum("abcd->dcba", [y]),
    "atleast_3d": torch.atleast_3d,
    "cartesian_prod": lambda y: torch.cartesian_prod(y[0, 0, 0]),
    "feature_dropout": lambda y: torch.feature_dropout(y, 0.5, False),
    "feature_dropout, as an operator": lambda y: aten.feature_dropout.default(y, 0.5, False),
    "conj_physical, as an operator": lambda y: aten.conj_physical.default(y),
    "cartesian_prod, as an operator": lambda y: aten.cartesian_prod.default([y[0, 0, 0]]),
    "einsum, as an operator": lambda y: aten.einsum.default("abcd->dcba", [y]),
    "a piece, as an operator": lambda y: aten.unsafe_chunk.default(y, 3, 1)[1],
}


@pytest.mark.parametrize("exported", (False, True))
@pytest.mark.parametrize("of_input", (False, True))
@pytest.mark.parametrize("view", VIEWS)
def test_writes_show_in_views_and_through_them(view: str, of_input: bool, exported: bool) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = x if of_input else m.c(x)
        seen = VIEWS[view](y)
        y.mul_(2.0)
        VIEWS[view](y).add_(1.0)
        return seen * 1, y * 1

    model = model_of(forward, c=nn.Conv2d(3, 3, 3, padding=1))
    check_equal(model, compile_graph(model, (image(),) if exported else None), image())


@pytest.mark.parametrize(
    "new", (lambda y: torch.einsum("abcd,abcd->abcd", y, y), lambda y: y.movedim(1, -1) + 1), ids=("einsum", "sum")
)
def test_what_is_made_of_views_is_no_view(new: Callable[..., Any]) -> None:
    assert in_place(lambda m, x: new(x).mul_(2.0)) == 0


FUNCTIONS_IN_PLACE = {
    name: list(parameters)
    for name, function in vars(F).items()
    if inspect.isfunction(function) and "inplace" in (parameters := inspect.signature(function).parameters)
}


@pytest.mark.parametrize("name", FUNCTIONS_IN_PLACE)
def test_every_function_in_place_by_position_writes(name: str) -> None:
    """As layers call them: nn.CELU calls F.celu(input, alpha, inplace)."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    place = FUNCTIONS_IN_PLACE[name].index("inplace")
    written = graph.call_function(getattr(F, name), (x, *(0.5,) * (place - 1), True))
    reads = graph.call_function(getattr(F, name), (x, *(0.5,) * (place - 1), False))
    assert writes(written, nn.Module()) == aliases(written, nn.Module()) == [x]
    assert not writes(reads, nn.Module())


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "celu": lambda y: F.celu(y, 1.0, True),
    "rrelu": lambda y: F.rrelu(y, 0.1, 0.3, False, True),
    "threshold": lambda y: F.threshold(y, 0.5, 0.25, True),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_readers_behind_an_activation_in_place_read_its_result(name: str) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.a(x)
        z = ACTIVATIONS[name](y)
        return z.flip(0), m.b(y)

    check(model_of(forward, a=nn.Linear(7, 7), b=nn.Linear(7, 7)), image(3, 7))


class Branching(nn.Module):
    """A module that cannot be traced; it reads its argument, or writes to it."""

    def __init__(self, writing: bool) -> None:
        super().__init__()
        self.writing = writing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e9:
            return x
        return x.mul_(2) + 1 if self.writing else x.exp()


def _hooked() -> nn.Module:
    relu = nn.ReLU(inplace=True)
    relu.register_forward_hook(lambda module, args, result: result + 1)
    return relu


class Keeping(nn.Module):
    """A module that cannot be traced; it returns a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(3, 7))

    def forward(self, x: torch.Tensor) -> Any:
        return x if x.sum() > 1e9 else self.kept


@fx.wrap
def _kept_by_a_function(x: torch.Tensor) -> torch.Tensor:
    return _KEPT


_KEPT = torch.ones(3, 7, dtype=torch.float64)
OWNERS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "buffer": lambda m, x: m.u(x),
    "function": lambda m, x: _kept_by_a_function(x),
}
WRITES: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "+=": lambda m, y, x: operator.iadd(y, x),
    "method": lambda m, y, x: y.add_(x),
    "function": lambda m, y, x: F.leaky_relu(y.sub_(2), 0.5, inplace=True),
    "module": lambda m, y, x: m.r(operator.isub(y, x)),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("owner", OWNERS)
def test_what_somebody_else_keeps_is_written_to(owner: str, write: str) -> None:
    """Each call finds what the one before left there."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.b(WRITES[write](m, OWNERS[owner](m, m.a(x)), x))

    model = model_of(forward, a=nn.Linear(7, 7), b=nn.Linear(7, 7), u=Keeping(), r=nn.ReLU(inplace=True))
    eager = copy.deepcopy(model)
    gm = compile_graph(model)
    found = []
    for each in (eager, gm):
        _KEPT.fill_(1)
        with torch.no_grad():
            found.append([each(image(3, 7)) for _ in range(3)])
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(gm.get_buffer("u.kept"), eager.u.kept)
    torch.testing.assert_close(model.u.kept, torch.ones_like(model.u.kept))


def test_what_a_hook_keeps_is_written_to() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x)
        y += 100
        return m.b(y)

    model = model_of(forward, a=nn.Linear(7, 7), b=nn.Linear(7, 7))
    kept: list[torch.Tensor] = []
    model.a.register_forward_hook(lambda module, args, result: kept.append(result))
    found = []
    for each in (model, compile_graph(model)):
        with torch.no_grad():
            each(image(3, 7))
        found.append(kept[-1])
    torch.testing.assert_close(found[1], found[0])


def test_a_table_whose_rows_are_scaled_is_no_constant() -> None:
    """With max_norm, reading rows writes to them: the product before read others."""

    def forward(m: Any, i: torch.Tensor) -> Any:
        doubled = m.table * 2
        rows = F.embedding(i, m.table, max_norm=0.5)
        bags = F.embedding_bag(i.reshape(1, -1), m.table, max_norm=0.25)
        return F.linear(m.a(rows), doubled), F.linear(bags, m.table)

    model = model_of(forward, a=nn.Linear(7, 7))
    model.table = nn.Parameter(torch.randn(9, 7, dtype=torch.float64))
    check(copy.deepcopy(model), torch.tensor([1, 2]))


class Counting(nn.Module):
    """A module that cannot be traced, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e9:
            return x
        self.calls.add_(1)
        return x * 2


COUNTED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "before": lambda m, x: (m.u.calls * 2, m.b(m.u(x)))[0] + m.b(x),
    "before, as it is": lambda m, x: (lambda before: m.b(m.u(x)) * before)(m.u.calls + 0),
    "behind": lambda m, x: m.b(m.u(x)) * (m.u.calls * 2),
}


@pytest.mark.parametrize("case", COUNTED)
def test_what_a_module_counts_is_read_where_forward_reads_it(case: str) -> None:
    model = model_of(COUNTED[case], b=nn.Linear(7, 7), u=Counting())
    eager = copy.deepcopy(model)
    gm = compile_graph(model)
    with torch.no_grad():
        for _ in range(5):
            torch.testing.assert_close(gm(image(3, 7)), eager(image(3, 7)))
    torch.testing.assert_close(model.u.calls, eager.u.calls)


UNKNOWN = {
    "reads": lambda: Branching(False),
    "writes": lambda: Branching(True),
    "in place, without a spelling": lambda: nn.CELU(inplace=True),
    "in place, with a hook": _hooked,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_readers_behind_a_module_that_stays_whole_read_their_own_value(name: str) -> None:
    """They read what the module left in the value, not the module's result."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x)
        z = m.u(y)
        return m.b(y) + z

    check(model_of(forward, a=nn.Linear(7, 7), b=nn.Linear(7, 7), u=UNKNOWN[name]()), image(3, 7))


def test_nobody_writes_to_a_size() -> None:
    """A module that nobody knows was ordered behind what had read the size: the graph lost nodes to that cycle."""

    class Unknown(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return x[:n]

    root = nn.Module()
    root.unknown = Unknown()
    graph = fx.Graph()
    x = graph.placeholder("x")
    size = graph.call_function(ops.size, (x, 0))
    more = graph.call_function(operator.add, (size, 1))
    call = graph.call_module("unknown", (x, more))
    graph.output(call)
    assert writes(call, root) == [x]
