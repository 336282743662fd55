"""Which graphs treat the samples of a batch one by one, so that a large batch may run in slices."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.specs import RegionValues
from fx_passes.ops.quantized import plain_axis

_PER_SAMPLE = ops.having(per_sample=True)


def is_batchwise(graph: fx.Graph, values: RegionValues) -> bool:
    """Whether dimension 0 of every run-time value is the batch, and no operation mixes samples.

    Strict: an operation that is not known to keep samples apart counts as mixing them.
    """
    specs = values.specs
    if not specs or any(not spec.shape for spec in specs.values()):
        return False
    batch = next(iter(specs.values())).shape[0]
    if any(spec.shape[0] != batch for spec in specs.values()):
        return False
    calls = [node for node in graph.nodes if node.op == "call_function" and node not in values.constants]
    return all(_keeps_samples_apart(node, values, batch) for node in calls)


def _keeps_samples_apart(node: fx.Node, values: RegionValues, batch: int) -> bool:
    if node.target in ops.SHAPE or node.target is operator.getitem:
        return True
    arguments = values.arguments(node)
    for entry in arguments.get("post_ops", ()):
        if entry[0] == "binary" and not _is_per_sample(entry[2], node, values, batch):
            return False
    src = arguments.get("src")
    ndim = values.specs[src].ndim if isinstance(src, fx.Node) and src in values.specs else 0
    if node.target in _PER_SAMPLE:
        return _has_batch(node, arguments, ndim)
    match node.target:
        case ops.binary:
            return all(_is_per_sample(arguments[name], node, values, batch) for name in ("a", "b"))
        case ops.quantize | ops.dequantize:
            axis = plain_axis(arguments["axis"], values.specs[src].shape) if isinstance(src, fx.Node) else ()
            return not isinstance(axis, tuple) and (not isinstance(axis, int) or bool(axis % ndim))
        case ops.softmax | ops.narrow | ops.chunk | ops.split | ops.split_at | ops.unflatten:
            return bool(arguments["dim"] % ndim)
        case ops.concat:
            return bool(arguments["dim"] % values.specs[node].ndim)
        case ops.layer_norm:
            return len(arguments["normalized_shape"]) < ndim
        case ops.reduce | ops.roll:
            return all(dim % ndim for dim in arguments["dims"])
        case ops.embedding | ops.embedding_bags | ops.concat_bags | ops.pick:
            return True  # pick begins behind dimension 0
        case ops.matmul:
            both = all(_is_per_sample(arguments[name], node, values, batch) for name in ("a", "b"))
            return both and values.specs[node].ndim > 2
        case ops.flatten:
            return bool(arguments["start_dim"] % ndim)
        case ops.permute:
            return arguments["dims"][0] % ndim == 0
        case ops.transpose:
            return all(arguments[name] % ndim for name in ("dim0", "dim1"))
    return False


def _has_batch(node: fx.Node, arguments: dict[str, Any], ndim: int) -> bool:
    """Whether dimension 0 is a batch to this operation, and not channels or rows."""
    spatial = arguments.get("stride", arguments.get("output_size"))
    if ops.TRAITS[node.target].windows:
        return ndim == len(spatial or ()) + 2
    return ndim >= 2


def _is_per_sample(value: Any, node: fx.Node, values: RegionValues, batch: int) -> bool:
    """Whether an operand belongs sample by sample to node's result, or is the same for all samples."""
    ndim = values.specs[node].ndim
    if isinstance(value, torch.Tensor):
        return value.ndim < ndim or value.shape[0] == 1
    if isinstance(value, fx.Node):
        spec = values.specs.get(value)
        return spec is not None and spec.ndim == ndim and spec.shape[0] == batch
    return True
