"""Whether somebody looks at each operation: then nothing may run outside of PyTorch, and nothing may be remembered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import _symbolic_trace
from torch.utils._device import DeviceContext

from zendnn_cffi.primitives.ambient import is_watched

__all__ = ["are_elsewhere", "changes_functions", "is_traced_by_fx", "is_watched", "override_functions"]

_PLAIN = frozenset((Tensor, nn.Parameter, type(None), bool, int, float, complex, str))
_DEEPEST = 4  # of containers in arguments that are searched

# Whether torch.fx traces, symbolically or for torch.export: one flag for all threads before PyTorch 2.14.
is_traced_by_fx: Callable[[], bool] = getattr(
    _symbolic_trace, "_get_is_fx_tracing", lambda: _symbolic_trace._is_fx_tracing_flag
)


def changes_functions() -> bool:
    """Whether a TorchFunctionMode may change what PyTorch's functions return; a default device of cpu does not."""
    modes = (torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack()))
    return not all(type(mode) is DeviceContext and mode.device.type == "cpu" for mode in modes)


def override_functions(values: Iterable[Any], depth: int = 0) -> bool:
    """Whether one of the values, or of what is in them, may have its own way of PyTorch's functions and methods.

    A subclass of Tensor may do something else in F.linear than in F.conv2d. A graph calls other functions than the
    model does.
    """
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            continue
        if _overrides(kind):  # type: ignore[arg-type]
            return True
        if depth < _DEEPEST and (inside := _inside(value, depth)) and override_functions(inside, depth + 1):
            return True
    return False


def are_elsewhere(values: Iterable[Any]) -> bool:
    """Whether one of the values is a tensor on another device, or one without strides."""
    return any(type(value) is Tensor and not (value.is_cpu and value.layout is torch.strided) for value in values)


def _inside(value: Any, depth: int) -> Iterable[Any]:
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, Mapping):
        return list(value.values())
    is_searched = depth < 2 and not isinstance(value, Tensor | nn.Module | type) and hasattr(value, "__dict__")
    return list(vars(value).values()) if is_searched else ()


@functools.lru_cache(maxsize=256)
def _overrides(kind: type) -> bool:
    """Whether a class does; PyTorch's own tensors for tracing compute what others do."""
    if kind.__module__.startswith("torch._"):
        return False
    return issubclass(kind, Tensor) or hasattr(kind, "__torch_function__")
