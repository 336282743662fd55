"""Tensors of a file lie in memory as they lay: strides, gaps, elements under several indices, views of each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.saved.container import _dtypes
from fx_passes.saved.errors import FileError
from fx_passes.saved.memory import decode_memory, encode_memory
from tests.support.lowering import noise


def named(*tensors: Tensor) -> dict[str, Tensor]:
    return {f"t{number}": tensor for number, tensor in enumerate(tensors)}


def overlapping() -> dict[str, Tensor]:
    whole = noise(12, 8)
    return named(whole[:8], whole[4:])


def viewed() -> dict[str, Tensor]:
    whole = noise(4, 8)
    return named(whole, whole[1:3], whole.t(), whole[:, ::2])


def of_other_dtypes() -> dict[str, Tensor]:
    whole = torch.arange(48, dtype=torch.uint8)
    return named(whole, whole[8:40].view(torch.float32), whole[8:40].view(torch.bfloat16))


CASES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "row by row": lambda: named(noise(4, 8), noise(), noise(0, 3)),
    "transposed": lambda: named(noise(4, 8).t()),
    "channels last": lambda: named(noise(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)),
    "a row for all": lambda: named(noise(1, 8).expand(4, 8)),
    "a number for all": lambda: named(noise().expand(3, 4)),
    "every other column": lambda: named(noise(4, 16)[:, ::2]),
    "windows that overlap": lambda: named(noise(10).unfold(0, 4, 2)),
    "integers, expanded": lambda: named(torch.arange(4).expand(3, 4)),
    "flags, every other one": lambda: named((noise(9) > 0)[::2]),
    "two that overlap": overlapping,
    "a tensor and views": viewed,
    "the same twice": lambda: (lambda whole: named(whole, whole.detach()))(noise(4, 8)),
    "views in other dtypes": of_other_dtypes,
    "dimensions of size 1": lambda: named(torch.empty_strided((1, 8, 1), (3, 1, 5)).fill_(2.0)),
}


def again(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a file makes of them, with the description as text."""
    rows = json.loads(json.dumps(encode_memory(tensors)))
    values = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    return {**values, **decode_memory(rows, values)}


@pytest.mark.parametrize("case", CASES)
def test_they_lie_as_they_lay(case: str) -> None:
    before = CASES[case]()
    after = again(before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor)
        assert after[name].stride() == tensor.stride() and after[name].dtype == tensor.dtype


@pytest.mark.parametrize("case", CASES)
def test_writes_to_one_are_in_the_others(case: str) -> None:
    """Each in turn, in bytes, as values of another dtype may be anything."""
    before = CASES[case]()
    after = again(before)
    for written in before:
        for tensors in (before, after):
            if tensors[written].numel():
                tensors[written][(0,) * tensors[written].ndim] = 1
        for name, tensor in before.items():
            assert tensor.contiguous().view(-1).view(torch.uint8).tolist() == (
                after[name].contiguous().view(-1).view(torch.uint8).tolist()
            ), (written, name)


def test_one_that_covers_the_others_stays_in_the_file() -> None:
    """It is mapped, so processes share it."""
    before = viewed()
    values = {name: tensor.contiguous().clone() for name, tensor in before.items()}
    after = decode_memory(encode_memory(before), values)
    assert {t.untyped_storage().data_ptr() for t in after.values()} == {values["t0"].untyped_storage().data_ptr()}


@pytest.mark.parametrize(
    "place",
    [[-4, [8, 1]], [4, [8, 1]], [2, [8, 1]], [0, [80, 1]], [0, [-8, 1]], [0, [8]], [0, [8, 1.0]], [1 << 60, [8, 1]]],
    ids=str,
)
def test_places_outside_of_the_memory_are_refused(place: list[Any]) -> None:
    values = named(noise(4, 8), noise(4, 8))
    with pytest.raises(FileError):
        decode_memory({"strides": {}, "pieces": [[128, {"t0": [0, [8, 1]], "t1": place}]]}, values)


class Held(nn.Module):
    """Weights that are expanded, and have gaps; a buffer, and a view of it that each call writes to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.first.weight = nn.Parameter(noise(8, 16)[:, ::2])
        self.first.bias = nn.Parameter(noise(1).expand(8))
        self.second.weight = nn.Parameter(noise(1, 8).expand(8, 8))
        self.register_buffer("whole", noise(4, 8))
        self.register_buffer("rows", self.whole[1:3])

    def forward(self, x: Tensor) -> Tensor:
        self.rows.add_(1.0)
        result: Tensor = self.second(self.first(x)) + self.whole.sum(0)
        return result


def test_a_module_whose_tensors_lie_oddly(tmp_path: Path) -> None:
    model, x = Held().eval(), noise(5, 8)
    fast = zendnn_cffi.optimize(Held().eval(), tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-5)
        zendnn_cffi.save(fast, tmp_path / "m")
        loaded: Any = zendnn_cffi.load(tmp_path / "m")
        for _ in range(3):
            torch.testing.assert_close(loaded(x), model(x), atol=1e-4, rtol=1e-5)
            assert torch.equal(loaded.whole, model.whole) and torch.equal(loaded.rows, loaded.whole[1:3])
    assert {n: p.stride() for n, p in loaded.named_parameters()} == {n: p.stride() for n, p in model.named_parameters()}


def test_a_negated_view(tmp_path: Path) -> None:
    class Negated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("scale", torch.complex(noise(8), noise(8) + 3).conj().imag)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(x) * self.scale
            return result

    model, x = Negated().eval(), noise(5, 8)
    fast = zendnn_cffi.optimize(model, tune="off")
    expected = fast(x)
    zendnn_cffi.save(fast, tmp_path / "m")
    assert torch.equal(zendnn_cffi.load(tmp_path / "m")(x), expected)


class Rotated(nn.Module):
    """Angles as complex numbers, conjugated when they are read, as rotary embeddings have them; a small integer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("angles", torch.polar(torch.ones(4), noise(4)).conj())
        self.register_buffer("count", torch.tensor([3, 60000], dtype=torch.uint16))
        self.register_buffer("small", noise(8).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.view_as_complex(self.layer(x).view(-1, 4, 2))
        return torch.view_as_real(pairs * self.angles).flatten(1) * self.small.float(), self.count


@pytest.mark.skipif(torch.complex64 not in _dtypes(), reason="safetensors 0.7 or newer has complex numbers")
def test_dtypes_that_safetensors_has(tmp_path: Path) -> None:
    model, x = Rotated().eval(), noise(5, 8)
    fast: Any = zendnn_cffi.optimize(model, tune="off")
    expected, _ = fast(x)
    zendnn_cffi.save(fast, tmp_path / "m")
    result, count = zendnn_cffi.load(tmp_path / "m")(x)
    assert torch.equal(result, expected) and count.tolist() == [3, 60000] and count.dtype == torch.uint16
    loaded: Any = zendnn_cffi.load(tmp_path / "m", verify=False)
    assert torch.equal(loaded.angles, model.angles) and loaded.small.dtype == torch.float8_e4m3fn
