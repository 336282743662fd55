"""The gate and up projections of one row as one operation: both products in one call, where that reads memory faster.

    gate = linear(x, a, post_ops=(silu,));  linear(x, b, post_ops=(mul by gate,))     x is one row, f32

A product of one row takes as long as reading its weights, and between two of them memory waits for Python: in a
decoding step, one product of both matrices takes less time than two. It needs them one under the other, as a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fx_passes import ops
from fx_passes.candidates.candidates import (
    Argument,
    Arguments,
    Candidate,
    Operation,
    PrimitiveTemplate,
    Result,
    Temporary,
    TorchTemplate,
    Weights,
)
from fx_passes.candidates.layouts import row_major
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.graph.graph import is_call, only_user
from fx_passes.lower.context import LoweringContext, constant_name
from fx_passes.lower.post_ops import Chain, EltwisePostOp, translate
from fx_passes.lower.primitives import first_optimized, keep_optimized
from fx_passes.lower.products.linear import Product
from fx_passes.lower.products.matrix_vector import NAME, batched_product, by_pieces, equal_pieces
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_SRC_1, PostOps, arg_post_op
from zendnn_cffi.primitives.memory import MemoryDesc


def cover_gated_rows(graph: fx.Graph, values: RegionValues) -> dict[fx.Node, fx.Node]:
    """Cover the gate of every such pair; return it by the layer whose operation computes both."""
    pairs = {up: _gate(up, values) for up in graph.find_nodes(op="call_function", target=ops.linear)}
    covering = {up: gate for up, gate in pairs.items() if gate is not None}
    for gate in covering.values():
        values.cover(gate)
    return covering


def _gate(up: fx.Node, values: RegionValues) -> fx.Node | None:
    """The gate that `up` is multiplied by, where both are products of one f32 row with weights of one shape."""
    if up.args[0] not in values.specs:  # a constant
        return None
    _, kind, gate, *_ = _only_post_op(up, "binary")
    if kind != "mul" or not is_call(gate, ops.linear) or gate.args[0] is not up.args[0] or only_user(gate) != up:
        return None
    activation = _only_post_op(gate, "eltwise")
    if activation[0] is None or len(translate(activation, values.base(gate), values) or ()) != 1:
        return None
    weights = [values.constants.get(node.args[1]) for node in (gate, up)]
    specs = [values.specs[up.args[0]], *(TensorSpec.of(w) for w in weights if isinstance(w, Tensor))]
    if len(specs) != 3 or any(spec.dtype != torch.float32 for spec in specs):
        return None
    src, *shapes = (spec.shape for spec in specs)
    return gate if shapes[0] == shapes[1] and len(src) >= 2 and math.prod(src) == shapes[0][1] else None


def _only_post_op(node: fx.Node, name: str) -> tuple[Any, ...]:
    """The one post-op of a linear layer without bias, where it is one of this name; else Nones."""
    post_ops: Any = node.kwargs.get("post_ops", ())
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    return post_ops[0] if len(post_ops) == 1 and post_ops[0][0] == name and bias is None else (None, None, None)


def lower_gated_row(node: fx.Node, gate_node: fx.Node, context: LoweringContext) -> Operation:
    """Lower both: by two primitives of one kind, or PyTorch's batched product of both matrices."""
    spec, source = context.values.specs[node], context.values.arguments(node)["src"]
    src = context.tensor(source, "src")
    gate, up = (context.constant(context.values.arguments(n)["weight"], "weight") for n in (gate_node, node))
    names = constant_name(gate_node, "weight"), constant_name(node, "weight")
    (entry,) = context.post_ops(gate_node.kwargs["post_ops"], spec)
    assert isinstance(entry, EltwisePostOp)
    n, k = gate.shape
    dst = row_major(spec.shape, torch.float32)
    name = f"{gate_node.name}_{node.name}"
    operation = Operation(node, name, "inner_product", (source,), spec, flops=4 * n * k)
    srcs = (row_major(src.shape, torch.float32),)
    for calls in _pairs((gate, up), names, entry):
        operation.candidates.append(Candidate(calls[0].pd.implementation, srcs, dst, calls))
    keep_optimized(operation, "no optimized product takes these shapes")
    both = Weights(" ".join(names), gate, row_major((2 * n, k), torch.float32), (up,))
    operation.candidates += _in_one_product(both, entry, srcs, dst)
    return operation


def _pairs(
    weights: tuple[Tensor, Tensor], names: tuple[str, str], activation: EltwisePostOp
) -> Iterator[tuple[PrimitiveTemplate, PrimitiveTemplate]]:
    """The product that ends in the activation, then the one multiplied by its result, both by one implementation."""
    n, k = weights[0].shape
    row = row_major((1, n), torch.float32)
    of_gate = Chain(PostOps().eltwise(activation.kind, activation.alpha, activation.beta))
    of_up = Chain(PostOps().binary("mul", row), {arg_post_op(0, ARG_SRC_1): Temporary(0, row)})
    gates, ups = (
        {(t.kind, t.pd.implementation): t for t in Product.of_row(weight, name, chain).templates()}
        for weight, name, chain in zip(weights, names, (of_gate, of_up), strict=True)
    )
    for which, template in gates.items():
        if which in ups:
            args: dict[int, Argument] = {**template.args, ARG_DST: Temporary(0, row)}
            yield replace(template, args=args, flops=2 * n * k), replace(ups[which], flops=2 * n * k)


def _in_one_product(
    weights: Weights, activation: EltwisePostOp, srcs: tuple[MemoryDesc, ...], dst: MemoryDesc
) -> Iterator[Candidate]:
    """PyTorch's batched product of both matrices, then two primitives; nothing where they make no equal pieces."""
    rows, k = weights.desc.dims
    pieces = equal_pieces(rows)
    if pieces is None:
        return

    column, matrices, both = by_pieces(weights, pieces)
    args = column, matrices, Temporary(0, both)
    key = f"{torch.__version__} bmm of {pieces} gated"
    product = TorchTemplate(batched_product(0, ()), "", True, key, args, flops=2 * rows * k)
    half = row_major((1, rows // 2), torch.float32)
    gate, up = Temporary(0, half), Temporary(0, half, half.size_bytes)
    function = descriptors.eltwise, activation.kind, half, activation.alpha, activation.beta
    activated = first_optimized({ARG_SRC: gate, ARG_DST: Result(half)}, "eltwise", *function, flops=0)
    args_of_mul: Arguments = {ARG_SRC: Result(half), ARG_SRC_1: up, ARG_DST: Result(half)}
    multiplied = first_optimized(args_of_mul, "binary", descriptors.binary, "mul", half, half, half, flops=0)
    if activated is not None and multiplied is not None:
        calls = product, activated, multiplied
        yield Candidate(f"{NAME} + {activated.pd.implementation}", srcs, dst, calls)
