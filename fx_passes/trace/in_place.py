"""Buffers that a forward writes to by `self.n += 1`, while it is traced.

Before: self.n is what iadd(n, 1) gave, a traced value     After: self.n is the buffer, as it is in eager PyTorch

The graph writes to the buffer by the same operator. Nothing else that a forward sets is taken back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from fx_passes.graph.graph import AUGMENTED


@contextmanager
def buffers_kept(root: nn.Module) -> Iterator[None]:
    """Put buffers of root back where a forward, traced inside, set them to what they are after a write in place."""
    modules = [(path, m) for path, m in root.named_modules() if not isinstance(m, torch.jit.ScriptModule)]
    held = {(path, name): buffer for path, module in modules for name, buffer in module._buffers.items()}
    yield
    now: Any
    for (path, name), buffer in held.items():
        module = root.get_submodule(path)
        now = module._buffers.get(name)
        if issubclass(type(now), fx.Proxy) and (source := _written(now.node)) is not None:
            owner, _, read = source.rpartition(".")
            if type(buffer) is torch.Tensor and held.get((owner, read)) is buffer:
                module._buffers[name] = buffer


def _written(node: fx.Node) -> str | None:
    """The attribute that operators which write in place left node of; None for what is no such."""
    while node.op == "call_function" and node.target in AUGMENTED and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return str(node.target) if node.op == "get_attr" else None
