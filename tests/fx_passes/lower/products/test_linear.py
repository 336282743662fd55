"""Linear layers and matrix products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.region import compile
from tests.fx_passes.lower.windows.test_convolution import BINARY, ELTWISE
from tests.support.lowering import fallbacks, kinds, net, noise, offload, oracle
from tests.tolerance import assert_close
from zendnn_cffi.primitives.attributes import ARG_DST

DTYPES = (None, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((1, 1), (5, 17), (2, 3, 17), (2, 1, 3, 16)), ids=str)
@pytest.mark.parametrize(("out", "bias"), ((1, True), (33, False)))
def test_linear(shape: tuple[int, ...], out: int, bias: bool, dtype: torch.dtype | None) -> None:
    found = offload(net(lambda m, x: m[0](x), nn.Linear(shape[-1], out, bias)), noise(*shape), dtype=dtype)
    assert kinds(found) == ["inner_product"]


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_packed_once_for_all_lengths(dtype: torch.dtype | None) -> None:
    """Without measuring, the matmul kernel with packed weights is taken, and its weights serve every length."""
    gm = zendnn_cffi.optimize(net(lambda m, x: m[0](x), nn.Linear(128, 128)), dtype=dtype, tune="off")
    packed = set()
    for length in (128, 7, 200):
        gm(noise(length, 128))
    (region,) = gm.regions().values()
    for lowered in region.lowered.values():
        program: Any = lowered.program
        (call,) = [call for call in program.calls if call.kind != "reorder"]
        assert call.kind == "matmul" and call.implementation.startswith("brg:")
        packed.add(tuple(t.data_ptr() for t in program.constants if t.numel() >= 128 * 128))
    assert len(packed) == 1


@pytest.mark.needs("bf16")
def test_a_result_that_leaves_is_written_in_its_own_dtype() -> None:
    model, x = net(lambda m, x: m[1](F.relu(m[0](x))), nn.Linear(64, 96), nn.Linear(96, 4096)), noise(33, 64)
    gm = zendnn_cffi.optimize(model, dtype=torch.bfloat16, tune="off")
    assert_close(gm(x), oracle(model, (x,))[0], dtype=torch.bfloat16, k=96)
    (region,) = gm.regions().values()
    for lowered in region.lowered.values():
        last = lowered.program.calls[-1]
        assert last.kind in ("matmul", "inner_product") and last.args[ARG_DST][1].dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ELTWISE)
def test_eltwise_post_op(name: str, dtype: torch.dtype | None) -> None:
    model = net(lambda m, x: m[1](ELTWISE[name](m[0](x))), nn.Linear(7, 17), nn.Linear(17, 3))
    found = offload(model, noise(5, 7), dtype=dtype)
    assert set(kinds(found)) <= {"inner_product", "eltwise"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("shape", ((2, 3, 17), (17,), (1, 3, 17), (2, 3, 1), ()), ids=str)
def test_binary_post_op(name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    model = net(lambda m, x, y: m[1](F.relu(BINARY[name](m[0](x), y))), nn.Linear(7, 17), nn.Linear(17, 3))
    found = offload(model, noise(2, 3, 7), noise(*shape), dtype=dtype)
    assert kinds(found).count("inner_product") == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "fn",
    (
        lambda m, x: m[0](x) + x,
        lambda m, x: (lambda a: m[0](a) + a)(m[1](x)),
        lambda m, x: (lambda a: (m[0](a) + a, a))(m[1](x)),
        lambda m, x: (lambda a: m[0](x) + a + m[1](a))(m[1](x)),
        lambda m, x: (lambda a: F.relu(m[0](x) + a) * a)(m[1](x)),
        lambda m, x: m[0](x.reshape(-1, 16)).reshape(2, 3, 16) + m[1](x),
        lambda m, x: (lambda a: m[0](x).flatten(0, 1) + a.flatten(0, 1))(m[1](x)),
        lambda m, x: (lambda a: (a.reshape(-1), m[0](x) + a))(m[1](x)),
    ),
)
def test_residuals(fn: object, dtype: torch.dtype | None) -> None:
    found = offload(net(fn, nn.Linear(16, 16), nn.Linear(16, 16)), noise(2, 3, 16), dtype=dtype)  # type: ignore[arg-type]
    assert kinds(found).count("inner_product") >= 1 and not fallbacks(found)


@pytest.mark.parametrize("shape", ((3, 5, 4), (2, 3, 5, 4), (2, 3, 1, 5, 4), (2, 1, 2, 3, 5, 4)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matmul(shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    b = shape[:-2] + (4, 17)
    model = net(lambda m, x, y: torch.tanh(torch.matmul(m[0](x), y) * 0.5), nn.Linear(4, 4))
    found = offload(model, noise(*shape), noise(*b), dtype=dtype)
    assert kinds(found)[:2] == ["inner_product", "matmul"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matmul_of_views(dtype: torch.dtype | None) -> None:
    model = net(lambda m, x: torch.softmax(m[0](x) @ m[1](x).transpose(-1, -2), -1), nn.Linear(8, 8), nn.Linear(8, 8))
    found = offload(model, noise(2, 5, 8), dtype=dtype)
    assert sorted(kinds(found)) == ["inner_product", "inner_product", "matmul", "softmax"]


def test_matmul_with_binary() -> None:
    model = net(lambda m, x, y: torch.matmul(m[0](x), y) + x, nn.Linear(4, 4))
    found = offload(model, noise(2, 3, 4, 4), noise(1, 3, 4, 4))
    assert "matmul" in kinds(found)
    found = offload(net(lambda m, x, y: torch.matmul(m[0](x), y) + y, nn.Linear(4, 4)), noise(4, 4), noise(4, 4))
    assert kinds(found) == ["inner_product", "matmul"]


def test_linear_without_batch() -> None:
    found = offload(net(lambda m, x: m[0](x), nn.Linear(4, 4)), noise(4))
    assert [n.became for n in found.nodes] == ["torch"]


@pytest.mark.parametrize("shape", [(), (1,), (1, 6), (5, 6), (5, 1)], ids=str)
def test_a_bias_that_is_broadcast_leaves_the_other_layers_alone(shape: tuple[int, ...]) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 6)
            self.bias = nn.Parameter(noise(*shape) if shape else noise(1)[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(F.relu(self.first(x)), self.second.weight, self.bias)

    found = offload(Layers().eval(), noise(5, 8))
    assert kinds(found) == ["inner_product", "torch"]


def test_broadcast_matmul_stays_right() -> None:
    offload(net(lambda m, x, y: torch.matmul(m[0](x), y), nn.Linear(4, 4)), noise(2, 3, 4, 4), noise(4, 5))
    offload(net(lambda m, x, y: torch.matmul(m[0](x), y), nn.Linear(4, 4)), noise(2, 3, 4, 4), noise(4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_classifier(dtype: torch.dtype | None) -> None:
    def fn(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return m[3](F.relu(m[2](torch.flatten(m[1](F.relu(m[0](x))), 1))))

    model = net(fn, nn.Conv2d(3, 17, 3), nn.AdaptiveAvgPool2d(2), nn.Linear(68, 33), nn.Linear(33, 10))
    found = offload(model, noise(5, 3, 8, 8), dtype=dtype)
    assert kinds(found) == ["convolution", "pooling", "inner_product", "inner_product"]


@pytest.mark.parametrize("tune", ("off", "full"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((1, 5, 3), (3, 27, 64), (2, 3, 5, 4)), ids=str)
def test_a_transposed_operand_is_read_as_it_lies(
    shape: tuple[int, ...], dtype: torch.dtype | None, tune: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def products(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m[0](x)
        return torch.matmul(x, x.transpose(-2, -1))

    seen: list[Any] = []
    build = compile.build_program
    monkeypatch.setattr(compile, "build_program", lambda *args: seen.append(build(*args)) or seen[-1])
    found = offload(net(products, nn.Linear(shape[-1], 16)), noise(*shape), dtype=dtype, tune=tune)
    assert tune == "full" or kinds(found) == ["inner_product", "matmul"]
    assert tune == "full" or not any(call.name.startswith("transpose") for call in seen[-1].calls)
