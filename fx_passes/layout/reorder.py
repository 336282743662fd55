"""Copy a tensor into memory of another layout."""

from __future__ import annotations

import torch

from fx_passes.lower.layouts import strided
from zendnn_cffi.attributes import ARG_DST, ARG_SRC
from zendnn_cffi.memory import Memory, MemoryDesc
from zendnn_cffi.primitive import Primitive, PrimitiveDesc


def reorder_into(source: torch.Tensor | Memory, target: torch.Tensor, desc: MemoryDesc) -> None:
    """Write source (a tensor, in whatever strides, or a memory) into target's bytes in the layout desc.

    The shapes may differ in ones: a tensor is reshaped to desc.dims first.
    """
    if isinstance(source, torch.Tensor):
        plain = source.detach().reshape(desc.dims)
        memory = Memory(strided(tuple(plain.shape), plain.dtype, tuple(plain.stride())), plain)
    else:
        memory = source
    want = desc if memory.desc.dims == desc.dims else desc.reshape(memory.desc.dims)
    primitive = Primitive(PrimitiveDesc.reorder(memory.desc, want))
    primitive.execute({ARG_SRC: memory, ARG_DST: Memory(want, target.data_ptr())})
