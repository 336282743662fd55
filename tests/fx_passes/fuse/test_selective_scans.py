"""Scans of state space models, of whose loops tracing leaves each round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch.utils import _pytree as pytree

import zendnn_cffi  # noqa: F401 - the backend
from fx_passes.pipeline import compile_graph
from tests.support.graphs import check_equal, count
from tests.support.lowering import noise
from tests.tolerance import assert_close
from zendnn_cffi.backend import compiled_modules

WIDTH, NUMBERS, STEPS = 6, 4, 5


class Scanning(nn.Module):
    """Mamba's mixer without its convolution and gate; `scan` writes the loop out in some way."""

    def __init__(self, scan: Callable[..., Tensor]) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH + 2 * NUMBERS)
        self.log_a = nn.Parameter(noise(WIDTH, NUMBERS))
        self.scan = scan
        self.eval()

    def forward(self, x: Tensor) -> Any:
        delta, b, c = self.project(x).split((WIDTH, NUMBERS, NUMBERS), -1)
        return self.scan(x, F.softplus(delta), -torch.exp(self.log_a), b, c)


def as_transformers(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    delta, x = delta.transpose(1, 2), x.transpose(1, 2)
    decays = torch.exp(a[None, :, None, :] * delta[:, :, :, None])
    drives = delta[:, :, :, None] * b[:, None, :, :] * x[:, :, :, None]
    state, read = x.new_zeros(x.shape[0], WIDTH, NUMBERS), []
    for step in range(x.shape[-1]):
        state = decays[:, :, step, :] * state + drives[:, :, step, :]
        read.append(torch.matmul(state, c[:, step, :].unsqueeze(-1))[:, :, 0])
    return torch.stack(read, dim=-1).transpose(1, 2)


def in_time(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    decays = torch.exp(delta.unsqueeze(-1) * a[None, None])
    drives = (delta * x).unsqueeze(-1) * b.unsqueeze(2)
    state, read = x.new_zeros(x.shape[0], WIDTH, NUMBERS), []
    for step in range(x.shape[1]):
        state = drives[:, step] + state * decays[:, step]
        read.append((state * c[:, step].unsqueeze(1)).sum(-1))
    return torch.stack(read, 1)


def numbers_first(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    delta, x, c = delta.transpose(1, 2), x.transpose(1, 2), c.transpose(1, 2)
    decays = torch.exp(delta.unsqueeze(-1) * a.unsqueeze(1))
    drives = x.unsqueeze(-1) * (delta.unsqueeze(-1) * b.unsqueeze(1))
    state: Any = 0.0
    read = []
    for step in range(x.shape[-1]):
        state = decays[:, :, step] * state + drives[:, :, step]
        read.append((state @ c[:, :, step].unsqueeze(-1)).squeeze(-1))
    return torch.stack(read, 2).transpose(1, 2)


WRITTEN = [as_transformers, in_time, numbers_first]


def exported(scan: Callable[..., Tensor], samples: int = 2) -> tuple[nn.Module, Any, Tensor]:
    model, x = Scanning(scan).double(), noise(samples, STEPS, WIDTH).double()
    gm = compile_graph(model, (x,))
    check_equal(model, gm, x)
    return model, gm, x


@pytest.mark.parametrize("scan", WRITTEN)
@pytest.mark.parametrize("samples", [1, 3])
def test_loops_become_one_operation(scan: Callable[..., Tensor], samples: int) -> None:
    model, gm, _ = exported(scan, samples)
    assert count(gm)["selective_scan"] == 1
    assert not any("stack" in str(node.target) for node in gm.graph.nodes)
    check_equal(model, gm, noise(samples, STEPS, WIDTH, seed=1).double())


def with_state(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor, read_at: int = -1) -> Any:
    """What is read, and the state after a step, the last one by default."""
    decays, drives = torch.exp(delta[..., None] * a), (delta * x)[..., None] * b[:, :, None]
    state, read, states = x.new_zeros(x.shape[0], WIDTH, NUMBERS), [], []
    for step in range(x.shape[1]):
        state = decays[:, step] * state + drives[:, step]
        states.append(state)
        read.append((state @ c[:, step, :, None])[..., 0])
    return torch.stack(read, 1), states[read_at]


def test_the_last_state_is_a_result() -> None:
    gm = exported(with_state)[1]
    assert count(gm)["selective_scan_and_state"] == 1 and count(gm)["selective_scan"] == 0


def test_the_last_state_alone_may_be_read() -> None:
    def scan(*given: Tensor) -> Tensor:
        read, state = with_state(*given)
        return read.sum() + torch.cat([state, state * 2])

    assert count(exported(scan)[1])["selective_scan_and_state"] == 1


@pytest.mark.parametrize("read_at", [0, 2, -2])
def test_a_state_between_keeps_the_loop(read_at: int) -> None:
    found = count(exported(lambda *given: with_state(*given, read_at=read_at))[1])
    assert not found["selective_scan"] and not found["selective_scan_and_state"]


def test_a_last_state_that_is_written_before_it_is_read_keeps_the_loop() -> None:
    def scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
        decays, drives = torch.exp(delta[..., None] * a), (delta * x)[..., None] * b[:, :, None]
        state, read = x.new_zeros(x.shape[0], WIDTH, NUMBERS), []
        for step in range(x.shape[1]):
            state = decays[:, step] * state + drives[:, step]
            if step == x.shape[1] - 1:
                state[:, 0] = 7.0
            read.append((state @ c[:, step, :, None])[..., 0])
        return torch.stack(read, 1), state

    found = count(exported(scan)[1])
    assert not found["selective_scan"] and not found["selective_scan_and_state"]


def _other(change: str) -> Callable[..., Tensor]:
    """A loop that differs from the scan in one thing."""

    def scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        decays, drives = torch.exp(delta[..., None] * a), (delta * x)[..., None] * b[:, :, None]
        if change == "decay":
            decays = torch.sigmoid(delta[..., None] * a)
        if change == "drive":
            drives = drives + delta[..., None]
        state, read = x.new_zeros(x.shape[0], WIDTH, NUMBERS), []
        for step in range(x.shape[1]):
            drive = drives[:, step - 1] if change == "order" and step == 3 else drives[:, step]
            state = decays[:, step] * state - drive if change == "sign" else decays[:, step] * state + drive
            out = (state.relu() if change == "relu" else state) @ c[:, step, :, None]
            read.append(out[..., 0])
        if change == "turned":
            read[0], read[1] = read[1], read[0]
        return torch.stack(read, 1)

    return scan


@pytest.mark.parametrize("change", ["decay", "drive", "order", "sign", "relu", "turned"])
def test_other_loops_stay(change: str) -> None:
    assert count(exported(_other(change))[1])["selective_scan"] == 0


def test_the_same_loop_without_a_change_is_one() -> None:
    assert count(exported(_other(""))[1])["selective_scan"] == 1


def _at_once(change: str = "") -> Callable[..., Tensor]:
    """The scan by PyTorch's associative_scan, as Transformers has it, or with one thing changed."""

    def combine(left: Any, right: Any) -> Any:
        product = left[0] * right[0]
        if change == "other":
            return product, left[1] + right[1]
        return product, right[0] * left[1] + right[1]

    def scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Any:
        delta, x = delta.transpose(1, 2), x.transpose(1, 2)
        decays = torch.exp(a[None, :, None, :] * delta[:, :, :, None])
        drives = delta[:, :, :, None] * b[:, None, :, :] * x[:, :, :, None]
        _, states = associative_scan(combine, (decays, drives), dim=2, combine_mode="generic")
        read = torch.matmul(states.transpose(1, 2), c.unsqueeze(-1)).squeeze(-1)
        return read if not change else (read, states[:, :, 1 if change == "middle" else -1])

    return scan


def _compiled(model: nn.Module, x: Tensor) -> tuple[Any, Any]:
    """(the graph that a compiled model runs, its results)."""
    torch._dynamo.reset()
    before = len(compiled_modules())
    with torch.no_grad():
        results = torch.compile(model, backend="zendnn")(x)
    (module,) = compiled_modules()[before:]
    return module, results


@pytest.mark.parametrize("steps", [3, 8, 13])
@pytest.mark.parametrize("samples", [1, 3])
def test_associative_scans_become_one_operation(samples: int, steps: int) -> None:
    """TorchDynamo takes them apart into maps of halves: none of these is left."""
    model, x = Scanning(_at_once()).double(), noise(samples, steps, WIDTH).double()
    loop = Scanning(in_time).double()
    loop.load_state_dict(model.state_dict())
    module, found = _compiled(model, x)
    assert count(module)["selective_scan"] == 1
    names = {str(node.target) for node in module.graph.nodes}
    assert not any("stack" in name or "under_mode" in name for name in names)
    with torch.no_grad():
        assert_close(found, loop(x), k=steps * NUMBERS)


def test_the_last_state_of_an_associative_scan_is_a_result() -> None:
    model, x = Scanning(_at_once("last")).double(), noise(2, 7, WIDTH).double()
    loop = Scanning(with_state).double()
    loop.load_state_dict(model.state_dict())
    module, found = _compiled(model, x)
    assert count(module)["selective_scan_and_state"] == 1
    with torch.no_grad():
        for actual, expected in zip(found, loop(x), strict=True):
            assert_close(actual, expected, k=7 * NUMBERS)
            assert actual.is_contiguous() == expected.is_contiguous()


@pytest.mark.parametrize("change", ["other", "middle"])
def test_other_associative_scans_stay(change: str) -> None:
    model, x = Scanning(_at_once(change)).double(), noise(2, 6, WIDTH).double()
    module, found = _compiled(model, x)
    assert not any(name.startswith("selective_scan") for name in count(module))
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = torch.compile(model, backend="eager")(x)
    for actual, expected in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        assert_close(actual, expected, k=99)


class Handed(Scanning):
    """The scan of numbers that the caller has; written: which of them are written to before the loop, or by its end."""

    def __init__(self, written: str) -> None:
        super().__init__(in_time)
        self.written = written

    def forward(self, x: Tensor, delta: Tensor, b: Tensor, c: Tensor, memory: Tensor) -> Tensor:
        decays = torch.exp(delta.unsqueeze(-1) * -torch.exp(self.log_a)[None, None])
        drives = delta.unsqueeze(-1) * x.unsqueeze(-1) * b.unsqueeze(2)
        for name, value in (("x", x), ("delta", delta), ("b", b), ("memory", memory)):
            if name == self.written:
                value.mul_(0.5)
        state, read = x.new_zeros(x.shape[0], WIDTH, NUMBERS), []
        for step in range(STEPS):
            state = drives[:, step] + state * decays[:, step]
            read.append((state * c[:, step].unsqueeze(1)).sum(-1))
        return (torch.stack(read, 1, out=memory) if self.written == "out" else torch.stack(read, 1)) + 1


@pytest.mark.parametrize("written", ["", "memory", "x", "delta", "b", "out"])
def test_loops_around_which_something_is_written(written: str) -> None:
    """TorchDynamo leaves writes, and `out`, in its graphs. Decays and drives keep what they were made of."""
    model = Handed(written).double()
    given = [noise(2, STEPS, n, seed=n).double().abs() for n in (WIDTH, WIDTH, NUMBERS, NUMBERS, WIDTH)]
    mine, theirs = ([each.clone() for each in given] for _ in range(2))
    torch._dynamo.reset()
    before = len(compiled_modules())
    with torch.no_grad():
        assert_close(torch.compile(model, backend="zendnn")(*mine), model(*theirs), k=STEPS * NUMBERS)
    for ours, other in zip(mine, theirs, strict=True):
        assert_close(ours, other, k=STEPS * NUMBERS)
    is_fused = written in ("", "memory")
    assert sum(count(module)["selective_scan"] for module in compiled_modules()[before:]) == is_fused
