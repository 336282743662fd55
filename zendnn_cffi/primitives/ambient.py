"""Who else looks at PyTorch's operations now: under modes and transforms, addresses of tensors mean nothing."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

_transforms = torch._C._functorch.peek_interpreter_stack


def is_watched() -> bool:
    """Whether operations must be PyTorch's own now: function transforms, forward derivatives, tracers and modes that
    look at each of them."""
    return (
        _transforms() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    )


def watcher() -> str:
    """Name what ``is_watched`` found, for messages: "FakeTensorMode", "torch.func.vmap", ..."""
    interpreter = _transforms()
    if interpreter is not None:
        return f"torch.func.{interpreter.key().name.lower()}"
    if forward_ad._current_level >= 0:
        return "forward-mode automatic differentiation"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    depth = torch._C._len_torch_dispatch_stack()
    return type(torch._C._get_dispatch_stack_at(depth - 1)).__name__ if depth else "nothing"
