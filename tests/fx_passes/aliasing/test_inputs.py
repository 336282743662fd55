"""Inputs that share memory with one that the graph writes to: as in eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi  # noqa: F401 - the backend
from fx_passes.aliasing.inputs import Places, WrittenInputs, storage_of
from fx_passes.pipeline import compile_graph
from tests.support.graphs import image, model_of
from zendnn_cffi.primitives.checks import overlap

CALLS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "apart": lambda: (image(4, 4), image(4, 4, seed=1)),
        "the same": lambda: (x := image(4, 4), x),
        "overlapping": lambda: ((big := image(6, 4))[:4], big[2:]),
        "beside each other": lambda: ((big := image(8, 4))[:4], big[4:]),
        "in turns": lambda: ((big := image(4, 8))[:, ::2], big[:, 1::2]),
        "transposed": lambda: (x := image(4, 4), x.t()),
        "of one array": lambda: (torch.from_numpy(a := image(4, 4).numpy()), torch.from_numpy(a)),
        "of parts of an array": lambda: (torch.from_numpy((a := image(6, 4).numpy())[:4]), torch.from_numpy(a[2:])),
        "of two parts of an array": lambda: (torch.from_numpy((a := image(8, 4).numpy())[:4]), torch.from_numpy(a[4:])),
        "empty": lambda: ((big := image(4, 4))[:0], big[:0]),
    }
)
SHARED = ("the same", "overlapping", "transposed", "of one array", "of parts of an array")


def reads_around_a_write(m: Any, x: Tensor, y: Tensor) -> Tensor:
    before = m.a(y)
    x.mul_(2)
    return before + m.a(y)


def model(forward: Callable[..., Any] = reads_around_a_write) -> nn.Module:
    torch.manual_seed(0)
    return model_of(forward, a=nn.Linear(4, 4))


def optimized(eager: nn.Module, entry: str) -> Any:
    if entry != "compile":
        return compile_graph(eager, CALLS["apart"]() if entry == "example" else None)
    torch._dynamo.reset()
    return torch.compile(eager, backend="zendnn", options={"tune": "off"})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("entry", ("optimize", "example", "keywords", "compile"))
def test_as_in_eager(call: str, entry: str) -> None:
    eager = model()
    fast = optimized(eager, entry)
    with torch.no_grad():
        for name in ("apart", call, "apart"):
            (x, y), (v, w) = CALLS[name](), CALLS[name]()
            expected = eager(x, y)
            torch.testing.assert_close(fast(y=w, x=v) if entry == "keywords" else fast(v, w), expected)
            torch.testing.assert_close((v, w), (x, y))


@pytest.mark.parametrize("call", CALLS)
def test_those_in_containers(call: str) -> None:
    eager = model(lambda m, x, y: reads_around_a_write(m, x["x"], y[0]))
    fast = compile_graph(eager)
    assert not fast.leaves
    with torch.no_grad():
        (x, y), (v, w) = CALLS[call](), CALLS[call]()
        expected = eager({"x": x}, [y])
        torch.testing.assert_close(fast({"x": v}, [w]), expected)


@pytest.mark.parametrize("call", CALLS)
def test_share_memory(call: str) -> None:
    x, y = CALLS[call]()
    assert overlap(x, y) == (call in SHARED) or call == "apart"
    assert compile_graph(model()).written_inputs.are_shared((x, y), {}) == (call in SHARED)


def test_elements_of_another_size() -> None:
    x = image(4, 4)
    assert overlap(x, x.view(torch.float32))


def test_only_what_writes_to_an_input_looks() -> None:
    assert compile_graph(model(lambda m, x, y: m.a(x) + y)).written_inputs is None
    assert compile_graph(model(lambda m, x, y: m.a(x).add_(y))).written_inputs is None
    assert isinstance(compile_graph(model()).written_inputs, WrittenInputs)


def test_inputs_that_are_read_alone_may_share_memory() -> None:
    fast = compile_graph(model(lambda m, x, y, z: reads_around_a_write(m, x, y) + z))
    y = image(4, 4)
    assert not fast.written_inputs.are_shared((image(4, 4), y, y), {})


@pytest.mark.parametrize("entry", ("optimize", "example", "compile"))
def test_a_buffer_as_an_input_that_is_written_to(entry: str) -> None:
    """What is made of the buffer beforehand would not know."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return m.a(y) + m.a(m.buffer)

    eager = model(forward)
    eager.register_buffer("buffer", image(4, 4))
    fast = optimized(eager, entry)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(image(4, 4), image(4, 4, seed=1)), eager(image(4, 4), image(4, 4, seed=1)))
            fresh = model(forward)
            held: Any = eager if entry == "compile" else fast
            fresh.load_state_dict(eager.state_dict(), strict=False)
            fresh.register_buffer("buffer", held.buffer.clone())
            expected = fresh(fresh.buffer, image(4, 4, seed=1))
            torch.testing.assert_close(fast(held.buffer, image(4, 4, seed=1)), expected)


WRITTEN: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "itself": lambda t: t,
        "a view": lambda t: t.t().t(),
        "another": lambda t: t.clone(),
        "its array": lambda t: torch.from_numpy(t.numpy()),
    }
)


@pytest.mark.parametrize("argument", WRITTEN)
@pytest.mark.parametrize("entry", ("optimize", "example", "compile"))
def test_a_buffer_that_is_written_to_as_an_input_that_is_read(entry: str, argument: str) -> None:
    """Both layers were one product, computed before the write."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        before = m.a(x)
        m.buffer.mul_(2)
        return before + m.b(x) + y

    def fresh() -> nn.Module:
        torch.manual_seed(0)
        made = model_of(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 4))
        made.register_buffer("buffer", image(4, 4))
        return made

    eager, other = fresh(), fresh()
    fast = optimized(other, entry)
    held: Any = other if entry == "compile" else fast
    with torch.no_grad():
        for _ in range(3):
            expected = eager(WRITTEN[argument](eager.buffer), image(4, 4, seed=1))
            torch.testing.assert_close(fast(WRITTEN[argument](held.buffer), image(4, 4, seed=1)), expected)
            torch.testing.assert_close(held.buffer, eager.buffer, rtol=0, atol=0)


def test_a_forward_without_arguments_that_writes() -> None:
    def forward(m: Any) -> Tensor:
        m.buffer.add_(1)
        return m.a(m.buffer)

    eager = model(forward)
    eager.register_buffer("buffer", image(4, 4))
    fast = compile_graph(eager)
    torch.testing.assert_close(fast(), eager())
    with pytest.raises(TypeError):
        fast(image(4, 4))


def test_places() -> None:
    """Of a storage that others begin or end in."""
    big, other = image(8, 4), image(4, 4)
    places = Places([big[2:4], other, big[5:], image(0)])
    for touching in (big, other[1:], torch.from_numpy(other.numpy()[2])):
        assert places.touch(storage_of(touching))
    for apart in (image(4, 4), image(0), torch.empty(4, device="meta")):
        assert not places.touch(storage_of(apart))
    assert not Places([]).touch(storage_of(big))
