"""Bias correction: rounding shifts the mean of a layer's results, and its bias can take that back.

Each layer is looked at alone, on the float model's values: both results in one run, with rounded operands and without
(Nagel et al. 2019, https://arxiv.org/abs/1906.04721; the fast form of OpenVINO's NNCF). Corrections in turn, with all
layers before rounded, were measured to gain less on a transformer and as much on a convolutional network.

A mean may be that of a few tokens whose values are clipped. Then the correction shifts all others, and the outputs
lose: MiniLM on 128 tokens went from 19.4 dB to 3.5. So corrections are kept where the outputs gain, with all layers
rounded: all of them, or halves of them, and so on in the order of execution. A look at each layer alone took six times
as long for the 149 layers of DaViT-Small, and was not better: MiniLM on 128 tokens has 19.7 dB, and had 19.5.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from zendnn_cffi.api.quantization.fake_quantized import FakeQuantized, Rounding, channel_axis
from zendnn_cffi.api.quantization.layers import kind, watch

_CALLS = 8  # inputs that tell whether the outputs gain
_GROUPS = 16  # of layers, which are corrected together or not
_WITH_BIAS = frozenset(("conv1d", "conv2d", "conv3d", "linear"))


def bias_corrections(fake: FakeQuantized) -> dict[str, Tensor]:
    """What to add to the bias of each layer: [channels] float32, mean over the inputs of float minus rounded result."""
    fake.switch(())
    layers, totals, counts = set(fake.layers), dict[str, Tensor](), dict[str, int]()

    def add(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        if node.name not in layers or kind(node) not in _WITH_BIAS:
            return
        rounded = [_rounded(fake.module, source, arg) for source, arg in zip(node.args, args, strict=True)]
        assert callable(node.target)
        by_channel = (result - node.target(*rounded, **kwargs)).double().movedim(channel_axis(node), 0)
        lost = by_channel.reshape(len(by_channel), -1)
        totals[node.name] = totals.get(node.name, 0) + lost.sum(1)
        counts[node.name] = counts.get(node.name, 0) + lost.shape[1]

    watch(fake.module, fake.calls, add)
    means = {name: (total / counts[name]).float() for name, total in totals.items()}
    # A class that its bias masks has minus infinity, and no mean
    return {name: mean.where(mean.isfinite(), 0.0) for name, mean in means.items()}


def correct(fake: FakeQuantized) -> dict[str, Tensor]:
    """Add corrections to the layers of a graph, those that make its outputs nearer; return them."""
    least = fake.noise(fake.layers, _CALLS)
    biases = bias_corrections(fake)
    fake.shift(biases)
    names, kept = list(biases), list[str]()
    smallest = -(-len(names) // _GROUPS)
    groups = [names]
    while groups:
        group = groups.pop()
        fake.keep_shifts([*kept, *group])
        found = fake.noise(fake.layers, _CALLS)
        if found <= least:
            least, kept = found, [*kept, *group]
        elif len(group) > smallest:
            half = len(group) // 2
            groups += [group[half:], group[:half]]
    fake.keep_shifts(kept)
    return {name: biases[name] for name in kept}


def _rounded(module: nn.Module, source: Any, value: Any) -> Any:
    if isinstance(source, fx.Node) and source.op == "call_module":
        rounding = module.get_submodule(str(source.target))
        if isinstance(rounding, Rounding):
            return rounding.rounded(value)
    return value
