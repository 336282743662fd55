"""Winograd convolutions, float32, in regions that compute in bf16: used, right, and converted to only where needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.candidates.candidates import Candidate, Operation
from fx_passes.search import cost, tuner
from tests.support.lowering import net, noise, offload
from zendnn_cffi.runtime.calls import PrimitiveCall

Fn = Callable[..., torch.Tensor]


@pytest.fixture
def eager_winograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates that favour Winograd at every size."""

    def estimate(operation: Operation, candidate: Candidate, threads: int) -> float:
        estimated_ns = cost.estimate_ns(operation, candidate, threads)
        return estimated_ns / 1e6 if "wino" in candidate.implementation else estimated_ns + 1e6

    monkeypatch.setattr(tuner, "estimate_ns", estimate)


def conv(c: int = 32, o: int = 32, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(c, o, kernel, padding=options.pop("padding", kernel // 2), **options)


def calls(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> list[tuple[str, torch.dtype, torch.dtype]]:
    """(kind or "winograd", dtype read, dtype written) of every call of the region, in order."""
    offload(model, *inputs, **options)
    gm = zendnn_cffi.optimize(model, tune="off", **options)
    with torch.no_grad():
        gm(*inputs)
    (region,) = gm.regions().values()
    (lowered,) = region.lowered.values()
    found = []
    for call in lowered.program.calls:
        assert isinstance(call, PrimitiveCall)
        pd = call.primitive.pd
        assert pd.src_desc is not None and pd.dst_desc is not None
        kind = "winograd" if "wino" in pd.implementation else call.kind
        found.append((kind, pd.src_desc.dtype, pd.dst_desc.dtype))
    return found


B, W = torch.bfloat16, torch.float32


@pytest.mark.needs("bf16")
def test_a_chain_stays_in_float32(eager_winograd: None) -> None:
    """No conversion between Winograd convolutions, through pooling, and out of a direct one that comes before."""

    def fn(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return m[2](F.max_pool2d(F.relu(m[1](F.relu(m[0](x)))), 2))

    found = calls(net(fn, conv(kernel=1), conv(), conv()), noise(2, 32, 20, 18), dtype=B)
    main = [call for call in found if call[0] != "reorder"]
    assert main == [("convolution", B, W), ("winograd", W, W), ("pooling", W, W), ("winograd", W, W)]
    assert not any(call[1:] in ((B, W), (W, B)) and call[0] == "reorder" for call in found[1:-1])


def residual(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    y = m[0](x)
    return m[3](F.relu(m[2](F.relu(m[1](y))) + y))


def scaled(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    y = m[0](x)
    return m[3](m[1](y) * F.adaptive_max_pool2d(m[2](y), 1))


def joined(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    y = m[0](x)
    return m[3](torch.cat((m[1](y), m[2](y)), 1)[:, 16:48])


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("model_dtype", (W, B), ids=str)
@pytest.mark.parametrize("channels", (32, 17), ids=("32", "17 channels"))
@pytest.mark.parametrize("fn", (residual, scaled, joined))
def test_readers_of_both_dtypes(fn: Fn, channels: int, model_dtype: torch.dtype, eager_winograd: None) -> None:
    """Residual sums, gates and concatenations around Winograd convolutions, then a direct one; also of bf16 models."""
    if fn is joined:
        channels = 32
    modules = conv(channels, channels, 1), conv(channels, channels), conv(channels, channels), conv(channels, 8, 1)
    model = net(fn, *modules).to(model_dtype)
    found = calls(model, noise(2, channels, 13, 11, dtype=model_dtype), dtype=B if model_dtype == W else None)
    assert [call[1:] for call in found if call[0] == "winograd"] == [(W, W)] * 2
    assert found[-1][0] in ("convolution", "inner_product", "reorder")


@pytest.mark.needs("bf16")
@pytest.mark.parametrize(
    "other",
    (conv(kernel=1), conv(stride=2), conv(dilation=2, padding=2), conv(groups=2), conv(kernel=5)),
    ids=("1x1", "stride", "dilation", "groups", "5x5"),
)
def test_other_convolutions_compute_in_bf16(other: nn.Conv2d, eager_winograd: None) -> None:
    found = calls(net(lambda m, x: m[1](m[0](x)), conv(kernel=1), other), noise(2, 32, 13, 11), dtype=B)
    assert all(call[1:] == (B, B) for call in found if call[0] != "reorder")


@pytest.mark.needs("bf16")
def test_refused(eager_winograd: None) -> None:
    model, x = net(lambda m, x: m[1](m[0](x)), conv(), conv()), noise(2, 32, 13, 11)
    found = calls(model, x, dtype=B, allow_winograd=False)
    assert all(call[1:] == (B, B) for call in found if call[0] != "reorder")


@pytest.mark.needs("bf16")
def test_explain_names_the_dtype(eager_winograd: None) -> None:
    """Of what is not the region's."""
    model, x = net(lambda m, x: m[1](m[0](x)), conv(kernel=1), conv()), noise(2, 32, 13, 11)
    assert all("float32" in node.layout for node in offload(model, x, dtype=B).nodes)
    assert not any("float" in node.layout for node in offload(model, x).nodes)
