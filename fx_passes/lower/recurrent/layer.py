"""One recurrent layer in one direction by the library's primitive: all steps, the product with the input included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fx_passes import ops
from fx_passes.candidates.candidates import (
    Argument,
    Candidate,
    Operand,
    Operation,
    Result,
    Template,
    Temporary,
    Weights,
    primitive_template,
)
from fx_passes.candidates.layouts import row_major
from fx_passes.lower.context import LoweringContext, NotLowered
from zendnn_cffi.errors import ZenDNNError
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import (
    ARG_BIAS,
    ARG_DST,
    ARG_DST_ITER,
    ARG_DST_ITER_C,
    ARG_SRC,
    ARG_SRC_ITER,
    ARG_SRC_ITER_C,
    ARG_WEIGHTS,
    ARG_WEIGHTS_ITER,
    ARG_WEIGHTS_PROJECTION,
)
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc

_ORDER = {"gru": (1, 0, 2)}  # the library's gates by the numbers of PyTorch's: update before reset


def lower_recurrent_layer(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.recurrent_layer with constant weights."""
    arguments = context.values.arguments(node)
    src = context.tensor(arguments["src"], "src")
    dtype, spec = context.dtype(src), context.values.specs[node]
    weights = [context.constant(weight, "a weight") for weight in arguments["weights"]]
    if any(weight.dtype != src.dtype for weight in weights):
        raise NotLowered("weights of another dtype than the sequence's")
    layer = _Layer(node, arguments, weights, src.shape, dtype)
    operands = [arguments["src"]]
    for name in ("h", "c"):
        if arguments[name] is not None:
            if context.tensor(arguments[name], name).dtype != src.dtype:
                raise NotLowered(f"{name} has another dtype than the sequence")
            operands.append(arguments[name])
    if len(set(operands)) < len(operands):
        raise NotLowered("one tensor is several operands")
    operation = Operation(node, node.name, "recurrent_layer", tuple(operands), spec, flops=layer.flops)
    srcs = tuple(row_major(context.values.specs[operand].shape, dtype) for operand in operands)
    operation.candidates = [
        Candidate(pd.implementation, srcs, row_major(spec.shape, dtype), layer.calls(pd))
        for pd in layer.implementations()
    ]
    if not operation.candidates:
        raise NotLowered("the library has no recurrent primitive for this cell")
    return operation


class _Layer:
    """What a primitive for the layer runs on.

    sizes  T, N, I of the sequence, H hidden numbers and O of the output
    """

    def __init__(
        self, node: fx.Node, arguments: dict[str, Any], weights: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self.kind: str = arguments["kind"]
        self.reverse, self.with_cell = bool(arguments["reverse"]), bool(arguments["with_cell"])
        self.has_biases, self.dtype = bool(arguments["has_biases"]), dtype
        self.weights, self.names = weights, [str(weight) for weight in node.args[3]]
        self.gates = ops.GATES[self.kind]
        self.steps, self.samples, self.inputs = shape
        self.hidden, self.width = weights[1].shape[0] // self.gates, weights[1].shape[1]
        self.h, self.c = arguments["h"] is not None, arguments["c"] is not None
        self.is_projected = self.hidden != self.width or len(weights) == 3 + 2 * self.has_biases

    @property
    def flops(self) -> int:
        products = self.gates * self.hidden * (self.inputs + self.width) + self.is_projected * self.hidden * self.width
        return 2 * self.steps * self.samples * products

    @property
    def _output_numbers(self) -> int:
        return self.steps * self.samples * self.width

    def implementations(self) -> Iterator[PrimitiveDesc]:
        """Every implementation; none where the library refuses."""
        n, dtype, gates = self.samples, self.dtype, self.gates
        rows, cells = row_major((1, 1, n, self.width), dtype), row_major((1, 1, n, self.hidden), torch.float32)
        given = self.h or self.c
        if self.kind == "lstm" and self.h != self.c:
            return
        if self.is_projected and dtype == torch.bfloat16:
            return  # known_problems says why
        try:
            yield from PrimitiveDesc(
                descriptors.recurrent(
                    row_major((self.steps, n, self.inputs), dtype),
                    MemoryDesc((1, 1, self.inputs, gates, self.hidden), dtype, "any"),
                    MemoryDesc((1, 1, self.width, gates, self.hidden), dtype, "any"),
                    row_major((1, 1, gates + (self.kind == "gru"), self.hidden), torch.float32),
                    row_major((self.steps, n, self.width), dtype),
                    kind=self.kind,
                    reverse=self.reverse,
                    projection=MemoryDesc((1, 1, self.hidden, self.width), dtype, "any") if self.is_projected else None,
                    src_iter=rows if given else None,
                    src_iter_c=cells if given and self.kind == "lstm" else None,
                    dst_iter=rows if self.with_cell else None,
                    dst_iter_c=cells if self.with_cell else None,
                )
            ).implementations()
        except ZenDNNError:
            return

    def calls(self, pd: PrimitiveDesc) -> tuple[Template, ...]:
        """The primitive on the operands; hidden and cell states lie behind the output where the latter is read."""
        descs = pd.expected_args
        args: dict[int, Argument] = {
            ARG_SRC: Operand(0, descs[ARG_SRC]),
            ARG_WEIGHTS: self._weights(0, descs[ARG_WEIGHTS]),
            ARG_WEIGHTS_ITER: self._weights(1, descs[ARG_WEIGHTS_ITER]),
            ARG_BIAS: self._bias(descs[ARG_BIAS]),
            ARG_DST: Result(descs[ARG_DST]),
        }
        if self.is_projected:
            plain = self.weights[-1].t()[None, None]
            args[ARG_WEIGHTS_PROJECTION] = Weights(
                f"{self.names[-1]} of a layer", plain, descs[ARG_WEIGHTS_PROJECTION]
            )
        if self.h:
            args[ARG_SRC_ITER] = Operand(1, descs[ARG_SRC_ITER])
        before: list[Template] = []
        after: list[Template] = []
        own = row_major((1, 1, self.samples, self.hidden), self.dtype)
        if self.c:
            args[ARG_SRC_ITER_C] = self._cell_state(1, Operand(2, own), descs[ARG_SRC_ITER_C], before, into=True)
        if self.with_cell:
            behind = Result(own, self._output_numbers * self.dtype.itemsize)
            args[ARG_DST_ITER] = Temporary(0, descs[ARG_DST_ITER])
            args[ARG_DST_ITER_C] = self._cell_state(2, behind, descs[ARG_DST_ITER_C], after, into=False)
        return (*before, primitive_template(pd, args, "rnn", self.flops), *after)

    def _cell_state(self, number: int, own: Argument, desc: MemoryDesc, calls: list[Template], into: bool) -> Argument:
        """own, in this dtype, or what stands for it as the primitive has cell states, in float32: copied by calls.

        into  whether the primitive reads it
        """
        if own.desc == desc:
            return own
        wide = Temporary(number, desc)
        source, target = (own, wide) if into else (wide, own)
        pd = PrimitiveDesc.reorder(source.desc, target.desc)
        calls.append(primitive_template(pd, {ARG_SRC: source, ARG_DST: target}, "reorder", 0))
        return wide

    def _weights(self, index: int, desc: MemoryDesc) -> Weights:
        """[gates * H, K] as the library sees it, [1, 1, K, gates, H]."""
        plain = self._by_gate(self.weights[index]).permute(2, 0, 1)[None, None]
        return Weights(f"{self.names[index]} of a layer", plain, desc)

    def _bias(self, desc: MemoryDesc) -> Weights:
        """The sum of both biases, [1, 1, gates, H]. Of a GRU that of the new state's recurrent part is apart."""
        if not self.has_biases:
            plain = torch.zeros(desc.dims, dtype=torch.float32, device="cpu")
            return Weights(f"no bias of {self.names[0]}", plain, desc)
        first, second = (self._by_gate(bias).float() for bias in self.weights[2:4])
        if self.kind == "gru":
            plain = torch.cat([first[:2] + second[:2], first[2:], second[2:]])
        else:
            plain = first + second
        return Weights(f"{self.names[2]} + {self.names[3]} of a layer", plain[None, None], desc)

    def _by_gate(self, weight: Tensor) -> Tensor:
        """[gates * H, ...] as [gates, H, ...], in the library's order."""
        each = weight.unflatten(0, (self.gates, self.hidden))
        order = _ORDER.get(self.kind)
        return each if order is None else each[list(order)]
