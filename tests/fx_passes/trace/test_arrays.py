"""Numpy arrays in the memory of tensors: copies share it as the model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace.arrays import moved, place_of, shared
from fx_passes.trace.skeleton import own_arrays, skeleton
from tests.support.lowering import noise
from tests.tolerance import assert_close

X = [noise(3, 8, seed=seed) for seed in range(3)]
HELD = numpy.zeros(8, numpy.float32)


class Beside(nn.Module):
    """A buffer, or a tensor in an attribute, in whose memory an array lies that forward changes."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        array = HELD if place == "global" else numpy.zeros(8, numpy.float32)
        array[:] = 0

        def closure() -> None:
            nonlocal array
            array += 1

        self.change: Any = {"closure": closure, "global": count_in_held}.get(place)
        if place == "attribute":
            self.array, self.h = array, torch.from_numpy(array)
        elif place == "in a list":
            self.arrays = [{"of": array[::-1]}]
            self.register_buffer("h", torch.from_numpy(array))
        elif place == "of a tensor":
            self.register_buffer("h", torch.zeros(8))
            self.array = self.h.numpy()[2:6]
        else:
            self.register_buffer("h", torch.from_numpy(array))
            if place == "buffer":
                self.array = array

    def forward(self, x: Tensor) -> Tensor:
        if self.change is not None:
            self.change()
        else:
            array = self.arrays[0]["of"] if hasattr(self, "arrays") else self.array
            array += 1
        y: Tensor = self.layer(x) + self.h
        return y


def count_in_held() -> None:
    numpy.add(HELD, 1, out=HELD)


PLACES = ("buffer", "attribute", "in a list", "of a tensor", "closure", "global")


def made(place: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Beside(place), nn.Linear(8, 8)).eval()


def expected_of(place: str) -> list[Tensor]:
    model = made(place)
    with torch.no_grad():
        return [model(x) for x in X]


@pytest.mark.parametrize("example", (None, X[0]), ids=("symbolic", "example"))
@pytest.mark.parametrize("place", PLACES)
def test_a_forward_that_changes_the_array_stays_plain(place: str, example: Any) -> None:
    expected, model = expected_of(place), made(place)
    fast: Any = zendnn_cffi.optimize(model, example, tune="off")
    assert list(fast.leaves) == ["1"] and not model[1].h.any()  # type: ignore[index]
    with torch.no_grad():
        for x, result in zip(X, expected, strict=True):
            assert_close(fast(x), result, k=64)
    if place not in ("closure", "global"):
        assert not model[1].h.any(), "the model has its own"  # type: ignore[index]


@pytest.mark.parametrize("place", ("buffer", "attribute", "closure", "global"))
def test_by_torch_compile(place: str) -> None:
    expected, model = expected_of(place), made(place)
    torch._dynamo.reset()
    fast = torch.compile(model, backend="zendnn", options={"tune": "off"})
    with torch.no_grad():
        for x, result in zip(X, expected, strict=True):
            assert_close(fast(x), result, k=64)


@pytest.mark.parametrize("example", (None, X[0]), ids=("symbolic", "example"))
def test_a_tensor_that_is_written_to_and_read_as_an_array(example: Any) -> None:
    class Read(Beside):
        def forward(self, x: Tensor) -> Tensor:
            self.h.add_(1)
            y: Tensor = self.layer(x) + torch.from_numpy(self.array)
            return y

    torch.manual_seed(0)
    model, oracle = Read("buffer").eval(), Read("buffer").eval()
    oracle.load_state_dict(model.state_dict())
    fast: Any = zendnn_cffi.optimize(model, example, tune="off")
    assert "numpy array" in str(fast.leaves)
    with torch.no_grad():
        for x in X:
            assert_close(fast(x), oracle(x), k=64)


def test_arrays_that_are_read_alone_cost_nothing() -> None:
    class Read(Beside):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x) * float(self.array[0] + 2)
            return y

    assert not zendnn_cffi.optimize(Read("buffer").eval(), tune="off").leaves


def test_groups() -> None:
    array, other = numpy.zeros((4, 6), numpy.float32), numpy.zeros(3)
    tensor, part = torch.from_numpy(array), torch.from_numpy(array[1:3, ::2])
    found = shared([tensor, part, torch.zeros(4)], [array, other, array[::-1, 2:], numpy.array([None])])
    (group,) = found
    assert len(group) == 4
    assert not shared([torch.zeros(0), torch.zeros(2, device="meta")], [numpy.zeros(0), other])
    start, end = place_of(array[::-1, 2:])
    assert end - start == array.nbytes - 8 and place_of(numpy.zeros(0)) == (0, 0) == place_of(numpy.array([None]))


@pytest.mark.parametrize("dtype", (numpy.float64, numpy.int8, numpy.bool_))
def test_moved_together(dtype: Any) -> None:
    array: Any = (numpy.arange(24) % 3).astype(dtype).reshape(4, 6)
    tensor, part = torch.from_numpy(array), nn.Parameter(torch.from_numpy(array[1:3, ::2]), requires_grad=False)
    turned = array[::-1, 2:]
    new: Any = moved([array, tensor, part, turned])
    for old in (array, tensor, part, turned):
        again = new[id(old)]
        assert type(again) is type(old) and again.shape == old.shape and again.dtype == old.dtype
        assert (numpy.asarray(again) == numpy.asarray(old)).all()
    was = array[1, 2].item()
    new[id(array)][1, 2] = not was
    assert new[id(tensor)][1, 2] == new[id(part)][0, 1] == new[id(turned)][2, 0] == (not was)
    assert array[1, 2] == was


@pytest.mark.parametrize("copied", (lambda m: skeleton(m, own_state=True), skeleton), ids=("own", "same memory"))
@pytest.mark.parametrize("place", ("buffer", "attribute", "in a list", "of a tensor"))
def test_copies_of_a_model(place: str, copied: Callable[[nn.Module], Any]) -> None:
    model = made(place)
    for again in (copied(model), copied(model)):
        if copied is skeleton:
            own_arrays(again)
        with torch.no_grad():
            again(X[0])
        assert again[1].h.any() and not model[1].h.any()  # type: ignore[index]
