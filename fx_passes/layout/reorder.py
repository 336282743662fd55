"""Copy a tensor into memory of another layout."""

from __future__ import annotations

import torch

from fx_passes.candidates.candidates import Operand, Result, Weights
from fx_passes.candidates.conversions import conversion, in_steps
from fx_passes.candidates.layouts import Layout, OpaqueDesc, Quantized, in_memory, strided
from zendnn_cffi.primitives.memory import Memory
from zendnn_cffi.primitives.primitive import Primitive


def reorder_into(
    source: torch.Tensor | Memory, target: torch.Tensor, desc: Layout, *, numbers: Quantized | None = None
) -> None:
    """Write source (a tensor, in whatever strides, or a memory) into target's bytes in the layout desc.

    The shapes may differ in ones: a tensor is reshaped to desc.dims first. Where the library does not have the dtype
    (a boolean mask), desc is plain, and PyTorch copies; dimensions of stride 0 get what source has at their start.
    numbers  what a memory of integers stands for; None: for themselves
    """
    if isinstance(desc, OpaqueDesc):
        assert isinstance(source, torch.Tensor)
        sizes = [1 if stride == 0 else size for size, stride in zip(desc.dims, desc.strides, strict=True)]
        first = source.detach().reshape(desc.dims)[tuple(slice(size) for size in sizes)]
        target[: desc.size_bytes].view(desc.dtype).as_strided(sizes, desc.strides).copy_(first)
        return
    if isinstance(source, torch.Tensor):
        plain = source.detach().reshape(desc.dims)
        plain = plain.float() if plain.dtype == torch.float16 and desc.dtype != torch.float16 else plain
        memory = Memory(strided(tuple(plain.shape), plain.dtype, tuple(plain.stride())), plain)
    else:
        memory = source
    want = desc if memory.desc.dims == desc.dims else desc.reshape(memory.desc.dims)
    *first, last = in_steps(numbers or memory.desc, want)
    for have, between in first:
        middle = torch.empty(between.size_bytes, dtype=torch.uint8, device="cpu")
        _convert(memory, have, middle, between)
        memory = Memory(in_memory(between), middle)
    _convert(memory, last[0], target, last[1])


def _convert(memory: Memory, have: Layout, target: torch.Tensor, want: Layout) -> None:
    template = conversion(have, want)
    memories: dict[int, Memory] = {}
    for arg, argument in template.args.items():
        match argument:
            case Operand():
                memories[arg] = memory
            case Result(seen):
                assert seen is not None
                memories[arg] = Memory(seen, target.data_ptr())
            case Weights(_, plain_weights, seen):
                memories[arg] = Memory(seen, plain_weights)
    Primitive(template.pd).execute(memories)
