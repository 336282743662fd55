"""Buffers that forward writes to, such as counters and caches: each look at a graph begins with them as they were.

A model is called some hundred times while it is calibrated and compared. What it keeps from call to call would be that
of these calls, in the results of quantize() as well.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx, nn

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import get_attribute

_TABLES = (nn.Embedding, nn.EmbeddingBag)


class State:
    """The buffers that an exported graph writes to; it gets buffers of its own for these, apart from the model's.

    exported  None: nothing is kept
    """

    def __init__(self, exported: fx.GraphModule | None = None) -> None:
        self._before: dict[str, torch.Tensor] = {}
        if exported is None:
            return
        aliasing, copied = Aliasing(exported), dict[int, object]()  # what lies in one memory stays so
        names = [str(n.target) for n in exported.graph.find_nodes(op="get_attr") if aliasing.is_written(n)]
        for name in dict.fromkeys(names):
            value = get_attribute(exported, name)
            if isinstance(value, torch.Tensor):
                self._before[name] = value.detach().clone()
                own = copy.deepcopy(value.detach(), copied)
                own = nn.Parameter(own) if isinstance(value, nn.Parameter) else own
                path, _, last = name.rpartition(".")
                setattr(exported.get_submodule(path), last, own)

    def restore(self, module: nn.Module) -> None:
        """Give a graph that was made of this one the numbers from before the first call."""
        with torch.no_grad():
            for name, before in self._before.items():
                path, _, last = name.rpartition(".")
                value = getattr(module.get_submodule(path), last, None)
                if isinstance(value, torch.Tensor):
                    value.copy_(before)


@contextmanager
def buffers_restored(model: nn.Module) -> Iterator[None]:
    """Leave buffers that forward writes to, such as counters, as they were: calibration calls it many times.

    They are the same tensors afterwards, too, where forward puts others in their place (`self.calls = self.calls + 1`).
    So are tables of embeddings with max_norm, whose rows each look-up makes shorter.
    """
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    tables = [
        module.weight for module in model.modules() if isinstance(module, _TABLES) and module.max_norm is not None
    ]
    written = (*model.buffers(), *dict.fromkeys(tables))
    held = [x for x in written if type(x) in (torch.Tensor, nn.Parameter) and x.layout is torch.strided]
    before = [x.detach().clone() for x in held]
    try:
        yield
    finally:
        for buffers, these in places:
            buffers.update(these)
        with torch.no_grad():
            for x, was in zip(held, before, strict=True):
                if not torch.equal(x, was):
                    x.copy_(was)
