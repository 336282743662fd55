"""Products with a constant matrix, as linear layers: torchao's quantizer looks for no others.

    Before: addmm(b, x, W)    mm(x, W)    matmul(x, W)                  W [K, N], x [..., K], b [N]
    After:  linear(x, t(W), b)                                          fold_constants() computes t(W) once

    Before: view(addmm(b, view(x, [-1, K]), W), [*sizes of x but K, N])     Conv1D of Transformers
    After:  linear(x, t(W), b)

What follows is then behind the layer itself, and what is before it may be smoothed.
Needs:  meta["val"]; nodes without it stay as they are
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.fold.rows import same_sizes, shape_of
from fx_passes.graph.graph import example, is_call, only_user, replace
from zendnn_cffi.api.quantization.constants import of_constants
from zendnn_cffi.api.quantization.sources import SOURCE

aten = torch.ops.aten
_PLAIN = (aten.mm.default, aten.matmul.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints)
_RESTORING = (*_VIEWS, aten.unflatten.int)


def name_products(exported: fx.GraphModule) -> None:
    """Respell products of a value and a constant matrix in float32 as linear layers, in place."""
    constants = of_constants(exported)
    found: list[fx.Node] = []
    for node in exported.graph.nodes:
        operands: tuple[Any, ...] = node.args
        if is_call(node, aten.addmm.default) and all(factor == 1 for factor in node.kwargs.values()):
            bias, source, weight = operands
        elif is_call(node, *_PLAIN):
            (source, weight), bias = operands, None
        else:
            continue
        if source not in constants and weight in constants and _is_layer(source, weight, bias):
            _respell(node, source, weight, bias)
            found.append(node)
    if found:
        _drop_views(exported, found)
        exported.recompile()


def _is_layer(source: fx.Node, weight: fx.Node, bias: fx.Node | None) -> bool:
    """Whether the operands are those of a linear layer; an addend of other shapes is no bias."""
    operands = source, weight, *(() if bias is None else (bias,))
    if any(value is None or value.dtype != torch.float32 for value in map(example, operands)):
        return False
    shape = shape_of(weight)
    return shape is not None and len(shape) == 2 and (bias is None or shape_of(bias) == shape[1:])


def _respell(product: fx.Node, source: fx.Node, weight: fx.Node, bias: fx.Node | None) -> None:
    if is_call(weight, aten.t.default):
        transposed: Any = weight.args[0]  # the layer's own weight, which others may share
    else:
        with product.graph.inserting_before(product):
            transposed = product.graph.call_function(aten.t.default, (weight,))
        value = example(weight)
        assert value is not None
        transposed.meta["val"] = value.t()
    product.target, product.kwargs = aten.linear.default, {}
    product.args = (source, transposed) if bias is None else (source, transposed, bias)
    product.meta[SOURCE] = [(product.name, nn.Linear)]


def _drop_views(exported: fx.GraphModule, layers: list[fx.Node]) -> None:
    """Let layers read what they have the rows of, where their results get its sizes again."""
    aliasing = Aliasing(exported)
    for layer in layers:
        source, result = _rows_of(layer.args[0]), only_user(layer)
        if source is None or not is_call(result, *_RESTORING) or aliasing.is_written(source):
            continue
        want, sizes, found = shape_of(result), shape_of(source), shape_of(layer)
        if want and sizes and found and same_sizes(want, (*sizes[:-1], found[-1])):
            layer.args = (source, *layer.args[1:])
            layer.meta["val"] = result.meta["val"]
            replace(result, layer)
    exported.graph.eliminate_dead_code()


def _rows_of(node: Any) -> fx.Node | None:
    """The value whose rows node has as a matrix; None where it is none."""
    if not is_call(node, *_VIEWS):
        return None
    source: Any = node.args[0]
    have, want = shape_of(source), shape_of(node)
    if not have or not want or len(want) != 2 or len(have) < 2 or not same_sizes(have[-1:], want[-1:]):
        return None
    return source if isinstance(source, fx.Node) else None
