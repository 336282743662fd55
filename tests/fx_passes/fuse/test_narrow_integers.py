"""Values quantized to a part of the 8-bit integers (reduce_range): clipped, and on integers like all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zendnn_cffi
from fx_passes import ops
from fx_passes.fuse.narrow_integers import clip_narrow_integers
from tests.support.graphs import check_twice, traced
from tests.support.lowering import noise
from tests.support.quantized import Integers, Weight, decomposed, optimized, ran

U8, S8 = torch.uint8, torch.int8
SEVEN = (0, 127)
Function = Callable[..., Any]


def kept(
    value: Tensor, scale: float, zero_point: int = 0, limits: tuple[int, int] = SEVEN, dtype: torch.dtype = U8
) -> Tensor:
    return decomposed.quantize_per_tensor.default(value, scale, zero_point, *limits, dtype)


def through(value: Tensor, scale: float, zero_point: int = 0, limits: tuple[int, int] = SEVEN) -> Tensor:
    integers = kept(value, scale, zero_point, limits)
    return decomposed.dequantize_per_tensor.default(integers, scale, zero_point, *limits, U8)


def network(w: Any, x: Tensor) -> Tensor:
    """As torchao writes it with reduce_range: a stem, a residual block, pools, a classifier."""
    y = through(F.relu(F.conv2d(through(x, 0.05, 64), w[0](), w[0].bias, padding=1)), 0.04)
    y = through(F.max_pool2d(y, 2), 0.04)
    z = through(F.relu(F.conv2d(y, w[1](), w[1].bias)), 0.04)
    y = through(F.relu(F.conv2d(z, w[2](), w[2].bias, padding=1) + y), 0.06)
    y = through(F.adaptive_avg_pool2d(y, 1), 0.06)
    return F.linear(y.flatten(1), w[3](), w[3].bias)


def layers() -> tuple[Weight, ...]:
    return Weight(16, 3, 3, 3), Weight(16, 16, 1, 1), Weight(16, 16, 3, 3), Weight(10, 16)


def test_a_network_of_seven_bits_runs_on_integers() -> None:
    model, x = Integers(network, *layers()), noise(2, 3, 10, 8)
    fast = optimized(model, x, steps=2.0, scale=0.06 * 0.75)
    found = [(kind, source) for kind, source, _ in ran(fast)]
    assert found[0] == ("eltwise", torch.float32) and [source for _, source in found[1:]] == [U8] * 6  # the input's


def test_relu6_is_a_post_op_beside_the_limits() -> None:
    def layer(w: Any, x: Tensor) -> Tensor:
        return through(F.relu6(F.conv2d(through(x, 0.05), w[0](), w[0].bias)), 0.045)

    fast = optimized(Integers(layer, Weight(16, 16, 3, 3)), noise(2, 16, 10, 8), steps=1.0, scale=0.045)
    assert [kind for kind, source, _ in ran(fast) if source == U8] == ["convolution"]
    assert len(ran(fast)) == 2, "the input's limits, and the layer"


# What is computed of x, and how many clips there are then.
EXAMPLES: dict[str, tuple[Function, int]] = {
    "a layer": (lambda w, x: kept(F.conv2d(through(x, 0.05, 64), w[0](), w[0].bias), 0.03, 60), 2),
    "relu becomes a part": (lambda w, x: kept(F.relu(x), 0.02), 1),
    "relu6 becomes a part": (lambda w, x: kept(F.relu6(x), 0.02), 1),
    "relu6 within the limits": (lambda w, x: kept(F.relu6(x), 0.1, 30), 1),
    "limits outside of the integers": (lambda w, x: kept(x.clamp(-9, -5), 0.02, 30), 1),
    "a limit on one side": (lambda w, x: kept(x.clamp(min=0.5), 0.02), 1),
    "relu6 that others read": (lambda w, x: (y := F.relu6(x), kept(y, 0.02)), 2),
    "int8": (lambda w, x: kept(x, 0.02, 0, (-64, 63), S8), 1),
    "twice the same": (lambda w, x: (kept(x, 0.02), kept(x, 0.02)), 1),
    "by two scales": (lambda w, x: (kept(x, 0.02), kept(x, 0.03)), 2),
    "the largest of a window": (lambda w, x: kept(F.max_pool2d(through(x, 0.02, 30), 2), 0.02, 30), 1),
    "an average": (lambda w, x: kept(F.avg_pool2d(through(x, 0.02, 30), 2, padding=1), 0.02, 30), 1),
    "joined": (lambda w, x: kept(torch.cat((through(x, 0.02), through(x + 1, 0.02)), 1), 0.02), 2),
    "bf16": (lambda w, x: kept(x.bfloat16() * 30, 0.02), 1),
    "a view": (lambda w, x: kept(through(x, 0.02).flatten(1), 0.02), 1),
    "the largest, of another scale": (lambda w, x: kept(F.max_pool2d(through(x, 0.02), 2), 0.03), 2),
    "joined, of two ranges": (
        lambda w, x: kept(torch.cat((through(x, 0.02), through(x, 0.02, 0, (0, 200))), 1), 0.02), 3,
    ),
}  # fmt: skip
STAYS: dict[str, Function] = {
    "all integers": lambda w, x: kept(x, 0.02, 0, (0, 255)),
    "for each channel": lambda w, x: decomposed.quantize_per_channel.default(
        x, torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3, dtype=torch.int64), 1, 0, 127, U8
    ),
    "a scale that may change": lambda w, x: decomposed.quantize_per_tensor.tensor(
        x, w[0].scales[0], w[0].zero_points[0], 0, 127, U8
    ),
    "bf16, whose limits would be rounded": lambda w, x: kept(x.bfloat16(), 0.02, 0, (0, 200)),
    "no 8-bit integers": lambda w, x: kept(x, 0.02, 0, SEVEN, torch.int32),
    "a zero point outside": lambda w, x: kept(x, 0.02, 200),
    "limits that are infinite": lambda w, x: kept(x, 3e38),
}


def clipped(function: Function) -> int:
    model, x = Integers(function, Weight(8, 3, 3, 3)), noise(2, 3, 6, 6)
    x[0, 0, 0] = torch.tensor([torch.inf, -torch.inf, 1e30, -1e30, 0, -0.0])
    gm = clip_narrow_integers(traced(model, x))
    check_twice(gm, clip_narrow_integers)
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)
    kinds = [node.args[1] for node in gm.graph.find_nodes(op="call_function", target=ops.eltwise)]
    assert kinds.count("clip") == 0 or "relu" not in kinds
    return kinds.count("clip") + kinds.count("hardtanh")


@pytest.mark.parametrize("example", EXAMPLES)
def test_clipped(example: str) -> None:
    function, clips = EXAMPLES[example]
    assert clipped(function) == clips


@pytest.mark.parametrize("miss", STAYS)
def test_stays(miss: str) -> None:
    assert clipped(STAYS[miss]) == 0


@pytest.mark.parametrize("limits", [(0, 127), (3, 250), (-64, 63), (-127, 127)])
@pytest.mark.parametrize("scale", [1e-30, 0.0117, 0.1, 1 / 3, 7e30])
def test_integers_are_the_same_at_the_limits(limits: tuple[int, int], scale: float) -> None:
    """Steps and halves of steps around the limits, and the numbers next to these."""
    dtype = U8 if limits[0] >= 0 else S8
    zero_point = (limits[0] + limits[1]) // 2
    halves = torch.arange(2 * limits[0] - 9, 2 * limits[1] + 10, dtype=torch.float64)
    x = ((halves / 2 - zero_point) * scale).float()
    x = torch.cat((x, x.nextafter(x + 1e38), x.nextafter(x - 1e38)))
    x = torch.cat((x, x.bfloat16().float()))
    model = Integers(lambda w, x: kept(x, scale, zero_point, limits, dtype))
    with torch.no_grad():
        ours, theirs = zendnn_cffi.optimize(model, (x,), tune="off")(x).int(), model(x).int()
        assert (ours.min(), ours.max()) == limits == (theirs.min(), theirs.max())
        halves = x.double() / scale - 0.5
        certain = (halves - halves.round()).abs() > 1e-3  # midway between two integers, either may come
        assert (ours - theirs).abs().max() <= 1 and torch.equal(ours[certain], theirs[certain])
        gm = clip_narrow_integers(traced(model, x))
        assert torch.equal(gm(x), model(x))
        if limits[1] - zero_point <= 127 and zero_point - limits[0] <= 127:
            assert torch.equal(gm(x.bfloat16()), model(x.bfloat16()))
