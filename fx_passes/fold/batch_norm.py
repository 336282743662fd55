"""Let the convolution, deconvolution or linear before (or behind) a batch normalization compute it as well.

    Before: conv(x, w, b) -> batch_norm(.., mean, var, g, h)     Needs: normalize, assume_ranks
    After:  conv(x, fold_bn_weight(w, ..), fold_bn_bias(b, ..))

The new weights are constant subgraphs over the original parameters: nothing is added to the state_dict, and lowering
(again after load_state_dict) evaluates them once, in float64.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.fold.ranks import rank_with_batch
from fx_passes.graph.graph import finish, is_call, is_constant, only_user, replace
from fx_passes.graph.inference import rank


def fold_batch_norm(gm: fx.GraphModule) -> fx.GraphModule:
    """Fold every batch normalization that has a linear neighbour of its own; the others stay."""
    aliasing, ranks = Aliasing(gm), dict[fx.Node, Any]()
    for norm in gm.graph.find_nodes(op="call_function", target=ops.batch_norm):
        if (producer := match_producer(norm, ranks)) is not None:
            if aliasing.may_move_down(producer, norm):
                fold_into_producer(producer, norm)
        elif (consumer := match_consumer(norm, ranks)) is not None and aliasing.may_move_down(norm, consumer):
            fold_into_consumer(norm, consumer)
    return finish(gm)


def match_producer(norm: fx.Node, ranks: dict[fx.Node, Any]) -> fx.Node | None:
    """The operation whose result only norm reads, channel for channel. ranks: those known, which folding leaves."""
    producer = norm.args[0]
    if not is_call(producer, ops.convolution, ops.deconvolution, ops.linear) or only_user(producer) is not norm:
        return None
    if producer.kwargs["post_ops"] or not _all_constant(producer, norm):
        return None
    return producer if rank(norm, ranks) == rank_with_batch(producer) else None


def match_consumer(norm: fx.Node, ranks: dict[fx.Node, Any]) -> fx.Node | None:
    """The convolution without padding, or linear, that alone reads norm. (Padding adds zeros behind the norm.)"""
    consumer = only_user(norm)
    if not is_call(consumer, ops.convolution, ops.linear) or consumer.args[0] is not norm or norm.kwargs["post_ops"]:
        return None
    if not _all_constant(consumer, norm):
        return None
    if consumer.target is ops.convolution and any(consumer.kwargs["padding_l"] + consumer.kwargs["padding_r"]):
        return None
    return consumer if rank(norm, ranks) == rank_with_batch(consumer) else None


def _all_constant(linear: fx.Node, norm: fx.Node) -> bool:
    return all(map(is_constant, (*linear.args[1:], *norm.args[1:])))


def _constant(graph: fx.Graph, op: Any, name: str, *args: Any) -> fx.Node:
    return graph.create_node("call_function", op, args, name=name)


def fold_into_producer(producer: fx.Node, norm: fx.Node) -> None:
    """norm's readers read producer, which has new weights."""
    src, weight, bias = producer.args
    _, mean, var, gamma, beta = norm.args
    eps, graph = norm.kwargs["eps"], norm.graph
    with graph.inserting_before(norm):
        if producer.target is ops.deconvolution:
            groups = producer.kwargs["groups"]
            scaled = _constant(
                graph, ops.fold_bn_deconv_weight, f"{producer.name}_weight_bn", weight, var, gamma, eps, groups
            )
        else:
            scaled = _constant(graph, ops.fold_bn_weight, f"{producer.name}_weight_bn", weight, var, gamma, eps)
        shifted = _constant(
            graph, ops.fold_bn_bias, f"{producer.name}_bias_bn", bias, mean, var, gamma, beta, eps, weight
        )
    norm.prepend(producer)
    producer.args = (src, scaled, shifted)
    producer.kwargs = {**producer.kwargs, "post_ops": norm.kwargs["post_ops"]}
    producer.meta.setdefault("folded", []).append(norm.meta.get("source", norm.name))
    replace(norm, producer)


def fold_into_consumer(norm: fx.Node, consumer: fx.Node) -> None:
    """consumer reads what norm read, with new weights."""
    src, mean, var, gamma, beta = norm.args
    _, weight, bias = consumer.args
    eps, graph, groups = norm.kwargs["eps"], norm.graph, consumer.kwargs.get("groups", 1)
    with graph.inserting_before(consumer):
        scaled = _constant(graph, ops.fold_pre_bn_weight, f"{consumer.name}_weight_bn", weight, var, gamma, eps, groups)
        shifted = _constant(
            graph, ops.fold_pre_bn_bias, f"{consumer.name}_bias_bn",
            bias, weight, mean, var, gamma, beta, eps, groups,
        )  # fmt: skip
    consumer.args = (src, scaled, shifted)
    consumer.meta.setdefault("folded", []).append(norm.meta.get("source", norm.name))
    graph.erase_node(norm)
