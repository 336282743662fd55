"""Recurrent networks: torch.lstm, gru, rnn_tanh and rnn_relu, their cells, and aten's overloads."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import is_call
from fx_passes.graph.inference import is_tensor
from fx_passes.spellings.registry import Built, Call, row, static

aten = torch.ops.aten
_ZEROS = (torch.zeros, aten.zeros.default)


def stack(
    src: Any, states: Any, weights: Any, kind: str, has_biases: Any, layers: Any, bidirectional: Any, batch_first: Any
) -> Built:
    """ops.recurrent, where it is known what the arguments are.

    states  None, or as many as the kind has
    """
    if not isinstance(src, fx.Node) or not static(has_biases, layers, bidirectional, batch_first):
        return None
    if not isinstance(weights, list | tuple) or not isinstance(has_biases, bool) or not are_states(states, kind):
        return None
    settings = {
        "has_biases": has_biases,
        "layers": layers,
        "bidirectional": bool(bidirectional),
        "batch_first": bool(batch_first),
    }
    return Call(ops.recurrent, (src, without_zeros(states), tuple(weights), kind), settings)


def are_states(states: Any, kind: str) -> bool:
    """Whether states are None, or tensors for certain, as many as a kind of cell has."""
    if states is None:
        return True
    return len(states) == 1 + (kind == "lstm") and all(map(is_tensor, states))


def without_zeros(states: Any) -> Any:
    """None where all states are zeros that are made for this."""
    return None if states is None or all(is_call(state, *_ZEROS) for state in states) else tuple(states)


def _lstm(
    input: Any,
    hx: Any,
    params: Any,
    has_biases: Any,
    num_layers: Any,
    dropout: Any,
    train: Any,
    bidirectional: Any,
    batch_first: Any,
) -> Built:
    """torch.lstm of a padded sequence: of a packed one, params are where has_biases is here."""
    if not isinstance(hx, list | tuple) or (train is not False and dropout):
        return None
    return stack(input, hx, params, "lstm", has_biases, num_layers, bidirectional, batch_first)


def _of_one_state(kind: str) -> Any:
    """Builder of torch.gru, rnn_tanh and rnn_relu."""

    def build(
        input: Any,
        hx: Any,
        params: Any,
        has_biases: Any,
        num_layers: Any,
        dropout: Any,
        train: Any,
        bidirectional: Any,
        batch_first: Any,
    ) -> Built:
        if train is not False and dropout:
            return None
        return stack(input, (hx,), params, kind, has_biases, num_layers, bidirectional, batch_first)

    return build


def cell(src: Any, states: Any, weights: Any, kind: str) -> Built:
    """ops.recurrent_cell, where it is known what the arguments are; weights end with the biases, or None for both."""
    if not isinstance(src, fx.Node) or not are_states(states, kind):
        return None
    biases = [w for w in weights[2:] if w is not None]
    if len(biases) not in (0, 2):
        return None
    settings = {"has_biases": bool(biases)}
    return Call(ops.recurrent_cell, (src, without_zeros(states), (*weights[:2], *biases), kind), settings)


def _lstm_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Built:
    """torch.lstm_cell."""
    return cell(input, hx, (w_ih, w_hh, b_ih, b_hh), "lstm") if isinstance(hx, list | tuple) else None


def _cell_of_one_state(kind: str) -> Any:
    """Builder of torch.gru_cell, rnn_tanh_cell and rnn_relu_cell, which return a tensor."""

    def build(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Built:
        built = cell(input, (hx,), (w_ih, w_hh, b_ih, b_hh), kind)
        return None if built is None else Call(operator.getitem, (built, 0))

    return build


row(_lstm, "lstm")
row(_lstm_cell, "lstm_cell")
for _kind in ("gru", "rnn_tanh", "rnn_relu"):
    row(_of_one_state(_kind), _kind)
    row(_cell_of_one_state(_kind), f"{_kind}_cell")
