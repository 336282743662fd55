"""Which classes of weights are understood."""

from __future__ import annotations

from typing import Any

import torch

from fx_passes.graph.quantized_tensors import is_understood
from tests.support.int4_tensors import block as int4_block
from tests.support.int8_tensors import block as int8_block


def test_weights_of_both_classes() -> None:
    models: tuple[Any, ...] = (int4_block(), int8_block())
    for model in models:
        assert is_understood(model.up.weight)
        model.up.weight.act_pre_scale = torch.ones(1)
        assert not is_understood(model.up.weight) and is_understood(model.down.weight)
    assert not is_understood(torch.ones(2)) and not is_understood(None)
