"""Linear layers of torchao's Int8Tensor, as torch.export spells them, are those that a module with such weights has.

Before: scale, zeros = choose_qparams_affine(x); kept = quantize(x, scale, zeros)
        sums = _int_mm(reshape(kept, (-1, K)), transpose(qdata))
        reshape(sums.float() * reshape(scale, (-1, 1)) * flatten(weight_scale), (*sizes, N)) + bias
After:  chosen = choose_row_scales(x); row_scaled_linear(quantize_rows_by(x, chosen), chosen, dequantize(qdata), bias)

So it is with one scale for all, with a scale of the weight (static), and where weights alone are integers: there the
product is one of floats, matmul(reshape(x, (-1, K)), qdata.t().to(dtype)).
Needs:  meta["val"]; nodes without it stay as they are
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.fold.behind import Behind, has_shape, is_cast_to_float, stripped
from fx_passes.fold.casts import dtype_of
from fx_passes.fold.rows import rows_of, same_sizes, shape_of
from fx_passes.graph.affine import LEAST_EPS, chosen_by
from fx_passes.graph.graph import finish, is_call, nodes_in, replace, tensor_of
from fx_passes.graph.int8_tensor import DTYPES, EPS, LIMITS, STATIC, Weight
from fx_passes.spellings.int8_linear import layer
from fx_passes.spellings.registry import Call, materialize
from zendnn_cffi.values import dataclass

aten = torch.ops.aten


@dataclass(frozen=True)
class Input:
    """What a layer reads, and how it is quantized.

    value       the input itself
    scale       of its integers; None where the layer multiplies floats
    zero_point  of its integers
    how         "symmetric", "asymmetric" or STATIC; "" where it stays float
    """

    value: fx.Node
    scale: Any = None
    zero_point: Any = None
    how: str = ""
    by_rows: bool = False
    limits: tuple[int, int] = LIMITS[0]
    eps: float = EPS


def fold_int8_layers(gm: fx.GraphModule) -> fx.GraphModule:
    """Respell every such layer whose sums nobody else reads."""
    products = [node for node in gm.graph.nodes if is_call(node, torch._int_mm, aten._int_mm.default, ops.matmul)]
    if not products:
        return gm
    aliasing = Aliasing(gm)
    for node in products:
        match = match_layer(node, gm) if len(node.args) == 2 else None
        if match is not None and not any(map(aliasing.is_written, nodes_in((match[1].args, match[1].kwargs)))):
            last, built = match
            made = materialize(gm.graph, built, last, node.meta.get("source", node.name))
            made.meta["val"] = last.meta["val"]
            replace(last, made)
    return finish(gm)


def match_layer(product: fx.Node, gm: fx.GraphModule) -> tuple[fx.Node, Call] | None:
    """The last node of the layer that product is of, and what computes it."""
    rows, matrix = product.args
    is_float = product.target is ops.matmul
    if is_float:
        if product.kwargs.get("post_ops") or not is_cast_to_float(matrix):
            return None
        matrix = matrix.args[0]
    qdata = _transposed(matrix)
    integers = _constant(gm, qdata)
    if integers is None or integers.dtype != torch.int8:
        return None
    read = _float_input(product, rows) if is_float else _integer_input(rows, gm)
    behind = Behind(product)
    how = None if read is None else _scaled(behind, read, qdata)
    if read is None or how is None:
        return None
    dtype = dtype_of(read.value)
    scale, wanted = stripped(behind.operand("mul", lambda node: has_shape(node, 1))), (1, integers.shape[0])
    held = _constant(gm, scale)
    if held is None or held.numel() not in wanted or not behind.restored(read.value):
        return None
    bias = behind.operand("add", lambda node: _is_bias(_constant(gm, node), wanted[1:], dtype))
    behind.cast(dtype)
    if dtype_of(behind.last) != dtype:
        return None
    axis = None if held.numel() == 1 else 0
    known = Weight(axis, how, read.by_rows, read.limits, dtype, read.eps)
    tensors = {"qdata": qdata, "scale": scale}
    if how.startswith(STATIC):
        tensors |= {"act_quant_scale": read.scale, "act_quant_zero_point": read.zero_point}
    return behind.last, layer(read.value, tensors, bias, known)


def _constant(gm: fx.GraphModule, node: Any) -> torch.Tensor | None:
    """The tensor of a get_attr node that nobody writes to; None for others."""
    return tensor_of(gm, node) if isinstance(node, fx.Node) and node.meta.get("constant") else None


def _is_bias(held: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype | None) -> bool:
    return held is not None and held.shape == shape and held.dtype == dtype


def _transposed(matrix: Any) -> Any:
    """What a matrix is the transpose of; None where it is none."""
    if is_call(matrix, ops.transpose) and {*matrix.args[1:]} in ({0, 1}, {-1, -2}):
        return matrix.args[0]
    if is_call(matrix, ops.permute) and tuple(matrix.args[1]) in ((1, 0), (-1, 0), (-1, -2)):
        return matrix.args[0]
    return matrix.args[0] if is_call(matrix, aten.t.default) else None


def _scaled(behind: Behind, read: Input, qdata: Any) -> str | None:
    """How the input is quantized, as graph.int8_tensor.Weight has it; None where sums are not multiplied by its scale.

    Moves behind to what is multiplied by the weight's scale.
    """
    if read.scale is None:
        return read.how
    if not behind.cast(torch.float32):
        return None
    factor = behind.operand("mul", lambda node: has_shape(node, 2) and node.meta["val"].shape[1] == 1)
    if factor is None or stripped(factor) is not read.scale:
        return None
    behind.cast(dtype_of(read.value))
    shifted = behind.operand("sub", lambda node: _is_shift(node, read, qdata)) is not None
    if read.how == STATIC:
        return STATIC + ("asymmetric" if shifted else "symmetric")
    return read.how if shifted == (read.how == "asymmetric") else None


def _is_shift(node: Any, read: Input, qdata: Any) -> bool:
    """Whether node is zero_point * scale * (sums of the weight's rows)."""
    product = stripped(node)
    if not is_call(product, ops.binary) or product.args[2] != "mul":
        return False
    numbers, sums = (stripped(each) for each in product.args[:2])
    if not is_call(numbers, ops.binary) or numbers.args[2] != "mul":
        return False
    if not is_call(sums, ops.reduce) or sums.args[:2] != (qdata, "sum") or tuple(sums.args[2]) not in ((-1,), (1,)):
        return False
    return {*map(stripped, numbers.args[:2])} == {read.scale, read.zero_point}


def _float_input(product: fx.Node, rows: Any) -> Input | None:
    """The input of a layer that multiplies floats: weights alone are integers."""
    value = rows_of(rows) or rows
    if not isinstance(value, fx.Node) or dtype_of(value) != dtype_of(product):
        return None
    return Input(value) if dtype_of(value) in DTYPES else None


def _integer_input(rows: Any, gm: fx.GraphModule) -> Input | None:
    """The input that a layer quantizes; None where no operation quantizes it so."""
    kept = rows_of(rows) or rows
    arguments = _quantized(kept)
    if arguments is None:
        return None
    value, scale, zero_point, sizes, limits = arguments
    dtype, shape = dtype_of(value), shape_of(value)
    if shape is None or len(sizes) != len(shape) or limits not in LIMITS:
        return None
    by_rows = len(shape) > 1 and all(size == 1 for size in sizes[:-1]) and same_sizes(_known(sizes[-1:]), shape[-1:])
    is_whole = same_sizes(_known(sizes), shape)
    if not by_rows and not is_whole:
        return None
    if _constant(gm, scale) is not None:
        return _static_input(value, scale, zero_point, limits, gm) if dtype == torch.float32 and is_whole else None
    if not is_call(scale, operator.getitem) or not is_call(zero_point, operator.getitem):
        return None
    called: Any = scale.args[0]
    chosen = chosen_by(called, value)
    if chosen is None or (scale.args[1], zero_point.args) != (0, (called, 1)) or chosen.dtype != torch.int8:
        return None
    if chosen.limits != limits or _known(chosen.block) != _known(sizes):
        return None
    if dtype == torch.bfloat16:
        if chosen.how != "symmetric" or not by_rows or chosen.scale_dtype != torch.float32:
            return None
    elif dtype != torch.float32 or not chosen.rounds_to_float32():
        return None
    if is_whole and chosen.how == "asymmetric" and chosen.eps >= LEAST_EPS:
        by_rows = False  # one row is all values, whose zero point costs no passes
    if not by_rows and chosen.eps < LEAST_EPS:
        return None
    return Input(value, scale, zero_point, chosen.how, by_rows, limits, chosen.eps)


def _static_input(
    value: fx.Node, scale: Any, zero_point: Any, limits: tuple[int, int], gm: fx.GraphModule
) -> Input | None:
    """The input of a layer whose weight has a scale for it."""
    held, zeros = _constant(gm, scale), _constant(gm, zero_point)
    if held is None or held.numel() != 1 or held.dtype != torch.float32:
        return None
    if is_call(zero_point, aten.zeros_like.default):
        return Input(value, scale, None, STATIC, False, limits)
    return Input(value, scale, zero_point, STATIC, False, limits) if zeros is not None and zeros.numel() == 1 else None


def _quantized(node: Any) -> tuple[fx.Node, Any, Any, tuple[Any, ...], tuple[int, int]] | None:
    """(value, scale, zero point, sizes of blocks, limits) of integers; None where they are not quantized by blocks."""
    if is_call(node, ops.quantize):
        value, scale, zero_point, sizes, low, high, dtype = node.args
    elif isinstance(node, fx.Node) and str(node.target) == "torchao.quantize_affine.default" and len(node.args) == 7:
        value, sizes, scale, zero_point, dtype, low, high = node.args
    else:
        return None
    if not isinstance(sizes, list | tuple) or dtype != torch.int8 or node.kwargs:
        return None
    return value, scale, zero_point, tuple(sizes), (low, high)


def _known(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes as numbers, or as what free ones stand for."""
    return tuple(size.meta.get("val") if isinstance(size, fx.Node) else size for size in sizes)
