"""Each way to compute a linear layer of quantized rows is right: by primitives or PyTorch, of all rows or of blocks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fx_passes.candidates.candidates import Operand
from fx_passes.candidates.layouts import row_major
from fx_passes.lower.products import row_blocks, row_scaled_linear
from tests.fx_passes.lower.products.test_dynamic import POST_OPS, optimized, products
from tests.fx_passes.lower.products.test_dynamic_rows import FORMS, K, by_token
from tests.support.lowering import noise
from tests.support.quantized import Integers, Weight
from zendnn_cffi.primitives.attributes import PostOps


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("form", ["per token", "per token, asymmetric"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("post_op", ["none", "gelu", "residual", "gated residual"])
@pytest.mark.parametrize("rows", [17, 120])
def test_each_way_of_many_rows_is_right(
    rows: int, post_op: str, bias: bool, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PyTorch or primitives, of all rows or of blocks: each is the only one in turn."""

    def forward(w: Any, x: Tensor) -> Tensor:
        y = F.linear(FORMS[form](x), w[0](), w[0].bias)
        wide = torch.cat((x, x), -1)
        if post_op == "gated residual":
            return F.relu(y * wide) + wide
        return y + wide if post_op == "residual" else POST_OPS[post_op](y)

    cache = 1024 if rows == 120 else 17 * 2 * K * 4
    monkeypatch.setattr(row_blocks, "CACHE_BYTES", cache)
    in_steps, seen = row_scaled_linear._Layer.in_steps, set()
    model, x = Integers(forward, Weight(2 * K, K, bias=bias)), noise(rows, K)
    number, count = 0, 1
    while number < count:

        def only(layer: Any, number: int = number) -> Any:
            nonlocal count
            found = [*in_steps(layer)]
            count = len(found)
            seen.add(
                (found[number].implementation, sum(type(c).__name__ == "TorchTemplate" for c in found[number].calls))
            )
            return iter(found[number : number + 1])

        monkeypatch.setattr(row_scaled_linear._Layer, "in_steps", only)
        assert products(optimized(model, x, least_db=40))
        number += 1
    assert count > (2 if rows == 120 else 1) and any("blocks" in name for name, _ in seen) == (rows == 120)
    assert any(torch_calls == 0 for _, torch_calls in seen) == (rows == 17 or "asymmetric" not in form)


@pytest.mark.parametrize("form", ["per token", "per token, asymmetric"])
@pytest.mark.parametrize("bias", [True, False])
def test_ways_are_measured_side_by_side(bias: bool, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ in nothing but their calls, so that comparing them would compare weights."""
    monkeypatch.setattr(row_blocks, "CACHE_BYTES", 1024)
    model = Integers(lambda w, x: F.linear(FORMS[form](x), w[0](), w[0].bias), Weight(24, K, bias=bias))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the region could not be lowered
        fast = optimized(model, noise(40, K), least_db=40, tune="full")
    assert fast.regions()


@pytest.mark.needs("vnni")
@pytest.mark.parametrize(("rows", "blocks"), [(16, 0), (36, 4), (40, 4), (121, 0), (127, 0)])
def test_blocks_are_equal_and_fit_a_cache_or_there_are_none(
    rows: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_blocks, "CACHE_BYTES", 1024 // torch.get_num_threads())  # ten rows of sums
    in_steps, offered = row_scaled_linear._Layer.in_steps, []

    def remembered(layer: Any) -> Any:
        offered.extend(in_steps(layer))
        return iter(offered)

    monkeypatch.setattr(row_scaled_linear._Layer, "in_steps", remembered)
    optimized(
        Integers(lambda w, x: F.linear(by_token(x), w[0](), w[0].bias), Weight(24, K)), noise(rows, K), least_db=40
    )
    named = {c.implementation for c in offered if "blocks" in c.implementation}
    assert all(name.endswith(f" in {blocks} blocks") for name in named) and bool(named) == bool(blocks)


@pytest.mark.parametrize("rows", [1, 2])
def test_blocks_read_their_own_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row, too, which look like an operand of one row: so it is with 128,256 outputs and one thread."""
    in_steps, layers = row_scaled_linear._Layer.in_steps, []

    def remembered(layer: Any) -> Any:
        layers.append(layer)
        return in_steps(layer)

    def forward(w: Any, x: Tensor) -> Tensor:
        y = F.linear(by_token(x), w[0](), w[0].bias)
        return (y * torch.cat((x, x), -1)) + w[0].bias

    monkeypatch.setattr(row_scaled_linear._Layer, "in_steps", remembered)
    optimized(Integers(forward, Weight(2 * K, K)), noise(20, K), least_db=40)
    layer = max(layers, key=lambda layer: len(layer.post_ops))
    block = layer.block(6, rows)
    for begin in (None, PostOps().binary("mul", row_major((rows, 1), torch.float32))):
        whole, *others = block.chain_of(layer.post_ops, begin).args.values()
        assert isinstance(whole, Operand) and whole.offset_bytes == 6 * 2 * K * torch.float32.itemsize
        assert all(not isinstance(other, Operand) or other.offset_bytes == 0 for other in others)
