"""4-bit weights: how PyTorch packs them here and elsewhere, and what they stand for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fx_passes import ops
from tests.support.int4_tensors import exact, packed
from tests.tolerance import assert_close
from zendnn_cffi.runtime.packed_int4 import block_here, dequantized, integers, packed_again, pieces

SIZES = [(16, 32, 32), (32, 64, 32), (48, 128, 64), (64, 96, 32), (112, 128, 128), (192, 256, 256), (208, 64, 64)]
_OTHERS = """
import sys, torch
for i, n in enumerate((16, 64, 112)):
    integers = torch.load(f"{sys.argv[1]}/{n}")
    torch.save(torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 1), f"{sys.argv[1]}/{n} packed")
torch.save(torch.backends.cpu.get_cpu_capability(), f"{sys.argv[1]}/capability")
"""


@pytest.mark.parametrize(("n", "k", "group"), SIZES)
def test_integers_are_read_back(n: int, k: int, group: int) -> None:
    expected, weights, _ = packed(n, k, group)
    found = integers(weights, block_here(), torch.empty(k, n, dtype=torch.int32))
    assert torch.equal(found.t() + 8, expected)
    assert torch.equal(packed_again(weights, block_here()), weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k", "group"), SIZES)
def test_weights_are_rounded_once(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    kept, weights, scales = packed(n, k, group, dtype)
    found = dequantized(weights, scales, group, block_here(), torch.empty(k, n, dtype=dtype)).t()
    expected = exact(kept, scales, group)
    half_a_step = torch.finfo(dtype).eps / 2
    assert ((found.double() - expected).abs() <= expected.abs() * half_a_step * 1.01 + 1e-9).all()


@pytest.mark.parametrize("shape", [(1, 64), (3, 64), (2, 3, 64), (0, 64), (64,)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_layer(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    kept, weights, scales = packed(48, 64, 32, dtype)
    x, added = torch.randn(shape).to(dtype), torch.randn(48).to(dtype) if bias else None
    found = ops.int4_linear(x, weights, scales, 32, block_here(), added)
    expected = x.double() @ exact(kept, scales, 32).t() + (added.double() if added is not None else 0)
    assert found.dtype == dtype
    assert_close(found, expected, k=64)


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_weights_that_another_machine_packed(capability: str, tmp_path: object) -> None:
    """Blocks are those of the vector length; each process packs for its own."""
    kept = {n: packed(n, 64, seed=n) for n in (16, 64, 112)}
    for n, (numbers, _, _) in kept.items():
        torch.save(numbers, f"{tmp_path}/{n}")
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    subprocess.run([sys.executable, "-c", _OTHERS, str(tmp_path)], check=True, env=environment)
    block = {"AVX512": 64, "AVX2": 32}.get(torch.load(f"{tmp_path}/capability"), 0)
    for n, (numbers, here, scales) in kept.items():
        theirs = torch.load(f"{tmp_path}/{n} packed")
        assert torch.equal(integers(theirs, block, torch.empty(64, n, dtype=torch.int8)).t() + 8, numbers)
        assert torch.equal(packed_again(theirs, block), here)
        x = torch.randn(3, 64).bfloat16()
        ours = ops.int4_linear(x, theirs, scales, 32, block)
        assert torch.equal(ours, ops.int4_linear(x, here, scales, 32, block_here()))


def test_pieces_fill_the_outputs() -> None:
    for block in (0, 32, 64):
        for n in range(16, 240, 16):
            found = list(pieces(n, block))
            assert [p.first for p in found[1:]] == [p.last for p in found[:-1]]
            assert (found[0].first, found[-1].last) == (0, n)
            assert all(p.in_halves == (p.last - p.first == block) for p in found)
