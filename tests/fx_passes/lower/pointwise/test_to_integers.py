"""Batch normalizations and gated values that leave integers, by one binary primitive or depthwise convolution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes.lower.pointwise import to_integers
from tests.support.lowering import noise
from tests.support.quantized import Integers, Weight, kept, optimized, ran, real, reorders, through

U8, S8, F32 = torch.uint8, torch.int8, torch.float32
CHANNELS = 19


def normalized(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    mean, weight, bias = (torch.randn(CHANNELS, generator=generator) for _ in range(3))
    var = torch.rand(CHANNELS, generator=generator) + 0.1
    return F.batch_norm(x, mean, var, weight, bias, False, 0.0, 1e-5)


def only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave one kind of candidates for a batch normalization between integers."""
    name = {"binary": "_as_depthwise", "convolution": "implementations"}[kind]
    monkeypatch.setattr(to_integers, name, lambda *args, **options: [])


@pytest.mark.parametrize("kind", ["binary", pytest.param("convolution", marks=pytest.mark.needs("vnni"))])
@pytest.mark.parametrize("dtypes", [(U8, U8), (S8, S8), (U8, S8), (S8, U8)])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("zero_points", [(0, 0), (7, 0), (3, 90)])
def test_it_reads_and_writes_integers(
    zero_points: tuple[int, int],
    relu: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        y = normalized(through(x, 0.02, zero_points[0], dtypes[0]))
        return kept(F.relu(y) if relu else y, 0.04, zero_points[1], dtypes[1])

    only(kind, monkeypatch)
    fast = optimized(Integers(forward), noise(2, CHANNELS, 9, 8))
    ((found, source, implementation),) = ran(fast)
    assert (found, source) == (kind, dtypes[0]) and implementation.startswith("jit")


def test_a_channel_without_a_factor_is_no_depthwise_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bias would be infinite: the binary primitive computes it, whatever is cheaper."""

    def forward(w: Any, x: Tensor) -> Tensor:
        weight = torch.ones(CHANNELS).index_fill(0, torch.tensor([4]), 0.0)
        y = F.batch_norm(
            through(x, 0.02, 7), torch.zeros(CHANNELS), torch.ones(CHANNELS), weight, torch.ones(CHANNELS), False
        )
        return kept(y, 0.04, 90)

    fast = optimized(Integers(forward), noise(2, CHANNELS, 9, 8))
    assert [kind for kind, _, _ in ran(fast)] == ["binary"]


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("kind", ["binary", "convolution"])
def test_it_stands_between_layers_of_a_dense_block(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only(kind, monkeypatch)

    def forward(w: Any, x: Tensor) -> Tensor:
        y = kept(F.conv2d(through(x, 0.02, 100), w[0](), w[0].bias, padding=1), 0.03, 120)
        y = kept(F.relu(normalized(real(y, 0.03, 120))), 0.02, 0)
        return kept(F.conv2d(real(y, 0.02, 0), w[1](), w[1].bias), 0.05, 128)

    weights = Weight(CHANNELS, 16, 3, 3), Weight(8, CHANNELS, 1, 1, seed=1)
    fast = optimized(Integers(forward, *weights), noise(1, 16, 9, 8), steps=3.0)
    assert [kind for kind, _, _ in ran(fast)] == ["convolution", kind, "convolution"]
    assert {source for _, source, _ in ran(fast)} == {U8}
    assert F32 not in {target for _, target in reorders(fast)}


def test_what_is_also_read_in_float32_is_not_rounded() -> None:
    def forward(w: Any, x: Tensor) -> Any:
        y = normalized(through(x, 0.02, 7))
        return kept(y, 0.04, 90), y * 2.0

    fast = optimized(Integers(forward), noise(1, CHANNELS, 9, 8))
    assert ("binary", U8, "jit:uni") not in ran(fast)


def gated(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x.mean((2, 3), keepdim=True))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("dtype", "zero_point"), [(U8, 0), (U8, 90), (S8, 0), (S8, -7)])
def test_a_gate_writes_integers(dtype: torch.dtype, zero_point: int, batch: int) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        return kept(gated(F.silu(through(x, 0.02, 100))), 0.01, zero_point, dtype)

    fast = optimized(Integers(forward), noise(batch, CHANNELS, 19, 18))
    assert ran(fast)[-1] == ("binary", F32, "jit:uni") and (F32, dtype) not in reorders(fast)[1:]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("dtype", "zero_point"), [(U8, 0), (U8, 9), (S8, -7)])
def test_a_gate_reads_and_writes_integers(dtype: torch.dtype, zero_point: int, batch: int) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        x = through(x, 0.02, zero_point, dtype)
        return kept(x * torch.sigmoid(x.mean((2, 3), keepdim=True)), 0.01, 40)

    fast = optimized(Integers(forward), noise(batch, CHANNELS, 29, 28))
    assert ran(fast).count(("binary", dtype, "jit:uni")) == (batch if zero_point else 1)
    assert (F32, U8) not in reorders(fast)[1:]


def test_a_gate_of_more_images_than_make_a_program_is_in_float32() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        x = through(x, 0.02, 9)
        return kept(x * torch.sigmoid(x.mean((2, 3), keepdim=True)), 0.01, 40)

    fast = optimized(Integers(forward), noise(65, 3, 5, 4))
    assert not [source for kind, source, _ in ran(fast) if kind == "binary" and source == U8]


def test_a_gated_value_that_is_also_read_in_float32_is_not_rounded() -> None:
    def forward(w: Any, x: Tensor) -> Any:
        y = gated(F.silu(through(x, 0.02, 100)))
        return kept(y, 0.01, 90), F.silu(y)

    fast = optimized(Integers(forward), noise(2, CHANNELS, 19, 18))
    assert (F32, U8) in reorders(fast)[1:]


@pytest.mark.needs("bf16")
def test_a_gated_value_in_bf16_is_not_written_as_integers() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        return kept(gated(F.silu(through(x, 0.02, 100))), 0.01, 90)

    fast = optimized(Integers(forward), noise(1, CHANNELS, 19, 18), steps=3.0, most_apart=0.2, dtype=torch.bfloat16)
    assert ("binary", F32, "jit:uni") not in ran(fast)


@pytest.mark.parametrize("shape", [(5, CHANNELS), (2, 5, CHANNELS), (2, 3, 5, CHANNELS)])
@pytest.mark.parametrize(("dtype", "zero_point"), [(U8, 0), (U8, 90), (S8, -7)])
@pytest.mark.parametrize("is_sum", [False, True])
def test_a_value_scaled_by_a_constant_is_written_as_integers(
    is_sum: bool, dtype: torch.dtype, zero_point: int, shape: tuple[int, ...]
) -> None:
    constant = torch.rand(CHANNELS) + 0.5

    def forward(w: Any, x: Tensor) -> Any:
        y = F.layer_norm(x, (CHANNELS,))
        return kept(y + constant if is_sum else y * constant, 0.03, zero_point, dtype), y

    fast = optimized(Integers(forward), noise(*shape), steps=1.0, most_apart=0.02)
    assert [kind for kind, _, _ in ran(fast)] == ["layer_normalization", "binary"] and not reorders(fast)


def test_a_scaled_value_that_is_also_read_in_float32_is_not_rounded() -> None:
    def forward(w: Any, x: Tensor) -> Any:
        y = F.layer_norm(x, (CHANNELS,)) * (torch.arange(CHANNELS) + 1.0)
        return kept(y, 0.03, 90), y.softmax(-1)

    assert (F32, U8) in reorders(optimized(Integers(forward), noise(5, CHANNELS)))
