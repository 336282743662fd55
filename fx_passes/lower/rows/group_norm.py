"""Group normalization: the rows of all groups normalized, then scaled and shifted per channel.

rows    = (x - mean) / sqrt(var + eps)      layer_normalization of [N * groups, C / groups * pixels]
result  = post_ops(rows * weight + bias)    binary, in place
"""

from __future__ import annotations

import torch
from torch import fx

from fx_passes.candidates.candidates import (
    Argument,
    Arguments,
    Candidate,
    Operand,
    Operation,
    PrimitiveTemplate,
    Result,
    Weights,
)
from fx_passes.candidates.layouts import row_major
from fx_passes.lower.context import (
    LoweringContext,
    NotLowered,
    constant_name,
    run_time_operands,
)
from fx_passes.lower.post_ops import Chain, build_chain
from fx_passes.lower.primitives import first_optimized
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_SRC_1, PostOps, arg_post_op
from zendnn_cffi.primitives.memory import MemoryDesc


def lower_group_norm(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.group_norm with constant weight and bias, or without either."""
    arguments = context.values.arguments(node)
    src = context.tensor(arguments["src"], "src")
    dtype, groups = context.dtype(src), src.shape[0] * arguments["groups"]
    desc, rows = row_major(src.shape, dtype), row_major((groups, src.numel // groups), dtype)
    per_channel = row_major((1, src.shape[1], *(1,) * (src.ndim - 2)), torch.float32)
    affine = {
        name: Weights(constant_name(node, name), context.constant(arguments[name], name), per_channel)
        for name in ("weight", "bias")
        if arguments[name] is not None
    }
    # the second primitive takes them, where there is one
    post_ops = context.post_ops(arguments["post_ops"], context.values.base(node), lambda chain: bool(affine))
    operands = run_time_operands((arguments["src"],), post_ops)
    chain = build_chain(post_ops, operands, desc, dtype)
    calls = _normalization(rows, arguments["eps"])
    if affine:
        calls += _per_channel(desc, affine, chain)
    if len(calls) != 1 + bool(affine):
        raise NotLowered("no optimized primitives take this group normalization")
    implementation = " + ".join(dict.fromkeys(call.pd.implementation for call in calls))
    candidate = Candidate(implementation, (desc, *chain.srcs), desc, calls)
    return Operation(node, node.name, "group_norm", operands, context.values.specs[node], [candidate])


def _normalization(rows: MemoryDesc, eps: float) -> tuple[PrimitiveTemplate, ...]:
    """The rows, from the operand into the result. () without an optimized implementation."""
    args: Arguments = {ARG_SRC: Operand(0, rows), ARG_DST: Result(rows)}
    found = first_optimized(
        args, "layer_normalization", descriptors.layer_normalization, rows, eps, scale=False, shift=False
    )
    return () if found is None else (found,)


def _per_channel(desc: MemoryDesc, affine: dict[str, Weights], chain: Chain) -> tuple[PrimitiveTemplate, ...]:
    """chain(result * weight + bias), in place. () without an optimized implementation."""
    (first, weights), *second = affine.items()
    args: dict[int, Argument] = {ARG_SRC: Result(), ARG_SRC_1: weights, ARG_DST: Result()}
    post_ops = PostOps()
    for _, bias in second:
        post_ops = post_ops.binary("add", bias.desc)
        args[arg_post_op(0, ARG_SRC_1)] = bias
    behind = arg_post_op(len(second)) - arg_post_op(0)  # the chain's own places are counted from 0
    args |= {arg + behind: argument for arg, argument in chain.args.items()}
    kind, joined = "mul" if first == "weight" else "add", PostOps((*post_ops, *chain.post_ops))
    found = first_optimized(args, "binary", descriptors.binary, kind, desc, weights.desc, desc, post_ops=joined)
    return () if found is None else (found,)
