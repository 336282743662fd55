"""Primitives by name in torch.profiler traces.

Each call is one event, "zendnn::convolution brgconv:avx512_core": the name says what runs, not where, so that
key_averages() has a row per primitive and implementation. With record_shapes=True the event also has the shapes of
its operands and, under "node", the node of the graph.

Whoever runs calls looks at `profiler._is_profiler_enabled` once per run (11 ns) and takes another loop where it is set;
PyTorch keeps that flag for quick checks from Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd import profiler

from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SCRATCHPAD
from zendnn_cffi.values import dataclass

if TYPE_CHECKING:
    from zendnn_cffi.primitives.memory_desc import MemoryDesc

__all__ = ["Label", "primitive_label", "profiler", "shaped"]


@dataclass(frozen=True)
class Label:
    """What a trace shows of one call.

    name    the event's name, by which key_averages() groups
    inputs  tensors of the operands' shapes and dtypes, without memory of their own
    node    where in the graph it is, "" for a call outside of one
    """

    name: str
    inputs: tuple[torch.Tensor, ...]
    node: str = ""

    def event(self) -> AbstractContextManager[Any]:
        """Return the context to make the call in; a new one for each."""
        return _event(self.name, self.inputs, {"node": self.node} if self.node else {})


class _Described(Protocol):
    """A primitive descriptor."""

    @property
    def op(self) -> Any: ...

    @property
    def implementation(self) -> str: ...


def primitive_label(pd: _Described, args: Mapping[int, MemoryDesc], node: str = "") -> Label:
    """Return the label of a primitive; args: how each argument lies, by argument id."""
    read = [args[arg] for arg in sorted(args) if arg not in (ARG_DST, ARG_SCRATCHPAD)]
    inputs = tuple(shaped(desc.dims, desc.dtype or torch.uint8) for desc in read)
    return Label(f"zendnn::{pd.op.kind if pd.op else 'primitive'} {pd.implementation}", inputs, node)


def shaped(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of this shape and dtype with one element of memory."""
    with torch.inference_mode(False):
        return torch.empty(1, dtype=dtype, device="cpu").expand(tuple(shape))


def _plain_event(name: str, inputs: Sequence[torch.Tensor], named: dict[str, str]) -> AbstractContextManager[Any]:
    return profiler.record_function(name)


def _find_event() -> Any:
    """PyTorch's quick context (0.7 us; record_function takes 7), where this version has it with shapes and names."""
    try:
        quick = torch._C._profiler._RecordFunctionFast
        quick("zendnn", (), {"node": ""})
    except (AttributeError, TypeError):
        return _plain_event
    return quick


_event = _find_event()
