"""A thread that follows a forward, and others that call, compile and optimize meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace.one_thread import following, say_who_traces

_METHODS = nn.Module.__call__, nn.Module.__getattr__


class Waiting(nn.Module):
    """Its forward, followed, waits for the test."""

    def __init__(self, meet: Callable[[], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.encoder: Any = None
        self._meet = [meet]

    def forward(self, x: Tensor) -> Tensor:
        self._meet[0]()
        y: Tensor = self.linear(x)
        return y if self.encoder is None else self.encoder(y)


@contextmanager
def followed(optimize: Callable[[nn.Module], Any], exports: bool = False) -> Iterator[None]:
    """While a forward is followed in another thread; afterwards what it made is compared with the model."""
    inside, go_on, made = threading.Event(), threading.Event(), queue.Queue[Any]()

    def meet() -> None:
        inside.set()
        go_on.wait(60)

    model = Waiting(meet).eval()
    if exports:
        model.encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    thread = threading.Thread(target=lambda: made.put(optimize(model)))
    thread.start()
    try:
        assert inside.wait(60)
        yield
    finally:
        go_on.set()
        thread.join(120)
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        torch.testing.assert_close(made.get(timeout=1)(x), model(x), rtol=1e-4, atol=1e-5)


def by_symbols(model: nn.Module) -> Any:
    return zendnn_cffi.optimize(model, tune="off")


def by_export(model: nn.Module) -> Any:
    return zendnn_cffi.optimize(model, (torch.randn(2, 3, 8),), tune="off")


def quantized(model: nn.Module) -> Any:
    return zendnn_cffi.quantize(
        model, [torch.linspace(-4, 4, 48).reshape(2, 3, 8)], compare=False, tune="off"
    ).converted


WAYS = {"symbols": (by_symbols, False), "export": (by_export, True)}


def compiled_function() -> Any:
    torch._dynamo.reset()
    return torch.compile(lambda x: x * 2 + 1, backend="eager")


@pytest.mark.parametrize("way", WAYS)
def test_what_is_compiled_runs_meanwhile(way: str) -> None:
    """PyTorch has every thread refused "using FX to symbolically trace a dynamo-optimized function"."""
    run, x = compiled_function(), torch.randn(3)
    expected = run(x)
    with followed(*WAYS[way]):
        assert torch.equal(run(x), expected)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_to_be_compiled_is_right_meanwhile(way: str) -> None:
    """It must not follow the methods of nn.Module that stand for the model's."""
    model, x, found = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval(), torch.randn(2, 3), queue.Queue[Tensor]()
    model.requires_grad_(False)
    run: Any = torch.compile(lambda value: model(value), backend="zendnn", options={"tune": "off"})
    compiled_function()(x)  # TorchDynamo is there
    with followed(*WAYS[way]):
        thread = threading.Thread(target=lambda: found.put(run(x)))
        thread.start()
        thread.join(0.5)
    thread.join(120)
    for result in (found.get(timeout=1), run(x)):
        torch.testing.assert_close(result, model(x))
    assert (nn.Module.__call__, nn.Module.__getattr__) == _METHODS


@pytest.mark.parametrize("make", [by_symbols, by_export, quantized], ids=lambda make: make.__name__)
def test_tracing_waits_for_what_is_compiled(make: Callable[[nn.Module], Any]) -> None:
    torch._dynamo.reset()
    inside, go_on, made = threading.Event(), threading.Event(), queue.Queue[Any]()

    def backend(gm: Any, _: Any) -> Any:
        inside.set()
        go_on.wait(60)
        return gm.forward

    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval().requires_grad_(False), torch.randn(2, 3, 8)
    run: Any = torch.compile(lambda value: model(value), backend=backend)
    compiling = threading.Thread(target=lambda: run(x))
    tracing = threading.Thread(target=lambda: made.put(make(model)))
    compiling.start()
    try:
        assert inside.wait(60)
        tracing.start()
        tracing.join(0.5)
        assert tracing.is_alive() and made.empty()
    finally:
        go_on.set()
    for thread in (compiling, tracing):
        thread.join(120)
    torch.testing.assert_close(made.get(timeout=1)(x), model(x), rtol=0.1, atol=0.1)
    assert (nn.Module.__call__, nn.Module.__getattr__) == _METHODS


def test_a_function_compiled_inside_is_still_refused() -> None:
    """By the thread that traces: its graph cannot hold what TorchDynamo compiles."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self._run = nn.Linear(3, 3), [compiled_function()]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self._run[0](self.linear(x))
            return y

    model, x = Calls().eval(), torch.randn(2, 3)
    fast = zendnn_cffi.optimize(model, tune="off")
    assert "dynamo-optimized" in str(zendnn_cffi.explain(fast))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("others", ["optimize", "quantize"])
def test_nothing_waits_for_itself_and_nothing_stays_replaced(others: str) -> None:
    """TorchDynamo calls our backend with its own lock held; tracing takes that one first."""
    torch._dynamo.reset()
    compiled_function()(torch.randn(3))
    failures: list[BaseException] = []
    start = threading.Barrier(2)

    def compile_models() -> None:
        for width in range(2, 8):
            model, x = nn.Sequential(nn.Linear(width, 8), nn.GELU()).eval(), torch.randn(3, width)
            run: Any = torch.compile(model, backend="zendnn", options={"tune": "off"})
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)

    def optimize_models() -> None:
        for width in range(2, 8 if others == "optimize" else 4):
            model, x = nn.Sequential(nn.Linear(width, 8), nn.GELU()).eval(), torch.randn(3, width)
            make = by_symbols if others == "optimize" else quantized_of(x)
            torch.testing.assert_close(make(model)(x), model(x), rtol=0.1, atol=0.1)

    def run(work: Callable[[], None]) -> None:
        try:
            start.wait(60)
            with torch.no_grad():
                work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in (compile_models, optimize_models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive()
    assert not failures
    assert (nn.Module.__call__, nn.Module.__getattr__) == _METHODS


def quantized_of(x: Tensor) -> Callable[[nn.Module], Any]:
    return lambda model: zendnn_cffi.quantize(model, [x], compare=False, tune="off").module


def test_the_lock_is_taken_again_by_its_own_thread() -> None:
    with following(), following():
        pass


def test_nobody_traces_nothing_is_said() -> None:
    before = torch.fx._symbolic_trace._is_fx_tracing_flag
    say_who_traces()
    assert torch.fx._symbolic_trace._is_fx_tracing_flag is before is False
