"""A mask that several regions read is looked at once in each call, and never remembered beyond it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.memoize import masks
from fx_passes.memoize.masks import asked_once
from tests.support.lowering import noise
from tests.tolerance import assert_close


class Layers(nn.Module):
    """Three attentions with something between them that no region computes, and one mask."""

    def __init__(self, how: str = "computed") -> None:
        super().__init__()
        self.layers, self.how = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)), how
        self.register_buffer("cache", torch.zeros(2, 8, 16))

    def forward(self, x: Tensor, number: Tensor, mask: Tensor) -> Tensor:
        if self.how in ("computed", "cache"):
            mask = (torch.arange(8) <= number)[None, None, None].expand(2, 1, 8, 8)
        for layer in self.layers:
            heads = layer(x).unflatten(-1, (2, 8)).transpose(1, 2)
            found = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).transpose(1, 2).flatten(2)
            x = found.flip(-1)  # what no region knows
            if self.how == "written":
                mask.logical_not_()
            if self.how == "cache":
                self.cache.index_copy_(1, number[None], x[:, :1])
        return x


def inputs(number: int) -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    mask[..., number + 1 :] = False
    return noise(2, 8, 16), torch.tensor(number), mask


def optimized(how: str) -> tuple[Layers, Any]:
    model = Layers(how).eval()
    return model, zendnn_cffi.optimize(model, inputs(3), tune="off")


def asked(fast: Any) -> int:
    return len(fast.graph.find_nodes(op="call_function", target=asked_once))


@pytest.mark.parametrize("how", ["computed", "given", "cache"])
def test_asked_once_in_each_call(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fast = optimized(how)
    with torch.no_grad():
        assert_close(fast(*inputs(3)), model(*inputs(3)))
    assert asked(fast) == 1 and len(fast.regions()) >= 3
    seen: list[int] = []
    describe, additive = masks.describe, masks.ops.additive_mask
    monkeypatch.setattr(masks, "describe", lambda *a, **k: seen.append(0) or describe(*a, **k))
    monkeypatch.setattr(masks.ops, "additive_mask", lambda *a, **k: seen.append(1) or additive(*a, **k))
    for number in (3, 5, 7, 1, 3):
        seen.clear()
        with torch.no_grad():
            ours = fast(*inputs(number))
            found = [*seen]
            assert_close(ours, model(*inputs(number)))
        assert found.count(0) == 1 and found.count(1) <= 1


def test_a_callers_mask_may_be_written_to_between_calls() -> None:
    model, fast = optimized("given")
    x, number, mask = inputs(3)
    with torch.no_grad():
        for cut in (3, 5, 2):
            mask.fill_(True)
            mask[..., cut:] = False
            assert_close(fast(x, number, mask), model(x, number, mask))
    assert not hasattr(mask, "_zendnn_cffi_known")


def test_a_mask_that_the_forward_writes_to_is_asked_each_time() -> None:
    model, fast = optimized("written")
    with torch.no_grad():
        for number in (3, 5):
            ours, theirs = inputs(number), inputs(number)
            assert_close(fast(*ours), model(*theirs))
            assert torch.equal(ours[2], theirs[2])
    assert asked(fast) == 0


def test_it_is_saved_and_reported_as_no_computation(tmp_path: Path) -> None:
    model, fast = optimized("computed")
    with torch.no_grad():
        expected = fast(*inputs(3))
        path = tmp_path / "model.safetensors"
        zendnn_cffi.save(fast, path)
        again = zendnn_cffi.load(path)
        assert torch.equal(again(*inputs(3)), expected)
        assert_close(again(*inputs(5)), model(*inputs(5)))
    rows = [row for row in zendnn_cffi.explain(fast).nodes if row.became == "movement" and "asked" in row.name]
    assert len(rows) == 1
