"""AOCL-BLIS's products with packed weights, between unreadable pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zendnn_cffi.engine.library import load
from zendnn_cffi.primitives.lpgemm import Gemm, GemmPostOp, PackedLayout

BETWEEN_PAGES = """
import itertools
import torch
from zendnn_cffi.primitives.lpgemm import Gemm, GemmPostOp
from zendnn_cffi.primitives.verification.places import Guarded

torch.set_num_threads({threads})
torch.manual_seed(0)
for dtype, result in {dtypes}:
    for m, n, k in itertools.product({rows}, (1, 3, 16, 17, 65, 130), (1, 3, 17, 64, 479)):
        def put(tensor):
            place = Guarded(tensor.numel() * tensor.element_size(), {at_end})
            place.inside.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            return place
        x, w, b, z = (t.to(dtype) for t in (torch.randn(m, k), torch.randn(n, k), torch.randn(n), torch.randn(m, n)))
        bias, added = (GemmPostOp(kind, operand=dtype) for kind in ("bias", "matrix_add"))
        gemm = Gemm((m, k, n), dtype, result, (bias, GemmPostOp("swish", (1.0, 0.0)), added))
        places, plain = (put(x), put(b), put(z)), put(w)
        packed = Guarded(-(-gemm.weights.size_bytes // 64) * 64, {at_end})
        gemm.weights.pack(plain.inside.view(dtype).view(n, k), packed.inside)
        dst = Guarded(m * n * result.itemsize, {at_end})
        src, *operands = (place.inside.data_ptr() for place in places)
        post_ops, alive = gemm.bind_post_ops(operands)
        gemm.function()(*gemm.arguments(src, packed.inside.data_ptr(), dst.inside.data_ptr(), post_ops))
        wanted = torch.nn.functional.silu(x.double() @ w.double().t() + b.double()) + z.double()
        error = (dst.inside.view(result).view(m, n) - wanted).abs().max() / wanted.abs().max().clamp(min=1)
        assert error <= (2e-2 if torch.bfloat16 in (dtype, result) else 1e-5), (dtype, m, n, k, error)
print("whole")
"""


@pytest.mark.parametrize("at_end", (True, False))
@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize(
    "dtypes",
    (
        ((torch.float32, torch.float32),),
        pytest.param(
            ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)), marks=pytest.mark.needs("bf16")
        ),
    ),
    ids=("float32", "bf16"),
)
def test_nothing_beyond_the_operands_is_touched(run_python: Any, dtypes: Any, at_end: bool, threads: int) -> None:
    rows = (1, 2, 3, 5, 13) if load().runs("cpu_isa_avx512_core") else (2, 3, 4, 5, 13)  # none of one row with AVX2
    done = run_python(BETWEEN_PAGES.format(rows=rows, dtypes=dtypes, at_end=at_end, threads=threads), check=False)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


@pytest.mark.parametrize(
    "dtype", (torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.needs("bf16"))), ids=str
)
def test_packed_weights_do_not_depend_on_what_their_memory_held(dtype: torch.dtype) -> None:
    layout = PackedLayout((13, 7), dtype)
    plain = torch.randn(13, 7).to(dtype)
    packed = [torch.full((layout.size_bytes,), fill, dtype=torch.uint8) for fill in (0, 255)]
    for target in packed:
        layout.pack(plain, target)
    assert torch.equal(*packed)


def test_layouts_are_told_apart() -> None:
    layout = PackedLayout((13, 7), torch.bfloat16)
    assert len({layout.key, PackedLayout((7, 13), torch.bfloat16).key, PackedLayout((13, 7), torch.float32).key}) == 3


def test_an_unknown_post_op_is_refused() -> None:
    gemm = Gemm((2, 3, 4), torch.float32, torch.float32, (GemmPostOp("bias"),))
    with pytest.raises(ValueError, match="no such post-op"):
        gemm.bind_post_ops(())
