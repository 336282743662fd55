"""Which sizes torch.export leaves free, and how long it may follow them through a forward.

    ALL      every size that the model does not depend on; where that takes too long,
    BATCH    the first size of each tensor alone; where that takes too long as well,
    NOTHING  all sizes are the example's

An arithmetic of sizes, as in windows over an image, makes each operation after it slower to follow. The batch takes no
part in it. What is found is kept with the graph, so that making it again does not spend the time again.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fx_passes.trace.time_limit import DispatchLimit, Limit


class Free(enum.IntEnum):
    """Which sizes of the arguments may be free."""

    NOTHING, BATCH, ALL = range(3)


SECONDS = 4.0  # of CPU time, for a model with all that is tried of it, where sizes become long terms
SHRINKS = 60.0  # seconds later, after which terms have to be shorter: no model is followed for minutes
LONGEST = 20.0  # symbols and operations, of tensors with free sizes: BERT 1.9, Deformable DETR 19, Swin 31 and more
_FIXED = {
    Free.NOTHING: "Sizes are those of the example",
    Free.BATCH: "Sizes but the first of each argument are those of the example",
}


class FreeSizes(NamedTuple):
    """Which sizes may be free, and why not all.

    others_by_symbols  whether symbolic tracing gives a graph for others, which sees less of the model
    has_one_graph      whether there can be no other graph: parameters will be released
    """

    free: Free = Free.ALL
    because: str = ""
    others_by_symbols: bool = False
    has_one_graph: bool = False

    @property
    def note(self) -> str:
        """What explain() says of it; "" where all may be free."""
        said = _FIXED.get(self.free)
        others = "have a graph that sees less" if self.others_by_symbols else "run as plain PyTorch"
        return "" if said is None else f"{said} ({self.because}): others {others}."

    def by_example(self, because: str) -> FreeSizes:
        """The batch at the most, as a graph for all sizes is there that sees less of the model."""
        if self.free is Free.NOTHING:
            return self
        return self._replace(free=Free.BATCH, because=because, others_by_symbols=True)

    def fewer(self) -> FreeSizes:
        """The next fewer, after following these took too long."""
        return self._replace(free=Free(self.free - 1), because="following all that could be free takes too long")


ALL = FreeSizes()
ASKED_FOR_NONE = FreeSizes(Free.NOTHING, "dynamic=False")


class TimeLeft:
    """The CPU time that following free sizes may still take, for a model and what is tried of its submodules.

    seconds, longest  when it is over, as Limit has it; None: SECONDS and LONGEST
    """

    def __init__(self, seconds: float | None = None, longest: float | None = None) -> None:
        self._left = dict.fromkeys((Free.ALL, Free.BATCH), SECONDS if seconds is None else seconds)
        self._longest = LONGEST if longest is None else longest

    @contextlib.contextmanager
    def limit(self, free: Free, strict: bool = False) -> Iterator[None]:
        """Raise TooLong in this block once no time is left for so many free sizes; there is no limit for NOTHING.

        strict  whether torch.export reads Python's code there, and does not run it
        """
        if free is Free.NOTHING:
            yield
            return
        limit = (DispatchLimit if strict else Limit)(self._left[free], self._longest, SHRINKS)
        try:
            with limit:
                yield
        finally:
            self._left[free] = min(self._left[free], limit.left)


class Attempt(NamedTuple):
    """A way to export.

    what   is free, in words
    mode   holds meanwhile
    of     what dynamic_shapes has for an argument; None: no size is free
    """

    what: str
    free: Free
    mode: AbstractContextManager[Any]
    of: Callable[[Any], Any] | None = None

    def shapes(self, root: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Any] | None:
        """dynamic_shapes by argument name: those of *args as a tuple, those of **kwargs as a mapping."""
        if self.of is None:
            return None
        args, kwargs = pytree.tree_map(self.of, example)
        return dict(inspect.signature(root.forward).bind(*args, **kwargs).arguments)


def attempts() -> Iterator[Attempt]:
    """Ways to export, the best first."""
    yield Attempt("sizes and batch", Free.ALL, _size_oblivious(), _free_sizes_and_batch)
    yield Attempt("sizes above 1", Free.ALL, contextlib.nullcontext(), _free_sizes)
    yield Attempt("the batch", Free.BATCH, _size_oblivious(), _free_batch)
    yield Attempt("no size", Free.NOTHING, contextlib.nullcontext())


def _size_oblivious() -> AbstractContextManager[Any]:
    """Let a size be free though it is 1 in the example: torch.export takes 0 and 1 for constants otherwise."""
    from torch.fx.experimental import _config as config

    # torch before 2.7 has no such setting; the sizes are constants there.
    known = hasattr(config, "backed_size_oblivious")
    return config.patch(backed_size_oblivious=True) if known else contextlib.nullcontext()


def _free_sizes(value: Any) -> Any:
    """Leave every size of a tensor to torch.export to find out, but for 0 and 1: those mean something."""
    if not isinstance(value, torch.Tensor):
        return None
    return {dim: torch.export.Dim.AUTO for dim, size in enumerate(value.shape) if size > 1}


def _free_batch(value: Any) -> Any:
    """Leave the first size of a tensor free, whatever it is."""
    return {0: torch.export.Dim.AUTO} if isinstance(value, torch.Tensor) and value.ndim else None


def _free_sizes_and_batch(value: Any) -> Any:
    """The same with the first size free as well."""
    free, batch = _free_sizes(value), _free_batch(value)
    return free if batch is None else {**free, **batch}
