"""Attention and rotary embedding: what PyTorch's own kernels are good at, planned here.

No primitive computes these. Their operands are read where and as they lie (slices of a wide projection, transposed
heads), the results are written into the arena in the layout that the next operation wants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fx_passes import ops
from fx_passes.candidates.candidates import (
    EXPONENTIALS,
    Argument,
    Candidate,
    Operand,
    Operation,
    PackedWeights,
    PrimitiveTemplate,
    Result,
    TorchTemplate,
    Weights,
)
from fx_passes.candidates.layouts import Numerics, is_known_dtype, row_major, strided
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.attention.exponentials import in_exponentials
from fx_passes.lower.attention.steps import Heads, in_steps
from fx_passes.lower.context import LoweringContext, NotLowered, eager_layout, torch_operation
from fx_passes.lower.primitives import first_optimized
from fx_passes.lower.quantized import numerics_of
from fx_passes.memoize.masks import additive
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_SRC_1, PostOps
from zendnn_cffi.primitives.memory import MemoryDesc


def lower_attention(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.attention of [B, H, L, D]: PyTorch's flash kernel or products in steps; the result is [B, L, H, D]."""
    arguments = context.values.arguments(node)
    query, spec = context.tensor(arguments["query"], "query"), context.values.specs[node]
    nodes = [arguments[name] for name in ("query", "key", "value")]
    mask = arguments["mask"]
    if query.ndim != 4 or any(context.tensor(n, "an operand").ndim != 4 for n in nodes):
        raise NotLowered("attention of another rank than 4")
    dtype = context.dtype(query)
    options = {name: arguments[name] for name in ("is_causal", "scale", "enable_gqa")}
    constant = mask if isinstance(mask, Tensor) else None
    masks = [mask] if isinstance(mask, fx.Node) else []
    mask_dtype = context.values.specs[mask].dtype if masks else None

    def attend(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        bias = given[0] if given else constant
        if bias is not None and bias.dtype not in (torch.bool, torch.float32, q.dtype):
            bias = bias.to(q.dtype)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, 0.0, **options)

    srcs = [as_it_lies(n, context, dtype) for n in nodes]
    if masks:
        srcs.append(as_it_lies(mask, context, mask_dtype or dtype))  # f32's least number is no number in bf16
    b, h, length, d = spec.shape
    dst = strided(spec.shape, dtype, (length * h * d, d, h * d, 1))
    flops = 2 * spec.numel * context.values.specs[nodes[1]].shape[2] * 2
    operation = _operation(node, context, "attention", (*nodes, *masks), srcs, dst, attend, flops=flops)
    if constant is None and dtype in (torch.float32, torch.bfloat16):
        scale = d**-0.5 if options["scale"] is None else float(options["scale"])
        q, k, v = srcs[:3]
        live = any(m.target is ops.additive_mask for m in masks)
        given = Heads(q, k, v, srcs[3] if masks else None, dst, scale, bool(options["is_causal"]), live)
        integers = _of_integers(given, nodes, context)
        ways = [given] if integers is None else [given, integers]
        steps = [step for heads in ways for step in in_steps(heads)]
        if steps and EXPONENTIALS not in context.without:
            for heads in (each for way in ways for each in _arrangements(way)):
                steps += in_exponentials(heads)
        if steps:  # now there is something to measure it beside
            described = f"{torch.__version__} attention {options} {given.mask and (given.mask.dims, given.mask.dtype)}"
            (flash,) = operation.candidates
            (template,) = flash.calls
            assert isinstance(template, TorchTemplate)
            operation.candidates = [*steps, replace(flash, calls=(replace(template, key=described),))]
    return operation


def _of_integers(heads: Heads, nodes: Sequence[fx.Node], context: LoweringContext) -> Heads | None:
    """The same with query and key as the integers that they are exactly some of; kernels take the key as int8."""
    query, key = (numerics_of(node, context.values) for node in nodes[:2])
    if query is None or key is None:
        return None
    if key.dtype == torch.uint8:  # the same numbers, counted from 128 less
        key = Numerics(torch.int8, key.scale, key.zero_point - 128)
    if query.zero_point and key.zero_point:
        return None
    kept = [as_it_lies(node, context, n.dtype) for node, n in zip(nodes[:2], (query, key), strict=True)]
    return replace(heads, query=kept[0], key=kept[1], kept=(query, key))


def _arrangements(heads: Heads) -> Iterator[Heads]:
    """The operands as they lie; then without gaps, which more kernels read: query and key, then value as well."""
    query, key, value = (_without_gaps(desc, heads.is_causal) for desc in (heads.query, heads.key, heads.value))
    dense = replace(heads, query=query, key=key)
    found = [heads, dense]
    if heads.mask is None:  # else values are written anew anyway
        found.append(replace(dense, value=value))
    yield from {(each.query, each.key, each.value): each for each in reversed(found)}.values()


def _without_gaps(desc: MemoryDesc, by_rows: bool) -> MemoryDesc:
    """[B, H, L, D] as it lies where that is dense, else in the order B, L, H, D; by_rows: always in that order."""
    b, h, length, d = desc.dims
    assert desc.dtype is not None
    if not by_rows and desc.strides == (h * length * d, length * d, d, 1):
        return desc
    return strided(desc.dims, desc.dtype, (length * h * d, d, h * d, 1))


def lower_additive_mask(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.additive_mask: PyTorch's, once for all attentions that read it, or once for a mask that stays."""
    operation, of_keys = torch_operation(node, context.values, ""), bool(context.values.arguments(node)["of_keys"])
    (candidate,) = operation.candidates
    template = TorchTemplate(lambda mask: additive(mask, of_keys), "")
    operation.candidates = [replace(candidate, calls=(template,))]
    return operation


def lower_rotary(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.rotary: src * cos, then both halves of the turned source added in place."""
    arguments = context.values.arguments(node)
    tables = [arguments[name] for name in ("cos", "sin")]  # constants, or computed at run time
    nodes = [arguments["src"], *(table for table in tables if not isinstance(table, Tensor))]
    specs = [context.tensor(n, "an operand") for n in nodes]
    spec, half = context.values.specs[node], specs[0].shape[-1] // 2
    operands = [*specs, *(table for table in tables if isinstance(table, Tensor))]
    promotes = len({each.dtype for each in operands}) > 1
    if spec.shape != specs[0].shape or promotes or any(each.shape[-1:] != (2 * half,) for each in operands):
        raise NotLowered("rotary embedding that broadcasts or promotes its source")
    dtype = context.dtype(spec)

    neighbours = slice(0, None, 2), slice(1, None, 2)
    first, second = neighbours if arguments["interleaved"] else (slice(0, half), slice(half, None))

    def rotate(x: Tensor, *given: Tensor) -> None:
        later, out = iter(given[:-1]), given[-1]  # constants as they are now, which may be written to
        cos, sin = (table.to(out.dtype) if isinstance(table, Tensor) else next(later) for table in tables)
        torch.mul(x, cos, out=out)
        out[..., first].addcmul_(x[..., second], sin[..., first], value=-1)
        out[..., second].addcmul_(x[..., first], sin[..., second])

    srcs = [as_it_lies(n, context, dtype) for n in nodes]
    operation = _operation(node, context, "rotary", nodes, srcs, row_major(spec.shape, dtype), rotate, into=True)
    if len(spec.shape) == 4 and spec.shape[2] > 1:  # as projections leave heads, and attention in blocks wants them
        b, h, length, d = spec.shape
        by_rows = strided(spec.shape, dtype, (length * h * d, d, h * d, 1))
        operation.candidates += [replace(candidate, dst=by_rows) for candidate in operation.candidates]
    return operation


def lower_rotation(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.rotation, once a call where its angles are no constants of the sizes.

    Of one position by primitives, as PyTorch's many functions are in no cache in a step; else by PyTorch.
    """
    arguments, spec = context.values.arguments(node), context.values.specs[node]
    nodes = [arguments[name] for name in ("cos", "sin")]
    dtype, interleaved = context.dtype(spec), bool(arguments["interleaved"])
    turn = partial(ops.rotation, interleaved=interleaved)
    srcs = [as_it_lies(n, context, dtype) for n in nodes]
    operation = _operation(node, context, "rotation", nodes, srcs, row_major(spec.shape, dtype), turn)
    calls = _one_rotation(spec.shape[-1], dtype, interleaved) if spec.numel == spec.shape[-1] ** 2 else None
    if calls is not None and all(context.values.specs[n].numel == spec.shape[-1] for n in nodes):
        operation.candidates = [replace(operation.candidates[0], implementation="binary", calls=calls)]
    return operation


def _one_rotation(size: int, dtype: torch.dtype, interleaved: bool) -> tuple[PrimitiveTemplate, ...] | None:
    """[D, D] of cos and sin [D]: the matrix where cos is 1 and sin 0, times cos, and the other one times sin."""
    row, matrix = row_major((1, size), dtype), row_major((size, size), dtype)
    zeros = torch.zeros(size, dtype=dtype, device="cpu")
    calls: list[PrimitiveTemplate] = []
    about = f"a rotation of {size}{' by pairs' * interleaved}, {dtype}"
    for name, post_ops in (("cos", PostOps()), ("sin", PostOps().sum())):
        turned = ops.rotation(zeros + (name == "cos"), zeros + (name == "sin"), interleaved)
        args: dict[int, Argument | PackedWeights] = {
            ARG_SRC: Weights(f"places of {name} in {about}", turned, matrix),
            ARG_SRC_1: Operand(len(calls), row),
            ARG_DST: Result(matrix),
        }
        call = first_optimized(args, "binary", descriptors.binary, "mul", matrix, row, matrix, post_ops=post_ops)
        if call is None:
            return None
        calls.append(call)
    return tuple(calls)


def _operation(
    node: fx.Node,
    context: LoweringContext,
    kind: str,
    operands: Sequence[fx.Node],
    srcs: Sequence[Any],
    dst: MemoryDesc,
    function: Callable[..., Any],
    *,
    into: bool = False,
    flops: int = 0,
) -> Operation:
    template = TorchTemplate(function, "", into)
    candidate = Candidate("torch", tuple(srcs), dst, (template,))
    return Operation(node, node.name, kind, tuple(operands), context.values.specs[node], [candidate], flops=flops)


def as_it_lies(node: fx.Node, context: LoweringContext, dtype: torch.dtype) -> Any:
    """The layout in which node's value is there without a copy, its last dimension dense."""
    spec = context.values.specs[node]
    if not is_known_dtype(dtype):
        return eager_layout(spec)
    steps = [s for s in context.plain_strides(node) if s[-1:] == (1,) or spec.shape[-1:] == (1,)]
    return _layout(spec, dtype, steps[-1]) if steps else row_major(spec.shape or (1,), dtype)


def _layout(spec: TensorSpec, dtype: torch.dtype, steps: tuple[int, ...]) -> Any:
    if 0 in steps:
        return row_major(spec.shape or (1,), dtype)
    return strided(spec.shape or (1,), dtype, steps or (1,))
