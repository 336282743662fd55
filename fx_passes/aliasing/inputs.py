"""Inputs that a graph writes to, and calls in which another input, or a constant, shares that memory.

Passes take the inputs for different memory: what is computed from y may move across a write to x. A call f(x, x), or
f(big[:4], big[2:6]), is for plain PyTorch where f writes to one of the two. So is f(buffer), and what was made of one
numpy array has storages of its own each time. A buffer that f writes to may be an input as well, which f reads.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import get_attribute
from zendnn_cffi.primitives.checks import overlap


class WrittenInputs:
    """Which inputs of a graph it may write to.

    only_reads  whether it writes to nothing that is there before and after a call, parameters and buffers included
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        aliasing = Aliasing(gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        self._names = [str(node.target) for node in placeholders]
        self._written = {str(node.target) for node in placeholders if aliasing.is_written(node)}
        held = gm.graph.find_nodes(op="get_attr")
        self._constants = list({str(node.target): None for node in held if aliasing.is_written(node)})
        self.only_reads = not self
        self._are_leaves = isinstance(gm.graph._codegen, _PyTreeCodeGen)

    def __bool__(self) -> bool:
        return bool(self._written or self._constants)

    def tensors_of(self, gm: fx.GraphModule) -> list[torch.Tensor]:
        """The parameters, buffers and other tensors of the graph's module that it may write to."""
        found = []
        for name in self._constants:
            with contextlib.suppress(AttributeError):  # it is gone: a change that is noticed elsewhere
                found.append(get_attribute(gm, name))
        return [value for value in found if isinstance(value, torch.Tensor)]

    def are_shared(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        constants: Places | None = None,
        written_constants: Places | None = None,
    ) -> bool:
        """Whether an input of this call lies in memory of one that is written, or of a constant, and one is written.

        constants          those that something was made of
        written_constants  those that are written
        """
        written, others = list[torch.Tensor](), list[torch.Tensor]()
        for name, value in self._by_name(args, kwargs):
            leaves = (value,) if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
            (written if name in self._written else others).extend(tensors)
        places = [storage_of(tensor) for tensor in (*written, *others)]
        if constants is not None and any(map(constants.touch, places[: len(written)])):
            return True
        if written_constants is not None and any(map(written_constants.touch, places)):
            return True
        if _are_apart(places):
            return False
        every = [*zip(places, (*written, *others), strict=True)]
        for i, ((start, end), tensor) in enumerate(every[: len(written)]):
            alike = (other for j, ((s, e), other) in enumerate(every) if j != i and s < end and start < e)
            if any(overlap(tensor, other) for other in alike):
                return True
        return False

    def _by_name(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        if self._are_leaves:
            yield from zip(self._names, pytree.tree_leaves((tuple(args), kwargs)), strict=False)
            return
        if not self._names:
            return
        names = self._names[: len(args)] + self._names[-1:] * (len(args) - len(self._names))
        yield from zip(names, args, strict=True)
        for name, value in kwargs.items():
            yield (name if name in self._names else self._names[-1]), value


class Places:
    """The memory of tensors, which does not change."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(storage_of(tensor) for tensor in tensors if tensor.layout is torch.strided):
            if self._ends and start < self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            elif start < end:
                self._starts.append(start)
                self._ends.append(end)

    def touch(self, storage: tuple[int, int]) -> bool:
        """Whether a storage has a byte of them."""
        start, end = storage
        at = bisect.bisect_left(self._starts, end)
        return start < end and at > 0 and self._ends[at - 1] > start


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor's storage, and behind its last; equal ones where there is none."""
    try:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
    except (RuntimeError, NotImplementedError):  # a fake tensor, or one of a subclass
        return 0, 0
    return start, start + storage.nbytes()


def _are_apart(places: list[tuple[int, int]]) -> bool:
    """Whether no two of these overlap."""
    behind = 0
    for start, end in sorted(places):
        if start < end:
            if start < behind:
                return False
            behind = end
    return True
