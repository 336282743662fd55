"""What a call of torchao.choose_qparams_affine says: how scales and zero points of blocks are chosen."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

LEAST_EPS = 1e-20  # of one scale for all values: ops.dynamic_linear divides biases by the scale
_SMALLEST_F32 = torch.finfo(torch.float32).tiny
_HOW = {"SYMMETRIC": "symmetric", "ASYMMETRIC": "asymmetric"}


class Chosen(NamedTuple):
    """How scales are chosen, as ops.choose_scale and ops.choose_row_scales take it.

    how          "symmetric" or "asymmetric"
    limits       of the integers
    dtype        of the integers
    eps          the smallest scale
    block        sizes of a block; nodes among them are sizes of the call
    scale_dtype  what scales are rounded to; None: the dtype of the values
    """

    how: str
    limits: tuple[int, int]
    dtype: torch.dtype
    eps: float
    block: tuple[Any, ...]
    scale_dtype: torch.dtype | None

    def rounds_to_float32(self) -> bool:
        """Whether scales of float32 values stay as they are."""
        return self.scale_dtype in (None, torch.float32, torch.float64)


def chosen_by(called: Any, src: fx.Node) -> Chosen | None:
    """How called chooses scales of src; None where it is another call, or of a way that no operation has."""
    if not isinstance(called, fx.Node) or str(called.target) != "torchao.choose_qparams_affine.default":
        return None
    given = _by_name(called)
    how, dtype = _HOW.get(given["mapping_type"]), given["target_dtype"]
    if how is None or dtype not in (torch.uint8, torch.int8) or given["input"] is not src:
        return None
    own = torch.iinfo(dtype)
    low = own.min if given["quant_min"] is None else given["quant_min"]
    high = own.max if given["quant_max"] is None else given["quant_max"]
    eps = _SMALLEST_F32 if given["eps"] is None else given["eps"]
    return Chosen(how, (low, high), dtype, eps, tuple(given["block_size"]), given["scale_dtype"])


def _by_name(called: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by name."""
    target: Any = called.target
    schema = target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {**given, **{a.name: value for a, value in zip(schema, called.args, strict=False)}, **called.kwargs}
