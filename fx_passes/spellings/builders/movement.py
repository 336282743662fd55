"""Moving data, sizes, and what evaluation mode does not do."""

from __future__ import annotations

from typing import Any

from torch import fx

from fx_passes import ops
from fx_passes.spellings.builders.base import Alias, Built, Call, is_number, static


def concat(tensors: Any, dim: Any = 0, *, out: Any = None, axis: Any = None) -> Built:
    dim = dim if axis is None else axis
    if out is not None or not isinstance(tensors, list | tuple) or not isinstance(dim, int):
        return None
    return Call(ops.concat, (tuple(tensors), dim))


def flatten(input: Any, start_dim: Any = 0, end_dim: Any = -1) -> Built:
    return Call(ops.flatten, (input, start_dim, end_dim)) if static(start_dim, end_dim) else None


def unflatten(input: Any, dim: Any, sizes: Any) -> Built:
    """Tensor.unflatten, torch.unflatten; not with names for dimensions."""
    if type(dim) is not int or not isinstance(sizes, list | tuple):
        return None
    if not sizes or any(not isinstance(size, int | fx.Node) for size in sizes):
        return None
    return Call(ops.unflatten, (input, dim, tuple(sizes)))


def reshape(input: Any, *shape: Any) -> Built:
    """Tensor.view, Tensor.reshape, torch.reshape; not view(dtype)."""
    if len(shape) == 1 and isinstance(shape[0], list | tuple):
        shape = tuple(shape[0])
    if not shape or any(not isinstance(s, int | fx.Node) for s in shape):
        return None
    if len(shape) == 1 and isinstance(shape[0], fx.Node):
        return None  # could be a whole torch.Size
    return Call(ops.reshape, (input, tuple(shape)))


def reshape_as(input: Any, other: Any) -> Built:
    """Tensor.reshape_as, Tensor.view_as."""
    return Call(ops.reshape_as, (input, other)) if isinstance(other, fx.Node) else None


def permute(input: Any, *dims: Any) -> Built:
    if len(dims) == 1 and isinstance(dims[0], list | tuple):
        dims = tuple(dims[0])
    return Call(ops.permute, (input, dims)) if dims and static(dims) else None


def transpose(input: Any, dim0: Any, dim1: Any) -> Built:
    return Call(ops.transpose, (input, dim0, dim1)) if static(dim0, dim1) else None


def chunk(input: Any, chunks: Any, dim: Any = 0) -> Built:
    return Call(ops.chunk, (input, chunks, dim)) if static(chunks, dim) else None


def split(tensor: Any, split_size_or_sections: Any, dim: Any = 0) -> Built:
    if not static(split_size_or_sections, dim):
        return None
    return Call(ops.split, (tensor, split_size_or_sections, dim))


def method_split(input: Any, split_size: Any, dim: Any = 0) -> Built:
    return split(input, split_size, dim)


def pad(input: Any, pad: Any, mode: Any = "constant", value: Any = None) -> Built:
    """A constant border, perhaps of sizes that are known once shapes are."""
    value = 0.0 if value is None else value
    if mode != "constant" or not isinstance(pad, list | tuple) or not is_number(value):
        return None
    if any(not isinstance(size, int | fx.Node) for size in pad):
        return None
    return Call(ops.pad, (input, tuple(pad), value))


def index(input: Any, item: Any) -> Built:
    """Indexing a tensor with what makes a view of it."""
    items = item if isinstance(item, tuple) else (item,)
    if not all(i is None or i is Ellipsis or type(i) is int or isinstance(i, slice) for i in items):
        return None
    return Call(ops.index, (input, item))


def squeeze(input: Any, dim: Any = None) -> Built:
    """One dimension of a known size: where that is 1, its only index."""
    shape = getattr(input.meta.get("val"), "shape", ()) if isinstance(input, fx.Node) else ()
    if not isinstance(dim, int) or not shape or not isinstance(shape[dim], int):
        return None
    return Call(ops.index, (input, (*(slice(None),) * (dim % len(shape)), 0))) if shape[dim] == 1 else Alias(input)


def unsqueeze(input: Any, dim: Any) -> Built:
    return Call(ops.unsqueeze, (input, dim)) if static(dim) else None


def expand(input: Any, *size: Any) -> Built:
    built = reshape(input, *size)
    return Call(ops.expand, built.args) if isinstance(built, Call) else None


def contiguous(input: Any) -> Built:
    return Call(ops.contiguous, (input,))


def size(input: Any, dim: Any = None) -> Built:
    return Call(ops.size, (input, dim)) if static(dim) else None


def rank(input: Any) -> Built:
    return Call(ops.rank, (input,))


def dropout(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Built:
    return Alias(input) if training is False else None


def stochastic_depth(input: Any, p: Any, mode: Any, training: Any = True) -> Built:
    return Alias(input) if training is False else None


def identity(input: Any, *args: Any) -> Built:
    return Alias(input)
