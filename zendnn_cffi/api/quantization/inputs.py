"""Calibration data as calls: positional and keyword arguments."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zendnn_cffi.api.quantization.layers import Call

_MOST_KEPT, _MOST_KEPT_BYTES = 64, 2**28


def calls_of(calibration: Iterable[Any]) -> Iterator[Call]:
    """Each input as positional and keyword arguments."""
    if isinstance(calibration, torch.Tensor | str | Mapping) or not isinstance(calibration, Iterable):
        kind = type(calibration).__name__
        raise TypeError(f"calibration must be an iterable of inputs, such as a list or a DataLoader, got {kind}")
    for each in calibration:
        if isinstance(each, torch.Tensor):
            yield (each,), {}
        elif isinstance(each, Mapping):
            yield (), dict(each)
        elif isinstance(each, Sequence) and not isinstance(each, str):
            yield tuple(each), {}
        else:
            raise TypeError(f"calibration inputs are tensors, sequences or mappings, got {type(each).__name__}")


def kept_calls(calls: Iterator[Call]) -> list[Call]:
    """The first 64 calls, or so many as take 256 MB, one at least: corrections and errors need them again."""
    kept: list[Call] = []
    size_bytes = 0
    for call in itertools.islice(calls, _MOST_KEPT):
        kept.append(call)
        size_bytes += sum(x.nbytes for x in pytree.tree_leaves(call) if isinstance(x, torch.Tensor))
        if size_bytes >= _MOST_KEPT_BYTES:
            break
    return kept
