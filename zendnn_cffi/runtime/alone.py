"""Small primitives, which the calling thread computes alone: sharing them with other threads takes longer than they do.

A loop that two threads of a Zen 4 EPYC share takes 1 to 2.5 us beside its work, as the host has it. Sums of 32 numbers
take one thread 0.75 us and two 1.7 to 3.2, sums of 32 x 384 numbers 2.0 and 2.5 to 4.2. So one thread computes a run of
small primitives, and the next larger one has all of them again. Results are the same bits: these kinds compute each
number, or each row, by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

from zendnn_cffi.engine.library import load
from zendnn_cffi.engine.openmp import computing_with, functions_of_count
from zendnn_cffi.primitives.attributes import ARG_SCRATCHPAD
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc

Bound = tuple[Callable[..., Any], tuple[Any, ...]]

# Kinds that share their work anew in each run, by the number of threads of then; others do as they were made for. With
# the bytes, read and written, up to which one thread gains, less two changes of the number.
_SMALL_BYTES = {"binary": 96 << 10, "eltwise": 96 << 10, "reduction": 96 << 10, "layer_normalization": 32 << 10}
_SMALL_COSTLY_BYTES = 16 << 10  # with a function that is not cheap
_CHEAP = ("relu", "linear", "clip", "clip_v2", "abs", "square", "round", "hardswish", "sqrt")  # element-wise functions


def is_small(pd: PrimitiveDesc, descs: Mapping[int, MemoryDesc]) -> bool:
    """Whether one thread computes the primitive no slower than several; descs: of its arguments, by argument id."""
    if pd.op is None or pd.op.kind not in _SMALL_BYTES:
        return False
    functions = [entry[1] for entry in pd.attr.post_ops if entry[0] == "eltwise"]
    if pd.op.kind == "eltwise":
        functions.append(pd.op.params["kind"])
    is_cheap = all(function in _CHEAP for function in functions)
    most = _SMALL_BYTES[pd.op.kind] if is_cheap else _SMALL_COSTLY_BYTES
    return sum(desc.used_bytes for arg, desc in descs.items() if arg != ARG_SCRATCHPAD) <= most


@lru_cache(maxsize=1)
def _count() -> tuple[Callable[[int], None], Callable[[], int]]:
    """The functions of OpenMP that set and tell the calling thread's number of threads: C's, as they take 0.2 us."""
    setter, getter = functions_of_count()
    cast = load().ffi.cast
    return cast("void (*)(int)", setter), cast("int (*)(void)", getter)


class Alone:
    """Calls bound to a context, and the same with changes of the number of threads around those that are small.

    whole    the calls
    small    which of them are small
    threads  how many threads compute what is not small; a thread that has another number makes the calls as they are
    """

    def __init__(self, calls: Sequence[Bound] = (), small: Sequence[bool] = ()) -> None:
        self.whole, self.small = calls, small
        self._set, self._get = _count()
        self.threads = self._get()
        self._paced = self.whole
        if self.threads > 1 and any(small):
            self._paced = self._with_changes()

    def _with_changes(self) -> list[Bound]:
        paced: list[Bound] = []
        alone = False
        for call, is_one in zip(self.whole, self.small, strict=True):
            if is_one != alone:
                paced.append((self._set, (1 if is_one else self.threads,)))
                alone = is_one
            paced.append(call)
        if alone:
            paced.append((self._set, (self.threads,)))
        return paced

    def sequence(self) -> Sequence[Bound]:
        """What to call in this thread. `restore` follows where that ends before its end."""
        return self._paced if self._paced is not self.whole and self._get() == self.threads else self.whole

    def restore(self, sequence: Sequence[Bound]) -> None:
        """Give the calling thread all its threads again, where the sequence may have taken them."""
        if sequence is not self.whole:
            self._set(self.threads)

    def with_its_threads(self, is_small: bool) -> AbstractContextManager[None]:
        """What is called in here by itself has the threads that it has in a run."""
        return computing_with(1) if is_small and self._get() == self.threads else nullcontext()
