"""Looking at what each layer of a graph computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from zendnn_cffi.api.quantization.layers import watch


def test_arguments_of_an_exported_module() -> None:
    """Its graph takes them one by one; what is called gets them as they were nested."""

    class Nested(nn.Module):
        def forward(self, pair: dict[str, Tensor], other: Tensor) -> Tensor:
            return pair["a"] + pair["b"] * other

    inputs = {"a": torch.ones(2), "b": torch.full((2,), 2.0)}, torch.full((2,), 3.0)
    gm = torch.export.export(Nested(), inputs).module()
    assert isinstance(gm, fx.GraphModule)
    seen: list[Any] = []
    watch(gm, [(inputs, {})] * 2, lambda node, args, kwargs, result: seen.append(result))
    assert [result.tolist() for result in seen[-1:]] == [[7.0, 7.0]] and len(seen) % 2 == 0
