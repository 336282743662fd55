"""What one recurrent layer in one direction computes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fx_passes import ops
from fx_passes.candidates.candidates import Argument, PrimitiveTemplate, primitive_template
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC
from zendnn_cffi.primitives.primitive import PrimitiveDesc


def is_projected(weights: list[Tensor], has_biases: bool) -> bool:
    return len(weights) == 3 + 2 * has_biases


class LayerArguments:
    """What a layer computes on, and its sizes.

    dtypes    that it computes in, and of the result
    operands  the run-time tensors: the sequence, then states
    """

    def __init__(
        self,
        node: fx.Node,
        arguments: dict[str, Any],
        weights: list[Tensor],
        shape: tuple[int, ...],
        dtypes: tuple[torch.dtype, torch.dtype],
        operands: tuple[fx.Node, ...],
    ) -> None:
        self.kind: str = arguments["kind"]
        self.reverse, self.with_cell = bool(arguments["reverse"]), bool(arguments["with_cell"])
        self.has_biases, self.dtype = bool(arguments["has_biases"]), dtypes[0]
        self.result = dtypes[1]
        self.weights, self.names = weights, [str(weight) for weight in node.args[3]]
        self.gates = ops.GATES[self.kind]
        self.steps, self.samples, self.inputs = shape
        self.hidden, self.width = weights[1].shape[0] // self.gates, weights[1].shape[1]
        self.states = [operands.index(s) for s in (arguments["h"], arguments["c"]) if s is not None]
        self.is_projected = is_projected(weights, self.has_biases)

    @property
    def flops(self) -> int:
        products = self.gates * self.hidden * (self.inputs + self.width) + self.is_projected * self.hidden * self.width
        return 2 * self.steps * self.samples * products

    @property
    def output_numbers(self) -> int:
        return self.steps * self.samples * self.width

    def by_gate(self, weight: Tensor) -> Tensor:
        """[gates * H, ...] as [gates, H, ...], in PyTorch's order."""
        return weight.unflatten(0, (self.gates, self.hidden))


def copied(source: Argument, target: Argument) -> PrimitiveTemplate:
    """The reorder of what is read into what is written, both seen through layouts of their own."""
    assert source.desc is not None and target.desc is not None
    pd = PrimitiveDesc.reorder(source.desc, target.desc)
    return primitive_template(pd, {ARG_SRC: source, ARG_DST: target}, "reorder", 0)
