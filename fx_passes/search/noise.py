"""Noise in place of what an operation reads, its constants included: what candidates are checked on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.candidates.candidates import Candidate, Operation, measurable
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.graph.graph import is_call, signature_of
from fx_passes.lower.context import NotLowered
from fx_passes.lower.products.dynamic import has_zero_point
from fx_passes.lower.quantized import numerics_of
from fx_passes.ops.quantized import ASYMMETRIC
from zendnn_cffi.primitives.checks import has_internal_overlap

_STEPS = 40.0  # the standard deviation of noise in integers of 8 bits: as that of values in use, about
_SIGNS: dict[Any, dict[str, int]] = {ops.batch_norm: {"var": 1}, ops.selective_scan: {"delta": 1, "a": -1}}
_NOISE_BYTES = 1 << 30  # of constants: larger ones, tables of embeddings, are read as they are


def noise_for(values: RegionValues, node: fx.Node, generator: torch.Generator) -> torch.Tensor:
    """Normal noise in the shape, dtype and strides of a node: a short period repeated, which is quick to make.

    Where the node's values are those of integers, so is the noise: kernels that read the integers lose nothing then.
    """
    spec = values.specs[node]
    if (numerics := numerics_of(node, values)) is not None:
        low, high = numerics.limits
        kept = _repeated(spec.numel, generator).mul_(_STEPS).round_().add_(numerics.zero_point).clamp_(low, high)
        return kept.sub_(numerics.zero_point).mul_(numerics.scale).to(spec.dtype).reshape(spec.shape)
    if is_call(node, ops.choose_scale):
        zero_point = _zero_point(node.args[4]) if has_zero_point(node) else 0
        bits = torch.tensor([zero_point], dtype=torch.int32, device="cpu").view(torch.float32)
        numbers = torch.tensor([1.0 / _STEPS, _STEPS, zero_point], dtype=torch.float32, device="cpu")
        return torch.cat([numbers, bits])
    if is_call(node, ops.choose_row_scales):
        return _row_scales(node, spec)
    if is_call(node, ops.quantize_by, ops.quantize_rows_by):
        low, high, dtype = (values.concrete(argument) for argument in node.args[2:])
        kept = _repeated(spec.numel, generator).mul_(_STEPS).round_().add_(_zero_point(dtype)).clamp_(low, high)
        return kept.to(dtype).reshape(spec.shape)
    return _repeated(spec.numel, generator).to(spec.dtype).reshape(spec.shape)


def _zero_point(dtype: torch.dtype) -> int:
    """Of noise: not the middle, so that it counts."""
    return 117 if dtype == torch.uint8 else 5


def _row_scales(node: fx.Node, spec: TensorSpec) -> torch.Tensor:
    """Scales that differ from row to row, so that a row's by another's shows."""
    rows = torch.arange(math.prod(spec.shape[1:]), dtype=torch.float32, device="cpu")
    scale = (1 + rows % 7 / 16) / _STEPS
    zero_points = (rows % 5 - 2,) if node.args[1] in ASYMMETRIC else ()
    return torch.stack((scale, 1.0 / scale, *zero_points)).reshape(spec.shape)


def _repeated(numel: int, generator: torch.Generator) -> torch.Tensor:
    return _repeat(_period(numel, generator), numel)


def _period(numel: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(min(numel, 65521), generator=generator, dtype=torch.float32, device="cpu")


def _repeat(period: torch.Tensor, numel: int) -> torch.Tensor:
    return period.repeat(-(-numel // period.numel()))[:numel] if numel else period


def twins_on_noise(
    operation: Operation,
    values: RegionValues,
    generator: torch.Generator,
    fingerprint: Callable[[Candidate], str],
) -> tuple[dict[str, Candidate] | None, RegionValues]:
    """The operation's candidates by fingerprint, and what its nodes stand for, with noise in place of its constants.

    A verdict is one on equal work of any weights, and these may be zeros, not numbers, or so large that results are.
    Where a candidate has no twin, the constants stay: then the candidates are None.
    """
    constants = values.constants_of(operation.node)
    if sum(value.numel() * value.element_size() for value in constants.values()) > _NOISE_BYTES:
        return None, values
    if any(is_call(node, ops.dequantize) for node in constants):
        return {fingerprint(c): c for c in operation.candidates}, values  # noise would not be that of integers
    if not any(value.is_floating_point() for value in constants.values()):
        return {fingerprint(c): c for c in operation.candidates}, values
    noisy = values.with_constants({node: _constant_noise(value, generator) for node, value in constants.items()})
    give_signs(operation.node, noisy.constants)
    try:
        again = None if operation.with_values is None else operation.with_values(noisy)
    except NotLowered:
        again = None
    twins = {fingerprint(c): c for c in again.candidates} if again is not None else {}
    if any(fingerprint(c) not in twins for c in measurable(operation.candidates)):
        return None, values
    return twins, noisy


def _constant_noise(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Normal noise pushed away from zero, which may be divided by, in value's shape, dtype and dense strides.

    Of matrices it is so small that products stay of order 1, as those of weights in use: functions after them saturate,
    or enlarge rounding errors, elsewhere.
    """
    if not value.is_floating_point():
        return value
    period = _period(value.numel(), generator)  # the arithmetic is done on it alone: weights may be large
    period = (period + period.sign() / 2) / math.sqrt(math.prod(value.shape[1:]))
    noise = _repeat(period.to(value.dtype), value.numel()).view(value.shape)
    return noise if value.is_contiguous() or has_internal_overlap(value) else torch.empty_like(value).copy_(noise)


def give_signs(node: fx.Node, values: Mapping[fx.Node, torch.Tensor]) -> None:
    """Let noise have the sign that node takes for granted: variances are positive, and no state grows without end."""
    signs = _SIGNS.get(node.target)
    if signs is None:
        return
    read = signature_of(node.target).bind(*node.args, **node.kwargs).arguments
    for name, sign in signs.items():
        if read.get(name) in values:
            values[read[name]].abs_().mul_(sign)


def made_up(spec: TensorSpec) -> torch.Tensor:
    """Noise in the shape, strides and dtype of an input; zeros for integers (indices), True for booleans: a mask that
    leaves nothing is no work like others.
    """
    span = sum((n - 1) * stride for n, stride in zip(spec.shape, spec.strides, strict=True)) + 1
    memory = torch.full((span,), spec.dtype == torch.bool, dtype=spec.dtype, device="cpu")
    if spec.dtype.is_floating_point:
        memory.normal_(generator=torch.Generator().manual_seed(0))  # the global one is the user's
    return memory.as_strided(spec.shape, spec.strides)
