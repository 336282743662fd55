"""Copy a tensor into memory of another layout."""

from __future__ import annotations

import torch

from fx_passes.candidates.layouts import OpaqueDesc, strided
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC
from zendnn_cffi.primitives.memory import Memory, MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive, PrimitiveDesc


def reorder_into(source: torch.Tensor | Memory, target: torch.Tensor, desc: MemoryDesc | OpaqueDesc) -> None:
    """Write source (a tensor, in whatever strides, or a memory) into target's bytes in the layout desc.

    The shapes may differ in ones: a tensor is reshaped to desc.dims first. Where the library does not have the dtype
    (a boolean mask), desc is plain, and PyTorch copies; dimensions of stride 0 get what source has at their start.
    """
    if isinstance(desc, OpaqueDesc):
        assert isinstance(source, torch.Tensor)
        sizes = [1 if stride == 0 else size for size, stride in zip(desc.dims, desc.strides, strict=True)]
        first = source.detach().reshape(desc.dims)[tuple(slice(size) for size in sizes)]
        target[: desc.size_bytes].view(desc.dtype).as_strided(sizes, desc.strides).copy_(first)
        return
    if isinstance(source, torch.Tensor):
        plain = source.detach().reshape(desc.dims)
        memory = Memory(strided(tuple(plain.shape), plain.dtype, tuple(plain.stride())), plain)
    else:
        memory = source
    want = desc if memory.desc.dims == desc.dims else desc.reshape(memory.desc.dims)
    primitive = Primitive(PrimitiveDesc.reorder(memory.desc, want))
    primitive.execute({ARG_SRC: memory, ARG_DST: Memory(want, target.data_ptr())})
