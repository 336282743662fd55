"""Bias correction: rounding shifts the mean of a layer's results, and its bias can take that back.

Each layer is looked at alone, on the float model's values: both results in one run, with rounded operands and without
(Nagel et al. 2019, https://arxiv.org/abs/1906.04721; the fast form of OpenVINO's NNCF). Corrections in turn, with all
layers before rounded, were measured to gain less on a transformer and as much on a convolutional network.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from zendnn_cffi.api.quantization.fake_quantized import FakeQuantized, Rounding, channel_axis
from zendnn_cffi.api.quantization.layers import kind, positional

_WITH_BIAS = frozenset(("conv1d", "conv2d", "conv3d", "linear"))


def bias_corrections(fake: FakeQuantized) -> dict[str, Tensor]:
    """What to add to the bias of each layer: [channels] float32, mean over the inputs of float minus rounded result."""
    fake.switch(())
    means = _Means(fake.module, set(fake.layers))
    with torch.no_grad():
        for call in fake.calls:
            means.run(*positional(fake.module, call))
    return {name: (total / means.counts[name]).float() for name, total in means.totals.items()}


class _Means(fx.Interpreter):
    """Sums, for each layer and channel, the difference that rounding its operands makes."""

    def __init__(self, gm: fx.GraphModule, layers: set[str]) -> None:
        super().__init__(gm)
        self._layers = layers
        self.totals: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self._layers and kind(n) in _WITH_BIAS:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            rounded = [self._rounded(node, arg) for node, arg in zip(n.args, args, strict=True)]
            assert callable(n.target)
            lost = (value - n.target(*rounded, **kwargs)).double().movedim(channel_axis(n), 0).flatten(1)
            self.totals[n.name] = self.totals.get(n.name, 0) + lost.sum(1)
            self.counts[n.name] = self.counts.get(n.name, 0) + lost.shape[1]
        return value

    def _rounded(self, node: Any, value: Any) -> Any:
        if isinstance(node, fx.Node) and node.op == "call_module":
            rounding = self.module.get_submodule(str(node.target))
            if isinstance(rounding, Rounding):
                return rounding.rounded(value)
        return value
