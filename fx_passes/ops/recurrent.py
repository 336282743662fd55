"""Recurrent networks: a whole stack as PyTorch has it, one layer in one direction, and cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from fx_passes.ops.registry import COMPUTE, CONSTANT, op

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""The kinds of cell, and how many matrices of a hidden size lie one under the other in each of their weights."""
_STACKS: dict[str, Any] = {name: getattr(torch, name) for name in GATES}
_CELLS: dict[str, Any] = {name: getattr(torch, f"{name}_cell") for name in GATES}
_EXPANDED = "its layers become operations of their own where shapes are known"


@op(kind=COMPUTE, several=True, no_rule=_EXPANDED)
def recurrent(
    src: Tensor,
    states: Sequence[Tensor] | None,
    weights: Sequence[Tensor],
    kind: str,
    *,
    has_biases: bool = True,
    layers: int = 1,
    bidirectional: bool = False,
    batch_first: bool = False,
) -> tuple[Any, ...]:
    """Return (output, h_n), of an LSTM (output, h_n, c_n), as nn.LSTM, nn.GRU and nn.RNN compute them.

    src      [T, N, I], [N, T, I] with batch_first, [T, I] without a batch, or a PackedSequence
    states   (h_0,) or (h_0, c_0), each [layers * directions, N, ...]; None: zeros
    weights  per layer and direction weight_ih, weight_hh, the biases where there are some, weight_hr where projected
    Raises   ValueError for src of other dimensions, RuntimeError for sizes that do not fit the weights. PyTorch's
             functions may take these: the modules do not.
    """
    if isinstance(src, PackedSequence):
        return _packed(src, states, weights, kind, has_biases, layers, bidirectional)
    if src.dim() not in (2, 3):
        raise ValueError(f"{kind.split('_')[0].upper()}: expected input to be 2D or 3D, got {src.dim()}D instead")
    batch_dim = 0 if batch_first else 1
    batch = src.shape[batch_dim : batch_dim + 1] if src.dim() == 3 else ()
    if fault := misfit(src, states, (layers * (1 + bidirectional), *batch), weights, kind):
        raise RuntimeError(fault)
    x = src if src.dim() == 3 else src.unsqueeze(batch_dim)
    if states is None:
        states = _zeros(x, x.shape[batch_dim], weights, kind, layers * (1 + bidirectional))
    elif src.dim() == 2:
        states = [state.unsqueeze(1) for state in states]
    given = tuple(states) if kind == "lstm" else states[0]
    found = _STACKS[kind](x, given, list(weights), has_biases, layers, 0.0, False, bidirectional, batch_first)
    if src.dim() == 3:
        return tuple(found)
    return (found[0].squeeze(batch_dim), *(state.squeeze(1) for state in found[1:]))


def _packed(
    src: PackedSequence,
    states: Sequence[Tensor] | None,
    weights: Sequence[Tensor],
    kind: str,
    has_biases: bool,
    layers: int,
    bidirectional: bool,
) -> tuple[Any, ...]:
    """As the modules: states are in the order of the samples, what is packed by length."""
    data, sizes, order, back = src
    if fault := misfit(data, states, (layers * (1 + bidirectional), int(sizes[0])), weights, kind):
        raise RuntimeError(fault)
    if states is None:
        states = _zeros(data, int(sizes[0]), weights, kind, layers * (1 + bidirectional))
    elif order is not None:
        states = [state.index_select(1, order) for state in states]
    given = tuple(states) if kind == "lstm" else states[0]
    found = _STACKS[kind](data, sizes, given, list(weights), has_biases, layers, 0.0, False, bidirectional)
    last = found[1:] if back is None else [state.index_select(1, back) for state in found[1:]]
    return (PackedSequence(found[0], sizes, order, back), *last)


def misfit(src: Any, states: Sequence[Any] | None, rows: Sequence[int], weights: Sequence[Any], kind: str) -> str:
    """Return how sizes do not fit the weights, or nothing: PyTorch's kernels read beyond tensors that are too small.

    src, states, weights  tensors, or what else has a shape
    rows                  sizes of a state in front of its width: layers * directions (of a stack), samples (of a batch)
    """
    width, expected = src.shape[-1], weights[0].shape[1]
    if width != expected:
        return f"input.size(-1) must be equal to input_size. Expected {expected}, got {width}"
    for index, (state, expected) in enumerate(zip(states or (), state_widths(weights[1].shape, kind), strict=False)):
        if tuple(state.shape) != (*rows, expected):
            which = f"hidden[{index}]" if kind == "lstm" else "hidden"
            return f"Expected {which} size {(*rows, expected)}, got {list(state.shape)}"
    return ""


def state_widths(weight: Sequence[int], kind: str) -> list[int]:
    """The widths of a layer's states, by the shape of its weight_hh: of h, and of an LSTM's c."""
    return [weight[1], weight[0] // GATES[kind]][: 1 + (kind == "lstm")]


def _zeros(src: Tensor, samples: int, weights: Sequence[Tensor], kind: str, rows: int) -> list[Tensor]:
    return [src.new_zeros(rows, samples, width) for width in state_widths(weights[1].shape, kind)]


@op(kind=COMPUTE)
def recurrent_layer(
    src: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weights: Sequence[Tensor],
    kind: str,
    *,
    has_biases: bool = True,
    reverse: bool = False,
    with_cell: bool = False,
) -> Tensor:
    """Return the output [T, N, O] of one layer in one direction: reverse begins at the last step.

    src        [T, N, I]
    h, c       [1, N, O], [1, N, H], or None: zeros
    with_cell  of an LSTM: return one dimension, the output's T * N * O numbers, zeros up to state_offset(T * N * O),
               and the N * H numbers of the last cell state
    """
    output, cell = output_and_cell(src, h, c, weights, kind, has_biases=has_biases, reverse=reverse)
    if not with_cell or cell is None:
        return output
    return with_state_behind(output, cell)


def with_state_behind(output: Tensor, state: Tensor) -> Tensor:
    """Return one dimension: the output's numbers, zeros up to their state_offset, and the state's."""
    between = output.new_zeros(state_offset(output.numel()) - output.numel())
    return torch.cat([output.reshape(-1), between, state.reshape(-1)])


def state_offset(numbers: int) -> int:
    """Where a last state lies behind an output of so many numbers: on a cache line in float32 and bfloat16."""
    return -(-numbers // 32) * 32


def output_and_cell(
    src: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    weights: Sequence[Tensor],
    kind: str,
    *,
    has_biases: bool = True,
    reverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What recurrent_layer has in one tensor: the output [T, N, O], and the last cell state [1, N, H] of an LSTM."""
    states = None
    if h is not None or c is not None:
        states = _zeros(src, src.shape[1], weights, kind, 1)
        states = [zeros if given is None else given for zeros, given in zip(states, (h, c), strict=False)]
    x = src.flip(0) if reverse else src
    output, _, *cell = recurrent(x, states, weights, kind, has_biases=has_biases)
    return output.flip(0) if reverse else output, cell[0] if cell else None


@op(kind=COMPUTE, several=True, no_rule=_EXPANDED)
def recurrent_cell(
    src: Tensor, states: Sequence[Tensor] | None, weights: Sequence[Tensor], kind: str, *, has_biases: bool = True
) -> tuple[Tensor, ...]:
    """Return (h,), of an LSTM (h, c), after one step, as nn.LSTMCell, nn.GRUCell and nn.RNNCell.

    src     [N, I] or [I]
    states  (h,) or (h, c), each [N, H] or [H]; None: zeros
    Raises  RuntimeError for sizes that do not fit the weights
    """
    if fault := misfit(src, states, src.shape[:-1], weights, kind):
        raise RuntimeError(fault)
    x = torch.atleast_2d(src)
    if states is None:
        states = [zeros[0] for zeros in _zeros(x, x.shape[0], weights, kind, 1)]
    given = [torch.atleast_2d(state) for state in states]
    found = _CELLS[kind](x, given if kind == "lstm" else given[0], *weights)
    found = found if isinstance(found, tuple) else (found,)
    return tuple(found) if src.dim() == 2 else tuple(state.squeeze(0) for state in found)


_CERTAIN = 1e9  # beyond what a gate's sum may be: its sigmoid is 1, of the negative 0


@op(kind=CONSTANT)
def holding(weight: Tensor) -> Tensor:
    """Return an LSTM's input weight [4 * H, I] with a column more: where that input is 1, the cell state stays."""
    column = weight.new_zeros(4, weight.shape[0] // 4)
    column[0], column[1] = -_CERTAIN, _CERTAIN  # nothing comes in, all is kept
    return torch.cat([weight, column.reshape(-1, 1)], 1)
