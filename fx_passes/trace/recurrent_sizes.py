"""While torch.export follows a forward, recurrent networks tell sizes alone: their sequences stay of any length.

PyTorch follows an LSTM, GRU or RNN step by step. The length is a constant then, though the graph has one call for all.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from zendnn_cffi.locks import new_lock

aten = torch.ops.aten
_STACKS: tuple[Any, ...] = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
_KEYS = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
_tracing: list[int] = []  # threads, one entry for each time that they entered
_own: dict[Any, dict[Any, Any]] = {}  # an operator's kernels, while others stand for them
_lock = new_lock()


@contextlib.contextmanager
def lengths_free() -> Iterator[None]:
    """Let operators of recurrent networks give results of the right sizes, and no numbers, to this thread meanwhile."""
    with _lock:
        if not _tracing:
            for stack in _STACKS:
                _own[stack] = dict(stack.py_kernels)
                stack.py_kernels.update({key: _telling(stack, own) for key, own in _own[stack].items() if key in _KEYS})
                stack._dispatch_cache.clear()
        _tracing.append(threading.get_ident())
    try:
        yield
    finally:
        with _lock:
            _tracing.remove(threading.get_ident())
            if not _tracing:
                for stack, own in _own.items():
                    stack.py_kernels.update(own)
                    stack._dispatch_cache.clear()
                _own.clear()


def _telling(stack: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    has_cells = stack is aten.lstm.input

    def results(src: Tensor, hx: Any, *others: Any) -> tuple[Tensor, ...]:
        if threading.get_ident() not in _tracing:
            found: tuple[Tensor, ...] = own(src, hx, *others)
            return found
        bidirectional, batch_first = others[-2:]
        states = hx if has_cells else (hx,)
        steps = src.transpose(0, 1) if batch_first else src
        result = src.new_empty(*steps.shape[:2], states[0].shape[-1] * (2 if bidirectional else 1))
        last = (src.new_empty(state.shape) for state in states)
        return result.transpose(0, 1) if batch_first else result, *last

    return results
