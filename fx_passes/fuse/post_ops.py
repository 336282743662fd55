"""Absorb what reads the result of a convolution, deconvolution, linear, matmul or batch_norm, as post-ops of it.

    Before: conv -> binary(conv, y, "add") -> eltwise(.., "relu")      Needs:  normalize, fold
    After:  conv[post_ops=(binary add y, eltwise relu)]

The fused node stands where the last of the absorbed ones stood, behind all its operands. Of two convolutions that are
added, the one that comes later absorbs the addition: the other's result is there by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import finish, is_call, is_constant, only_user, replace, set_example
from fx_passes.spellings.registry import is_number
from zendnn_cffi.values import dataclass

log = logging.getLogger("zendnn_cffi.passes")

MAX_POST_OPS = 31  # the library takes 32, but not the argument of a binary one in the last place


@dataclass(frozen=True)
class PostOp:
    """A row: which consumer, and the entries it becomes (None: not this one)."""

    name: str
    op: Callable[..., Any]
    entries: Callable[[fx.Node, fx.Node], tuple[Any, ...] | None]


def fuse_post_ops(gm: fx.GraphModule) -> fx.GraphModule:
    """Fuse until nothing matches, last producers first."""
    aliasing = Aliasing(gm)
    for producer in reversed([n for n in gm.graph.nodes if is_call(n, *ops.WITH_POST_OPS)]):
        while (match := match_post_op(producer)) is not None and aliasing.may_move_down(producer, match[0]):
            absorb(producer, *match)
    return finish(gm)


def match_post_op(producer: fx.Node) -> tuple[fx.Node, PostOp, tuple[Any, ...]] | None:
    """The only reader of producer, the first row that takes it, and the entries it becomes."""
    consumer = only_user(producer)
    if consumer is None or consumer.op != "call_function" or is_constant(producer):
        return None
    for row in POST_OPS:
        if row.op is consumer.target and (entries := row.entries(producer, consumer)) is not None:
            return (consumer, row, entries) if len(producer.kwargs["post_ops"]) + len(entries) <= MAX_POST_OPS else None
    return None


def absorb(producer: fx.Node, consumer: fx.Node, row: PostOp, entries: tuple[Any, ...]) -> None:
    """Move producer to consumer's place, with the entries added."""
    consumer.prepend(producer)
    producer.kwargs = {**producer.kwargs, "post_ops": (*producer.kwargs["post_ops"], *entries)}
    set_example(producer, consumer.meta.get("val"))
    producer.meta.setdefault("fused", []).append(consumer.meta.get("source", consumer.name))
    log.debug("fuse: %s absorbs %s (%s)", producer.name, consumer.name, row.name)
    replace(consumer, producer)


def eltwise(producer: fx.Node, consumer: fx.Node) -> tuple[Any, ...] | None:
    """Any element-wise function of the result that may be computed of what primitives round."""
    _, kind, alpha, beta = consumer.args
    return None if kind in ops.PERIODIC else (("eltwise", kind, alpha, beta),)


def scalar(producer: fx.Node, consumer: fx.Node) -> tuple[Any, ...] | None:
    """A number added to, multiplied with, ... the result: linear(alpha, beta), of whole numbers where it is one.

    Of integers whole numbers make integers, and others floating-point numbers.
    """
    a, b, kind = consumer.args
    number = b if a is producer else a
    if not is_number(number):
        return None
    one = type(number)(1)
    if kind == "add":
        return (("eltwise", "linear", one, number),)
    if kind == "mul":
        return (("eltwise", "linear", number, type(number)(0)),)
    if kind == "sub" and a is producer:
        return (("eltwise", "linear", one, -number),)
    if kind == "sub":
        return (("eltwise", "linear", -one, number),)
    if kind == "div" and a is producer and number != 0:
        return (("binary", "div", number),)
    return None


def residual(producer: fx.Node, consumer: fx.Node) -> tuple[Any, ...] | None:
    """Another tensor, in either operand's place."""
    a, b, kind = consumer.args
    other = b if a is producer else a
    if not isinstance(other, fx.Node) or (is_pooled(producer) and not is_pooled(other)):
        return None  # of a gate times its input, the gate is the small side
    if a is producer:
        return (("binary", kind, other),)
    if kind in ("add", "mul", "max", "min"):
        return (("binary", kind, other, True),)
    if kind == "sub":
        return (("eltwise", "linear", -1, 0), ("binary", "add", other))
    return None


def parametric_relu(producer: fx.Node, consumer: fx.Node) -> tuple[Any, ...] | None:
    """PReLU of the result, with a constant slope."""
    src, weight = consumer.args
    return (("prelu", weight),) if src is producer and is_constant(weight) else None


POST_OPS = (
    PostOp("eltwise", ops.eltwise, eltwise),
    PostOp("scalar", ops.binary, scalar),
    PostOp("binary", ops.binary, residual),
    PostOp("prelu", ops.prelu, parametric_relu),
)


def is_pooled(node: Any) -> bool:
    """Whether every spatial size of node is 1: global pooling, and what keeps its shape."""
    if is_call(node, ops.adaptive_pool):
        return all(s == 1 for s in node.args[2])
    if is_call(node, ops.reduce):
        return bool(node.args[3]) and len(node.args[2]) > 1
    if is_call(node, ops.convolution):
        return not any(node.kwargs["padding_l"]) and is_pooled(node.args[0])
    if is_call(node, ops.eltwise, ops.batch_norm, ops.prelu):
        return is_pooled(node.args[0])
    return is_constant(node)
