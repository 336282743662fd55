"""Element-wise operations on their own: those that no convolution or linear absorbed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from fx_passes.candidates.candidates import (
    Arguments,
    Candidate,
    Operand,
    Operation,
    PackedWeights,
    Result,
    Weights,
    primitive_template,
)
from fx_passes.candidates.layouts import activation_layouts, row_major
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.context import LoweringContext, NotLowered
from fx_passes.lower.pointwise.to_integers import gated_to_integers, scaled_to_integers
from fx_passes.lower.post_ops import COARSE, FUSABLE_BINARY, EltwisePostOp, as_linear, translate_eltwise
from fx_passes.lower.primitives import candidates, implementations, keep_optimized, optimized_implementations
from fx_passes.lower.residuals import kept_dtype
from fx_passes.lower.windows.depthwise import gated
from fx_passes.lower.windows.gated_weights import lower_gated_weights
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_SRC_1, ARG_WEIGHTS
from zendnn_cffi.primitives.memory import MemoryDesc

_COMMUTATIVE = frozenset({"add", "mul", "max", "min"})


def lower_eltwise(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.eltwise, in every layout, in place where the input is read by nobody later."""
    arguments = context.values.arguments(node)
    src = context.tensor(arguments["src"], "src")
    spelled = translate_eltwise(arguments["kind"], arguments["alpha"], arguments["beta"])
    if spelled is None and arguments["kind"] in COARSE:
        raise NotLowered(f"the library's kernels for {arguments['kind']} lose small results")
    if spelled is None:
        raise NotLowered(f"no primitive computes {arguments['kind']}")
    return _eltwise(node, context, arguments["src"], src, spelled)


def _eltwise(
    node: fx.Node, context: LoweringContext, src_node: fx.Node, src: TensorSpec, spelled: Sequence[EltwisePostOp]
) -> Operation:
    """One eltwise primitive; further functions of a chain work in place on its result."""
    dtype = context.dtype(src)
    operation = Operation(node, node.name, "eltwise", (src_node,), context.values.specs[node])
    for desc in activation_layouts(src.shape or (1,), dtype):
        calls = []
        for step, function in enumerate(spelled):
            found = implementations(descriptors.eltwise, function.kind, desc, function.alpha, function.beta)
            args: Arguments = {ARG_SRC: Result() if step else Operand(0), ARG_DST: Result()}
            calls += [primitive_template(pd, args, "eltwise") for pd in found[:1]]
        if len(calls) == len(spelled):
            implementation = calls[0].pd.implementation
            operation.candidates.append(Candidate(implementation, (desc,), desc, tuple(calls), may_overwrite=0))
    if not operation.candidates:
        raise NotLowered(f"no implementation of eltwise {spelled[0].kind} takes {src}")
    return operation


def lower_binary(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.binary of two tensors, one of which may broadcast to the other, or of a tensor and a number."""
    arguments = context.values.arguments(node)
    a, b, kind = arguments["a"], arguments["b"], arguments["kind"]
    spec = context.values.specs[node]
    if isinstance(b, int | float) and not isinstance(b, bool):
        return _with_number(node, context, a, as_linear(kind, b))
    if isinstance(a, int | float) and not isinstance(a, bool):
        reverse = EltwisePostOp("linear", -1.0, float(a)) if kind == "sub" else None
        return _with_number(node, context, b, as_linear(kind, a) if kind in ("add", "mul") else reverse)
    if kind in _COMMUTATIVE and _shape(a, context) != spec.shape:
        a, b = b, a
    if kind == "mul" and isinstance(a, torch.Tensor) and isinstance(b, fx.Node):
        return lower_gated_weights(node, a, b, context)
    a_spec = context.tensor(a, "a")
    if kind not in FUSABLE_BINARY or a_spec.shape != spec.shape or not spec.shape:
        raise NotLowered(f"no primitive computes {kind} of these shapes")
    return _binary(node, context, a, b, kind)


def _with_number(node: fx.Node, context: LoweringContext, src: fx.Node, post_op: EltwisePostOp | None) -> Operation:
    src_spec = context.tensor(src, "the tensor operand")
    if post_op is None or src_spec.dtype != context.values.specs[node].dtype:
        raise NotLowered("no primitive computes this of a tensor and a number")
    return _eltwise(node, context, src, src_spec, (post_op,))


def _shape(value: object, context: LoweringContext) -> tuple[int, ...]:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    return context.values.specs[value].shape if value in context.values.specs else ()


def _binary(node: fx.Node, context: LoweringContext, a: fx.Node, b: fx.Node | torch.Tensor, kind: str) -> Operation:
    spec = context.values.specs[node]
    dtype, computed = kept_dtype(node, context), context.dtype(spec)
    constant = b if isinstance(b, torch.Tensor) else None
    b_spec = TensorSpec.of(constant) if constant is not None else context.tensor(b, "b")
    if b_spec.dtype != spec.dtype or context.values.specs[a].dtype != spec.dtype or b_spec.ndim > spec.ndim:
        raise NotLowered("operands of different dtypes are promoted by PyTorch")
    shape = (1,) * (spec.ndim - b_spec.ndim) + b_spec.shape
    operands = (a,) if constant is not None else (a, b)
    operation = Operation(node, node.name, "binary", operands, spec)
    if kind == "mul" and constant is None and shape == (*spec.shape[:2], 1, 1) != spec.shape:
        operation.candidates += gated(spec, dtype, (a, b))
        operation.candidates += gated_to_integers(node, a, context)
    constant_name = str(node.args[1] if node.args[0] is a else node.args[0])
    for desc in activation_layouts(spec.shape, dtype):
        full = b_spec.shape == spec.shape
        other = desc if full and constant is None else row_major(shape, dtype)
        other_operand = other if full else row_major(b_spec.shape or (1,), dtype)
        second = Operand(1, other) if constant is None else Weights(constant_name, constant, other)
        args: Arguments = {ARG_SRC: Operand(0), ARG_SRC_1: second, ARG_DST: Result()}
        srcs = (desc,) if constant is not None else (desc, other_operand)
        found = implementations(descriptors.binary, kind, desc, other, desc)[:1]
        operation.candidates += candidates(found, args, "binary", srcs, desc, may_overwrite=0)
    if dtype != computed and constant is None and b_spec.shape == spec.shape:
        operation.candidates += _sums_of_two_dtypes(spec, dtype, computed)
    if constant is not None:
        operation.candidates += scaled_to_integers(node, kind, constant_name, constant, context)
    return keep_optimized(operation, f"no optimized binary {kind} takes {list(spec.shape)} and {list(shape)}")


def _sums_of_two_dtypes(spec: TensorSpec, wide: torch.dtype, narrow: torch.dtype) -> Iterator[Candidate]:
    """One addend in each dtype, row by row: neither is converted first."""
    result = row_major(spec.shape, wide)
    for dtypes in ((wide, narrow), (narrow, wide)):
        a, b = (row_major(spec.shape, dtype) for dtype in dtypes)
        args: Arguments = {ARG_SRC: Operand(0), ARG_SRC_1: Operand(1), ARG_DST: Result()}
        found = optimized_implementations(descriptors.binary, "add", a, b, result)[:1]
        yield from candidates(found, args, "binary", (a, b), result)


def lower_prelu(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.prelu with a constant slope: one for all, or one per channel."""
    arguments = context.values.arguments(node)
    src = context.tensor(arguments["src"], "src")
    weight = context.constant(arguments["weight"], "weight")
    dtype = context.dtype(src)
    if src.ndim < 2:
        raise NotLowered(f"src {src} has no channel dimension")
    shape = (1, weight.numel(), *(1,) * (src.ndim - 2))
    operation = Operation(node, node.name, "prelu", (arguments["src"],), context.values.specs[node])
    for desc in activation_layouts(src.shape, dtype):
        found = implementations(descriptors.prelu, desc, MemoryDesc(shape, dtype, "any"))[:1]
        weights = PackedWeights(str(node.args[1]), weight.reshape(shape))
        args: Arguments = {ARG_SRC: Operand(0), ARG_WEIGHTS: weights, ARG_DST: Result()}
        operation.candidates += candidates(found, args, "prelu", (desc,), desc)
    if not operation.candidates:
        raise NotLowered("no prelu implementation takes these shapes")
    return operation
