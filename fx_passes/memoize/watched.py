"""Whether somebody looks at each operation: then nothing may run outside of PyTorch, and nothing may be remembered."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import _symbolic_trace
from torch.utils._device import DeviceContext

from zendnn_cffi.primitives.ambient import is_watched

__all__ = ["changes_functions", "is_traced_by_fx", "is_watched"]

# Whether torch.fx traces, symbolically or for torch.export: one flag for all threads before PyTorch 2.14.
is_traced_by_fx: Callable[[], bool] = getattr(
    _symbolic_trace, "_get_is_fx_tracing", lambda: _symbolic_trace._is_fx_tracing_flag
)


def changes_functions() -> bool:
    """Whether a TorchFunctionMode may change what PyTorch's functions return; a default device of cpu does not."""
    modes = (torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack()))
    return not all(type(mode) is DeviceContext and mode.device.type == "cpu" for mode in modes)
