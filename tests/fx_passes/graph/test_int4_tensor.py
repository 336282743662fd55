"""What Int4OpaqueTensors say, and near misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fx_passes.graph.int4_tensor import group_of, is_int4_tensor, is_packed
from tests.support.int4_tensors import packed, quantized
from tests.support.int8_tensors import block as int8_block


def weight_of(group: int = 32, dtype: torch.dtype = torch.bfloat16) -> Any:
    return quantized(nn.Linear(128, 48), group, dtype).weight


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_every_configuration(group: int, dtype: torch.dtype) -> None:
    weight = weight_of(group, dtype)
    assert is_int4_tensor(weight) and group_of(weight) == group


def _scaled_before(weight: Any) -> None:
    weight.act_pre_scale = torch.ones(128)


def _of_integers(weight: Any) -> None:
    weight.act_mapping_type = "asymmetric"


def _of_blocks(weight: Any) -> None:
    weight.block_size = [2, 32]


def _padded(weight: Any) -> None:
    weight.qdata = torch.cat([weight.qdata, weight.qdata[:16]])


def _not_contiguous(weight: Any) -> None:
    weight.scale_and_zero = torch.stack([weight.scale_and_zero] * 2, -1)[..., 0]


@pytest.mark.parametrize("change", [_scaled_before, _of_integers, _of_blocks, _padded, _not_contiguous])
def test_near_misses(change: Callable[[Any], None]) -> None:
    weight = weight_of()
    change(weight)
    assert is_int4_tensor(weight) and group_of(weight) is None


def test_other_tensors() -> None:
    others: tuple[Any, ...] = (torch.ones(2), nn.Parameter(torch.ones(2)), int8_block().up.weight, None)
    for other in others:
        assert not is_int4_tensor(other) and group_of(other) is None


def test_the_kernel_takes_these_alone() -> None:
    _, weights, scales = packed(48, 64)
    assert is_packed(weights, scales, 32)
    for group in (16, 64, 48):
        assert not is_packed(weights, scales, group)
    assert not is_packed(weights.int(), scales, 32) and not is_packed(weights.t(), scales, 32)
    assert not is_packed(weights[:40], scales[:, :40], 32)  # not a multiple of 16 outputs
