"""The module that computes the bags between offsets of all tables: when it joins them, what it leaves to PyTorch."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zendnn_cffi
from fx_passes.bags import offset_bags
from fx_passes.bags.offset_bags import EACH, JOINED, JoinedOffsetBags
from tests.support.exported import needs_export
from tests.tolerance import assert_close
from zendnn_cffi import backend

ROWS, WIDTH = (9, 30, 5), 16


class Model(nn.Module):
    """Bags of three tables beside a linear layer, and a linear layer on top."""

    def __init__(self, mode: str = "sum", last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, WIDTH, mode=mode, include_last_offset=last) for rows in ROWS)
        self.bottom, self.top = nn.Linear(6, WIDTH), nn.Linear(4 * WIDTH, 3)

    def forward(self, x: Tensor, offsets: Tensor, i: Tensor, j: Tensor, k: Tensor) -> Tensor:
        bags = [table(index, offsets[t]) for t, (table, index) in enumerate(zip(self.tables, (i, j, k), strict=True))]
        result: Tensor = self.top(torch.cat([self.bottom(x), *bags], 1))
        return result


def inputs(batch: int = 4, length: int = 2, dtype: torch.dtype = torch.int64) -> tuple[Tensor, ...]:
    """Evenly spaced bags."""
    generator = torch.Generator().manual_seed(batch)
    flat = [torch.randint(0, rows, (batch * length,), generator=generator).to(dtype) for rows in ROWS]
    offsets = (torch.arange(batch) * length).repeat(3, 1).to(dtype)
    return torch.randn(batch, 6, generator=generator), offsets, *flat


def uneven(batch: int = 4) -> tuple[Tensor, ...]:
    """Bags of several lengths, some empty."""
    x, _, *flat = inputs(batch)
    offsets = [[0, *sorted((7 * t + 3 * bag) % (2 * batch + 1) for bag in range(1, batch))] for t in range(3)]
    return x, torch.tensor(offsets), *flat


def optimized(model: nn.Module, **options: Any) -> tuple[Any, JoinedOffsetBags]:
    gm = zendnn_cffi.optimize(model.eval(), **{"tune": "off", **options})
    return gm, module_of(gm)


def module_of(gm: nn.Module) -> JoinedOffsetBags:
    [module] = [module for module in gm.modules() if isinstance(module, JoinedOffsetBags)]
    return module


def agree(gm: Any, model: nn.Module, args: Any, dtype: torch.dtype = torch.float32) -> None:
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(args[0].double(), *args[1:])
        assert_close(gm(*args), expected, dtype=dtype, k=4 * WIDTH)


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("mode", ("sum", "mean"))
@pytest.mark.parametrize("make", (inputs, uneven))
@pytest.mark.parametrize("batch", (1, 5, 33))
def test_one_call_over_joined_tables(make: Any, batch: int, mode: str, dtype: torch.dtype | None) -> None:
    model = Model(mode)
    gm, module = optimized(model, dtype=dtype)
    for _ in range(2):
        agree(gm, model, make(batch), dtype or torch.float32)
    assert module.calls == {JOINED: 2, EACH: 0}
    assert [kind for kind, _ in zendnn_cffi.explain(gm).counts()].count("embedding_bags") == 1
    assert "one call over joined tables (2 times)" in str(zendnn_cffi.explain(gm))
    assert len(gm.regions()) == 1


@pytest.mark.parametrize("offsets_dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_index_dtypes_and_strides(dtype: torch.dtype, offsets_dtype: torch.dtype) -> None:
    model = Model()
    gm, module = optimized(model)
    x, offsets, *flat = inputs(5, dtype=dtype)
    offsets = offsets.to(offsets_dtype)
    for args in (
        (x, offsets, *flat),
        (x, offsets.t().contiguous().t(), flat[0].repeat_interleave(2)[::2], *flat[1:]),
        (x, torch.cat([offsets, offsets]), flat[0].long(), *flat[1:]),
    ):
        agree(gm, model, args)
    assert module.calls[JOINED] == 3


def test_last_offsets() -> None:
    model = Model(last=True)
    gm, module = optimized(model)
    x, offsets, *flat = inputs(4)
    agree(gm, model, (x, torch.cat([offsets, torch.full((3, 1), 8)], 1), *flat))
    assert module.calls[JOINED] == 1


@st.composite
def calls(draw: st.DrawFn) -> tuple[Tensor, ...]:
    """Offsets that ascend or not, any indices. PyTorch itself reads beyond its indices for offsets that point there."""
    batch = draw(st.integers(0, 4))
    flat = [draw(st.lists(st.integers(-1, rows), max_size=6)) for rows in ROWS]
    offsets = [draw(st.lists(st.integers(0, len(i)), min_size=batch, max_size=batch)) for i in flat]
    if draw(st.booleans()):
        offsets = [sorted([0, *row])[:batch] for row in offsets]
    whole = torch.tensor(offsets, dtype=torch.int64).view(3, batch)
    return torch.randn(batch, 6), whole, *(torch.tensor(i, dtype=torch.int64) for i in flat)


@settings(max_examples=150, deadline=None)
@given(args=calls())
def test_what_eager_computes_or_raises(args: Any) -> None:
    model = Model().eval()
    with torch.no_grad():
        try:
            expected = model(*args)
        except (RuntimeError, ValueError, IndexError) as error:
            with pytest.raises(type(error)):
                _OPTIMIZED(*args)
        else:
            result = _OPTIMIZED(*args)
            if (args[1].diff(dim=1) < 0).any():  # of bags that end before they begin PyTorch returns unwritten memory
                assert result.shape == expected.shape
            else:
                torch.testing.assert_close(result, expected)


_OPTIMIZED, _ = optimized(Model())


@pytest.mark.parametrize("change", ("optimizer", "data", "parameter", "load", "share_memory", "layer"))
def test_changed_tables(change: str) -> None:
    model = Model()
    gm, module = optimized(model)
    agree(gm, model, inputs())
    watched: Any = gm
    with torch.no_grad():
        if change == "optimizer":
            model.tables[1].weight.add_(1.0)
            watched = model
        elif change == "data":
            gm.tables[1].weight.data = torch.randn(ROWS[1], WIDTH)
        elif change == "parameter":
            gm.tables[1].weight = nn.Parameter(torch.randn(ROWS[1], WIDTH))
        elif change == "load":
            gm.load_state_dict({name: torch.randn_like(value) for name, value in gm.state_dict().items()})
        elif change == "share_memory":
            model.share_memory()
            watched = model
        else:
            gm.tables[1] = nn.EmbeddingBag(ROWS[1], WIDTH, mode="sum")
    after = copy.deepcopy(model)
    after.load_state_dict(watched.state_dict())
    for _ in range(4):
        agree(gm, after, inputs())
    assert module_of(gm).calls[JOINED] >= 2 + (change != "layer") - (change == "layer")


def test_gradients_transforms_and_fakes_are_pytorchs() -> None:
    model = Model()
    gm, module = optimized(model)
    args = inputs()
    x = args[0].clone().requires_grad_()
    gm(x, *args[1:]).sum().backward()
    expected = args[0].clone().requires_grad_()
    model(expected, *args[1:]).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)
    torch.testing.assert_close(gm.tables[0].weight.grad, model.tables[0].weight.grad)
    state = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    with torch.no_grad():
        replaced = torch.func.functional_call(gm, state, args)
        torch.testing.assert_close(replaced, torch.func.functional_call(model, state, args))
        many = torch.randn(3, *args[0].shape)
        mapped = torch.func.vmap(lambda x: gm(x, *args[1:]))(many)
        torch.testing.assert_close(mapped, torch.stack([model(x, *args[1:]) for x in many]))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert gm(*map(mode.from_tensor, args)).shape == (4, 3)
    assert module.calls == {JOINED: 0, EACH: 0}
    agree(gm, model, args)
    assert module.calls[JOINED] == 1


def test_copies_and_pickles() -> None:
    model = Model()
    gm, _ = optimized(model)
    agree(gm, model, inputs())
    for again in (copy.copy(gm), copy.deepcopy(gm), pickle.load(io.BytesIO(pickle.dumps(gm)))):
        agree(again, model, inputs())
        assert module_of(again).calls[JOINED] == 1


def test_threads() -> None:
    model = Model()
    gm, module = optimized(model)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for batch in range(1, 20):
                agree(gm, model, inputs(batch + number) if batch % 2 else uneven(batch + number))
                if batch % 5 == 0:
                    module.forget()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("way", (JOINED, EACH))
def test_tuning_takes_the_faster_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offset_bags, "_fastest", lambda ways: way)
    model = Model()
    gm, module = optimized(model, tune="auto")
    for make in (inputs, uneven):
        agree(gm, model, make())
    assert module.calls == {JOINED: 1 + (way == JOINED), EACH: way == EACH}
    bad = (*inputs()[:-1], torch.full((8,), ROWS[-1]))
    with torch.no_grad(), pytest.raises(RuntimeError):
        gm(*bad)


def test_the_faster_way_is_the_one_whose_fastest_run_is() -> None:
    event = threading.Event()
    assert offset_bags._fastest({EACH: lambda: event.wait(0.01), JOINED: lambda: None}) == JOINED


def test_tables_that_cannot_be_joined() -> None:
    model = Model()
    model.tables[1].weight.data = torch.randn(WIDTH, ROWS[1]).t()  # not contiguous
    gm, module = optimized(model)
    agree(gm, model, inputs())
    assert module.calls == {JOINED: 0, EACH: 0} and "cannot be joined" in str(zendnn_cffi.explain(gm))


def test_released_weights() -> None:
    model = Model()
    expected = copy.deepcopy(model)
    gm, module = optimized(model, release_weights=True)
    for make in (inputs, uneven, inputs):
        agree(gm, expected, make())
    assert module.calls[JOINED] == 3


def test_offsets_of_the_model() -> None:
    class Fixed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("starts", inputs()[1])

        def forward(self, x: Tensor, *flat: Tensor) -> Tensor:
            return super().forward(x, self.starts, *flat)

    model = Fixed()
    x, _, *flat = inputs()
    gm, module = optimized(model, example_inputs=(x, *flat))
    agree(gm, model, (x, *flat))
    with torch.no_grad():
        model.starts.copy_(uneven()[1])
    for _ in range(3):
        agree(gm, model, (x, *flat))
    assert module.calls[JOINED] == 4  # nothing was made of them: they are read in each call


class Listed(Model):
    """As DLRM's code: offsets and indices come as lists."""

    def forward(self, x: Tensor, offsets: list[Tensor], indices: list[Tensor]) -> Tensor:  # type: ignore[override]
        bags = [table(indices[t], offsets[t]) for t, table in enumerate(self.tables)]
        result: Tensor = self.top(torch.cat([self.bottom(x), *bags], 1))
        return result


def test_lists_of_tensors() -> None:
    model = Listed()
    gm, module = optimized(model)
    for make in (inputs, uneven):
        x, offsets, *flat = make()
        agree(gm, model, (x, list(offsets), flat))
        agree(gm, model, (x, offsets, flat))
    assert module.calls[JOINED] == 4


@pytest.mark.parametrize("dynamic", (None, True))
def test_torch_compile(dynamic: bool | None) -> None:
    model = Model().eval()
    torch._dynamo.reset()
    backend.register()
    compiled = torch.compile(model, backend="zendnn", options={"tune": "off"}, dynamic=dynamic)
    for batch in (5, 9, 12):
        for make in (inputs, uneven):
            agree(compiled, model, make(batch))
    found = [m for gm in backend.compiled_modules() for m in gm.modules() if isinstance(m, JoinedOffsetBags)]
    assert sum(module.calls[JOINED] for module in found) >= 6


def test_an_exported_model_with_free_sizes() -> None:
    class Checked(Model):  # a condition that symbolic tracing cannot follow
        def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
            return super().forward(x, *rest) if needs_export(x) and x.shape[0] > 1 else super().forward(x * 1, *rest)

    model = Checked()
    gm, module = optimized(model, example_inputs=inputs())
    for args in (inputs(5), uneven(7), inputs(3, 4)):
        agree(gm, model, args)
    assert module.calls[JOINED] == 3
