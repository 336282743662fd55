"""Recognise linear layers of values that are quantized by scales computed in the call, of all values or of each row.

Before: scale, zero_point = choose_qparams.tensor(x, low, high, eps, dtype)
        linear(dequantize(quantize(x, scale, zero_point), scale, zero_point), dequantize(weight), bias)
After:  chosen = choose_scale(x); dynamic_linear(quantize_by(x, chosen), chosen, dequantize(weight), bias)
Rows:   chosen = choose_row_scales(x); row_scaled_linear(quantize_rows_by(x, chosen), chosen, dequantize(weight), bias)
Others: rows that something else reads, or a linear layer whose weights no kernel takes as integers (with a scale for
        each group of inputs, or zero points), are dequantize_rows_by(quantize_rows_by(x, chosen), chosen)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.affine import LEAST_EPS, chosen_by
from fx_passes.graph.graph import finish, is_call, tensor_of
from fx_passes.graph.inference import dtype as dtype_of
from fx_passes.ops.quantized import TOKEN, plain_axis
from zendnn_cffi.values import dataclass

_DTYPES = (torch.uint8, torch.int8)
_TOKEN_EPS, _TOKEN_HIGH = 1e-5, 127  # of choose_qparams_per_token
_XNNPACK_EPS, _XNNPACK_RANGE = torch.finfo(torch.float32).eps, (-128, 127)  # of choose_qparams_per_token_asymmetric


@dataclass(frozen=True)
class Choice:
    """How a call chooses scales.

    node       what calls it
    by_rows    whether each row has a scale
    arguments  of ops.choose_row_scales or ops.choose_scale
    """

    node: fx.Node
    by_rows: bool
    arguments: tuple[Any, ...]


def fuse_dynamic_quantization(gm: fx.GraphModule) -> fx.GraphModule:
    """Replace every chain whose dequantized values only linear layers of int8 weights read.

    Layers that quantize one value alike (query, key and value of attention) share scales and integers.
    """
    aliasing, made = Aliasing(gm), dict[Any, fx.Node]()

    def call(function: Callable[..., Any], *arguments: Any) -> fx.Node:
        key = function, arguments
        if key not in made:
            made[key] = gm.graph.call_function(function, arguments)
        return made[key]

    for node in [node for node in gm.graph.nodes if is_call(node, *_SHARED)]:
        if any(map(aliasing.is_written, (node, *node.all_input_nodes))):
            continue
        first = made.setdefault((node.target, node.args, *node.kwargs.items()), node)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
    for layer in gm.graph.find_nodes(op="call_function", target=ops.row_scaled_linear):
        if not _is_int8(layer.args[2], gm) and layer.kwargs.get("dtype") in (None, torch.float32):
            kept, chosen, *rest = layer.args
            with gm.graph.inserting_before(layer):
                real = call(ops.dequantize_rows_by, kept, chosen, torch.float32)
            layer.target, layer.args = ops.linear, (real, *rest)
            layer.kwargs = {name: value for name, value in layer.kwargs.items() if name != "dtype"}
    for node in gm.graph.find_nodes(op="call_function", target=ops.quantize):
        readers = _layers(node, gm)
        choice = match_choice(node, gm, readers) if readers or _is_dequantized(node) else None
        if choice is None or not (readers or choice.by_rows) or aliasing.is_written(node.args[0]):
            continue
        src, _, _, _, low, high, dtype = node.args
        choose, quantize, linear = _BY_ROWS if choice.by_rows else _AS_A_WHOLE
        with gm.graph.inserting_before(node):
            chosen = call(choose, *choice.arguments)
            kept = call(quantize, src, chosen, low, high, dtype)
        chosen.meta.setdefault("source", choice.node.meta.get("source", ""))
        kept.meta = kept.meta or dict(node.meta)
        for reader in readers:
            reader.target, reader.args = linear, (kept, chosen, *reader.args[1:])
        for real in () if readers else list(node.users):
            real.target, real.args = ops.dequantize_rows_by, (kept, chosen, torch.float32)
        _erase_unread(gm.graph, node, choice.node)
    return finish(gm)


_AS_A_WHOLE = ops.choose_scale, ops.quantize_by, ops.dynamic_linear
_SHARED = ops.choose_scale, ops.choose_row_scales, ops.quantize_by, ops.quantize_rows_by
_BY_ROWS = ops.choose_row_scales, ops.quantize_rows_by, ops.row_scaled_linear


def _erase_unread(graph: fx.Graph, node: fx.Node, choice: fx.Node) -> None:
    """What nobody reads any more; choice is named, as operators with a schema of their own are kept else."""
    for unread in (*node.users, node, *choice.users, choice):
        if not unread.users:
            graph.erase_node(unread)


def match_choice(node: fx.Node, gm: fx.GraphModule, readers: list[fx.Node]) -> Choice | None:
    """How node, an ops.quantize, gets its scales and zero points; None where nothing known chooses them."""
    _, scale, zero_point, _, _, _, _ = node.args
    if not is_call(scale, operator.getitem) or not is_call(zero_point, operator.getitem):
        return None
    called: Any = scale.args[0]
    if (scale.args[1], zero_point.args) != (0, (called, 1)) or not isinstance(called, fx.Node):
        return None
    match = _CHOICES.get(_name(called))
    return None if match is None else match(node, called, gm, readers)


def _layers(node: fx.Node, gm: fx.GraphModule) -> list[fx.Node]:
    """The linear layers that read what node quantizes; empty where anything else does, or weights are no int8."""
    found: list[fx.Node] = []
    if not _is_dequantized(node):
        return []
    for real in node.users:
        for reader in real.users:
            if not is_call(reader, ops.linear) or reader.args[0] is not real or reader.args[1] is real:
                return []
            if not _is_int8(reader.args[1], gm):
                return []
            found.append(reader)
    return list(dict.fromkeys(found))


def _is_dequantized(node: fx.Node) -> bool:
    """Whether what reads node's integers dequantizes them alike, to float32."""
    return all(
        is_call(real, ops.dequantize) and real.args[1:4] == node.args[1:4] and real.args[4] == torch.float32
        for real in node.users
    )


def _is_int8(weight: Any, gm: fx.GraphModule) -> bool:
    """Whether weight is dequantized from int8 with a scale for each output, or one, and no zero points."""
    if not is_call(weight, ops.dequantize):
        return False
    kept, _, zero_point, axis, _ = weight.args
    shape, zero_points = _shape(weight, gm), tensor_of(gm, zero_point)
    if shape is None or dtype_of(kept, gm) != torch.int8 or plain_axis(axis, shape) not in (None, 0):
        return False
    return not bool(zero_points.any()) if zero_points is not None else not zero_point


def _shape(weight: fx.Node, gm: fx.GraphModule) -> tuple[int, ...] | None:
    """The shape of a dequantized parameter; of one that the graph quantizes first, too."""
    kept: Any = weight.args[0]
    tensor = tensor_of(gm, kept.args[0] if is_call(kept, ops.quantize) else kept)
    return None if tensor is None else tuple(tensor.shape)


def _name(node: fx.Node) -> str:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return ""
    return str(target).removesuffix(".default")


_Matcher = Callable[[fx.Node, fx.Node, fx.GraphModule, list[fx.Node]], Choice | None]


def _whole(symmetric: bool) -> _Matcher:
    """choose_qparams.tensor and choose_qparams_symmetric.tensor."""

    def match(node: fx.Node, called: fx.Node, gm: fx.GraphModule, readers: list[fx.Node]) -> Choice | None:
        _, _, _, axis, low, high, dtype = node.args
        if axis is not None or called.kwargs or len(called.args) != 5 or dtype not in _DTYPES:
            return None
        if called.args[1:3] != (low, high) or called.args[4] != dtype:
            return None
        return Choice(called, False, (*called.args, symmetric))

    return match


def _token(how: str, eps: float, low: int, high: int) -> _Matcher:
    """choose_qparams_per_token and choose_qparams_per_token_asymmetric."""

    def match(node: fx.Node, called: fx.Node, gm: fx.GraphModule, readers: list[fx.Node]) -> Choice | None:
        src, _, _, axis, *_, dtype = node.args
        if axis != TOKEN or called.args != (src, torch.int8) or called.kwargs or dtype != torch.int8:
            return None
        return Choice(called, True, (src, how, low, high, eps)) if _may_be_float32(src, gm) else None

    return match


def _affine(node: fx.Node, called: fx.Node, gm: fx.GraphModule, readers: list[fx.Node]) -> Choice | None:
    """choose_qparams_affine of all values, or of each row."""
    src, _, _, sizes, low, high, dtype = node.args
    chosen = chosen_by(called, src)
    if chosen is None or chosen.dtype != dtype or not isinstance(sizes, tuple) or not chosen.rounds_to_float32():
        return None
    if chosen.block != sizes or chosen.limits != (low, high) or not _may_be_float32(src, gm):
        return None
    how, eps = chosen.how, chosen.eps
    if len(sizes) > 1 and set(sizes[:-1]) == {1} and sizes[-1] == _features(src, readers, gm):
        centred = how == "asymmetric" or (low + high + 1) // 2 == 0
        return Choice(called, True, (src, how, low, high, eps)) if centred else None
    value = src.meta.get("val")
    if not isinstance(value, torch.Tensor) or plain_axis(sizes, tuple(value.shape)) is not None:
        return None
    if eps < LEAST_EPS:
        return None
    return Choice(called, False, (src, low, high, eps, dtype, how == "symmetric"))


def _may_be_float32(src: fx.Node, gm: fx.GraphModule) -> bool:
    """Whether src is float32, as what is made of it is, as far as anybody knows: scales of others are rounded."""
    return dtype_of(src, gm) in (None, torch.float32)


def _features(src: fx.Node, readers: list[fx.Node], gm: fx.GraphModule) -> Any:
    """How many numbers a row has: as many as linear layers read, or as the example of it; None where neither says."""
    shape = _shape(readers[0].args[1], gm) if readers else getattr(src.meta.get("val"), "shape", None)
    return shape[-1] if shape else None


_CHOICES: dict[str, _Matcher] = {
    "quantized_decomposed.choose_qparams.tensor": _whole(False),
    "quantized_decomposed.choose_qparams_symmetric.tensor": _whole(True),
    "quantized_decomposed.choose_qparams_per_token": _token("largest", _TOKEN_EPS, -_TOKEN_HIGH, _TOKEN_HIGH),
    "quantized_decomposed.choose_qparams_per_token_asymmetric": _token("nearest", _XNNPACK_EPS, *_XNNPACK_RANGE),
    "torchao.choose_qparams_affine": _affine,
}
