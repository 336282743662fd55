"""Embeddings of quantized tables: rows that are read are dequantized alone, whoever wrote the table."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.quantization import Float8WeightOnlyConfig, IntxWeightOnlyConfig, PerAxis, PerGroup, quantize_

import zendnn_cffi
import zendnn_cffi.backend
from fx_passes import ops
from tests.support.lowering import check_regions, noise
from tests.support.quantized import decomposed

ROWS, WIDTH = 40, 64
GRANULARITIES = {"groups": PerGroup(16), "rows": PerAxis(0)}
IDS = torch.tensor([[3, 0, 39, 3, 7], [1, 1, 2, 38, 0]])


class Tables(nn.Module):
    """Rows of two tables, read in the way of `how`, and a linear layer."""

    def __init__(self, how: str = "module") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.table, self.other, self.linear = nn.Embedding(ROWS, WIDTH), nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 24)

    def forward(self, ids: Tensor) -> Tensor:
        if self.how == "function":
            return self.linear(F.embedding(ids, self.table.weight, padding_idx=0))
        if self.how == "concatenated":
            return torch.cat([self.table(ids[:, 0]), self.other(ids[:, 1] % 9)], 1)
        if self.how == "summed":
            return self.linear(self.table(ids) + self.other(ids % 9))
        if self.how == "two readers":
            return self.table(ids).sum() + self.linear(self.table(ids.flatten())).sum()
        return self.linear(self.table(ids)).relu()


def quantized(
    how: str = "module", bits: Any = torch.int4, granularity: str = "groups", dtype: torch.dtype = torch.float32
) -> Any:
    """Tables whose embeddings torchao quantized."""
    model = Tables(how).eval().to(dtype)
    config = IntxWeightOnlyConfig(weight_dtype=bits, granularity=GRANULARITIES[granularity])
    quantize_(model, config, lambda module, name: isinstance(module, nn.Embedding))
    return model


def float8(dtype: torch.dtype) -> Any:
    """The same with a table of 8-bit floats."""
    model = Tables().eval().to(dtype)
    quantize_(model, Float8WeightOnlyConfig(), lambda module, name: isinstance(module, nn.Embedding))
    return model


def optimized(model: nn.Module, entry: str, ids: Tensor) -> tuple[Any, Any]:
    """What to call, and the optimized module behind it."""
    if entry == "torch.compile":
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="zendnn", options={"tune": "off"})
        compiled(ids)
        return compiled, zendnn_cffi.backend.compiled_modules()[-1]
    given = torch.export.export(model, (ids,)) if entry == "torch.export" else model
    fast = zendnn_cffi.optimize(given, None if entry == "torch.export" else (ids,), tune="off")
    return fast, fast


def lookups(behind: Any) -> int:
    return len(behind.graph.find_nodes(op="call_function", target=ops.quantized_embedding))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("bits", [torch.int8, torch.int4, torch.int2])
def test_tables(bits: Any, granularity: str, dtype: torch.dtype) -> None:
    check_tables(quantized("module", bits, granularity, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_of_float8(dtype: torch.dtype) -> None:
    check_tables(float8(dtype))


def check_tables(model: Any) -> None:
    fast, behind = optimized(model.table, "optimize", IDS)
    with torch.no_grad():
        for ids in (IDS, IDS.int(), IDS[0], IDS[0, 2], IDS[:0], IDS.T, IDS[:, ::2]):
            assert torch.equal(fast(ids), model.table(ids))
    whole, _ = optimized(model, "optimize", IDS)
    with torch.no_grad():
        torch.testing.assert_close(whole(IDS), model(IDS))
    assert lookups(behind) == lookups(whole) == 1 and "Intx" not in str(zendnn_cffi.explain(whole))
    check_regions(whole)


@pytest.mark.parametrize("how", ["module", "function", "concatenated", "summed", "two readers"])
@pytest.mark.parametrize("entry", ["optimize", "torch.compile", "torch.export"])
def test_entries(entry: str, how: str) -> None:
    model = quantized(how)
    with torch.no_grad():
        fast, behind = optimized(model, entry, IDS)
        torch.testing.assert_close(fast(IDS), model(IDS))
    assert lookups(behind) == (1 if how in ("module", "function") else 2)


@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
@pytest.mark.parametrize("index", [ROWS, -1])
def test_indices_beyond_the_table_raise(index: int, entry: str) -> None:
    with torch.no_grad():
        fast, _ = optimized(quantized(), entry, IDS)
        with pytest.raises(IndexError, match="out of range"):
            fast(torch.full_like(IDS, index))


def test_changed_tables_are_noticed() -> None:
    model, other = quantized(), quantized(bits=torch.int8)
    fast, _ = optimized(model, "optimize", IDS)
    with torch.no_grad():
        model.table.weight.scale.mul_(2)
        torch.testing.assert_close(fast(IDS), model(IDS))
        model.table.weight = other.table.weight
        torch.testing.assert_close(copy.deepcopy(fast)(IDS), fast(IDS))
        own = zendnn_cffi.optimize(model, (IDS,), tune="off")
        torch.testing.assert_close(own(IDS), other(IDS))


def test_saved(tmp_path: Path) -> None:
    fast, _ = optimized(quantized(), "optimize", IDS)
    with torch.no_grad():
        zendnn_cffi.save(fast, tmp_path / "model.safetensors")
        loaded = zendnn_cffi.load(tmp_path / "model.safetensors")
        assert torch.equal(loaded(IDS), fast(IDS))
    assert "table.weight.qdata" in loaded.state_dict()


def test_a_table_that_is_renormalized_stays() -> None:
    model = quantized()
    model.table.max_norm = 1.0
    fast, behind = optimized(model, "optimize", IDS)
    with torch.no_grad():
        torch.testing.assert_close(fast(IDS), model(IDS))
    assert lookups(behind) == 0


class Decomposed(nn.Module):
    """A table as torchao's EmbeddingQuantizer leaves it, with a scale for each row; or with other scales."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("table", (50 * noise(ROWS, WIDTH)).to(torch.int8))
        self.register_buffer("scales", noise((ROWS, WIDTH)[axis]).abs() + 0.1)
        self.register_buffer("zeros", (5 * noise((ROWS, WIDTH)[axis])).to(torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        given = (self.scales, self.zeros, self.axis, -128, 127, torch.int8)
        return F.embedding(ids, decomposed.dequantize_per_channel.default(self.table, *given))


@pytest.mark.parametrize("entry", ["optimize", "torch.compile", "torch.export"])
@pytest.mark.parametrize("axis", [0, 1])
def test_tables_that_a_graph_dequantizes(axis: int, entry: str) -> None:
    model = Decomposed(axis).eval()
    fast, behind = optimized(model, entry, IDS)
    assert torch.equal(fast(IDS), model(IDS))
    assert lookups(behind) == (1 if axis == 0 else 0)
