"""Calls of a copied model's own forward: what they write to is not the model's that was copied.

    def forward(self, x, mask=None):
        if mask is not None:
            self.masked.add_(1)          no graph of fast(x) has this write, and fast(x, mask) has no graph at first

What graphs write to is known, and has memory of its own. The first call of each kind by plain PyTorch tells the rest:
operators say by their schemas what they write to, which moves before they do. Its further calls are not looked at.
Arguments stay where they are, also where that is memory of the model's: whoever gives them reads what is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fx_passes.changes import in_functional_call
from fx_passes.trace.call_kind import ways_of
from fx_passes.trace.traced import Traced
from zendnn_cffi.locks import makes_elsewhere
from zendnn_cffi.primitives.ambient import is_watched
from zendnn_cffi.runtime.uncompiled import nothing_compiled

_MOST_KINDS = 256


class FirstWrites:
    """Runs forwards of a tree and of its submodules.

    root    the tree
    shared  addresses of the memory that it has of the model's that was copied
    """

    def __init__(self, root: nn.Module, shared: frozenset[int]) -> None:
        self._root, self._shared = root, shared
        self._seen = set[Any]()
        self._plainly_seen = set[Any]()  # what is in _seen, by what takes less time to find out

    def remember(self, traced: Traced) -> None:
        """What calls write to that are of the kind of its example is known: it was looked at."""
        if traced.kind is not None:
            self._seen.add((id(traced.root), traced.kind.ways))

    def run(self, traced: Traced, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a forward of what was traced: the tree, or a module in it."""
        plainly = _plainly(traced.root, args, kwargs)
        if plainly in self._plainly_seen:
            return forward(*args, **kwargs)
        kind = id(traced.root), ways_of(traced.parameters, args, kwargs)
        here = *kind, _enabled(args, kwargs)
        is_known = kind in self._seen or here in self._seen
        if is_known and plainly is not None and len(self._plainly_seen) < _MOST_KINDS:
            self._plainly_seen.add(plainly)
        if is_known or len(self._seen) >= _MOST_KINDS or is_watched() or in_functional_call() or makes_elsewhere():
            return forward(*args, **kwargs)  # the next one is looked at, where this one would wait for another thread
        from fx_passes.trace.aside import Moving, storage_of  # a module from a file does without

        given = map(storage_of, pytree.tree_leaves((args, kwargs)))
        with nothing_compiled(), Moving(self._root, self._shared.difference(given)) as moving:
            result = forward(*args, **kwargs)
        self._seen.add(here)
        return pytree.tree_map(moving.now, result) if moving.has_moved else result


def _plainly(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The kind and state of a call whose arguments are tensors, flags and texts; None for others, which take 40 us."""
    found: list[Any] = [id(root), len(args), *kwargs, *_state()]
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append((type(value), value.dtype, value.ndim, value.requires_grad))
        elif value is None or type(value) in (bool, str):
            found.append((value,))
        else:
            return None
    return tuple(found)


def _enabled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, ...]:
    """What else they may ask of PyTorch."""
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    asks = any(tensor.requires_grad for tensor in tensors)
    return asks, *_state()


def _state() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
