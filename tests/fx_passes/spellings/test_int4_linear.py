"""Layers that torchao gave weights of 4 bits: understood by each entry, right, and held once."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization.linear_quant_modules import WeightOnlyInt4Linear

import zendnn_cffi
from fx_passes import ops
from tests.fx_passes.spellings.test_int8_linear import optimized
from tests.support.int4_tensors import block, exact_weight, packed, quantized
from tests.support.int8_tensors import Block
from tests.support.lowering import noise
from tests.tolerance import assert_close

F32, BF16 = torch.float32, torch.bfloat16
NAMES = "torch:int4pack", "dequantized"


def layers(fast: Any) -> list[str]:
    """How the layers of 4-bit weights of all regions run: by PyTorch's kernel, or by primitives."""
    found = [node for node in zendnn_cffi.explain(fast).nodes if node.implementation.startswith(NAMES)]
    return [node.implementation.split(":")[0] for node in found]


def real(model: Any) -> Block:
    """The block with the numbers that its weights stand for, in float64."""
    made = Block(*model.up.weight.shape[::-1], asks=model.asks).double()
    for name in ("up", "down"):
        layer, given = made.get_submodule(name), model.get_submodule(name)
        layer.weight = nn.Parameter(exact_weight(given.weight))
        if given.bias is not None:
            layer.bias = nn.Parameter(given.bias.detach().double())
    return made.eval()


def check(fast: Any, model: nn.Module, x: Tensor) -> None:
    """As near to exact arithmetic as the tolerance that eager has, on whatever rows."""
    expected = real(model)
    with torch.no_grad():
        sources = (x, 5 * x, x[:1], x[:, :1], x[..., ::2].repeat_interleave(2, -1), x.transpose(0, 1), x[:0])
        for source in sources:
            ours, theirs, right = fast(source), model(source), expected(source.double())
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            if not source.numel():
                continue
            if x.dtype == F32:
                assert_close(ours, right, k=224)
            else:  # of the size of eager's: dequantized weights are rounded once more than there
                assert (ours - right).norm() <= 1.5 * (theirs - right).norm()


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
@pytest.mark.parametrize(
    ("dtype", "rows", "how"), [(BF16, 5, "torch"), (BF16, 40, "dequantized brg"), (F32, 5, "dequantized brg")]
)
def test_runs(dtype: torch.dtype, rows: int, how: str, entry: str, asks: bool) -> None:
    model, x = block(dtype, asks=asks), noise(3, rows, 128, dtype=dtype)
    with torch.no_grad():
        fast, behind = optimized(model, entry, x)
    assert layers(behind) == [how, how]
    check(fast, model, x)


@pytest.mark.parametrize("group", [64, 128])
def test_groups(group: int) -> None:
    model, x = block(group=group, sizes=(128, 256)), noise(3, 5, 128, dtype=BF16)
    with torch.no_grad():
        fast, behind = optimized(model, "optimize", x)
    assert layers(behind) == ["torch", "torch"]
    check(fast, model, x)


@pytest.mark.needs("bf16")
def test_bf16_inside_of_float32() -> None:
    model, x = block(F32), noise(3, 5, 128)
    with torch.no_grad():
        fast, behind = optimized(model, "optimize", x, dtype=BF16)
        assert_close(fast(x), real(model)(x.double()), dtype=BF16, k=128)
    assert layers(behind) == ["torch", "torch"]


def test_float16_is_computed_in_float32() -> None:
    """Nearer to exact arithmetic than eager, which multiplies in bf16."""
    model, x = block(torch.float16), noise(3, 5, 128, dtype=torch.float16)
    with torch.no_grad():
        fast, behind = optimized(model, "optimize", x)
        ours, theirs, exact = fast(x), model(x), real(model)(x.double())
    assert ours.dtype == theirs.dtype == torch.float16
    assert (ours - exact).norm() <= (theirs - exact).norm()
    assert layers(behind) and "torch" not in layers(behind)


def test_whatever_is_measured_to_be_fastest_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZENDNN_CFFI_CACHE", str(tmp_path))
    model, x = block(), noise(3, 40, 128, dtype=BF16)
    check(zendnn_cffi.optimize(model, (x,), tune="full"), model, x)


@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
def test_inputs_of_another_dtype_are_eagers(entry: str) -> None:
    model, x = block(), noise(3, 128, dtype=BF16)
    with torch.no_grad():
        fast, _ = optimized(model, entry, x)
        for call in (fast, model):
            with pytest.raises(RuntimeError, match="expected scalar type"):
                call(x.float())
        assert torch.equal(fast(x), fast(x))


@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
def test_changed_weights_are_noticed(entry: str) -> None:
    model, other, x = block(), block(seed=1), noise(3, 128, dtype=BF16)
    with torch.no_grad():
        fast, _ = optimized(model, entry, x)
        model.load_state_dict(other.state_dict())
        assert torch.equal(fast(x), other(x)) and torch.equal(fast(x), other(x))
        layer: Any = model.up
        layer.weight.scale_and_zero.mul_(2)
        assert torch.equal(fast(x), model(x)) and torch.equal(fast(x), model(x))


@pytest.mark.parametrize("change", ["layer", "part", "float"])
def test_parts_that_are_replaced_are_noticed(change: str) -> None:
    x, other, model = noise(3, 128, dtype=BF16), block(seed=1), block()
    fast = zendnn_cffi.optimize(block(), (x,), tune="off")
    with torch.no_grad():
        fast(x)
        for each in (fast.get_submodule("up"), model.up):
            layer: Any = each
            if change == "part":
                layer.weight.qdata = torch.zeros_like(layer.weight.qdata)
            else:
                layer.weight = other.up.weight if change == "layer" else nn.Parameter(noise(224, 128, dtype=BF16))
        for _ in range(2):
            assert_close(fast(x), model(x), k=128)
    assert len(layers(fast)) == (1 if change == "float" else 2)


@pytest.mark.parametrize("rows", [5, 64])
def test_copied_released_and_saved(rows: int, tmp_path: Path) -> None:
    """The file holds what the weight is made of, and needs no torchao."""
    model, x = block(), noise(rows, 128, dtype=BF16)
    with torch.no_grad():
        fast = zendnn_cffi.optimize(model, (x,), tune="off")
        expected = fast(x)
        assert torch.equal(copy.deepcopy(fast)(x), expected)
        released = zendnn_cffi.optimize(model, (x,), tune="off", release_weights=True)
        assert torch.equal(released(x), expected) and torch.equal(released(x[:3]), fast(x[:3]))
        zendnn_cffi.save(fast, tmp_path / "model.safetensors")
        loaded = zendnn_cffi.load(tmp_path / "model.safetensors")
        assert torch.equal(loaded(x), expected) and torch.equal(loaded(x[:3]), fast(x[:3]))
        assert torch.equal(model(x), block()(x))  # whose tensors they share
    assert loaded.get_buffer("up.weight.qdata").dtype == torch.uint8 and len(layers(loaded)) >= 2


_ELSEWHERE = """
import sys, torch, zendnn_cffi
with torch.no_grad():
    loaded = zendnn_cffi.load(f"{sys.argv[1]}/model.safetensors")
    torch.save([loaded(x) for x in torch.load(f"{sys.argv[1]}/inputs")], f"{sys.argv[1]}/results")
"""


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_files_for_a_machine_whose_kernel_reads_other_blocks(capability: str, tmp_path: Path) -> None:
    model, inputs = block(), [noise(rows, 128, dtype=BF16) for rows in (5, 64)]
    fast = zendnn_cffi.optimize(model, (inputs[0],), tune="off")
    with torch.no_grad():
        fast(inputs[0])
    zendnn_cffi.save(fast, tmp_path / "model.safetensors")
    torch.save(inputs, tmp_path / "inputs")
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    subprocess.run([sys.executable, "-c", _ELSEWHERE, str(tmp_path)], check=True, env=environment)
    for x, theirs in zip(inputs, torch.load(tmp_path / "results"), strict=True):
        right = real(model)(x.double())
        assert (theirs - right).norm() <= 1.5 * (model(x) - right).norm()


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("rows", [5, 64])
def test_no_second_copy_of_the_weights(rows: int) -> None:
    model, x = block(), noise(rows, 128, dtype=BF16)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        fast(x)
    assert len(layers(fast)) == 2
    assert sum(region.weights.size_bytes(region.originals) for region in fast.regions().values()) <= 4 * 224


def test_an_exported_program() -> None:
    """torch.export follows torchao's function to PyTorch's."""
    model, x = block(), noise(3, 5, 128, dtype=BF16)
    with torch.no_grad():
        fast = zendnn_cffi.optimize(torch.export.export(model, (x,)), tune="off")
        assert_close(fast(x), real(model)(x.double()), k=128)
    assert layers(fast) == ["torch", "torch"]


class _Plain(nn.Module):
    """Layers that hold packed weights as plain tensors, as torchao's WeightOnlyInt4Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = WeightOnlyInt4Linear(256, 48, bias=False, device=torch.device("cpu"), groupsize=32)
        _, self.layer.weight, self.layer.scales_and_zeros = packed(48, 256)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.layer(x))


@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_layers_that_hold_packed_weights(dtype: torch.dtype, entry: str) -> None:
    model, x = _Plain().eval(), noise(3, 5, 256, dtype=dtype)
    with torch.no_grad():
        fast, behind = optimized(model, entry, x)
        assert_close(fast(x), model(x), dtype=BF16, k=256)
        assert fast(x).dtype == dtype
    assert layers(behind) == ["torch"]


def test_what_is_not_understood_stays_and_is_named() -> None:
    model, x = block(), noise(3, 128, dtype=BF16)
    up: Any = model.up
    up.weight.act_pre_scale = torch.full((128,), 2.0, dtype=BF16)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        assert_close(fast(x), model(x), k=128)
    assert len(layers(fast)) == 1 and "weight is a Int4OpaqueTensor" in str(zendnn_cffi.explain(fast))


class _Reads(nn.Module):
    """A layer whose weight a function reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight, self.layer.bias)


def test_functions() -> None:
    model, x = quantized(_Reads()), noise(5, 128, dtype=BF16)
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        assert_close(fast(x), model(x), k=128)
    nodes = [node.target for region in fast.regions().values() for node in region.graph.nodes]
    assert nodes.count(ops.int4_linear) == 1 and layers(fast) == ["torch"]
