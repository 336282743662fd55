"""The limit on CPU time ends with its block, and is no exception that a model would catch."""

from __future__ import annotations

import contextlib
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import zendnn_cffi
from fx_passes.trace import export
from fx_passes.trace.time_limit import DispatchLimit, Limit, MostCalls, TooLong, TooMany
from tests.support.answers import offloaded


def test_a_limit_ends_with_its_block() -> None:
    x = torch.randn(3, 4)
    with Limit(60.0):
        assert torch.equal(x.relu(), F.relu(x))
    with pytest.raises(TooLong), Limit(0.0):
        x.relu()
    assert torch.equal(x.relu(), F.relu(x))


def test_it_is_no_exception_that_a_model_catches() -> None:
    caught = []
    with pytest.raises(TooLong), Limit(0.0):
        try:
            torch.zeros(1)
        except Exception as error:
            caught.append(error)
    assert not caught


@pytest.mark.parametrize("constants", (0, 50), ids="{} constants".format)
@pytest.mark.parametrize(
    "longest, shrinks, over", ((1.0, math.inf, True), (9.0, math.inf, False), (9.0, 60.0, False), (9.0, 1e-9, True))
)
def test_many_operations_may_take_longer_than_long_sizes(
    longest: float, shrinks: float, over: bool, constants: int
) -> None:
    class Windows(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """x [N, L]; returns [N, 4, L / 4]."""
            with Limit(0.0, longest, shrinks):
                for _ in range(constants):
                    torch.ones(3)
                y = x.unflatten(1, (4, x.shape[1] // 4))
                for _ in range(4):
                    y = y.relu()
            return y

    shapes = {"x": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    with pytest.raises(TooLong) if over else contextlib.nullcontext():
        torch.export.export(Windows(), (torch.randn(3, 16),), dynamic_shapes=shapes)


@pytest.mark.parametrize("longest, over", ((1.0, True), (9.0, False)))
def test_a_limit_where_dynamo_reads_the_forward(longest: float, over: bool) -> None:
    class Windows(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """x [N, L]; returns [N, 4, L / 4]."""
            y = x.unflatten(1, (4, x.shape[1] // 4))
            for _ in range(4):
                y = y.relu()
            return y

    dispatch = FakeTensorMode.__torch_dispatch__
    shapes = {"x": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}
    with pytest.raises(TooLong) if over else contextlib.nullcontext(), DispatchLimit(0.0, longest):
        torch.export.export(Windows(), (torch.randn(3, 16),), dynamic_shapes=shapes, strict=True)
    assert FakeTensorMode.__torch_dispatch__ is dispatch


def test_a_limit_of_fake_tensors_is_for_its_thread_and_limits_lie_within_others() -> None:
    dispatch = FakeTensorMode.__torch_dispatch__

    def sizes() -> torch.Size:
        with FakeTensorMode() as mode:
            return mode.from_tensor(torch.ones(3, 4)).relu().shape

    with DispatchLimit(60.0), ThreadPoolExecutor(1) as others:
        with DispatchLimit(0.0):
            with pytest.raises(TooLong):
                sizes()
            assert others.submit(sizes).result() == (3, 4)
        assert sizes() == (3, 4) and FakeTensorMode.__torch_dispatch__ is not dispatch
    assert FakeTensorMode.__torch_dispatch__ is dispatch


def test_calls_are_counted_and_attributes_are_not() -> None:
    x = torch.zeros(2)
    with MostCalls(2):
        assert [x.shape, x.dtype, x.device] and x.relu().neg().is_cpu
    with pytest.raises(TooMany, match="more than 2 functions"), MostCalls(2):
        x.relu().neg().abs()


def test_a_loop_over_data_is_left_to_pytorch_and_layers_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Smoothed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """x [T, 4]; returns [T, 4]."""
            mean, found = x[0], []
            for row in range(x.shape[0]):
                mean = (mean + x[row]) / 2
                found.append(mean)
            return self.layers(torch.stack(found))

    monkeypatch.setattr(export, "MOST_CALLS", 60)
    model, x = Smoothed().eval(), torch.randn(50, 4)
    optimized = zendnn_cffi.optimize(model, (x,), tune="off")
    torch.testing.assert_close(optimized(x), model(x))
    assert offloaded([optimized])[0] > 0
    assert "more than 60 functions" in str(zendnn_cffi.explain(optimized))


def test_parameters_are_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MOST_CALLS", 30)

    class Exported(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """x [N, 4]; returns [N, 4]."""
            if x.shape[1] != 4:  # no symbolic trace
                raise ValueError
            return super().forward(x)

    model, x = Exported(*(torch.nn.Linear(4, 4) for _ in range(10))).eval(), torch.randn(3, 4)
    optimized = zendnn_cffi.optimize(model, (x,), tune="off")
    torch.testing.assert_close(optimized(x), model(x))
    assert offloaded([optimized]) == (10, 10, 1)
