"""Linear layers of integers for torch.export, which would follow torchao's functions to the products inside of them.

While a forward is followed, F.linear of an Int8Tensor is one operator, zendnn_cffi::int8_linear, of its plain tensors.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fx_passes.graph.int8_tensor import PARTS, Weight, is_int8_tensor, understood
from fx_passes.spellings.int8_linear import evaluate, layer
from fx_passes.trace.skeleton import tensors_of

_SCHEMA = (
    "(Tensor input, Tensor qdata, Tensor scale, Tensor? zero_point, Tensor? act_pre_scale, Tensor? act_quant_scale,"
    " Tensor? act_quant_zero_point, Tensor? bias, int[] axis, str how,"
    " bool by_rows, int low, int high, ScalarType dtype, float eps) -> Tensor"
)


def as_operators(root: nn.Module) -> AbstractContextManager[Any]:
    """The mode, where a module holds such a weight: every function that is followed goes through it."""
    return AsOperators() if any(map(is_int8_tensor, tensors_of(root))) else nullcontext()


def ask_for_dtype(root: nn.Module) -> bool:
    """Whether a layer is understood only where its input's dtype is known, which torch.fx does not tell."""
    return any((known := understood(tensor)) is not None and bool(known.more) for tensor in tensors_of(root))


class AsOperators(TorchFunctionMode):
    """A mode in which these layers are operators."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and (found := _linear(*args, **kwargs)) is not None:
            return found
        return func(*args, **kwargs)


def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """The layer as an operator; None where its weight is no Int8Tensor that is understood."""
    known = understood(weight)
    if known is None or not isinstance(input, torch.Tensor) or input.dtype != weight.dtype:
        return None
    tensors = (getattr(weight, name) if name in known.parts else None for name in PARTS)
    return _operator()(input, *tensors, bias, *known.numbers)


@functools.cache
def _operator() -> Any:
    """The operator, which is made where a model needs it."""
    torch.library.define("zendnn_cffi::int8_linear", _SCHEMA)
    torch.library.impl("zendnn_cffi::int8_linear", "CPU", _compute)
    torch.library.register_fake("zendnn_cffi::int8_linear", _shaped)
    return torch.ops.zendnn_cffi.int8_linear


def _compute(input: Any, *others: Any) -> torch.Tensor:
    tensors, bias, numbers = others[: len(PARTS)], others[len(PARTS)], others[len(PARTS) + 1 :]
    named = dict(zip(PARTS, tensors, strict=True))
    result: torch.Tensor = evaluate(layer(input, named, bias, Weight.of_numbers(*numbers)))
    return result


def _shaped(input: Any, qdata: Any, *others: Any) -> torch.Tensor:
    torch._check(input.shape[-1] == qdata.shape[1])  # else an export leaves the features free, and they seem to grow
    result: torch.Tensor = input.new_empty((*input.shape[:-1], qdata.shape[0]))
    return result
