"""The plain-torch bodies of recurrent networks against PyTorch's modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._pytree import tree_leaves

from fx_passes import ops

KINDS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}


def weights_of(network: Any) -> list[Tensor]:
    return [getattr(network, name) for names in network._all_weights for name in names]


def states_of(network: Any, samples: int) -> tuple[Tensor, ...]:
    rows = network.num_layers * (1 + network.bidirectional)
    widths = [network.proj_size or network.hidden_size, network.hidden_size]
    return tuple(torch.randn(rows, samples, width) for width in widths[: 1 + isinstance(network, nn.LSTM)])


def assert_same(found: Any, expected: Any) -> None:
    for a, e in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert type(a) is type(e)
        if isinstance(a, Tensor):
            assert a.stride() == e.stride()
            torch.testing.assert_close(a, e)


def flat(found: Any) -> tuple[Any, ...]:
    """(output, h) or (output, h, c)."""
    output, states = found
    return (output, *states) if isinstance(states, tuple) else (output, states)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("source", ["batch", "single", "packed", "sorted"])
def test_a_stack_is_the_module(kind: str, batch_first: bool, given: bool, source: str) -> None:
    torch.manual_seed(0)
    network = KINDS[kind](5, 4, 2, bidirectional=True, batch_first=batch_first).eval()
    x = torch.randn(3, 6, 5) if batch_first else torch.randn(6, 3, 5)
    states = states_of(network, 3) if given else None
    src: Tensor | PackedSequence = x
    if source == "single":
        src = x[:, 0]
        states = states and tuple(state[:, 0] for state in states)
    elif source != "batch":
        lengths = torch.tensor([6, 4, 1] if source == "sorted" else [4, 6, 1])
        src = pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=source == "sorted")
    settings = {"layers": 2, "bidirectional": True, "batch_first": batch_first}
    with torch.no_grad():
        found = ops.recurrent(src, states, weights_of(network), kind, **settings)  # type: ignore[arg-type]
        hx = states if states is None or kind == "lstm" else states[0]
        assert_same(found, flat(network(src, hx)))


def test_projections_and_missing_biases() -> None:
    torch.manual_seed(0)
    network = nn.LSTM(5, 6, 2, proj_size=4, bias=False).eval()
    x = torch.randn(7, 2, 5)
    found = ops.recurrent(x, None, weights_of(network), "lstm", has_biases=False, layers=2)
    assert_same(found, flat(network(x)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_in_reverse_is_the_second_direction(kind: str) -> None:
    torch.manual_seed(0)
    network = KINDS[kind](5, 4, bidirectional=True).eval()
    x, states = torch.randn(6, 3, 5), states_of(network, 3)
    output, last, *cell = flat(network(x, states if kind == "lstm" else states[0]))
    h, c = (*(state[1:] for state in states), None)[:2]
    own = weights_of(network)[4:]
    torch.testing.assert_close(ops.recurrent_layer(x, h, c, own, kind, reverse=True), output[..., 4:])
    torch.testing.assert_close(output[0, :, 4:], last[1])
    if kind == "lstm":
        both = ops.recurrent_layer(x, h, c, own, kind, reverse=True, with_cell=True)
        torch.testing.assert_close(both[:72], output[..., 4:].reshape(-1))
        assert not both[72:96].any()  # the cell state begins on a cache line
        torch.testing.assert_close(both[96:], cell[0][1].reshape(-1))


@pytest.mark.parametrize(("kind", "module"), [("lstm", nn.LSTMCell), ("gru", nn.GRUCell), ("rnn_tanh", nn.RNNCell)])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("shape", [(2, 5), (5,)], ids=str)
def test_a_cell_is_the_module(kind: str, module: Any, given: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    cell = module(5, 4).eval()
    x = torch.randn(shape)
    states = tuple(torch.randn(*shape[:-1], 4) for _ in range(1 + (kind == "lstm"))) if given else None
    weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
    expected = cell(x, states if states is None or kind == "lstm" else states[0])
    assert_same(ops.recurrent_cell(x, states, weights, kind), expected if kind == "lstm" else (expected,))


def test_an_input_that_is_one_holds_the_cell_state() -> None:
    """Beyond the end of a text, whatever else comes in."""
    torch.manual_seed(0)
    network = nn.LSTM(5, 4)
    weights = weights_of(network)
    x = torch.randn(6, 3, 5)
    is_over = torch.zeros(6, 3, 1)
    is_over[4:, 0] = is_over[1:, 2] = 1
    held = ops.recurrent(torch.cat([x, is_over], 2), None, [ops.holding(weights[0]), *weights[1:]], "lstm")
    for sample, steps in enumerate((4, 6, 1)):
        _, (_, cell) = network(x[:steps, sample])
        torch.testing.assert_close(held[2][:, sample], cell)


def test_rows_by_their_number_over_all_dimensions() -> None:
    x = torch.randn(6, 3, 5)
    numbers = torch.tensor([[0, 17], [4, 4]])
    assert torch.equal(ops.take_rows(x, numbers), torch.stack([x[[0, 5], [0, 2]], x[[1, 1], [1, 1]]]))


@pytest.mark.parametrize("dimensions", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_other_dimensions_are_refused_as_by_the_module(kind: str, dimensions: int) -> None:
    network, x = KINDS[kind](3, 5), torch.randn(2, 2, 4, 3)[(0,) * (4 - dimensions)]
    for call in (network, lambda x: ops.recurrent(x, None, weights_of(network), kind)):
        with pytest.raises(ValueError, match=f"(?i)expected input to be 2D or 3D, got {dimensions}D"):
            call(x)


SIZES = {
    "width": ((7, 3, 6), (4, 3)),
    "samples": ((7, 3, 5), (4, 2)),
    "rows": ((7, 3, 5), (2, 3)),
    "states of a batch": ((7, 5), (4, 1)),
    "no states": ((7, 6), None),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_do_not_fit_are_refused_as_by_the_module(kind: str, case: str) -> None:
    """PyTorch's kernels read beyond tensors that are too small."""
    (shape, rows), network = SIZES[case], KINDS[kind](5, 4, 2, bidirectional=True)
    x, states = torch.randn(shape), None
    if rows is not None:
        states = tuple(torch.randn(*rows, 4) for _ in range(1 + (kind == "lstm")))
    settings = {"layers": 2, "bidirectional": True}
    hx = states if states is None or kind == "lstm" else states[0]
    for call in (lambda: network(x, hx), lambda: ops.recurrent(x, states, weights_of(network), kind, **settings)):
        with pytest.raises(RuntimeError, match=r"input.size\(-1\) must be equal|[Ee]xpected hidden|should also be"):
            call()


def test_a_packed_sequence_of_another_width_is_refused() -> None:
    network = nn.LSTM(5, 4)
    packed = pack_padded_sequence(torch.randn(6, 3, 6), torch.tensor([6, 4, 1]))
    for call in (network, lambda x: ops.recurrent(x, None, weights_of(network), "lstm")):
        with pytest.raises(RuntimeError, match="Expected 5, got 6|11x6 and 5x16"):
            call(packed)


@pytest.mark.parametrize(("shape", "state"), [((2, 6), (2, 4)), ((2, 5), (3, 4)), ((2, 5), (2, 3)), ((5,), (1, 4))])
def test_a_cell_refuses_sizes_that_do_not_fit(shape: tuple[int, ...], state: tuple[int, ...]) -> None:
    cell, x, h = nn.GRUCell(5, 4), torch.randn(shape), torch.randn(state)
    weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
    for call in (lambda: cell(x, h), lambda: ops.recurrent_cell(x, (h,), weights, "gru")):
        with pytest.raises(RuntimeError):
            call()
