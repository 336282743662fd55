"""Whether somebody looks at each operation: then nothing may run outside of PyTorch, and nothing may be remembered."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import _symbolic_trace

from zendnn_cffi.primitives.ambient import is_watched

__all__ = ["is_traced_by_fx", "is_watched"]

# Whether torch.fx traces, symbolically or for torch.export: one flag for all threads before PyTorch 2.14.
is_traced_by_fx: Callable[[], bool] = getattr(
    _symbolic_trace, "_get_is_fx_tracing", lambda: _symbolic_trace._is_fx_tracing_flag
)
