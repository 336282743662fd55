"""Memory for C: plain CPU tensors whatever PyTorch's defaults are, and a MemoryError that names the bytes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zendnn_cffi import functional as zf
from zendnn_cffi.primitives import allocation

ROOT = Path(__file__).parents[3]
# Functions of torch that make a tensor from nothing: without a device they follow the default one.
FACTORIES = {"empty", "empty_strided", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "eye"}
TYPED = FACTORIES - {"arange", "randint", "tensor"}  # whose dtype, too, is a default


def test_default_device_and_dtype_change_nothing() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            made = [
                allocation.empty((2, 3), torch.float32),
                allocation.empty((2, 3), torch.float32, (1, 2)),
                allocation.filled((2, 3), 1.5, torch.float32),
                allocation.numbers([1.5], torch.float32),
            ]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(t.device.type == "cpu" and t.dtype == torch.float32 and t.data_ptr() for t in made)
    assert made[1].stride() == (1, 2) and made[2].sum() == 9


def test_too_little_memory_names_the_bytes() -> None:
    huge = torch.zeros(1).expand(2**20, 2**27)
    column = torch.zeros(2**22, 1)
    for function, size_bytes in (
        (lambda: allocation.empty((2**31, 2**20), torch.float32), 2**53),
        (lambda: allocation.empty((2**40, 2**40), torch.float32), 2**82),
        (lambda: allocation.empty((2**20, 2**20), torch.bfloat16, (2**21, 2)), 2**42 - 2),
        (lambda: zf.matmul(column, column.t()), 2**46),
        (lambda: zf.gemm(column, column.t()), 2**46),
        (lambda: zf.eltwise(huge, "relu"), 2**49),  # the copy that an expanded view needs
    ):
        with pytest.raises(MemoryError, match=f"no memory for {size_bytes} bytes"):
            function()


def test_sizes_beyond_32_bits_are_refused() -> None:
    wide = torch.zeros(1, dtype=torch.int8).expand(1, 2**31)
    with pytest.raises(ValueError, match=r"src has shape \[1, 2147483648\].*at most 2147483647"):
        zf.reorder(wide)
    with pytest.raises(ValueError, match="the result has shape"):
        zf.resampling(torch.zeros(1, 1, 1), "nearest", 2**31)
    with pytest.raises(ValueError, match="at most 16777216 are taken"):
        zf.resampling(torch.zeros(1, 1, 1), "nearest", 2**24 + 1)


def factories(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}:
            yield node


@pytest.mark.parametrize("package", ["zendnn_cffi", "fx_passes"])
def test_every_new_tensor_says_device_and_dtype(package: str) -> None:
    silent = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for call in factories(ast.parse(path.read_text())):
            said = {keyword.arg for keyword in call.keywords}
            needed = {"device", *({"dtype"} if call.func.attr in TYPED else ())}  # type: ignore[attr-defined]
            if not needed <= said:
                silent.append(f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)} lacks {needed - said}")
    assert not silent, "\n".join(silent)
