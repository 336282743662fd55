"""What names a region under one signature, in whatever is kept about it between processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.specs import TensorSpec
from fx_passes.graph.graph import is_call
from fx_passes.lower.post_ops import as_of_floats
from fx_passes.region.options import RegionOptions


def region_key(
    graph: fx.Graph,
    specs: Sequence[TensorSpec],
    parameters: Mapping[str, torch.Tensor],
    options: RegionOptions,
    *,
    exact: bool = False,
) -> str:
    """A key that is equal for the same graph on the same shapes, of parameters too, with the same options.

    exact  whether scales and zero points that a calibration found are part of it. Times do not depend on these.
    """
    shapes = {name: TensorSpec.of(value) for name, value in parameters.items()}
    work = str(graph) if exact else _without_scales(graph)
    text = as_of_floats(f"{work}|{specs}|{shapes}|{options.key}")
    return "region " + hashlib.sha256(text.encode()).hexdigest()


def _without_scales(graph: fx.Graph) -> str:
    """The graph as text. Each scale with its zero point is a number in order, as two alike may share memory."""
    if not any(map(_has_scale, graph.nodes)):
        return str(graph)
    numbers: dict[tuple[Any, Any], int] = {}
    lines = []
    for node in graph.nodes:
        if not _has_scale(node):
            lines.append(str(node.format_node()))
            continue
        src, scale, zero_point, *others = node.args
        number = numbers.setdefault((scale, zero_point), len(numbers))
        shift = "" if zero_point in (0, None) else " with a zero point"
        lines.append(f"{node} = {node.target.__name__}({src}, scale {number}{shift}, {others}, {node.kwargs})")
    return "\n".join(lines)


def _has_scale(node: fx.Node) -> bool:
    """Whether the call's scale and zero point are numbers, not tensors."""
    numbers = node.args[1:3] if is_call(node, ops.quantize, ops.dequantize) else ()
    return len(numbers) == 2 and not any(isinstance(number, fx.Node) for number in numbers)
