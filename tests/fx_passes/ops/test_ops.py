"""The plain-torch bodies of the vocabulary against torch, where they are not a single call of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import ops
from tests.support.graphs import image

CONV = {"stride": (1, 2), "dilation": (2, 1), "groups": 1}


def test_convolution_with_unequal_padding() -> None:
    x, w = image(), image(4, 3, 3, 2, seed=1)
    expected = F.conv2d(F.pad(x, (0, 3, 1, 2)), w, None, (1, 2), 0, (2, 1))
    torch.testing.assert_close(ops.convolution(x, w, padding_l=(1, 0), padding_r=(2, 3), **CONV), expected)


def test_pool_with_unequal_padding() -> None:
    kwargs = {"kernel": (3, 2), "stride": (1, 2), "dilation": (1, 1), "ceil_mode": False}
    actual = ops.pool(image(), "avg_include_padding", padding_l=(0, 1), padding_r=(2, 0), **kwargs)
    torch.testing.assert_close(actual, F.avg_pool2d(F.pad(image(), (1, 0, 0, 2)), (3, 2), (1, 2)))


def test_post_ops_apply_in_order() -> None:
    x, other, slope = image(), image(seed=1), torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    entries = (("binary", "sub", other), ("prelu", slope), ("eltwise", "linear", 2.0, 1.0), ("binary", "max", other))
    expected = torch.maximum(F.prelu(x - other, slope) * 2 + 1, other)
    torch.testing.assert_close(ops.apply_post_ops(x, entries), expected)
    with pytest.raises(ValueError, match="unknown post-op 'sum'"):
        ops.apply_post_ops(x, (("sum", 1.0),))


def test_every_eltwise_kind_computes_on_numbers_of_its_domain() -> None:
    x = image().abs() + 0.1
    for kind in ops.ELTWISE:
        y = ops.eltwise(x, kind, 0.5, 2.0)
        assert y.shape == x.shape and y.isfinite().all(), kind


def test_numbers_pass_through_binary() -> None:
    assert ops.binary(7, 2, "add") == 9 and ops.binary(7, 2, "div") == 3.5


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("deconv", [False, True])
def test_folded_weights_round_once(groups: int, deconv: bool) -> None:
    """In float32 the folded weights are the float64 ones, rounded: not a product of rounded factors."""
    torch.manual_seed(0)
    linear = (nn.ConvTranspose2d if deconv else nn.Conv2d)(4, 6, 3, groups=groups)
    norm = nn.BatchNorm2d(6).eval()
    nn.init.uniform_(norm.running_var, 0.1, 3)
    nn.init.uniform_(norm.weight)
    args = (norm.running_var, norm.weight, norm.eps)
    weight, double = linear.weight, linear.weight.double()
    if deconv:
        folded = ops.fold_bn_deconv_weight(weight, *args, groups)
        exact = ops.fold_bn_deconv_weight(double, args[0].double(), args[1].double(), args[2], groups)
    else:
        folded = ops.fold_bn_weight(weight, *args)
        exact = ops.fold_bn_weight(double, args[0].double(), args[1].double(), args[2])
    assert folded.dtype == torch.float32 and torch.equal(folded, exact.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("block", [1, 80, 1 << 17])  # numbers multiplied at once: less than a row, two rows, all
def test_folded_weights_are_the_same_numbers_whether_anybody_differentiates(
    dtype: torch.dtype, memory_format: torch.memory_format, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fx_passes.ops.constants._BLOCK_NUMBERS", block)
    weight = torch.randn(6, 4, 3, 3).to(dtype).to(memory_format=memory_format)
    mean, var = torch.randn(6), torch.rand(6) + 0.1
    for fold in (
        lambda: ops.fold_bn_weight(weight, var, mean, 1e-5),
        lambda: ops.scale_channels(weight, var),
        lambda: ops.scale_channels(weight, var[:1]),
        lambda: ops.scale_channels(mean.to(dtype), var),
    ):
        with torch.enable_grad():
            expected = fold()
        with torch.no_grad():
            found = fold()
        assert torch.equal(found, expected) and found.stride() == expected.stride() and found.dtype == dtype
