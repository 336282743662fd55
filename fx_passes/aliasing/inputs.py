"""Inputs that a graph writes to, and calls in which another input shares that memory.

Passes take the inputs for different memory: what is computed from y may move across a write to x. A call f(x, x), or
f(big[:4], big[2:6]), is for plain PyTorch where f writes to one of the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree

from fx_passes.aliasing.aliasing import Aliasing
from zendnn_cffi.primitives.checks import overlap


class WrittenInputs:
    """Which inputs of a graph it may write to."""

    def __init__(self, gm: fx.GraphModule) -> None:
        aliasing = Aliasing(gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._names = [str(node.target) for node in placeholders]
        self._written = {str(node.target) for node in placeholders if aliasing.is_written(node)}
        self._are_leaves = isinstance(gm.graph._codegen, _PyTreeCodeGen)

    def __bool__(self) -> bool:
        return bool(self._written) and len(self._names) > 1

    def are_shared(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether another input of this call lies in memory of a written one."""
        written, others = list[torch.Tensor](), list[torch.Tensor]()
        for name, value in self._by_name(args, kwargs):
            leaves = (value,) if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
            (written if name in self._written else others).extend(tensors)
        storages = dict[int, list[torch.Tensor]]()
        for tensor in (*written, *others):
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        if len(storages) == len(written) + len(others):
            return False
        for tensor in written:
            alike = storages[tensor.untyped_storage()._cdata]
            alike.pop(next(i for i, other in enumerate(alike) if other is tensor))  # once: it may be given twice
            if any(overlap(tensor, other) for other in alike):
                return True
        return False

    def _by_name(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        if self._are_leaves:
            yield from zip(self._names, pytree.tree_leaves((tuple(args), kwargs)), strict=False)
            return
        names = self._names[: len(args)] + [self._names[-1]] * (len(args) - len(self._names))
        yield from zip(names, args, strict=True)
        for name, value in kwargs.items():
            yield (name if name in self._names else self._names[-1]), value
