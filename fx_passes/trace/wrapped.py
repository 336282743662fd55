"""Functions that torch.fx.wrap hides from symbolic tracing: it follows them where an example answers what they ask."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch.fx import _symbolic_trace as fx_tracing

from fx_passes.trace.theirs import is_theirs

Spaces = Sequence[dict[str, Any]]  # globals of functions that a forward may call


def has_wrapped(spaces: Spaces) -> bool:
    """Whether one of them has such a function."""
    return bool(_wrapped(spaces))


@contextlib.contextmanager
def wrapped_followed(spaces: Spaces) -> Iterator[None]:
    """Let symbolic tracing follow them, while this lasts."""
    hidden = fx_tracing._wrapped_fns_to_patch
    taken = {key: hidden.pop(key) for key in _wrapped(spaces)}
    try:
        yield
    finally:
        hidden.update(taken)


def _wrapped(spaces: Spaces) -> list[tuple[int, str]]:
    """What torch.fx knows them by: functions of PyTorch's and Python's stay hidden."""
    own = set(map(id, spaces))
    return [
        key
        for key, space in fx_tracing._wrapped_fns_to_patch.items()
        if id(space) in own
        and isinstance(function := space.get(key[1]), types.FunctionType)
        and is_theirs(function.__module__ or "")
    ]
