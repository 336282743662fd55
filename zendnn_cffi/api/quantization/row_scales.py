"""Scales of the call for each row (token) in place of one for all: torchao's quantizer for x86 has none for rows.

    Before: scale, zero_point = choose_qparams.tensor(x, 0, 255, eps, uint8); quantize_per_tensor, dequantize_per_tensor
    After:  scale, zero_point = choose_qparams_per_token(x, int8); quantize_per_token, dequantize_per_token

Zero points of rows cost two passes more, so only values that lie on one side of zero (behind a GELU or relu) have some.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from torch import Tensor, fx

from zendnn_cffi.api.quantization.layers import Call, observer_of, watch

_OPERATORS = torch.ops.quantized_decomposed
_LOW, _HIGH, _DTYPE = -128, 127, torch.int8
_ONE_SIDED = 0.5  # and less: the shorter side of zero in parts of the longer one
_MARK = "_zendnn_cffi_one_sided"


def mark_one_sided(prepared: fx.GraphModule, calls: Iterable[Call]) -> None:
    """Note on observers of values whose scales calls choose whether those values lie on one side of zero."""
    sides: dict[Any, tuple[float, float]] = {}

    def see(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        observer = observer_of(prepared, node)
        if observer is not None and getattr(observer, "is_dynamic", False) and args[0].numel():
            below, above = sides.get(observer, (-math.inf, -math.inf))
            sides[observer] = max(below, float(-args[0].min())), max(above, float(args[0].max()))

    watch(prepared, calls, see)
    for observer, (below, above) in sides.items():
        setattr(observer, _MARK, min(below, above) <= _ONE_SIDED * max(below, above))


def is_one_sided(observer: Any) -> bool:
    """Whether mark_one_sided found the observer's values on one side of zero."""
    return bool(getattr(observer, _MARK, False))


def one_sided_values(prepared: fx.GraphModule) -> set[str]:
    """Names of the nodes whose values have zero points of rows."""
    observers = [node for node in prepared.graph.nodes if is_one_sided(observer_of(prepared, node))]
    return {node.args[0].name for node in observers}


def scale_rows(converted: fx.GraphModule, one_sided: Collection[str]) -> fx.GraphModule:
    """Let values of two dimensions or more whose scales each call chooses have one for each row, in place.

    one_sided  names of those that have zero points, too
    """
    for chosen in converted.graph.find_nodes(op="call_function", target=_OPERATORS.choose_qparams.tensor):
        src = chosen.args[0]
        value = src.meta.get("val")
        if isinstance(value, Tensor) and value.ndim > 1:
            _scale_rows_of(chosen, _choice(src.name in one_sided))
    converted.graph.lint()
    converted.recompile()
    return converted


def rounded_rows(x: Tensor, one_sided: bool) -> Tensor:
    """Quantize and dequantize x as the graph does."""
    scales, zero_points = _choice(one_sided)(x, _DTYPE)
    given = scales, zero_points, _LOW, _HIGH, _DTYPE
    rounded: Tensor = _OPERATORS.dequantize_per_token(_OPERATORS.quantize_per_token(x, *given), *given, torch.float32)
    return rounded


def _choice(one_sided: bool) -> Any:
    form = "choose_qparams_per_token_asymmetric" if one_sided else "choose_qparams_per_token"
    return getattr(_OPERATORS, form).default


def _scale_rows_of(chosen: fx.Node, choose: Any) -> None:
    graph, src = chosen.graph, chosen.args[0]
    with graph.inserting_before(chosen):
        by_rows = graph.call_function(choose, (src, _DTYPE))
        scale, zero_point = (graph.call_function(operator.getitem, (by_rows, which)) for which in (0, 1))
    given = scale, zero_point, _LOW, _HIGH, _DTYPE
    readers = dict.fromkeys(reader for part in chosen.users for reader in part.users)
    for quantized in [reader for reader in readers if reader.target is _OPERATORS.quantize_per_tensor.tensor]:
        for dequantized in list(quantized.users):
            with graph.inserting_before(dequantized):
                kept = graph.call_function(_OPERATORS.quantize_per_token.default, (src, *given))
                args = (kept, *given, torch.float32)
                real = graph.call_function(_OPERATORS.dequantize_per_token.default, args)
            real.meta = dict(dequantized.meta)
            dequantized.replace_all_uses_with(real)
            graph.erase_node(dequantized)
        graph.erase_node(quantized)
    for part in (*chosen.users, chosen):
        graph.erase_node(part)
