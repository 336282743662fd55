"""Recurrent networks: torch.lstm, gru, rnn_tanh and rnn_relu, their cells, aten's overloads; the modules."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from fx_passes import ops
from fx_passes.graph.graph import is_call
from fx_passes.graph.inference import is_tensor
from fx_passes.spellings.registry import Built, Call, Parameter, refusal, row, static

aten = torch.ops.aten
_NAMES = frozenset(kind + cell for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for cell in ("", "_cell"))
_FUNCTIONS = frozenset(getattr(torch, name) for name in _NAMES)
_ZEROS = (torch.zeros, aten.zeros.default)
STACKS: tuple[type[nn.Module], ...] = (nn.LSTM, nn.GRU, nn.RNN)
CELLS: tuple[type[nn.Module], ...] = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)


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
    """Whether states are None, or tensors for certain, as many as a kind of cell has.

    The one state of a kind may be an argument that is None at times. A pair of states is written out only where both
    are tensors.
    """
    if states is None:
        return True
    if kind == "lstm":
        return len(states) == 2 and all(isinstance(state, fx.Node) for state in states)
    return is_tensor(states[0])


def without_zeros(states: Any) -> Any:
    """None where all states are zeros that are made for this, and that nobody may have written to."""
    return None if states is None or all(map(_stays_zeros, states)) else tuple(states)


def _stays_zeros(state: fx.Node) -> bool:
    return is_call(state, *_ZEROS) and all(map(_only_reads, state.users))


def _only_reads(user: fx.Node) -> bool:
    """Whether user is a recurrent network, asks for sizes, or returns its operand."""
    if user.op == "call_module":
        owner = user.graph.owning_module
        return owner is not None and type(owner.get_submodule(str(user.target))) in (*STACKS, *CELLS)
    if user.op == "output" or is_call(user, ops.recurrent, ops.recurrent_cell, *ops.SHAPE):
        return True
    return user.op == "call_function" and (user.target in _FUNCTIONS or getattr(user.target, "_opname", "") in _NAMES)


def _stack_of(kind: str) -> Any:
    """Builder of torch.lstm, gru, rnn_tanh and rnn_relu of a padded sequence: of a packed one, an LSTM's params are
    where has_biases is here.
    """

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
        states = hx if kind == "lstm" else (hx,)
        if not isinstance(states, list | tuple) or (train is not False and dropout):
            return None
        return stack(input, states, params, kind, has_biases, num_layers, bidirectional, batch_first)

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


def module_call(module: Any, p: Parameter, src: Any, given: Any = None) -> Call | None:
    """What a module of STACKS or CELLS computes of a sequence and its states, where the states are known to be tensors.

    The call has all results side by side: `arranged` gives them the module's structure.
    """
    if refusal(module) or (module.training and getattr(module, "dropout", 0.0)) or not _is_plain(module):
        return None
    kind, states = _cell_kind(module), None
    if given is not None:
        if kind == "lstm" and (not isinstance(given, list | tuple) or len(given) != 2):
            return None
        states = tuple(given) if kind == "lstm" else (given,)
    if type(module) in CELLS:
        weights = [p(name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        built = cell(src, states, weights, kind)
    else:
        names = [name for names in module._all_weights for name in names]
        settings = module.bias, module.num_layers, module.bidirectional, module.batch_first
        built = stack(src, states, [p(name) for name in names], kind, *settings)
    return built if isinstance(built, Call) else None


def arranged(call: Call, result: Callable[[int], fx.Node]) -> Any:
    """What the module returns: result(i) in nested tuples."""
    is_lstm = call.args[3] == "lstm"
    if call.op is ops.recurrent_cell:
        return (result(0), result(1)) if is_lstm else result(0)
    return result(0), (result(1), result(2)) if is_lstm else result(1)


def _cell_kind(module: Any) -> str:
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return "lstm"
    return "gru" if isinstance(module, nn.GRU | nn.GRUCell) else f"rnn_{module.nonlinearity}"


def _is_plain(module: Any) -> bool:
    """Whether all weights are the module's parameters, and those that it computes with."""
    names = [name for names in getattr(module, "_all_weights", ()) for name in names]
    flat = getattr(module, "_flat_weights", ())
    own = [module._parameters.get(name) for name in names]
    return len(own) == len(flat) and all(a is b and a is not None for a, b in zip(own, flat, strict=True))


row(_stack_of("lstm"), "lstm")
row(_lstm_cell, "lstm_cell")
for _kind in ("gru", "rnn_tanh", "rnn_relu"):
    row(_stack_of(_kind), _kind)
    row(_cell_of_one_state(_kind), f"{_kind}_cell")
