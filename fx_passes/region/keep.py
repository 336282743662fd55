"""What a region was lowered to, for a file; and programs that a file gives to a region."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from fx_passes.candidates.specs import TensorSpec
from fx_passes.region.lowered import LoweredRegion
from fx_passes.region.programs import Signature, threads_of
from zendnn_cffi.values import dataclass


@dataclass(frozen=True)
class ToKeep:
    """What a region was lowered to for one signature.

    threads  PyTorch's, that it is for
    kinds    what each mask says
    lowered  None where plain PyTorch runs, with the reason
    """

    threads: int
    inputs: tuple[TensorSpec, ...]
    kinds: tuple[str, ...]
    lowered: LoweredRegion | None
    reason: str


class SavedFor(NamedTuple):
    """A signature, as ToKeep has it."""

    threads: int
    inputs: tuple[TensorSpec, ...]
    kinds: tuple[str, ...]


class Known(Protocol):
    """Programs that a region has for some signatures without choosing anything."""

    def __call__(
        self, region: Any, inputs: Sequence[torch.Tensor], kinds: tuple[str, ...], keep: bool
    ) -> LoweredRegion | None:
        """Return the program for these inputs, None where there is none; NotLowered where plain PyTorch runs."""

    def wants(self, region: Any) -> bool:
        """Whether to note() what is chosen for the region."""

    def note(self, region: Any, inputs: Sequence[torch.Tensor], kinds: tuple[str, ...], lowered: LoweredRegion) -> None:
        """Be told what was chosen for good; `lowered` holds what it was built from."""


class Lowerable(Protocol):
    """A region, as far as it is lowered again for a file."""

    @property
    def lowered(self) -> dict[Signature, LoweredRegion | None]:
        """What was lowered, by signature; None where plain PyTorch runs."""

    @property
    def saved_for(self) -> Sequence[SavedFor]:
        """What the file that it comes from had programs for."""

    def key_of(self, number: int, value: TensorSpec) -> tuple[Any, ...]:
        """What of an input decides which program runs."""

    def kinds_of(self, signature: Signature) -> tuple[str, ...]:
        """What each mask says."""

    def lower_to_keep(self, inputs: Sequence[torch.Tensor], kinds: tuple[str, ...]) -> tuple[LoweredRegion | None, str]:
        """Return a program that holds what it was built from, or None with the reason."""


def lowered_to_keep(region: Lowerable, threads: Sequence[int] | None = None) -> list[ToKeep]:
    """Lower again for each signature there is, with everything measured; return what programs are built from.

    Those of the file that the region comes from are among them, whether it was called with such inputs or not.
    threads  for which numbers of them (None: those of the signatures)
    """
    from fx_passes.search.noise import made_up  # a loaded module does without

    wanted: dict[Any, tuple[int, Sequence[TensorSpec], tuple[str, ...]]] = {}
    for signature, lowered in region.lowered.items():
        kinds = region.kinds_of(signature)
        given: Sequence[TensorSpec] | None = _specs_of(signature) if lowered is None else lowered.inputs
        if given is not None:  # else sizes that grow, where plain PyTorch runs
            for count in threads or (threads_of(signature),):
                wanted.setdefault((count, kinds, signature[1:]), (count, given, kinds))
    for (_, kinds, key), saved in saved_keys(region).items():
        for count in threads or (saved.threads,):
            wanted.setdefault((count, kinds, key), (count, saved.inputs, kinds))
    kept = []
    for count, specs, kinds in wanted.values():
        with _thread_count(count):
            again, reason = region.lower_to_keep(list(map(made_up, specs)), kinds)
        kept.append(ToKeep(count, tuple(specs), kinds, again, reason))
    return kept


def saved_keys(region: Lowerable) -> dict[tuple[int, tuple[str, ...], tuple[Any, ...]], SavedFor]:
    """What the file had programs for, by threads, what each mask says, and the rest of the signature."""
    return {
        (saved.threads, saved.kinds, tuple(map(region.key_of, range(len(saved.inputs)), saved.inputs))): saved
        for saved in region.saved_for
    }


def _specs_of(signature: Signature) -> list[TensorSpec] | None:
    """What inputs the signature is of; None where sizes are left open."""
    parts = signature[1:]
    if any("n" in shape for shape, _, _ in parts):
        return None
    return [TensorSpec(tuple(shape), dtype, tuple(strides)) for shape, dtype, strides in parts]


@contextmanager
def _thread_count(threads: int) -> Iterator[None]:
    """So many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
