"""Whether somebody looks at each operation: then nothing may run outside of PyTorch, and nothing may be remembered."""

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
