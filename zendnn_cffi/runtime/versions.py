"""Version counters of many tensors at once: whether anybody wrote to one in place.

PyTorch keeps the counter of a tensor in an object of its own, which its detached aliases share. Tensor._version
reaches it by way of three other objects. After a call that evicted them all, 262 tensors take 108 us (Zen 5), a
twentieth of a MobileNetV2 call. So the counters are read where they lie, by one gather: their misses overlap.

    tensor (Python) -> TensorImpl -> VersionCounter: [vtable, reference counts, version]
                       _cdata        address at 8 * _PLACE.pointer, version at 4 * _PLACE.version

No header says where they lie, so an experiment on three tensors tells, when this is imported. What it does not settle,
and each tensor for which the place holds another number, is asked for _version instead.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterable
from typing import NamedTuple

import torch

from zendnn_cffi.runtime.words import PLAIN, Words, words_at

_version = operator.attrgetter("_version")
_IMPL_WORDS = 16  # words of 8 bytes to look at: a TensorImpl has more than 20
_COUNTER_WORDS = 6  # words of 4 bytes that a VersionCounter has


class Place(NamedTuple):
    """Where the address of its counter is in a TensorImpl, in words of 8 bytes, and in that the version, of 4."""

    pointer: int
    version: int


class Versions:
    """What the version counters of these tensors were; none may be an inference tensor, which has none.

    Raises  RuntimeError for a tensor without a version counter.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._aliases: list[torch.Tensor] = []  # they keep the counters alive
        self._asked: list[torch.Tensor] = []
        addresses = []
        for tensor in tensors:
            alias, address = _located(tensor)
            if alias is None:
                self._asked.append(tensor)
            else:
                self._aliases.append(alias)
                addresses.append(address)
        self._counters = Words(addresses, 4)
        self._answers = list(map(_version, self._asked))

    def unchanged(self) -> bool:
        """Whether they are what they were."""
        return self._counters.unchanged() and (not self._asked or list(map(_version, self._asked)) == self._answers)


def _located(tensor: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    """A detached alias with the same counter, and where the version lies; None where that is not certain."""
    if PLACE is None or type(tensor) not in PLAIN:
        return None, 0
    with torch.inference_mode(False):
        alias = tensor.detach()
    if type(alias) is not torch.Tensor:
        return None, 0
    counter = _words(alias)[PLACE.pointer]
    if counter != _words(tensor)[PLACE.pointer]:
        return None, 0
    address = counter + 4 * PLACE.version
    certain = ctypes.c_uint32.from_address(address).value == tensor._version
    return (alias, address) if certain else (None, 0)


def find_place() -> Place | None:
    """Where PyTorch keeps version counters: what aliases share and .data does not, and what a write counts up."""
    with torch.inference_mode(False):
        tensor = torch.zeros(1, dtype=torch.float32, device="cpu")
        alias, other = tensor.detach(), tensor.data
    if any(type(t) is not torch.Tensor for t in (tensor, alias, other)):
        return None  # imported in a mode that replaces tensors
    triples = zip(_words(tensor), _words(alias), _words(other), strict=True)
    pointers = [i for i, (mine, shared, own) in enumerate(triples) if mine == shared != own and mine and own]
    if len(pointers) != 1 or _words(tensor)[pointers[0]] % 8:
        return None
    counter = (ctypes.c_uint32 * _COUNTER_WORDS).from_address(_words(tensor)[pointers[0]])
    before = list(counter)
    with torch.inference_mode(False):
        for _ in range(3):
            alias.add_(1)
    after = list(counter)
    counted = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if len(counted) != 1 or after[counted[0]] != tensor._version or tensor._version < before[counted[0]] + 3:
        return None
    return Place(pointers[0], counted[0])


def _words(tensor: torch.Tensor) -> list[int]:
    return words_at(tensor._cdata, _IMPL_WORDS)


PLACE = find_place()
