"""Bags of all tables and what is concatenated with them, copied where the concatenation lies.

The bags come table by table in memory [T, N, D]; the copy into the concatenation puts them in order of samples.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from fx_passes.candidates.candidates import Argument, Candidate, Operand, Operation, Result, TorchTemplate
from fx_passes.candidates.layouts import row_major
from fx_passes.lower.context import LoweringContext, NotLowered, eager_layout


def lower_concat_bags(node: fx.Node, context: LoweringContext) -> Operation:
    """Lower ops.concat_bags; the bags are read with the strides that they have."""
    arguments, spec = context.values.arguments(node), context.values.specs[node]
    dtype = context.dtype(spec)
    bags = context.tensor(arguments["bags"], "bags")
    beside = [[(piece, context.tensor(piece, "a piece")) for piece in arguments[side]] for side in ("before", "after")]
    pieces = [entry for side in beside for entry in side]
    if len({spec.dtype, bags.dtype, *(s.dtype for _, s in pieces)}) > 1:
        raise NotLowered("pieces of different dtypes are promoted by PyTorch")
    if spec.ndim != 2 or bags.ndim != 3 or any(s.ndim != 2 for _, s in pieces):
        raise NotLowered("pieces of more than two dimensions")
    widths = [s.shape[1] for _, s in beside[0]], [s.shape[1] for _, s in beside[1]]
    srcs = (eager_layout(bags), *(row_major(s.shape, dtype) for _, s in pieces))
    operands = (arguments["bags"], *(piece for piece, _ in pieces))
    args: tuple[Argument, ...] = (*map(Operand, range(len(operands))), Result())
    template = TorchTemplate(_Concat(*widths, spec.shape[1]), "", into=True, args=args)
    candidate = Candidate("torch", srcs, row_major(spec.shape, dtype), (template,))
    return Operation(node, node.name, "concat", operands, spec, [candidate])


class _Concat:
    """function(bags [N, T, D], *before, *after, result [N, width]); before and after: widths of the pieces there."""

    def __init__(self, before: Sequence[int], after: Sequence[int], width: int) -> None:
        self.places = [*side_by_side(0, before), *side_by_side(width - sum(after), after)]
        self.bags = slice(sum(before), width - sum(after))

    def __call__(self, bags: Tensor, *tensors: Tensor) -> None:
        pieces, out = tensors[:-1], tensors[-1]
        out[:, self.bags].unflatten(1, bags.shape[1:]).copy_(bags)
        for piece, place in zip(pieces, self.places, strict=True):
            out[:, place].copy_(piece)


def side_by_side(start: int, widths: Sequence[int]) -> list[slice]:
    """The columns of pieces that lie side by side from `start` on."""
    ends = [start + sum(widths[: i + 1]) for i in range(len(widths))]
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
