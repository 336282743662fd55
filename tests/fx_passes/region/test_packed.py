"""Packed sequences through optimized recurrent layers, against PyTorch's modules."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

import zendnn_cffi
from fx_passes import ops
from fx_passes.region import packed as packed_module
from fx_passes.region.packed import PADDED, STEPS, padded_graph, stack_of
from tests.support.lowering import fallbacks, kinds, net, noise
from tests.tolerance import assert_close
from zendnn_cffi.runtime.sizes import rounded_up

KINDS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
UNSORTED, SORTED = [7, 1, 13, 7], [13, 7, 7, 1]


def pack(lengths: list[int], width: int = 17, seed: int = 0) -> PackedSequence:
    x = noise(max(lengths), len(lengths), width, seed=seed)
    return pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=lengths == sorted(lengths, reverse=True))


def assert_alike(found: Any, expected: Any, dtype: torch.dtype | None = None) -> None:
    """Of one structure, and the tensors near each other."""
    assert type(found[0]) is PackedSequence
    leaves, others = tree_leaves(found), tree_leaves(expected)
    assert len(leaves) == len(others)
    for ours, theirs in zip(leaves, others, strict=True):
        if theirs is None or not theirs.is_floating_point():
            assert ours is theirs or torch.equal(ours, theirs)
        else:
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            assert_close(ours, theirs, dtype=dtype, k=32, scale=1.0)


def layers(gm: Any) -> int:
    """How many layers the library computes; no node may be PyTorch's for a reason."""
    found = zendnn_cffi.explain(gm)
    assert not fallbacks(found)
    return kinds(found).count("recurrent_layer")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("count", "bias"), [(1, True), (2, False)])
@pytest.mark.parametrize("lengths", [UNSORTED, SORTED, [1], [5, 5, 5]], ids=str)
def test_a_stack(
    kind: str, bidirectional: bool, count: int, bias: bool, lengths: list[int], dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    model = KINDS[kind](17, 24, count, bidirectional=bidirectional, bias=bias).eval()
    gm = zendnn_cffi.optimize(model, dtype=dtype, tune="off")
    with torch.no_grad():
        assert_alike(gm(pack(lengths)), model(pack(lengths)), dtype)
    assert layers(gm) == count * (1 + bidirectional)


@pytest.mark.parametrize("projected", [0, 9])
@pytest.mark.parametrize("lengths", [UNSORTED, SORTED], ids=str)
def test_given_states(projected: int, lengths: list[int]) -> None:
    """In the order of the samples, which that of the packed data is not."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LSTM with projections")
        network = nn.LSTM(17, 24, 2, bidirectional=True, proj_size=projected).eval()
        model = net(lambda m, x, h, c: m[0](x, (h, c)), network)
        inputs = pack(lengths), noise(4, 4, projected or 24), noise(4, 4, 24, seed=1)
        gm = zendnn_cffi.optimize(model, inputs, tune="off")
        with torch.no_grad():
            assert_alike(gm(*inputs), model(*inputs))
    assert layers(gm) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_large_numbers_do_not_let_what_is_over_in(kind: str) -> None:
    """The states of a short text are those after its own end, whatever the inputs' size."""
    torch.manual_seed(0)
    model = KINDS[kind](17, 24, bidirectional=True).eval()
    data, *others = pack([9, 1])
    packed = PackedSequence(data * 1e3, *others)
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        found, expected = tree_leaves(gm(packed)), tree_leaves(model(packed))
    assert layers(gm) == 2
    for ours, theirs in zip(found, expected, strict=True):
        if theirs is not None and theirs.is_floating_point():
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def test_other_lengths_and_padded_sequences() -> None:
    """Each after the other; lengths that are padded alike share a program."""
    torch.manual_seed(0)
    model = nn.LSTM(17, 24).eval()
    gm = zendnn_cffi.optimize(model, tune="off")
    (region,) = gm.regions().values()
    with torch.no_grad():
        for lengths in ([30, 20, 25], [29, 29, 28], [31, 16, 16], [3, 2, 2]):
            assert_alike(gm(pack(lengths)), model(pack(lengths)))
        x = noise(7, 3, 17)
        assert_close(gm(x)[0], model(x)[0], k=24)
    assert rounded_up(30) == rounded_up(29) == 30 and rounded_up(31) == 32
    assert len(region.packed.region.lowered) == 3
    assert len(region.lowered) == 1


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 9, 17, 33, 60, 100, 129, 1000])
def test_lengths_are_rounded_up_by_an_eighth_at_most(steps: int) -> None:
    assert steps <= rounded_up(steps) <= steps * 9 / 8
    assert rounded_up(rounded_up(steps)) == rounded_up(steps)


class Tagger(nn.Module):
    """No graph: its lengths are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 17)
        self.lstm = nn.LSTM(17, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 5)

    def forward(self, text: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(self.embedding(text), lengths, batch_first=True, enforce_sorted=False)
        output, (h, _) = self.lstm(packed)
        return self.head(pad_packed_sequence(output, batch_first=True)[0]), h[-1]


@pytest.mark.parametrize("given", [True, False])
def test_a_tagger_computes_by_its_lstm_in_the_engine(given: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Tagger().eval(), (torch.randint(0, 50, (4, 13)), torch.tensor(UNSORTED))
    gm: Any = zendnn_cffi.optimize(model, inputs if given else None, tune="off")
    with torch.no_grad():
        for copied in (gm, copy.deepcopy(gm)):
            for ours, expected in zip(copied(*inputs), model(*inputs), strict=True):
                assert_close(ours, expected, k=64)
            assert "lstm" in copied.optimized_submodules
            assert layers(copied.optimized_submodules["lstm"]) == 2


def test_the_faster_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tuning is on, it is found by measuring; both compute the same."""
    torch.manual_seed(0)
    model = nn.GRU(17, 24).eval()
    for way in (PADDED, STEPS):
        monkeypatch.setattr(packed_module, "_times_ns", lambda ways, way=way: _times(ways, way))
        gm = zendnn_cffi.optimize(model, tune_seconds=0.0)
        (region,) = gm.regions().values()
        with torch.no_grad():
            for _ in range(2):
                assert_alike(gm(pack(UNSORTED)), model(pack(UNSORTED)))
        found = zendnn_cffi.explain(gm)
        became = [(node.became, node.reason, node.offloaded) for node in found.nodes if node.computes]
        if way == PADDED:
            assert layers(gm) == 1
        else:
            assert became == [("torch", f"measured: {STEPS} 1.00 ms, {PADDED} 2.00 ms", False)]


def _times(ways: dict[str, Any], fastest: str) -> dict[str, float]:
    """Run both ways and say that this one took a millisecond, the other two."""
    return {way: run() and (1e6 if way == fastest else 2e6) for way, run in ways.items()}


def test_pytorchs_way_is_told_beside_programs_for_other_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of lengths for which a program is at hand that other texts of the same size use."""
    torch.manual_seed(0)
    model = nn.GRU(17, 24).eval()
    faster = iter((STEPS, PADDED, STEPS))
    monkeypatch.setattr(packed_module, "_times_ns", lambda ways: _times(ways, next(faster)))
    gm = zendnn_cffi.optimize(model, tune_seconds=0.0)
    with torch.no_grad():
        for lengths in ([13, 1, 1, 1], [13, 13, 13, 13], [9, 9]):
            assert_alike(gm(pack(lengths)), model(pack(lengths)))
    nodes = [node for node in zendnn_cffi.explain(gm).nodes if node.computes]
    steps = [node.signature for node in nodes if node.reason.startswith("measured")]
    assert steps == ["13x4xpacked", "9x2xpacked"]
    others = [node for node in nodes if node.signature not in steps]
    assert [node.became for node in others].count("recurrent_layer") == 1
    assert all(node.signature.startswith("13x4x17") for node in others)


def test_sequences_in_an_order_of_their_own_are_pytorchs_and_told() -> None:
    torch.manual_seed(0)
    model = nn.GRU(17, 24).double().eval()
    gm = zendnn_cffi.optimize(model, tune="off")
    data, *others = pack(SORTED)
    packed = PackedSequence(torch._neg_view(-data.double()), *others)
    assert_alike(gm(packed), model(packed))
    assert {node.became for node in zendnn_cffi.explain(gm).nodes} == {"torch"}


def test_without_measuring_little_text_among_padding_is_pytorchs() -> None:
    torch.manual_seed(0)
    model, lengths = nn.GRU(17, 24).eval(), [40, *[1] * 9]
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        assert_alike(gm(pack(lengths)), model(pack(lengths)))
    found = zendnn_cffi.explain(gm)
    assert [node.became for node in found.nodes if node.computes] == ["torch"]
    assert "padded, 88% would be padding" in str(found)


def test_new_weights_are_packed_again() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(17, 24).eval()
    gm: Any = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        gm(pack(SORTED))
        for parameter in model.parameters():
            parameter.mul_(0.5)
        for _ in range(3):
            assert_alike(gm(pack(SORTED)), model(pack(SORTED)))
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        gm.invalidate()
        for _ in range(3):
            assert_alike(gm(pack(SORTED)), model(pack(SORTED)))
    assert layers(gm) == 1


def test_saved_loaded_and_released(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(17, 24, bidirectional=True).eval()
    with torch.no_grad():
        gm = zendnn_cffi.optimize(model, tune="off")
        gm(pack(SORTED))
        zendnn_cffi.save(gm, tmp_path / "lstm.safetensors")
        assert_alike(zendnn_cffi.load(tmp_path / "lstm.safetensors")(pack(SORTED)), model(pack(SORTED)))
        released = zendnn_cffi.optimize(model, tune="off", release_weights=True)
        for _ in range(3):
            assert_alike(released(pack(SORTED)), model(pack(SORTED)))


def test_what_pytorch_refuses_raises_its_error() -> None:
    torch.manual_seed(0)
    model = nn.GRU(17, 24).eval()
    gm = zendnn_cffi.optimize(model, tune="off")
    data, sizes, *orders = pack(SORTED)
    for wrong in (PackedSequence(data[:, :5], sizes, *orders), PackedSequence(data[:3], sizes, *orders)):
        with pytest.raises(RuntimeError) as expected:
            model(wrong)
        with pytest.raises(RuntimeError) as found:
            gm(wrong)
        assert type(found.value) is type(expected.value)
    freed = pack(SORTED)
    freed.data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="storage was freed"):
        gm(freed)


def test_gradients_flow_as_in_eager() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(17, 24).eval(), noise(13, 4, 17).requires_grad_()
    gm = zendnn_cffi.optimize(model, tune="off")
    grads = []
    for network in (gm, model):
        x.grad = None
        network(pack_padded_sequence(x, torch.tensor(SORTED)))[0].data.sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def graph_of(model: nn.Module) -> Any:
    (region,) = zendnn_cffi.optimize(model, tune="off").regions().values()
    return region.graph


def test_stacks_alone_are_found() -> None:
    stack = stack_of(graph_of(nn.LSTM(6, 5).eval()))
    assert stack is not None and stack.target is ops.recurrent
    assert [node.target for node in padded_graph(stack).nodes].count(ops.holding) == 1
    assert stack_of(graph_of(net(lambda m, x: m[1](m[0](x)[0]), nn.LSTM(6, 5), nn.Linear(5, 4)))) is None
    assert stack_of(graph_of(net(lambda m, x: m[0](x.relu())[0], nn.GRU(6, 5)))) is None
