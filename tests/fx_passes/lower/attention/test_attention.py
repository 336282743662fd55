"""Attention in steps (products around a softmax), and masks that leave nothing out or what comes later."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.rules import lower_graph
from fx_passes.memoize.masks import CAUSAL, FULL, KEYS, LIVE, OTHER, describe
from fx_passes.region.compile import _report
from tests.support.lowering import noise, offload
from tests.tolerance import assert_close

DTYPES = (None, torch.bfloat16)
HEADS = 3


class Attention(nn.Module):
    """Heads of width 16 between two linears, one shared projection for q, k and v."""

    def __init__(self, *, is_causal: bool = False, scale: float | None = None) -> None:
        super().__init__()
        width = 16 * HEADS
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.is_causal, self.scale = is_causal, scale

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, None)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        n, length, _ = x.shape
        heads = self.qkv(x).reshape(n, length, 3, HEADS, 16).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, 0.0, self.is_causal, scale=self.scale)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


class Masked(Attention):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.attend(x, mask)


class Unbound(Attention):
    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(n, length, 3, HEADS, 16).permute(2, 0, 3, 1, 4).unbind(0)
        result: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return result


def steps(gm: Any) -> list[list[str]]:
    """Of every program of the one region, the kinds of the calls that attention became."""
    (region,) = gm.regions().values()
    found = []
    for lowered in region.lowered.values():
        calls = [call for call in lowered.program.calls if "attention" in call.name and call.kind != "reorder"]
        found.append([call.kind for call in calls])
    return found


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("shape", ((1, 1), (2, 7), (3, 33), (1, 128)), ids=str)
def test_two_products_and_a_softmax(shape: tuple[int, int], is_causal: bool, dtype: torch.dtype | None) -> None:
    model, x = Attention(is_causal=is_causal).eval(), noise(*shape, 16 * HEADS)
    offload(model, x, dtype=dtype)
    gm = zendnn_cffi.optimize(model, dtype=dtype, tune="off")
    with torch.no_grad():
        gm(x)
    assert steps(gm) == [["matmul", "softmax", "matmul"]]


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("examples", (False, True))
def test_heads_taken_apart_by_unbind(examples: bool) -> None:
    model, x = Unbound().eval(), noise(2, 11, 16 * HEADS)
    gm = zendnn_cffi.optimize(model, (x,) if examples else None, tune="off")
    with torch.no_grad():
        assert_close(gm(x), model(x), k=48)
    assert steps(gm) == [["matmul", "softmax", "matmul"]]


def test_scale() -> None:
    offload(Attention(scale=0.7).eval(), noise(2, 9, 16 * HEADS))


def test_scores_beyond_the_caches_go_to_the_flash_kernel() -> None:
    gm = zendnn_cffi.optimize(Attention().eval(), tune="off")
    with torch.no_grad():
        gm(noise(1, 2048, 16 * HEADS))  # 3 x 2048 x 2048 scores
    assert steps(gm) == [["attention"]]


def masks(n: int, length: int) -> dict[str, Tensor]:
    """Boolean and additive masks [N or 1, 1, L or 1, L]; sample 0 of the padded ones is left out altogether."""
    keys = torch.arange(length) < torch.arange(n).unsqueeze(1) * length / max(n - 1, 1)
    padded = keys[:, None, None, :]
    lower = torch.ones(length, length, dtype=torch.bool).tril()
    added = torch.zeros(n, 1, 1, length).masked_fill(~padded, -math.inf)
    return {
        "full": torch.ones(n, 1, 1, length, dtype=torch.bool).expand(n, 1, length, length),
        "causal": lower.expand(n, 1, length, length),
        "padded": padded,
        "padded and causal": padded & lower,
        "expanded": padded.expand(n, 1, length, length),
        "added": added,
        "added, expanded": added.expand(n, 1, length, length),
        "finite": torch.zeros(n, 1, 1, length).masked_fill(~padded, torch.finfo(torch.float32).min),
    }


@pytest.mark.parametrize("tune", ("off", "full"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", masks(3, 11))
def test_masks(name: str, dtype: torch.dtype | None, tune: str) -> None:
    """As PyTorch: what is left out has no share, and where all is, the result is zero."""
    model, x, mask = Masked().eval(), noise(3, 11, 16 * HEADS), masks(3, 11)[name]
    gm = zendnn_cffi.optimize(model, (x, mask), dtype=dtype, tune=tune)
    with torch.no_grad():
        want = model.double()(x.double(), mask if mask.dtype == torch.bool else mask.double())
        model.float()
        for _ in range(2):
            assert_close(gm(x, mask), want, dtype=dtype or torch.float32, k=48)
        (region,) = gm.regions().values()
        (reason,) = map(region.reason, region.lowered)
        assert not reason or (tune == "full" and reason.startswith("plain PyTorch is faster")), reason


class Twice(Masked):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.attend(self.attend(x, mask), mask)


PADDINGS = {  # all leave something of each row: (of keys [N, 1, 1, L], given as [N, 1, L, L])
    "keys": lambda keys, length: keys,
    "expanded": lambda keys, length: keys.expand(-1, 1, length, length),
    "copied": lambda keys, length: keys.expand(-1, 1, length, length).contiguous(),
    "and causal": lambda keys, length: keys & torch.ones(length, length, dtype=torch.bool).tril(),
    "by heads": lambda keys, length: keys.expand(-1, HEADS, length, length).contiguous(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (1, 3))
@pytest.mark.parametrize("name", PADDINGS)
def test_padding_is_added_to_the_scores(name: str, n: int, dtype: torch.dtype | None) -> None:
    """Made additive once, then an operand of each first product."""
    length = 11
    keys = torch.arange(length) < torch.arange(7, 7 + n).unsqueeze(1)
    model, x, mask = Twice().eval(), noise(n, length, 16 * HEADS), PADDINGS[name](keys[:, None, None, :], length)
    gm = zendnn_cffi.optimize(model, (x, mask), dtype=dtype, tune="off")
    with torch.no_grad():
        for _ in range(2):
            assert_close(gm(x, mask), model.double()(x.double(), mask), dtype=dtype or torch.float32, k=96)
            model.float()
    (region,) = gm.regions().values()
    (lowered,) = region.lowered.values()
    kinds = [call.kind for call in lowered.program.calls]
    assert kinds.count("additive_mask") == 1 and kinds.count("softmax") == 2 and "attention" not in kinds


def test_another_mask_for_each_sample_may_leave_one_out() -> None:
    """The same shapes, first with something for everyone, then not, and back."""
    model, x = Twice().eval(), noise(3, 11, 16 * HEADS)
    gm = zendnn_cffi.optimize(model, (x, torch.ones(3, 1, 11, 11, dtype=torch.bool)), tune="off")
    with torch.no_grad():
        for lengths in ((3, 11, 1), (0, 2, 11), (11, 11, 4), (0, 0, 0)):
            keys = torch.arange(11) < torch.tensor(lengths).unsqueeze(1)
            mask = keys[:, None, None, :].expand(3, 1, 11, 11)
            assert_close(gm(x, mask), model(x, mask), k=96)


@pytest.mark.needs("avx512")
def test_a_program_for_what_the_mask_says_not_for_one_mask() -> None:
    """The same shapes, other contents: each call is right, and masks that say the same share a program."""
    model, x = Masked().eval(), noise(3, 11, 16 * HEADS)
    kinds = masks(3, 11)
    same = [kinds[name].expand(3, 1, 11, 11).contiguous() for name in ("full", "causal", "padded", "padded and causal")]
    gm = zendnn_cffi.optimize(model, (x, same[0]), tune="off")
    with torch.no_grad():
        for mask in (*same, *reversed(same), ~same[1], torch.zeros_like(same[0])):
            assert_close(gm(x, mask), model(x, mask), k=48)
    found = sorted(map(tuple, steps(gm)))
    assert found.count(("matmul", "softmax", "matmul")) == 2  # full and causal
    assert len(found) == 3


@pytest.mark.parametrize(
    ("mask", "kind"),
    (
        (torch.ones(2, 1, 5, 7, dtype=torch.bool), FULL),
        (torch.ones(1, 1, dtype=torch.bool), FULL),
        (torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(2, 3, 5, 5), FULL),
        (torch.ones(4, 4, dtype=torch.bool).tril(), CAUSAL),
        (torch.ones(4, 4, dtype=torch.bool).tril().expand(2, 3, 4, 4), CAUSAL),
        (torch.ones(2, 1, 4, 4, dtype=torch.bool).tril(), CAUSAL),
        (torch.ones(4, 5, dtype=torch.bool).tril(), OTHER),
        (torch.ones(4, 4, dtype=torch.bool).triu(), OTHER),
        (torch.ones(2, 1, 4, 4, dtype=torch.bool).triu(), LIVE),
        (torch.arange(4).lt(3).expand(2, 1, 4, 4), KEYS),
        (torch.arange(4).lt(torch.tensor([[3], [0]]))[:, None, None].expand(2, 1, 4, 4), OTHER),
        (torch.arange(4).lt(3)[:, None].expand(2, 1, 4, 4), OTHER),
        (torch.ones(4, 4, dtype=torch.bool).tril(-1), OTHER),
        (torch.zeros(2, 1, 4, 4, dtype=torch.bool), OTHER),
        (torch.ones(4, 4), OTHER),
        (torch.ones(4, dtype=torch.bool), OTHER),
        (torch.ones(1, 1, 4, 4, dtype=torch.bool).expand(0, 1, 4, 4), OTHER),
    ),
)
def test_what_masks_say(mask: Tensor, kind: str) -> None:
    assert describe(mask) == kind


def test_one_sample_that_differs_is_seen() -> None:
    for leading in ((2, 1), (1, 3)):
        mask = torch.ones(*leading, 4, 4, dtype=torch.bool).tril()
        mask[-1, -1, 2, 1] = False
        assert describe(mask) == LIVE
        assert describe(mask.triu().tril() | True) == FULL


@pytest.mark.needs("avx512")
def test_two_products_around_pytorchs_softmax_are_no_plain_pytorch() -> None:
    """explain says what the attention became, where its mask may leave nothing of a row."""
    graph = fx.Graph()
    heads = [graph.placeholder(name) for name in ("query", "key", "value")]
    graph.output(graph.call_function(ops.attention, (*heads, graph.placeholder("mask"))))
    specs = [TensorSpec.of(torch.empty(2, HEADS, 5, 16))] * 3 + [
        TensorSpec.of(torch.ones(2, 1, 5, 5, dtype=torch.bool))
    ]
    (operation,), _ = lower_graph(graph, specs, {})
    reports = {len(c.calls): _report(operation, c, None) for c in operation.candidates}
    assert reports[3].kind == "attention" and not reports[3].reason and "brg" in reports[3].implementation
    assert not operation.fallback_reason and 1 in reports  # PyTorch's own
