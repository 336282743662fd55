"""Attention without a softmax: right in all its blocks, and computed again where scores are out of range."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.candidates import EXPONENTIALS, Candidate, Operation
from fx_passes.lower.attention import exponentials as attention_exponentials
from fx_passes.search import tuner
from tests.support.lowering import noise, offload
from tests.tolerance import assert_close
from zendnn_cffi.runtime.other_threads import for_threads
from zendnn_cffi.runtime.sliced_program import SlicedProgram

DTYPES = (None, torch.bfloat16)
HEADS, WIDTH = 3, 16


class Attention(nn.Module):
    """Heads between two linears, one shared projection for q, k and v; a mask maybe."""

    def __init__(self, *, is_causal: bool = False, scale: float | None = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH), nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.is_causal, self.scale = is_causal, scale

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        n, length, _ = x.shape
        heads = self.qkv(x).reshape(n, length, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], mask, 0.0, self.is_causal, scale=self.scale)
        result: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return result


@pytest.fixture(autouse=True)
def _preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """By estimate, attention without a softmax is the fastest, in as many blocks as there may be."""
    estimate = tuner.estimate_ns

    def preferring(operation: Operation, candidate: Candidate, threads: int) -> float:
        if candidate.implementation.endswith("no softmax"):
            return -1e6 * len(candidate.calls)  # less than what calls into PyTorch cost beside their time
        return estimate(operation, candidate, threads)

    monkeypatch.setattr(tuner, "estimate_ns", preferring)


def calls(gm: Any) -> list[str]:
    """The kinds of the calls that attention became, in the one program of the one region."""
    (region,) = gm.regions().values()
    (lowered,) = region.lowered.values()
    return [c.kind for c in lowered.program.calls if c.name.startswith("scaled_dot") and c.kind != "reorder"]


def given_up(gm: Any) -> tuple[str, ...]:
    """The kinds of candidates that its one region does without."""
    (region,) = gm.regions().values()
    without: tuple[str, ...] = region.options.without
    return without


def expected(blocks: int, *, masked: bool = False) -> list[str]:
    return ["attention"] * masked + ["matmul"] * 3 * blocks + ["binary"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize(("shape", "blocks"), (((1, 1), 1), ((2, 7), 1), ((3, 131), 2), ((1, 257), 4)), ids=str)
def test_right_in_blocks(shape: tuple[int, int], blocks: int, is_causal: bool, dtype: torch.dtype | None) -> None:
    model, x = Attention(is_causal=is_causal).eval(), noise(*shape, HEADS * WIDTH)
    offload(model, x, dtype=dtype)
    gm = zendnn_cffi.optimize(model, dtype=dtype, tune="off")
    with torch.no_grad():
        gm(x)
    assert calls(gm) == expected(blocks if is_causal else 1) and not given_up(gm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", (False, True))
def test_samples_in_slices(masked: bool, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_exponentials, "_SLICE_BYTES", 2 * HEADS * 9 * 9 * 4)
    model, x = Attention().eval(), noise(4, 9, HEADS * WIDTH)
    inputs = (x, padding(4, 9)) if masked else (x,)
    gm = zendnn_cffi.optimize(model, inputs, dtype=dtype, tune="off")
    with torch.no_grad():
        actual = gm(*inputs)
        assert_close(actual, model.double()(x.double(), *inputs[1:]), dtype=dtype or torch.float32, k=48)
    assert calls(gm) == expected(2, masked=masked)


def padding(n: int, length: int) -> Tensor:
    """[n, 1, length, length]: sample i has 3 + i keys, whatever the query."""
    keys = torch.arange(length) < torch.arange(3, 3 + n).unsqueeze(1)
    return keys[:, None, None, :].expand(n, 1, length, length).contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (1, 3))
def test_keys_left_out_weigh_nothing(n: int, dtype: torch.dtype | None) -> None:
    """What is there in their place does not matter."""
    model, x, mask = Attention().eval(), noise(n, 11, HEADS * WIDTH), padding(n, 11)
    gm = zendnn_cffi.optimize(model, (x, mask), dtype=dtype, tune="off")
    other = torch.where(mask[:, 0, 0].unsqueeze(-1), x, x + 1.0)
    kept = mask[:, 0, 0]
    with torch.no_grad():
        assert_close(gm(x, mask), model.double()(x.double(), mask), dtype=dtype or torch.float32, k=48)
        assert torch.equal(gm(x, mask)[kept], gm(other, mask)[kept])
    assert calls(gm) == expected(1, masked=True)


def test_masks_that_differ_by_query_go_through_the_softmax() -> None:
    model, x = Attention().eval(), noise(2, 11, HEADS * WIDTH)
    mask = padding(2, 11) & torch.ones(11, 11, dtype=torch.bool).tril()
    gm = zendnn_cffi.optimize(model, (x, mask), tune="off")
    with torch.no_grad():
        assert_close(gm(x, mask), model(x, mask), k=48)
    assert calls(gm) == ["matmul", "softmax", "matmul"]


def out_of_range() -> dict[str, tuple[nn.Module, Tensor]]:
    """Attentions whose scores are too large, far too large, too small, and no numbers."""
    x = noise(1, 9, HEADS * WIDTH)
    opposite = Attention(is_causal=True, scale=1.0)  # the first query sees its own key alone: -30 |q|^2
    with torch.no_grad():
        opposite.qkv.weight[HEADS * WIDTH : 2 * HEADS * WIDTH] = -30.0 * opposite.qkv.weight[: HEADS * WIDTH]
        opposite.qkv.bias[HEADS * WIDTH : 2 * HEADS * WIDTH] = -30.0 * opposite.qkv.bias[: HEADS * WIDTH]
    nan = x.clone()
    nan[0, 4, 3] = math.nan
    return {
        "large": (Attention(), 12 * x),
        "far too large": (Attention(), 1e4 * x),
        "small": (opposite, x),
        "nan": (Attention(), nan),
    }


@pytest.mark.parametrize("name", out_of_range())
def test_out_of_range_is_computed_again_and_lowered_with_a_softmax(name: str) -> None:
    model, x = out_of_range()[name]
    gm = zendnn_cffi.optimize(model.eval(), tune="off")
    with torch.no_grad():
        gm(noise(1, 9, HEADS * WIDTH))
        assert given_up(gm) == (EXPONENTIALS,) * (name == "small")  # whatever x is
        assert_close(gm(x), model(x), k=48)
        assert given_up(gm) == (EXPONENTIALS,)
        assert_close(gm(x), model(x), k=48)
        assert calls(gm) in (["matmul", "softmax", "matmul"], ["attention"])  # f32 scores of 300 are not near enough
        assert_close(gm(noise(1, 9, HEADS * WIDTH)), model(noise(1, 9, HEADS * WIDTH)), k=48)


def test_one_check_at_the_end_covers_all_attentions() -> None:
    """Of two layers, the first one's scores are too large, or the second one's."""
    for large in (0, 1):
        layers = nn.Sequential(Attention(), Attention()).eval()
        with torch.no_grad():
            for layer in layers:
                layer.qkv.bias.zero_(), layer.out.bias.zero_()
            layers[large].qkv.weight[: 2 * HEADS * WIDTH].mul_((20.0, 200.0)[large])
        x = noise(2, 9, HEADS * WIDTH)
        gm = zendnn_cffi.optimize(layers, tune="off")
        (region,) = gm.regions().values()
        with torch.no_grad():
            gm(0.001 * x)
            (lowered,) = region.lowered.values()
            assert [call.kind for call in lowered.program.calls].count("check") == 1
            assert lowered.program.calls[-1].kind == "check" and not given_up(gm)
            assert_close(gm(x), layers(x), k=48, scale=100.0)
        assert given_up(gm) == (EXPONENTIALS,) and "softmax" in calls(gm)


def test_guards_of_saved_programs_hold_and_fail(tmp_path: Path) -> None:
    """A loaded module runs the saved program, and gives up what failed, as the one that was saved."""
    model, x = Attention().eval(), noise(2, 9, HEADS * WIDTH)
    gm = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        gm(x)
        zendnn_cffi.save(gm, tmp_path / "m.safetensors")
        again = zendnn_cffi.load(tmp_path / "m.safetensors")
        (region,) = again.regions().values()
        assert_close(again(x), model(x), k=48)
        assert region.known.used == 1 and calls(again) == expected(1) and not given_up(again)
        assert_close(again(12 * x), model(12 * x), k=48)
        assert given_up(again) == (EXPONENTIALS,) and "binary" not in calls(again)
        zendnn_cffi.save(again, tmp_path / "n.safetensors")
        assert given_up(zendnn_cffi.load(tmp_path / "n.safetensors")) == (EXPONENTIALS,) and not given_up(gm)


def test_guards_of_slices_and_of_fewer_threads_are_the_programs_own() -> None:
    model, x = Attention().eval(), noise(2, 9, HEADS * WIDTH)
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        gm(x)
        (region,) = gm.regions().values()
        (lowered,) = region.lowered.values()
        sliced = SlicedProgram(
            lowered.program, 2, [replace(o, shape=(6, *o.shape[1:])) for o in lowered.program.outputs]
        )
        fewer = for_threads(sliced, 1, [torch.cat([x] * 3)])
        assert isinstance(fewer, SlicedProgram) and not sliced.failed
        fewer([torch.cat([x, 12 * x, x])])
        assert sliced.failed == lowered.program.failed == {EXPONENTIALS}


def test_a_mask_of_keys_is_whole_for_the_softmax() -> None:
    """Its first product adds a mask of the scores' own rows faster than one row."""
    model, x, mask = Attention().eval(), noise(2, 11, HEADS * WIDTH), padding(2, 11)
    gm = zendnn_cffi.optimize(model, (x, mask), tune="off")
    with torch.no_grad():
        for given in (12 * x, x):
            assert_close(gm(given, mask), model(given, mask), k=48)
    (region,) = gm.regions().values()
    (signature,) = region.lowered
    assert "live" in signature[0] and "keys" not in signature[0]


def test_another_threads_scores_are_its_own() -> None:
    """What one thread computes again does not make another one's region give up."""
    model, x = Attention().eval(), noise(2, 9, HEADS * WIDTH)
    small, large = (zendnn_cffi.optimize(model, tune="off") for _ in range(2))
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        want = [small(x), model(12 * x)]
        given = pool.submit(torch.no_grad()(large), 12 * x)
        assert_close(small(x), want[0], k=48)
        assert_close(given.result(), want[1], k=48)
        small(x)
    assert calls(small) == expected(1)


def test_a_mask_of_keys_is_made_additive_by_its_first_row() -> None:
    mask = padding(2, 5)
    added = ops.additive_mask(mask, True)
    assert added.shape == (2, 1, 1, 5) and added.is_contiguous()
    assert torch.equal(added == 0.0, mask[:, :, :1])
    assert ops.additive_mask(mask).shape == mask.shape
