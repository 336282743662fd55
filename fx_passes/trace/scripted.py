"""ScriptModules in a model. C++ copies them: their memory, and what their forward writes to, is looked after here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_COUNTER = "num_batches_tracked"  # of batch normalizations, which count in training


def share_scripted(copied: nn.Module, model: nn.Module, *, own_state: bool, own_parameters: bool) -> None:
    """Let the tensors of ScriptModules in a copy of a model lie where the model's do, but for buffers they write to.

    own_state       buffers keep memory of their own
    own_parameters  so do parameters
    """
    copies: dict[str, Any] = dict(copied.named_modules())
    for path, module in model.named_modules():
        own = copies.get(path)
        if own is None or own is module or not isinstance(module, torch.jit.ScriptModule):
            continue
        parameters = {} if own_parameters else dict(module._parameters.items())
        buffers = {} if own_state else dict(module._buffers.items())
        written = _written_buffers(module) if buffers else ()
        for name, theirs in (*parameters.items(), *buffers.items()):
            mine = getattr(own, name)
            if mine is not None and theirs is not None and theirs.layout is torch.strided and name not in written:
                mine.data = theirs.detach()


def sets_attributes(module: nn.Module) -> bool:
    """Whether it is a ScriptModule whose forward may set attributes: a copy sets its own."""
    return any(node.kind() == "prim::SetAttr" for node in _nodes(module))


def _written_buffers(module: nn.Module) -> set[str]:
    """The names of what a ScriptModule's forward may write to in place, whichever of its submodules has it."""
    found = set[str]()
    for node in _nodes(module):
        if not (node.kind().startswith("aten::") and node.kind().endswith("_")):
            continue
        while node.kind().startswith("aten::") and [*node.inputs()]:
            node = next(node.inputs()).node()  # a view, perhaps
        if node.kind() == "prim::GetAttr":
            found.add(node.s("name"))
    return found - {_COUNTER}


def _nodes(module: nn.Module) -> Iterator[Any]:
    """The operations of a ScriptModule's forward and of what it calls, in branches and loops, too."""
    if not isinstance(module, torch.jit.ScriptModule) or not module._c._has_method("forward"):
        return
    graph: Any = module.inlined_graph  # which its nodes do not keep alive
    blocks = [graph]
    while blocks:
        for node in blocks.pop().nodes():
            yield node
            blocks += node.blocks()
