"""Moving data, sizes, and what evaluation mode does not do."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fx_passes import ops
from fx_passes.graph import inference
from fx_passes.graph.graph import is_call, is_shape
from fx_passes.spellings.registry import Alias, Built, Call, Parameter, is_number, row, spelled, static

aten = torch.ops.aten


@spelled(
    functions=[torch.cat, torch.concat, torch.concatenate],
    overloads=[aten.cat.default, aten.concat.default, aten.concatenate.default],
)
def concat(tensors: Any, dim: Any = 0, *, out: Any = None, axis: Any = None) -> Built:
    dim = dim if axis is None else axis
    if out is not None or not isinstance(tensors, list | tuple) or not isinstance(dim, int):
        return None
    return Call(ops.concat, (tuple(tensors), dim))


@spelled("roll")
def roll(input: Any, shifts: Any, dims: Any = None) -> Built:
    """Along dimensions that are named: without these PyTorch rolls all elements in a row."""
    shifts, dims = ((each,) if type(each) is int else each for each in (shifts, dims))
    if not dims or not static(shifts, dims) or len(shifts) != len(dims):
        return None
    return Call(ops.roll, (input, tuple(shifts), tuple(dims)))


@spelled("flatten", modules={nn.Flatten: ("start_dim", "end_dim")})
def flatten(input: Any, start_dim: Any = 0, end_dim: Any = -1) -> Built:
    return Call(ops.flatten, (input, start_dim, end_dim)) if static(start_dim, end_dim) else None


@spelled("unflatten", modules={nn.Unflatten: ("dim", "unflattened_size")})
def unflatten(input: Any, dim: Any, sizes: Any) -> Built:
    """Tensor.unflatten, torch.unflatten; not with names for dimensions."""
    if type(dim) is not int or not isinstance(sizes, list | tuple):
        return None
    if not sizes or any(not isinstance(size, int | fx.Node) for size in sizes):
        return None
    return Call(ops.unflatten, (input, dim, tuple(sizes)))


@spelled("reshape", methods=["view"], overloads=[aten.view.default, aten._unsafe_view.default], strict=["view"])
def reshape(input: Any, *shape: Any) -> Built:
    """Tensor.view, Tensor.reshape, torch.reshape; not view(dtype)."""
    if len(shape) == 1 and isinstance(shape[0], list | tuple):
        shape = tuple(shape[0])
    if not shape or any(not isinstance(s, int | fx.Node) for s in shape):
        return None
    if len(shape) == 1 and isinstance(shape[0], fx.Node):
        like = _whole_shape_of(shape[0])
        return None if like is None else Call(ops.reshape_as, (input, like))
    return Call(ops.reshape, (input, tuple(shape)))


def _whole_shape_of(node: fx.Node) -> fx.Node | None:
    """x where node is x.shape; None where it is another number, or could be one."""
    if not is_call(node, ops.size) or node.args[1:] not in ((), (None,)):
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None


@spelled("reshape_as", "view_as", strict=["view_as"])
def reshape_as(input: Any, other: Any) -> Built:
    """Tensor.reshape_as, Tensor.view_as."""
    return Call(ops.reshape_as, (input, other)) if isinstance(other, fx.Node) else None


@spelled("permute")
def permute(input: Any, *dims: Any) -> Built:
    if len(dims) == 1 and isinstance(dims[0], list | tuple):
        dims = tuple(dims[0])
    return Call(ops.permute, (input, dims)) if dims and static(dims) else None


@spelled("transpose", "swapaxes", "swapdims")
def transpose(input: Any, dim0: Any, dim1: Any) -> Built:
    return Call(ops.transpose, (input, dim0, dim1)) if static(dim0, dim1) else None


@spelled("movedim", "moveaxis")
def movedim(input: Any, source: Any, destination: Any) -> Built:
    """Dimensions elsewhere, the others in their order: a permutation, where the rank is known."""
    moved, wanted = ((each,) if type(each) is int else each for each in (source, destination))
    rank = inference.rank(input)
    if rank is None or not static(moved, wanted) or len(moved) != len(wanted):
        return None
    if any(not -rank <= dim < rank for dim in (*moved, *wanted)):
        return None
    places = dict(zip((dim % rank for dim in wanted), (dim % rank for dim in moved), strict=True))
    if len(places) < len(moved) or len(set(places.values())) < len(moved):
        return None
    others = iter(dim for dim in range(rank) if dim not in places.values())
    return Call(ops.permute, (input, tuple(places[dim] if dim in places else next(others) for dim in range(rank))))


@spelled("chunk")
def chunk(input: Any, chunks: Any, dim: Any = 0) -> Built:
    return Call(ops.chunk, (input, chunks, dim)) if static(chunks, dim) else None


@spelled(functions=[torch.split], overloads=[aten.split.Tensor, aten.split_with_sizes.default])
def split(tensor: Any, split_size_or_sections: Any, dim: Any = 0) -> Built:
    if not static(split_size_or_sections, dim):
        return None
    return Call(ops.split, (tensor, split_size_or_sections, dim))


@spelled(methods=["split"])
def method_split(input: Any, split_size: Any, dim: Any = 0) -> Built:
    return split(input, split_size, dim)


@spelled("tensor_split", overloads=[aten.tensor_split.indices])
def tensor_split(
    input: Any, indices_or_sections: Any = None, dim: Any = 0, *, sections: Any = None, indices: Any = None
) -> Built:
    """Cut before indices; not into a number of pieces, nor at what a tensor says."""
    indices = indices_or_sections if indices is None else indices
    if sections is not None or not isinstance(indices, list | tuple) or not static(tuple(indices), dim):
        return None
    return Call(ops.split_at, (input, tuple(indices), dim))


def _pad_module(m: Any, p: Parameter, args: tuple[Any, ...]) -> Built:
    return pad(args[0], m.padding, "constant", getattr(m, "value", 0.0))


@spelled(
    functions=[F.pad, torch._C._nn.pad],  # the second as TorchDynamo leaves it
    overloads=[aten.pad.default],
    modules=dict.fromkeys(
        (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d), _pad_module
    ),
)
def pad(input: Any, pad: Any, mode: Any = "constant", value: Any = None) -> Built:
    """A constant border, perhaps of sizes that are known once shapes are."""
    value = 0.0 if value is None else value
    if mode != "constant" or not isinstance(pad, list | tuple) or not is_number(value):
        return None
    if any(not isinstance(size, int | fx.Node) for size in pad):
        return None
    return Call(ops.pad, (input, tuple(pad), value))


_border = pad
row(lambda input, pad, value=0: _border(input, pad, "constant", value), overloads=[aten.constant_pad_nd.default])


@spelled(functions=[operator.getitem])
def index(input: Any, item: Any) -> Built:
    """Indexing a tensor with what makes a view of it."""
    return None if inference.view_places(item) is None else Call(ops.index, (input, item))


@spelled(overloads=[aten.slice.Tensor])
def narrow(input: Any, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1) -> Built:
    """A slice along a dimension, perhaps between sizes that are known once shapes are."""
    if not static(dim, step):
        return None
    if step != 1:
        whole = static(start, end) and dim >= 0
        return Call(ops.index, (input, (*(slice(None),) * dim, slice(start, end, step)))) if whole else None
    if static(start, end):
        return Call(ops.narrow, (input, dim, start, end))
    if dim < 0 or not all(bound is None or type(bound) is int or is_shape(bound) for bound in (start, end)):
        return None
    return Call(ops.index, (input, (*(slice(None),) * dim, slice(start, end))))


@spelled(overloads=[aten.select.int])
def select(input: Any, dim: Any, index: Any) -> Built:
    """One index along a dimension: x[:, :, 3]."""
    if not static(dim, index) or dim < 0:
        return None
    return Call(ops.index, (input, (*(slice(None),) * dim, index)))


@spelled(overloads=[aten.t.default])
def transposed(input: Any) -> Built:
    """t() of a matrix; what has fewer dimensions stays as it is."""
    value = input.meta.get("val") if isinstance(input, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return transpose(input, 0, 1) if value.dim() == 2 else Alias(input)


@spelled("squeeze")
def squeeze(input: Any, dim: Any = None) -> Built:
    """One dimension of a known size: where that is 1, its only index."""
    shape = getattr(input.meta.get("val"), "shape", ()) if isinstance(input, fx.Node) else ()
    if not isinstance(dim, int) or not shape or not isinstance(shape[dim], int):
        return None
    before = (slice(None),) * (dim % len(shape))
    return Call(ops.index, (input, (*before, 0 if shape[dim] == 1 else slice(None))))  # a view, where nothing goes, too


@spelled("unsqueeze")
def unsqueeze(input: Any, dim: Any) -> Built:
    return Call(ops.unsqueeze, (input, dim)) if static(dim) else None


@spelled(methods=["expand"])
def expand(input: Any, *size: Any) -> Built:
    built = reshape(input, *size)
    return Call(ops.expand, built.args) if isinstance(built, Call) and built.op is ops.reshape else None


row(lambda input, size, *, implicit=False: expand(input, size), overloads=[aten.expand.default])


@spelled(methods=["contiguous"])
def contiguous(input: Any) -> Built:
    return Call(ops.contiguous, (input,))


@spelled(overloads=[aten.contiguous.default])
def aten_contiguous(input: Any, *, memory_format: Any = None) -> Built:
    return contiguous(input) if memory_format in (None, torch.contiguous_format) else None


@spelled(methods=["size"], overloads=[aten.sym_size.int])
def size(input: Any, dim: Any = None) -> Built:
    return Call(ops.size, (input, dim)) if static(dim) else None


@spelled(methods=["dim", "ndimension"])
def rank(input: Any) -> Built:
    return Call(ops.rank, (input,))


def _evaluated(m: Any, p: Parameter, args: tuple[Any, ...]) -> Built:
    """Dropout and its kin do nothing, unless this one alone was put in training mode."""
    return None if m.training else Alias(args[0])


@spelled(
    functions=[F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout],
    modules=dict.fromkeys(
        (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout), _evaluated
    ),
)
def dropout(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> Built:
    return Alias(input) if training is False else None


@spelled(
    overloads=[
        aten.dropout.default,
        aten.feature_dropout.default,
        aten.alpha_dropout.default,
        aten.feature_alpha_dropout.default,
    ]
)
def aten_dropout(input: Any, p: Any, train: Any) -> Built:
    return dropout(input, p, train)


@spelled(qualified=["torchvision.ops.stochastic_depth.stochastic_depth"])
def stochastic_depth(input: Any, p: Any, mode: Any, training: Any = True) -> Built:
    return Alias(input) if training is False else None


@spelled(modules={nn.Identity: ()})
def identity(input: Any, *args: Any) -> Built:
    return Alias(input)
