"""Bags of several tables and pairs picked out of their products, through optimize and torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from benchmarks.workloads_recommender import DLRM
from fx_passes.lower.movement import embedding_bags
from tests.support.exported import needs_export
from tests.support.lowering import check_regions, fallbacks, kinds, net, noise, offload, oracle
from tests.tolerance import assert_close
from zendnn_cffi import backend

DTYPES = (None, torch.bfloat16)
ROWS = 9
cat = torch.cat


def bags(number: int = 3, width: int = 16, mode: str = "sum", **options: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    return [*(nn.EmbeddingBag(ROWS + i, width, mode=mode, **options) for i in range(number)), nn.Linear(6, width)]


def indices(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def three(m: Any, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return cat([m[3](x), m[0](s[:, 0]), m[1](s[:, 1]), m[2](s[:, 2])], 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ("sum", "mean"))
@pytest.mark.parametrize("width", (1, 5, 16, 64))
@pytest.mark.parametrize("batch", (1, 33))
def test_one_operation(batch: int, width: int, mode: str, dtype: torch.dtype | None) -> None:
    found = offload(net(three, *bags(width=width, mode=mode)), noise(batch, 6), indices(batch, 3, 7), dtype=dtype)
    assert kinds(found) == ["inner_product", "embedding_bags"] and not fallbacks(found)


FORMS: dict[str, Callable[..., Any]] = {
    "pieces on both sides": lambda m, x, s: cat([x, m[0](s[:, 0]), m[1](s[:, 1]), m[3](x), x], 1),
    "bags alone": lambda m, x, s: (m[3](x), cat([m[0](s[:, 0]), m[1](s[:, 1])], 1)),
    "from the second": lambda m, x, s: cat([m[3](x), m[0](s[:, 1]), m[1](s[:, 2])], 1),
    "other tensors": lambda m, x, s: cat([m[3](x), m[0](s[:, 2]), m[1](s[:, 0] // 2)], 1),
    "several lengths": lambda m, x, s: cat([m[3](x), m[0](s[:, 0]), m[1](s[:, 1, :1])], 1),
    "computed on": lambda m, x, s: m[3](cat([m[0](s[:, 0]), m[1](s[:, 1]), x], 1)[:, -6:]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, dtype: torch.dtype | None) -> None:
    found = offload(net(FORMS[name], *bags()), noise(5, 6), indices(5, 3, 4), dtype=dtype)
    assert kinds(found).count("embedding_bags") == 1


def lookups(m: Any, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return cat([m[3](x), m[0](s[:, 0]), m[1](s[:, 1]), m[2](s[:, 2])], 1)


def lookups_apart(m: Any, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return cat([m[0](s[:, 2]), m[1](s[:, 0] // 2), m[3](x)], 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fn", (lookups, lookups_apart))
@pytest.mark.parametrize("batch", (1, 33))
def test_rows_in_place_of_bags(batch: int, fn: Any, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model = net(fn, *(nn.Embedding(ROWS + i, 16) for i in range(3)), nn.Linear(6, 16))
    found = offload(model, noise(batch, 6), indices(batch, 3), dtype=dtype)
    inside = {node.became for node in found.nodes if node.region}
    assert inside == {"embedding_bags", "inner_product"} and not fallbacks(found)
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad(), pytest.raises(IndexError):
        gm(noise(batch, 6), indices(batch, 3) + ROWS)


def several_lengths(m: Any, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return cat([x, *(m[t](s[:, t]) for t in range(4)), m[4](x)], 1)


def several_lengths_apart(m: Any, x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return cat([m[3](s[:, 0]), m[0](s[:, 2] // 2), m[2](s[:, 2]), m[4](x)], 1)


@pytest.mark.parametrize("limit", (0, 1 << 20), ids=("in place", "copied"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fn", (several_lengths, several_lengths_apart))
@pytest.mark.parametrize("index_dtype", (torch.int32, torch.int64), ids=str)
def test_rows_of_several_lengths(
    index_dtype: torch.dtype, fn: Any, dtype: torch.dtype | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each index has the range of its own table, and what is outside raises PyTorch's error."""
    monkeypatch.setattr(embedding_bags, "_COPIED_BYTES", limit)
    torch.manual_seed(0)
    model = net(fn, *(nn.Embedding(ROWS + i, width) for i, width in enumerate((5, 16, 5, 1))), nn.Linear(6, 7))
    for batch in (1, 33):
        found = offload(model, noise(batch, 6), indices(batch, 4, dtype=index_dtype), dtype=dtype)
        inside = {node.became for node in found.nodes if node.region}
        assert inside == {"embedding_bags", "inner_product"} and not fallbacks(found)
    gm = zendnn_cffi.optimize(model, tune="off")
    x, wrong = noise(5, 6), indices(5, 4, dtype=index_dtype)
    wrong[:, 2], wrong[:, 3] = ROWS + 1, ROWS  # the last row of one table, no row of some others
    with torch.no_grad():
        if fn is several_lengths:
            assert_close(gm(x, wrong), oracle(model, (x, wrong))[0], k=6)
        wrong[4, 0] = -1
        with pytest.raises(IndexError):
            gm(x, wrong)
        wrong[4, 0], wrong[4, 2] = 0, ROWS + 2
        with pytest.raises(IndexError):
            gm(x, wrong)


def test_rows_of_sequences_stay_plain_pytorch() -> None:
    model = net(
        lambda m, x, s: m[2](cat([m[0](s[:, :2]), m[1](s[:, 1:])], 1)) * x,
        *(nn.Embedding(ROWS, 16), nn.Embedding(ROWS, 16)),
        nn.Linear(16, 16),
    )
    found = offload(model, noise(5, 1, 16), indices(5, 3))
    assert "inner_product" in kinds(found) and "embedding_bags" not in kinds(found)


@pytest.mark.parametrize("tune", ("off", "auto"))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_index_dtypes(dtype: torch.dtype, tune: str) -> None:
    found = offload(net(three, *bags()), noise(5, 6), indices(5, 3, 4, dtype=dtype), tune=tune)
    assert "embedding_bags" in kinds(found) or tune == "auto"  # measured: so small a region may stay plain PyTorch


@pytest.mark.parametrize("model_dtype", (torch.float64, torch.float16, torch.bfloat16), ids=str)
def test_other_dtypes_of_tables(model_dtype: torch.dtype) -> None:
    model = net(three, *bags()).to(model_dtype)
    gm = zendnn_cffi.optimize(model, tune="off")
    x, s = noise(5, 6, dtype=model_dtype), indices(5, 3, 4)
    with torch.no_grad():
        torch.testing.assert_close(gm(x, s), model(x, s), rtol=2e-2, atol=2e-2)


def test_strided_and_expanded_indices() -> None:
    model = net(three, *bags())
    for s in (indices(3, 5, 4).transpose(0, 1), indices(5, 6, 4)[:, ::2], indices(1, 3, 4).expand(5, 3, 4)):
        assert "embedding_bags" in kinds(offload(model, noise(5, 6), s))


@pytest.mark.parametrize("bad", (-1, ROWS, 2**40))
def test_an_index_out_of_range_is_pytorchs_error(bad: int) -> None:
    """On the first call, and later ones; the module works again afterwards."""
    model, x, good = net(three, *bags()), noise(5, 6), indices(5, 3, 4)
    wrong = good.clone()
    wrong[4, 0, 3] = bad
    with torch.no_grad():
        expected = model(x, good)
        with pytest.raises(Exception) as theirs:
            model(x, wrong)
        first = zendnn_cffi.optimize(model, tune="off")
        with pytest.raises(type(theirs.value)):
            first(x, wrong)
        assert_close(first(x, good), expected, k=6)
        with pytest.raises(type(theirs.value)):
            first(x, wrong)
        assert_close(first(x, good), expected, k=6)
        wrong[4, 0, 3], wrong[4, 1, 3] = 0, ROWS  # a row of the second table, which has one more
        assert_close(first(x, wrong), model(x, wrong), k=6)


def test_more_tables_than_indices_is_an_index_error() -> None:
    gm = zendnn_cffi.optimize(net(three, *bags()), tune="off")
    with torch.no_grad(), pytest.raises(IndexError):
        gm(noise(5, 6), indices(5, 2, 4))


@pytest.mark.parametrize("name", ("pieces on both sides", "bags alone", "computed on"))
def test_tables_that_move_and_results_that_are_kept(name: str) -> None:
    """Joined tables and places in the result are made once for where these lie."""
    model = net(FORMS[name], *bags())
    gm = zendnn_cffi.optimize(model, tune="off")
    calls = [(noise(5, 6, seed=i), indices(5, 3, 4).roll(i, 0)) for i in range(4)]
    with torch.no_grad():
        expected = [model(*call) for call in calls]
        results = [gm(*call) for call in calls[:2]]
        model.share_memory()
        results += [gm(*call) for call in calls[2:]]
    torch.testing.assert_close(results, expected)
    assert kinds(zendnn_cffi.explain(gm)).count("embedding_bags") == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_changed_tables_are_read(dtype: torch.dtype | None) -> None:
    model = net(three, *bags())
    gm = zendnn_cffi.optimize(model, tune="off", dtype=dtype)
    other = net(three, *bags())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
        gm(noise(5, 6), indices(5, 3, 4))
        gm.load_state_dict(other.state_dict())
        [expected] = oracle(other, (noise(5, 6), indices(5, 3, 4)))
        assert_close(gm(noise(5, 6), indices(5, 3, 4)), expected, dtype=dtype or torch.float32, k=6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_released_weights(dtype: torch.dtype | None) -> None:
    model = net(three, *bags())
    [expected] = oracle(model, (noise(5, 6), indices(5, 3, 4)))
    gm = zendnn_cffi.optimize(copy.deepcopy(model), tune="off", dtype=dtype, release_weights=True)
    with torch.no_grad():
        for _ in range(2):
            assert_close(gm(noise(5, 6), indices(5, 3, 4)), expected, dtype=dtype or torch.float32, k=6)
        [expected] = oracle(model, (noise(2, 6), indices(2, 3, 4)))
        assert_close(gm(noise(2, 6), indices(2, 3, 4)), expected, dtype=dtype or torch.float32, k=6)


@pytest.mark.parametrize("dtype", (None, pytest.param(torch.bfloat16, marks=pytest.mark.needs("bf16"))), ids=str)
@pytest.mark.parametrize("limit", (0, 1 << 20))
@pytest.mark.parametrize("distance", (16, 12), ids=("whole rows", "between rows"))
def test_tables_are_copied_only_where_that_joins_them(
    distance: int, limit: int, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one constant: for another dtype, or where they are small and their distances are no whole rows."""
    monkeypatch.setattr(embedding_bags, "_COPIED_BYTES", limit)
    model = net(three, *bags(width=16))
    memory = torch.zeros(4096)
    with torch.no_grad():
        for number, table in enumerate(model.m[:3]):
            size, start = table.weight.numel(), number * (64 * 16 + distance)
            memory[start : start + size].copy_(table.weight.view(-1))
            table.weight.data = memory[start : start + size].view(table.weight.shape)
    gm = zendnn_cffi.optimize(model, tune="off", dtype=dtype)
    x, s = noise(5, 6), indices(5, 3, 4)
    with torch.no_grad():
        assert_close(gm(x, s), oracle(model, (x, s))[0], dtype=dtype or torch.float32, k=6)
    [region] = gm.regions().values()
    [lowered] = region.lowered.values()
    kept = {tensor.data_ptr() for tensor in lowered.program.constants}
    in_place = [table.weight.data_ptr() in kept for table in model.m[:3]]
    copied = dtype is not None or (limit > 0 and distance == 12)
    assert in_place == [not copied] * 3


def small_dlrm(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    for name, value in (("TABLES", 5), ("ROWS", ROWS), ("WIDTH", 16)):
        monkeypatch.setattr(f"benchmarks.workloads_recommender.{name}", value)
    torch.manual_seed(0)
    return DLRM().eval()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", (1, 2))
def test_a_recommender_is_one_region(monkeypatch: pytest.MonkeyPatch, threads: int, dtype: torch.dtype | None) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = offload(small_dlrm(monkeypatch), noise(33, 13), indices(33, 5, 7), dtype=dtype)
    finally:
        torch.set_num_threads(before)
    expected = [*["inner_product"] * 3, "embedding_bags", "matmul", "pick", "concat", *["inner_product"] * 3]
    assert kinds(found) == expected and not fallbacks(found)
    assert len({node.region for node in found.nodes}) == 1


def test_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = small_dlrm(monkeypatch), (noise(33, 13), indices(33, 5, 7))
    [expected] = oracle(model, inputs)
    torch._dynamo.reset()
    backend.register()
    compiled = torch.compile(model, backend="zendnn", options={"tune": "off"})
    with torch.no_grad():
        for _ in range(2):
            assert_close(compiled(*inputs), expected, k=512)
    [gm] = backend.compiled_modules()[-1:]
    found = kinds(zendnn_cffi.explain(gm))
    assert found.count("embedding_bags") == 1 and found.count("pick") == 1
    check_regions(gm)


class Checked(nn.Module):
    """What torch.fx cannot trace symbolically, so that torch.export does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) if needs_export(x) and x.shape[0] > 1 else x


def test_picks_in_an_exported_graph() -> None:
    model, x = Checked(Pick(PICKS["rows of a table"][0], **PICKS["rows of a table"][1])).eval(), noise(3, 5, 4)
    gm = zendnn_cffi.optimize(model, x, tune="off")
    with torch.no_grad():
        assert_close(gm(x), oracle(model, (x,))[0], k=16)
    assert kinds(zendnn_cffi.explain(gm)).count("pick") == 1


LOW, HIGH = torch.tril_indices(5, 5, -1)


class Pick(nn.Module):
    """Products of pairs, of which some are picked by constant tables."""

    def __init__(self, function: Callable[..., torch.Tensor], **tables: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        for name, table in tables.items():
            self.register_buffer(name, table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return self.function(self, torch.matmul(x, x.transpose(1, 2)), x)


PICKS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]] = {
    "pairs": (lambda m, p, x: p[:, m.i, m.j], {"i": LOW, "j": HIGH}),
    "rows of a table": (lambda m, p, x: p[:, m.ij[0], m.ij[1]], {"ij": torch.stack([LOW, HIGH])}),
    "negative": (lambda m, p, x: p[:, m.i, m.j], {"i": LOW - 5, "j": HIGH}),
    "int32": (lambda m, p, x: p[:, m.i, m.j], {"i": LOW.int(), "j": HIGH.int()}),
    "last dimension": (lambda m, p, x: x[:, :, m.i], {"i": torch.tensor([3, 0, 0])}),
    "one": (lambda m, p, x: p[:, m.i, m.j], {"i": LOW[:1], "j": HIGH[:1]}),
}
STAY: dict[str, tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]] = {
    "middle dimension": (lambda m, p, x: x[:, m.i], {"i": torch.tensor([3, 0, 0])}),
    "matrices of indices": (lambda m, p, x: p[:, m.i, m.j], {"i": LOW.view(2, 5), "j": HIGH.view(2, 5)}),
    "broadcast": (lambda m, p, x: p[:, m.i, m.j], {"i": LOW[:1], "j": HIGH}),
    "a mask": (lambda m, p, x: p[:, m.i], {"i": torch.ones(5, 5).tril(-1).bool()}),
    "first dimension": (lambda m, p, x: p[m.i], {"i": torch.tensor([1, 0])}),
    "all dimensions": (lambda m, p, x: x[m.i, m.j], {"i": torch.tensor([1, 0]), "j": torch.tensor([4, 0])}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PICKS)
def test_picks(name: str, dtype: torch.dtype | None) -> None:
    function, tables = PICKS[name]
    found = offload(Pick(function, **tables).eval(), noise(3, 5, 4), dtype=dtype, k=16)
    assert kinds(found).count("pick") == 1 and not fallbacks(found)


@pytest.mark.parametrize("name", STAY)
def test_picks_that_stay_plain_pytorch(name: str) -> None:
    function, tables = STAY[name]
    found = offload(Pick(function, **tables).eval(), noise(3, 5, 4), k=16)
    assert "pick" not in kinds(found)


def test_an_index_that_is_not_there_is_pytorchs_error() -> None:
    gm = zendnn_cffi.optimize(Pick(PICKS["pairs"][0], i=LOW, j=HIGH + 4).eval(), tune="off")
    with torch.no_grad(), pytest.raises(IndexError):
        gm(noise(3, 5, 4))
