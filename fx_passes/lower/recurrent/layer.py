"""One recurrent layer in one direction by the library's primitive: all steps, the product with the input included."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from fx_passes.candidates.candidates import (
    Argument,
    Candidate,
    Operand,
    Operation,
    Result,
    Template,
    Temporary,
    TorchTemplate,
    Weights,
    primitive_template,
)
from fx_passes.candidates.layouts import computed_as, row_major
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.recurrent.arguments import LayerArguments, copied, is_projected
from fx_passes.lower.recurrent.steps import by_steps
from fx_passes.ops.recurrent import output_and_cell, state_offset
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
    result, spec = context.dtype(src), context.values.specs[node]
    weights = [context.constant(weight, "a weight") for weight in arguments["weights"]]
    # in bfloat16 the library's projected layers are wrong: known_problems
    dtype = computed_as(src.dtype) if is_projected(weights, arguments["has_biases"]) else result
    if any(weight.dtype != src.dtype for weight in weights):
        raise NotLowered("weights of another dtype than the sequence's")
    states = [arguments[name] for name in ("h", "c")]
    if any(state is not None and context.tensor(state, "a state").dtype != src.dtype for state in states):
        raise NotLowered("a state of another dtype than the sequence's")
    operands = tuple(dict.fromkeys(node for node in (arguments["src"], *states) if node is not None))
    layer = _Primitive(node, arguments, weights, src.shape, (dtype, result), operands)
    operation = Operation(node, node.name, "recurrent_layer", operands, spec, flops=layer.flops)
    srcs = tuple(row_major(context.values.specs[operand].shape, dtype) for operand in operands)
    dst = row_major(spec.shape, result)
    operation.candidates = [Candidate(pd.implementation, srcs, dst, layer.calls(pd)) for pd in layer.implementations()]
    if not operation.candidates:
        raise NotLowered("the library has no recurrent primitive for this cell")
    operation.candidates += by_steps(layer, srcs, dst)
    operation.candidates.append(Candidate("torch", srcs, dst, (layer.by_torch(),)))
    return operation


class _Primitive(LayerArguments):
    """The library's primitive for the whole layer."""

    def implementations(self) -> Iterator[PrimitiveDesc]:
        """Every implementation; none where the library refuses."""
        n, dtype, gates = self.samples, self.dtype, self.gates
        rows, cells = row_major((1, 1, n, self.width), dtype), row_major((1, 1, n, self.hidden), torch.float32)
        given = bool(self.states)
        if given and len(self.states) != 1 + (self.kind == "lstm"):
            return  # one of both
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
        }
        if self.is_projected:
            plain = self.weights[-1].t()[None, None]
            args[ARG_WEIGHTS_PROJECTION] = Weights(f"{self.names[-1]} of a layer", plain, descs[ARG_WEIGHTS_PROJECTION])
        if self.states:
            args[ARG_SRC_ITER] = Operand(self.states[0], descs[ARG_SRC_ITER])
        before: list[Template] = []
        after: list[Template] = []
        output = Result(row_major((self.steps, self.samples, self.width), self.result))
        args[ARG_DST] = self._converted(3, output, descs[ARG_DST], after)
        state = (1, 1, self.samples, self.hidden)
        if len(self.states) > 1:
            own = Operand(self.states[1], row_major(state, self.dtype))
            args[ARG_SRC_ITER_C] = self._converted(1, own, descs[ARG_SRC_ITER_C], before, is_read=True)
        if self.with_cell:
            behind = Result(row_major(state, self.result), state_offset(self.output_numbers) * self.result.itemsize)
            args[ARG_DST_ITER] = Temporary(0, descs[ARG_DST_ITER])
            args[ARG_DST_ITER_C] = self._converted(2, behind, descs[ARG_DST_ITER_C], after)
        return (*before, primitive_template(pd, args, "rnn", self.flops), *after)

    def by_torch(self) -> TorchTemplate:
        """PyTorch's own, on weights of this dtype: the rival."""
        settings = {"has_biases": self.has_biases, "reverse": self.reverse}
        kind, count, number, with_cell = self.kind, len(self.weights), len(self.states), self.with_cell

        def compute(src: Tensor, *rest: Tensor) -> None:
            h, c = (*rest[:number], None, None)[:2]
            weights, out = rest[-1 - count : -1], rest[-1]
            output, cell = output_and_cell(src, h, c, weights, kind, **settings)
            if with_cell and cell is not None:
                out[state_offset(output.numel()) :].view(cell.shape).copy_(cell)
                out = out[: output.numel()].view(output.shape)
            out.copy_(output)

        weights = (
            Weights(name, weight, row_major(tuple(weight.shape), self.dtype))
            for name, weight in zip(self.names, self.weights, strict=True)
        )
        args: tuple[Argument, ...] = (*map(Operand, (0, *self.states)), *weights, Result())
        shapes = [tuple(weight.shape) for weight in self.weights]
        key = f"{torch.__version__} recurrent_layer {kind} {settings} {number} {with_cell} {shapes}"
        return TorchTemplate(compute, "", True, key, args, flops=self.flops)

    def _converted(
        self, number: int, own: Operand | Result, desc: MemoryDesc, calls: list[Template], is_read: bool = False
    ) -> Argument:
        """own, or a temporary in the primitive's dtype that a further call copies; cell states are float32 there."""
        assert own.desc is not None
        if own.desc == desc:
            return own
        wide = Temporary(number, desc)
        source, target = (own, wide) if is_read else (wide, own)
        calls.append(copied(source, target))
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
        each = self.by_gate(weight)
        order = _ORDER.get(self.kind)
        return each if order is None else each[list(order)]
