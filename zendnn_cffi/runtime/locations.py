"""Where the numbers of many tensors lie and how they are read: whether anybody gave one other memory, or another view.

`p.data = q` counts no version up: the object p comes to stand for the memory and the view of q. Asking 262 tensors for
address, shape and strides takes 240 us after a call that evicted them (an Intel Xeon with AVX-512). Reading the words
that say it, where they lie, takes 70 us:

    tensor (Python) -> TensorImpl                                     -> StorageImpl
    PLACES.impl        PLACES.views: storage, sizes, strides, dtype      PLACES.data: the address

Each is gathered only after what leads to it was the same, and is held by that: `swap_tensors` may free the rest. No
header says where they lie, so an experiment tells, when this is imported. Where it fails, PyTorch is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from zendnn_cffi.runtime.words import PLAIN, Words, words_at

_IMPL_WORDS = 23  # that a TensorImpl has at most: 22 in PyTorch 2.13; what follows is the allocator's
_STORAGE_WORDS = 6  # that a StorageImpl has, and more
_INLINE_DIMENSIONS = 5  # of tensors with more, sizes and strides lie elsewhere


class Places(NamedTuple):
    """Positions in words of 8 bytes.

    impl     of the TensorImpl's address in Python's object
    storage  of the StorageImpl's address in a TensorImpl
    views    of all that assigning to .data changes in a TensorImpl
    data     of the address of the numbers in a StorageImpl
    """

    impl: int
    storage: int
    views: tuple[int, ...]
    data: int


class Locations:
    """Where the numbers of these tensors lay and how they were read; those without an address are left out."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._known = [(t, known) for t in tensors if (known := described(t)) is not None]
        self._asked: list[torch.Tensor] = []
        objects, impls, storages = list[int](), list[int](), list[torch.UntypedStorage]()
        places = PLACES or _NOWHERE
        for tensor, _ in self._known:
            storage = tensor.untyped_storage()
            storages.append(storage)
            if _is_certain(tensor, storage):
                objects.append(id(tensor) + 8 * places.impl)
                impls += [tensor._cdata + 8 * place for place in places.views]
            else:
                self._asked.append(tensor)
        self._objects, self._impls = Words(objects, 8), Words(impls, 8)
        self._addresses = Addresses(storages)  # which holds them: new memory lies elsewhere
        self._answers = list(map(described, self._asked))

    def unchanged(self) -> bool:
        """Whether they lie where they lay, and are read as they were."""
        return (
            self._objects.unchanged()
            and self._impls.unchanged()
            and self._addresses.unchanged()
            and list(map(described, self._asked)) == self._answers
        )

    def changed(self) -> list[torch.Tensor]:
        """Those that do not, as PyTorch says."""
        return [tensor for tensor, known in self._known if described(tensor) != known]


class Addresses:
    """Where the numbers of these storages lay; share_memory() moves them within the storage."""

    def __init__(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self._storages = list(storages)
        self._asked: list[torch.UntypedStorage] = []
        words = []
        for storage in self._storages:
            if PLACES is not None and words_at(storage._cdata + 8 * PLACES.data, 1) == [storage.data_ptr()]:
                words.append(storage._cdata + 8 * PLACES.data)
            else:
                self._asked.append(storage)
        self._words = Words(words, 8)
        self._answers = [storage.data_ptr() for storage in self._asked]

    def unchanged(self) -> bool:
        """Whether they lie where they lay."""
        asked = self._asked
        return self._words.unchanged() and (not asked or [each.data_ptr() for each in asked] == self._answers)


def described(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Address and view of a tensor, as PyTorch says; None where it has no address."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        return None
    sizes = None if tensor.is_nested else (tensor.shape, tensor.stride())  # of nested ones each part has its own
    return address, tensor.dtype, sizes, tensor.is_neg(), tensor.is_conj()


def _is_certain(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether all words of this tensor but its address lie where PLACES says."""
    if PLACES is None or type(tensor) not in PLAIN or tensor.is_nested or tensor.dim() > _INLINE_DIMENSIONS:
        return False
    impl = tensor._cdata
    return words_at(id(tensor) + 8 * PLACES.impl, 1) == [impl] and words_at(impl + 8 * PLACES.storage, 1) == [
        storage._cdata
    ]


def find_places() -> Places | None:
    """Where Python and PyTorch keep them: the words that follow what is done to a tensor."""
    with torch.inference_mode(False), torch.no_grad():
        tensor = torch.zeros(2, 3, 4, 5, 6, dtype=torch.float32, device="cpu")
        if type(tensor) is not torch.Tensor:
            return None  # imported in a mode that replaces tensors
        impl = _only(words_at(id(tensor), torch.Tensor.__basicsize__ // 8), tensor._cdata)
        storage = _only(_impl(tensor), tensor.untyped_storage()._cdata)
        data = _data_place(tensor.untyped_storage())
        views = _changed_by_data(tensor)
        numbers = [_impl(tensor)[place] for place in views]
    if impl is None or storage is None or data is None or storage not in views:
        return None
    has_all = all(number in numbers for number in (*tensor.shape, *tensor.stride()))
    return Places(impl, storage, views, data) if has_all else None


def _changed_by_data(tensor: torch.Tensor) -> tuple[int, ...]:
    """Positions in a TensorImpl of whatever differs after some assignment to .data."""
    moved = tensor.permute(1, 2, 3, 4, 0)
    others = (tensor.clone(), moved, moved.permute(1, 2, 3, 4, 0), tensor[1:], tensor[1:, 1:], tensor.double(),
              tensor._neg_view(), tensor.flatten(), tensor[0, 0, 0], tensor.unsqueeze(0))  # fmt: skip
    changed = set()
    for other in others:
        watched = tensor.detach()
        before = _impl(watched)
        watched.data = other
        changed |= {i for i, (old, new) in enumerate(zip(before, _impl(watched), strict=True)) if old != new}
    return tuple(sorted(changed))


def _data_place(storage: torch.UntypedStorage) -> int | None:
    """The first position in a StorageImpl that has the address of the numbers, before and after they move."""
    before = words_at(storage._cdata, _STORAGE_WORDS)
    was = storage.data_ptr()
    other = torch.zeros(1000, dtype=torch.float32, device="cpu").untyped_storage()
    after = words_at(other._cdata, _STORAGE_WORDS)
    found = [i for i in range(_STORAGE_WORDS) if before[i] == was and after[i] == other.data_ptr()]
    return found[0] if found else None


def _impl(tensor: torch.Tensor) -> list[int]:
    return words_at(tensor._cdata, _IMPL_WORDS)


def _only(words: list[int], wanted: int) -> int | None:
    """The position of a number that is there once."""
    return words.index(wanted) if words.count(wanted) == 1 else None


_NOWHERE = Places(0, 0, (), 0)
PLACES = find_places()
