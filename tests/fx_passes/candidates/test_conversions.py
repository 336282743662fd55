"""Conversions between float32 and bf16: by PyTorch where nothing else changes, and the same numbers as a reorder's."""

from __future__ import annotations

import pytest
import torch

from fx_passes.candidates.candidates import PrimitiveTemplate, TorchTemplate
from fx_passes.candidates.conversions import conversion, fastest_conversion
from fx_passes.candidates.layouts import Layout, Numerics, Quantized, layout, row_major, strided
from fx_passes.search.measure import reorder_fingerprint, time_reorder
from tests.support.lowering import noise

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtypes", [(F32, BF16), (BF16, F32)], ids=str)
@pytest.mark.parametrize("shape", [(3,), (1, 1), (5, 17), (2, 3, 17), (2, 3, 1, 5)], ids=str)
def test_rounding_alone_is_a_call_of_pytorch(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    have, want = (row_major(shape, dtype) for dtype in dtypes)
    template = fastest_conversion(have, want)
    assert isinstance(template, TorchTemplate) and template.kind == "reorder"
    src, out = noise(*shape).to(dtypes[0]), torch.empty(shape, dtype=dtypes[1])
    template.function(src, out)
    assert torch.equal(out, src.to(dtypes[1]))
    assert time_reorder(have, want) > 0 and "torch" in reorder_fingerprint(have, want)


INTEGERS = Quantized(row_major((2, 16, 3, 3), torch.uint8), Numerics(torch.uint8, 0.5, 3))
OTHERS: dict[str, tuple[Layout, Layout]] = {
    "another order": (row_major((2, 16, 3, 3), F32), layout((2, 16, 3, 3), BF16, "nhwc")),
    "blocks": (layout((2, 16, 3, 3), F32, "nChw16c"), layout((2, 16, 3, 3), BF16, "nChw16c")),
    "gaps": (strided((4, 8), F32, (16, 1)), strided((4, 8), BF16, (16, 1))),
    "one dtype": (row_major((2, 16, 3, 3), F32), layout((2, 16, 3, 3), F32, "nhwc")),
    "integers": (row_major((2, 16, 3, 3), F32), INTEGERS),
    "from integers": (INTEGERS, row_major((2, 16, 3, 3), BF16)),
}


@pytest.mark.parametrize("have, want", OTHERS.values(), ids=OTHERS)
def test_everything_else_is_a_reorder(have: Layout, want: Layout) -> None:
    template = fastest_conversion(have, want)
    assert isinstance(template, PrimitiveTemplate) and str(template) == str(conversion(have, want))
    assert "torch" not in reorder_fingerprint(have, want).replace("torch.", "")
