"""A calibrated graph in which each observer rounds or not, by a switch: the error of any choice of layers in one run.

convert_pt2e makes a graph for one choice of layers. Here the choice is a set of names, so that the error of each layer
alone costs as many calls of the float model as there are calibration inputs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from zendnn_cffi.api.quantization.layers import Call, Edge, edges, kind, observer_of, quantized_layers, sharing_weights
from zendnn_cffi.api.quantization.row_scales import is_one_sided, rounded_rows
from zendnn_cffi.api.quantization.states import State
from zendnn_cffi.api.quantization_report import powers


class FakeQuantized:
    """The calibrated graph on given inputs, any of its layers rounded.

    layers  names of the layers that can be, in execution order
    module  the graph, to be called like the model; switch() chooses the layers
    state   of the graph, with which each call begins that is compared (default: there is none)
    """

    def __init__(self, prepared: fx.GraphModule, calls: Sequence[Call], state: State | None = None) -> None:
        self.prepared, self.calls, self.state = prepared, calls, state or State()
        self.layers = [node.name for node in quantized_layers(prepared)]
        self._rounding: dict[Edge, Rounding] = {}
        self._shifts: dict[str, Shift] = {}
        self._shifted: frozenset[str] = frozenset()  # those that switch() may turn on
        self.module = self._switched()
        self._expected: list[list[Tensor]] | None = None

    def switch(self, layers: Collection[str]) -> None:
        """Let just these layers compute in integers."""
        on = edges(self.prepared, layers)
        for edge, rounding in self._rounding.items():
            rounding.on = edge in on
        for name, shift in self._shifts.items():
            shift.on = name in layers and name in self._shifted

    def noise(self, layers: Collection[str], calls: int | None = None) -> float:
        """Noise over signal of the outputs, a ratio of powers, with just these layers in integers.

        calls  how many of the inputs are run, spread evenly; all by default
        """
        self.switch(layers)
        return self.noise_of(self.module, calls)

    def noise_of(self, module: Any, calls: int | None = None) -> float:
        """The same of a module that takes the model's inputs."""
        expected = self.expected()
        step = 1 if calls is None else -(-len(self.calls) // calls)
        signal = noise = 0.0
        with torch.no_grad():
            for (args, kwargs), outputs in zip(self.calls[::step], expected[::step], strict=True):
                self.state.restore(module)
                of_call = powers(outputs, _floats(module(*args, **kwargs)))
                signal, noise = signal + of_call[0], noise + of_call[1]
        if not noise:
            return 0.0
        return noise / signal if signal else math.inf

    def has_signal(self) -> bool:
        """Whether the float model returns a floating point number other than zero for any input."""
        return any(bool(x.any()) for outputs in self.expected() for x in outputs)

    def expected(self) -> list[list[Tensor]]:
        """What the float model returns, its floating point tensors, for each input."""
        if self._expected is None:
            switches: list[Any] = [*self._rounding.values(), *self._shifts.values()]
            on = [switch for switch in switches if switch.on]
            for switch in on:
                switch.on = False
            with torch.no_grad():
                self._expected = []
                for args, kwargs in self.calls:
                    self.state.restore(self.module)
                    self._expected.append(_floats(self.module(*args, **kwargs)))
            for switch in on:
                switch.on = True
        return self._expected

    def shift(self, biases: Mapping[str, Tensor]) -> None:
        """Add to the results of layers, where these compute in integers: one number for each channel."""
        for node in [node for node in self.module.graph.nodes if node.name in biases]:
            self._shifts[node.name] = Shift(biases[node.name], channel_axis(node))
            name = f"_shift_{len(self._shifts)}"
            self.module.add_module(name, self._shifts[node.name])
            with self.module.graph.inserting_after(node):
                shifted = self.module.graph.call_module(name, (node,))
            node.replace_all_uses_with(shifted, delete_user_cb=lambda user, own=shifted: user is not own)
        self.module.recompile()
        self.keep_shifts(biases)

    def keep_shifts(self, names: Collection[str]) -> None:
        """Add to the results of just these layers from here on; the others' numbers are kept for another choice."""
        self._shifted = frozenset(names)

    def _switched(self) -> fx.GraphModule:
        """A copy of the graph with a switch on each edge in place of the observers; weights are shared."""
        switched = sharing_weights(self.prepared)
        by_name = {node.name: node for node in switched.graph.nodes}
        for node in self.prepared.graph.nodes:
            observer = observer_of(self.prepared, node)
            if observer is None:
                continue
            source = by_name[node.name].args[0]
            for reader in node.users:
                self._rounding[node, reader] = rounding = Rounding(observer, constant=source.op == "get_attr")
                name = f"_rounding_{len(self._rounding)}"
                switched.add_module(name, rounding)
                with switched.graph.inserting_before(by_name[reader.name]):
                    new = switched.graph.call_module(name, (source,))
                by_name[reader.name].replace_input_with(by_name[node.name], new)
            switched.graph.erase_node(by_name[node.name])
        switched.recompile()
        return switched


class Rounding(nn.Module):
    """What an observer's quantize and dequantize do to a value, while it is on."""

    def __init__(self, observer: Any, constant: bool) -> None:
        super().__init__()
        self.on, self._constant = False, constant
        self._rounded: Tensor | None = None
        self._range, self._dtype = (observer.quant_min, observer.quant_max), observer.dtype
        self._axis, self._eps = getattr(observer, "ch_axis", None), observer.eps
        self._dynamic, self._one_sided = bool(getattr(observer, "is_dynamic", False)), is_one_sided(observer)
        if not self._dynamic:
            scale, zero_point = observer.calculate_qparams()
            self._scale, self._zero_point = scale.float(), zero_point.to(torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        return self.rounded(x) if self.on else x

    def rounded(self, x: Tensor) -> Tensor:
        if not self._constant:
            return self._round(x)
        if self._rounded is None:
            self._rounded = self._round(x)
        return self._rounded

    def _round(self, x: Tensor) -> Tensor:
        if self._dynamic and x.ndim > 1:
            return rounded_rows(x, self._one_sided)
        if self._dynamic:
            choose = torch.ops.quantized_decomposed.choose_qparams.tensor
            scale, zero_point = choose(x, *self._range, float(self._eps), self._dtype)
            return torch.fake_quantize_per_tensor_affine(x, scale.float(), zero_point.to(torch.int32), *self._range)
        if self._axis is not None and self._scale.numel() == x.shape[self._axis]:
            return torch.fake_quantize_per_channel_affine(x, self._scale, self._zero_point, self._axis, *self._range)
        return torch.fake_quantize_per_tensor_affine(x, float(self._scale), int(self._zero_point), *self._range)


class Shift(nn.Module):
    """Adds a number to each channel, while it is on."""

    def __init__(self, values: Tensor, axis: int) -> None:
        super().__init__()
        self.on, self._values = False, values.reshape(-1, *[1] * (-1 - axis))

    def forward(self, x: Tensor) -> Tensor:
        return x + self._values if self.on else x


def channel_axis(layer: fx.Node) -> int:
    """The axis of a layer's result that its bias runs along, counted from the end."""
    spatial = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
    return -1 - spatial.get(kind(layer), 0)


def _floats(result: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
