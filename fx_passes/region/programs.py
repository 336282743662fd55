"""What a region keeps between calls: its programs by signature, and where the parameters lie that these read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fx_passes.candidates.specs import TensorSpec
from fx_passes.region.lowered import LoweredRegion
from zendnn_cffi.runtime.arenas import clock
from zendnn_cffi.runtime.locations import Addresses

MAX_PROGRAMS = 32
FEWEST_PROGRAMS = 8  # that many stay, however large
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
    are_large    asked whether programs keep too many bytes: then some go, though they are few
    """

    def __init__(self, are_large: Callable[[], bool]) -> None:
        self.found: dict[Signature, LoweredRegion | None] = {}
        self.provisional: dict[Signature, list[TensorSpec]] = {}
        self._reasons: dict[Signature, str] = {}
        self._noted: dict[Signature, int] = {}  # when one was put, or said to be used; programs know of later uses
        self._are_large = are_large

    @property
    def are_full(self) -> bool:
        """Whether the next one takes another's place."""
        return len(self.found) >= MAX_PROGRAMS

    def put(self, signature: Signature, lowered: LoweredRegion | None, reason: str) -> None:
        """Remember what a signature was lowered to, None with the reason, and make room."""
        old = self.found.pop(signature, None)
        if old is not None:
            old.close()
        self._reasons.pop(signature, None)
        if lowered is None:
            self._reasons[signature] = reason
        while len(self.found) >= MAX_PROGRAMS:
            self._drop_oldest(self.found)
        self.found[signature] = lowered
        self._noted[signature] = next(clock)
        while len(self.found) > FEWEST_PROGRAMS and self._are_large():
            if not (programs := [key for key, kept in self.found.items() if kept is not None and key != signature]):
                break  # what runs plain PyTorch packs nothing
            self._drop_oldest(programs)

    def touch(self, signature: Signature) -> None:
        """It was used."""
        if signature in self.found:
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
        self.provisional.clear()
        self._reasons.clear()


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
