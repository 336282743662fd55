"""What a region keeps between calls: its programs by signature, and where the parameters lie that these read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fx_passes.candidates.specs import TensorSpec
from fx_passes.region.lowered import LoweredRegion
from zendnn_cffi.runtime.arenas import clock
from zendnn_cffi.runtime.locations import Addresses

MAX_PROGRAMS = 128  # of a region
MAX_SIGNATURES = 1024  # of a region, with those for which plain PyTorch runs
SURE_PROGRAMS = 32  # so many of a region stay, however many nodes those of all regions have
MOST_NODES = 16_384  # of the programs of all regions, 17 to 43 KB each; a BERT of 6 layers has 121, ResNet-18 31
FEWEST_PROGRAMS = 8  # that many stay, however much they pack
# threads, or (threads, what each mask says); then (shape, dtype, strides) of each input. Of one that grows (caches,
# their masks) all but the size that does.
Signature = tuple[Any, ...]


def threads_of(signature: Signature) -> int:
    """The number of threads that a signature is for."""
    threads: int = signature[0][0] if isinstance(signature[0], tuple) else signature[0]
    return threads


class Programs:
    """Programs by signature; where there are too many, the least recently used signature goes first.

    found        what a signature was lowered to; None where plain PyTorch runs
    provisional  signatures of which not all was measured, with what they were called with
    are_large    asked whether packed weights take too many bytes: then some go, though they are few
    are_full     whether the latest program took another's place: the next one is likely to
    """

    def __init__(self, are_large: Callable[[], bool]) -> None:
        self.found: dict[Signature, LoweredRegion | None] = {}
        self.provisional: dict[Signature, list[TensorSpec]] = {}
        self._reasons: dict[Signature, str] = {}
        self._noted: dict[Signature, int] = {}  # when one was put, or said to be used; programs know of later uses
        self._are_large = are_large
        self.are_full = False
        _all.add(self)

    def put(self, signature: Signature, lowered: LoweredRegion | None, reason: str) -> None:
        """Remember what a signature was lowered to, None with the reason, and make room."""
        old = self.found.pop(signature, None)
        if old is not None:
            old.close()
        self._reasons.pop(signature, None)
        if lowered is None:
            self._reasons[signature] = reason
        if old is None:
            self.are_full = False
        self.found[signature] = lowered
        self._noted[signature] = next(clock)
        while len(self.found) > MAX_SIGNATURES:
            self._drop_oldest(key for key in self.found if key != signature)
        while self._have_programs(MAX_PROGRAMS) or (self._have_programs(SURE_PROGRAMS) and _nodes() > MOST_NODES):
            self._drop_oldest(self._others(signature))
        while self._have_programs(FEWEST_PROGRAMS) and self._are_large():
            self._drop_oldest(self._others(signature))

    @property
    def nodes(self) -> int:
        """Of all programs."""
        return sum(len(lowered.nodes) for lowered in list(self.found.values()) if lowered is not None)

    def _have_programs(self, more_than: int) -> bool:
        return sum(lowered is not None for lowered in self.found.values()) > more_than

    def _others(self, signature: Signature) -> list[Signature]:
        """All that have a program but this one."""
        return [key for key, lowered in self.found.items() if lowered is not None and key != signature]

    def touch(self, signature: Signature) -> None:
        """It was used."""
        if signature in self._noted:
            self._noted[signature] = next(clock)

    def _last_used(self, signature: Signature) -> int:
        lowered = self.found[signature]
        return max(self._noted[signature], lowered.program.last_used if lowered else 0)

    def _drop_oldest(self, signatures: Iterable[Signature]) -> None:
        """Forget the least recently used of these, with a program or without one."""
        old = min(signatures, key=self._last_used)
        lowered = self.found.pop(old)
        self._reasons.pop(old, None)
        del self._noted[old]
        self.are_full = True
        if lowered is not None:
            lowered.close()

    def reason(self, signature: Signature) -> str:
        """Why plain PyTorch runs for a signature."""
        return self._reasons.get(signature, "")

    def clear(self) -> None:
        """Forget all of them."""
        for lowered in self.found.values():
            if lowered is not None:
                lowered.close()
        self.found.clear()
        self._noted.clear()
        self.are_full = False
        self.provisional.clear()
        self._reasons.clear()


_all: weakref.WeakSet[Programs] = weakref.WeakSet()


def _nodes() -> int:
    """Of the programs of all regions."""
    return sum(programs.nodes for programs in list(_all))


class Borrowed:
    """Parameters that programs read where they lie: share_memory() of the model moves them."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._addresses: list[Addresses] = []

    def note(self, constants: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        """A program reads these constants, some of which are parameters themselves."""
        own = {t.untyped_storage()._cdata for t in parameters}
        storages = (t.untyped_storage() for t in constants)
        new = {s._cdata: s for s in storages if s._cdata in own and s._cdata not in self._storages}
        if new:
            self._storages |= new
            self._addresses = [*self._addresses, Addresses(new.values())]

    def have_moved(self) -> bool:
        """Whether one lies elsewhere now."""
        return any(not addresses.unchanged() for addresses in self._addresses) if self._addresses else False

    def clear(self) -> None:
        """No program reads any."""
        self._storages, self._addresses = {}, []
