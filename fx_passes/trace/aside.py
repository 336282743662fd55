"""Runs that write to a model's memory, and leave it as it is: of what is written to a copy is made before.

    with writes_aside(root) as written:
        copy_of_root(x)                  weight.div_(2): half of the weight, in memory of its own
        copy_of_root(x)                  reads the halves
    root.weight                          as before; written.names(): [("", "weight")]

Copies of a model share its parameters: nobody wants a large model twice. Operators say by their schemas what they write
to, so memory is copied at the first write, and read there until the run is over. Writes that are no operators, by
numpy's arrays, are not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fx_passes.trace.arrays import shared as arrays_beside
from fx_passes.trace.skeleton import held_by, tensors_in, tensors_of
from fx_passes.trace.state import arrays_of
from zendnn_cffi.runtime.uncompiled import nothing_compiled


class Aside(TorchDispatchMode):
    """While it is entered, operators of this thread write to no memory of a tree."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would import TorchDynamo for that, which nobody runs here

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._root = root
        self._held: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors_of(root):
            if place := storage_of(tensor):
                self._held.setdefault(place, []).append(tensor)
        self._copies: dict[int, torch.Tensor] = {}  # bytes of a storage, by its address
        self._versions: list[Any] = []

    def names(self) -> list[tuple[str, str]]:
        """(path of a module, name) of tensors in whose memory a write would have been."""
        return [
            (path, name)
            for path, module in self._root.named_modules()
            for name, value in held_by(module).items()
            if self._copies and any(storage_of(tensor) in self._copies for tensor in tensors_in(value))
        ]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            if torch.Tag.inplace_view in func.tags:  # writes to no memory, but to what a tensor says of itself
                return func(*args, **kwargs)
            for tensor in pytree.tree_leaves(_written(func, args, kwargs)):
                self._set_aside(tensor)
        if not self._copies:
            return func(*args, **kwargs)
        given: dict[int, tuple[Any, Any]] = {}  # what an operator that writes returns is what it was given

        def copied(value: Any) -> Any:
            result = self.now(value)
            if result is not value:
                given[id(result)] = result, value
            return result

        args, kwargs = pytree.tree_map(copied, (args, kwargs))
        return pytree.tree_map(
            lambda value: given[id(value)][1] if id(value) in given else value, func(*args, **kwargs)
        )

    def now(self, value: Any) -> Any:
        """A tensor that lies in memory of which there is a copy, as it lies in that; others as they are."""
        copy = self._copies.get(storage_of(value))
        if copy is None:
            return value
        result = torch.empty(0, dtype=value.dtype, device="cpu")
        return result.set_(copy.untyped_storage(), value.storage_offset(), value.shape, value.stride())

    def _set_aside(self, tensor: Any) -> None:
        place = storage_of(tensor)
        if place not in self._held or place in self._copies:
            return
        storage = tensor.untyped_storage()
        self._copies[place] = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).clone()
        counted = [each for each in self._held[place] if not each.is_inference()]
        self._versions += map(torch.autograd._unsafe_preserve_version_counter, counted)

    def take_back_counts(self) -> None:
        """Let version counters say what they did: nothing was written to."""
        for version in self._versions:
            version.__exit__()


def _written(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operator writes to."""
    if func is torch.ops.aten.native_batch_norm.default and args[5]:  # training: its schema does not say so
        return [*args[3:5]]  # running mean and variance
    if not func._schema.is_mutable:
        return []
    rows = [(i, row) for i, row in enumerate(func._schema.arguments) if row.alias_info and row.alias_info.is_write]
    return [args[i] if i < len(args) else kwargs.get(row.name) for i, row in rows]


class Moving(Aside):
    """As Aside, but what is written to lies in its copy from then on: the model that was copied keeps its values.

    shared  addresses of the memory that the tree has of that model's; other memory is written to where it lies
    """

    def __init__(self, root: nn.Module, shared: frozenset[int]) -> None:
        super().__init__(root)
        beside = chain.from_iterable(arrays_beside(tensors_of(root), arrays_of(root)))
        stay = set(map(storage_of, beside))  # an array would not move with them
        self._held = {place: held for place, held in self._held.items() if place in shared - stay}

    @property
    def has_moved(self) -> bool:
        """Whether something was written to; views from before lie where now() says."""
        return bool(self._copies)

    def _set_aside(self, tensor: Any) -> None:
        super()._set_aside(tensor)
        for each in self._held.pop(storage_of(tensor), ()):
            each.data = self.now(each)


def storage_of(tensor: Any) -> int:
    """The address of the memory that a tensor lies in; 0 where there is none that can be copied."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return 0
    if tensor.device.type != "cpu" or tensor.is_quantized or torch._is_functional_tensor(tensor):
        return 0
    return tensor.untyped_storage().data_ptr()


@contextmanager
def writes_aside(root: nn.Module) -> Iterator[Aside]:
    """Let operators that would write to memory of root, or of copies that share it, write to other memory."""
    aside = Aside(root)
    try:
        with nothing_compiled(), aside:
            yield aside
    finally:
        aside.take_back_counts()
