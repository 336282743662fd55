"""Embeddings of a call's own indices are part of the region that reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zendnn_cffi
from fx_passes import ops
from tests.support.exported import needs_export
from tests.support.lowering import check_regions

ROWS, WIDTH = 50, 16


class Lookup(nn.Module):
    """A table, a linear, and how the rows come to it: forward = read(module, ids)."""

    def __init__(self, read: Callable[[Any, Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.table, self.linear, self.norm = nn.Embedding(ROWS, WIDTH, **options), nn.Linear(WIDTH, 8), nn.LayerNorm(16)
        self.read = read

    def forward(self, ids: Tensor) -> Any:
        return self.read(self, ids)


class Exported(Lookup):
    """What symbolic tracing cannot follow."""

    def forward(self, ids: Tensor) -> Any:
        return self.read(self, ids) if needs_export(ids) and ids.shape[0] > 1 else ids


SPELLINGS: dict[str, Callable[[Any, Tensor], Any]] = {
    "module": lambda m, ids: m.linear(m.table(ids)),
    "function": lambda m, ids: m.linear(F.embedding(ids, m.table.weight)),
    "aten": lambda m, ids: m.linear(torch.ops.aten.embedding.default(m.table.weight, ids)),
    "norm first": lambda m, ids: m.linear(m.norm(m.table(ids))),
    "residual": lambda m, ids: m.table(ids) + F.pad(m.linear(m.norm(m.table(ids))), (0, 8)),
    "something else written to": lambda m, ids: m.linear(m.table(ids)) + m.norm.bias.mul_(1.0).sum(),
    "two readers": lambda m, ids: (m.linear(m.table(ids)), m.norm(m.table(ids))),
}
OUTSIDE: dict[str, Callable[[Any, Tensor], Any]] = {
    "computed indices": lambda m, ids: m.linear(m.table(ids * 2 - ids)),
    "read by nothing of a region": lambda m, ids: m.linear(torch.cumsum(m.table(ids), 0)),
    "a table written to": lambda m, ids: m.linear(m.table(ids)) + m.table.weight.mul_(1.0).sum(),
    "indices written to": lambda m, ids: m.linear(m.table(ids)) + ids.clamp_(max=3).sum(),
}


def indices(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def lookups(gm: Any) -> list[str]:
    """The names of regions' embeddings."""
    regions = gm.regions().values()
    return [node.name for region in regions for node in region.graph.nodes if node.target is ops.embedding]


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
@pytest.mark.parametrize("name", SPELLINGS)
def test_rows_go_straight_into_the_region(name: str, dtype: torch.dtype) -> None:
    ids = indices(2, 7, dtype=dtype)
    for model in (Lookup(SPELLINGS[name]).eval(), Exported(SPELLINGS[name]).eval()):
        gm = zendnn_cffi.optimize(model, (ids,), tune="off")
        with torch.no_grad():
            torch.testing.assert_close(gm(ids), model(ids), rtol=1e-5, atol=1e-5)
        assert len(lookups(gm)) in (1, 2)  # where it is looked up twice
        assert lookups(gm) and not [n for n in gm.graph.nodes if n.op == "call_module" and "table" in str(n.target)]
        found = zendnn_cffi.explain(gm)
        assert {node.became for node in found.nodes if node.name in lookups(gm)} == {"embedding"}
        assert all(node.region for node in found.nodes if node.name in lookups(gm))
        check_regions(gm)


@settings(max_examples=20, deadline=None)
@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3), bf16=st.booleans())
def test_any_shape(shape: list[int], bf16: bool) -> None:
    model, ids = Lookup(SPELLINGS["norm first"]).eval(), indices(*shape)
    gm = zendnn_cffi.optimize(model, tune="off", dtype=torch.bfloat16 if bf16 else None)
    with torch.no_grad():
        torch.testing.assert_close(gm(ids), model(ids), rtol=1e-5, atol=5e-2 if bf16 else 1e-5)
    assert lookups(gm) == ["table"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_others_stay_outside(name: str) -> None:
    model, ids = Lookup(OUTSIDE[name]).eval(), indices(5)
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        torch.testing.assert_close(gm(ids.clone()), model(ids.clone()))
    assert gm.regions() and not lookups(gm)


def test_small_change_makes_no_region() -> None:
    model = Exported(lambda m, ids: m.table(ids) + 1).eval()
    gm = zendnn_cffi.optimize(model, (indices(5),), tune="off")
    with torch.no_grad():
        torch.testing.assert_close(gm(indices(5)), model(indices(5)), rtol=0, atol=0)
    assert not gm.regions() and any(node.target is ops.embedding for node in gm.graph.nodes)


def test_a_table_that_is_renormalized_stays_outside() -> None:
    model = Lookup(SPELLINGS["module"], max_norm=0.5).eval()
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        torch.testing.assert_close(gm(indices(5)), model(indices(5)))
    assert gm.regions() and not lookups(gm)


@pytest.mark.parametrize("wrong", (ROWS, -1))
def test_an_index_that_is_not_there_raises_what_pytorch_raises(wrong: int) -> None:
    model, ids = Lookup(SPELLINGS["module"]).eval(), indices(2, 3)
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        for _ in range(3):
            for run in (gm, model):
                with pytest.raises(IndexError, match="index out of range in self"):
                    run(torch.full((2, 3), wrong))
            torch.testing.assert_close(gm(ids), model(ids))


def test_a_table_written_to_later_counts() -> None:
    model = Lookup(SPELLINGS["module"]).eval()
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        gm(indices(4))
        model.table.weight.mul_(2)
        torch.testing.assert_close(gm(indices(4)), model(indices(4)))


def test_through_torch_compile() -> None:
    torch._dynamo.reset()
    model = Lookup(SPELLINGS["norm first"]).eval()
    others = zendnn_cffi.backend.compiled_modules()
    compiled = torch.compile(model, backend="zendnn", options={"tune": "off"})
    with torch.no_grad():
        for length in (3, 4, 9):
            torch.testing.assert_close(compiled(indices(2, length)), model(indices(2, length)))
    ours = [gm for gm in zendnn_cffi.backend.compiled_modules() if gm not in others]
    assert ours and all(map(lookups, ours))


def test_a_released_table_is_there_once_for_all_lengths() -> None:
    """Tied to a linear: after release the plain table is made again from the packed one, once."""

    class Tied(Lookup):
        def forward(self, ids: Tensor) -> Any:
            return F.linear(self.norm(self.table(ids)), self.table.weight)

    model = Tied(SPELLINGS["module"]).eval()
    gm = zendnn_cffi.optimize(model, tune="off", release_weights=True)
    with torch.no_grad():
        for length in (5, 7, 9):
            torch.testing.assert_close(gm(indices(2, length)), model(indices(2, length)), rtol=1e-5, atol=1e-5)
    (region,) = gm.regions().values()
    programs = [lowered.program for lowered in region.lowered.values()]
    tables = {t.data_ptr() for program in programs[1:] for t in program.constants if t.shape == (ROWS, WIDTH)}
    assert len(programs) == 3 and len(tables) == 1
