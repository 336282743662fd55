"""Batch normalizations in the layer before them, where that computes the same.

    Before: x -> conv(W, b) -> batch_norm(mean, variance, g, h)
    After:  x -> conv(W * f, (b - mean) * f + h)                    f = g / sqrt(variance + eps)

torchao folds them, too, but whoever else reads the layer's result, another layer with the same weights, and a second
normalization behind the first got wrong numbers by that. So those that are left are hidden from it. That also saves its
convert_pt2e from exporting 96 patterns of training, which took 20 s for a network of two layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.inference import rank
from zendnn_cffi.api.quantization.constants import LAYERS, TRANSPOSED, is_constant
from zendnn_cffi.api.quantization.layers import constant_of, kind, replace_constant

aten = torch.ops.aten
_GROUPS_OF_TRANSPOSED = 6  # the position of that argument
_BY_BATCH = 5  # and of the flag that statistics are those of the batch


def _batch_norm(*args: Any, **kwargs: Any) -> Any:
    return aten.batch_norm.default(*args, **kwargs)


def _decomposed_batch_norm(*args: Any, **kwargs: Any) -> Any:
    return aten._native_batch_norm_legit_no_training.default(*args, **kwargs)


_STAND_INS: dict[Any, Any] = {
    aten.batch_norm.default: _batch_norm,
    aten._native_batch_norm_legit_no_training.default: _decomposed_batch_norm,
}
_ORIGINALS = {stand_in: original for original, stand_in in _STAND_INS.items()}


def fold_norms(exported: fx.GraphModule) -> list[str]:
    """Fold batch normalizations into convolutions and linear layers, in place; return the names of these."""
    folded = []
    for norm in exported.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        layer = _layer_before(norm)
        if layer is not None:
            _fold(exported, layer, norm)
            folded.append(layer.name)
    exported.graph.eliminate_dead_code()
    exported.recompile()
    return folded


@contextmanager
def hidden_norms(gm: fx.GraphModule) -> Iterator[None]:
    """Let torchao see no batch normalizations in gm; show_norms() undoes that on what it returns."""
    _retarget(gm, _STAND_INS)
    try:
        yield
    finally:
        show_norms(gm)


@contextmanager
def shown_norms(gm: fx.GraphModule) -> Iterator[None]:
    """Let a graph of hidden batch normalizations have them for a while."""
    show_norms(gm)
    try:
        yield
    finally:
        _retarget(gm, _STAND_INS)


def show_norms(gm: fx.GraphModule) -> None:
    """Let a graph that was made of a hidden one have its batch normalizations again, in place."""
    _retarget(gm, _ORIGINALS)


def _retarget(gm: fx.GraphModule, targets: dict[Any, Any]) -> None:
    found = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in targets]
    for node in found:
        node.target = targets[node.target]
    if found:
        gm.recompile()


def _layer_before(norm: fx.Node) -> fx.Node | None:
    """The layer that norm can be folded into: nobody else reads its result, and all numbers are constants."""
    layer, statistics = norm.args[0], norm.args[1:_BY_BATCH]
    if not isinstance(layer, fx.Node) or kind(layer) not in LAYERS or set(layer.users) != {norm}:
        return None
    if layer.kwargs or norm.kwargs or norm.args[_BY_BATCH] or not is_constant(layer.args[1]):
        return None
    bias = layer.args[2] if len(layer.args) > 2 else None
    if not all(arg is None or is_constant(arg) for arg in (bias, *statistics)) or None in statistics[2:]:
        return None
    if rank(layer.args[0]) != _rank_with_batch(layer):
        return None
    return layer


def _rank_with_batch(layer: fx.Node) -> int:
    """The number of dimensions with which channels lie along the second, where a normalization takes them from.

    Of more rows, a linear layer's are the last; of a sample alone, a convolution's are the first.
    """
    return 2 if kind(layer) == "linear" else 2 + int(kind(layer)[-2])  # such as conv_transpose2d


def _fold(gm: fx.GraphModule, layer: fx.Node, norm: fx.Node) -> None:
    _, scale, shift, mean, variance, _, _, eps, *_ = (_constant(gm, arg) for arg in norm.args)
    weight, bias = _constant(gm, layer.args[1]), _constant(gm, layer.args[2] if len(layer.args) > 2 else None)
    if kind(layer) in TRANSPOSED:
        groups: Any = layer.args[_GROUPS_OF_TRANSPOSED] if len(layer.args) > _GROUPS_OF_TRANSPOSED else 1
        folded = ops.fold_bn_deconv_weight(weight, variance, scale, eps, groups)
    else:
        folded = ops.fold_bn_weight(weight, variance, scale, eps)
    replace_constant(gm, layer, 1, folded, "folded")
    replace_constant(gm, layer, 2, ops.fold_bn_bias(bias, mean, variance, scale, shift, eps, weight), "folded")
    norm.replace_all_uses_with(layer)
    gm.graph.erase_node(norm)


def _constant(gm: fx.GraphModule, arg: Any) -> Any:
    return constant_of(gm, arg) if isinstance(arg, fx.Node) and arg.op == "get_attr" else arg
