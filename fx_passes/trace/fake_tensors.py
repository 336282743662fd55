"""Fake tensors, with which torch.export follows a forward, without their cache.

PyTorch remembers which result an operator has for which sizes. Where sizes are free, an entry costs more than it saves:
each is compared with a result made of it, and each use makes guards anew.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any


def without_cache() -> AbstractContextManager[Any]:
    """Let fake tensors that are made in this block compute each result."""
    try:
        from torch._dynamo import config
    except ImportError:  # what is not PyTorch's interface may be elsewhere
        return contextlib.nullcontext()
    known = hasattr(config, "fake_tensor_cache_enabled")
    return config.patch(fake_tensor_cache_enabled=False) if known else contextlib.nullcontext()
