"""Recurrent networks: stacks, cells, directions, states, projections."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.candidates import Candidate
from fx_passes.pipeline import compile_graph
from tests.support.lowering import check_regions, fallbacks, kinds, net, noise, offload, tensors
from tests.tolerance import assert_close
from zendnn_cffi import backend

DTYPES = (None, torch.bfloat16)
NETWORKS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn_tanh": nn.RNNCell}


def layers(found: Any) -> int:
    """How many layers the library computes; none may be PyTorch's."""
    assert not fallbacks(found)
    return kinds(found).count("recurrent_layer")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("sizes", "batch_first"), [((7, 3, 17), False), ((1, 1, 16), True), ((5, 16, 33), True)])
def test_a_stack_that_is_the_whole_model(
    kind: str, bidirectional: bool, sizes: tuple[int, ...], batch_first: bool, dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    model = NETWORKS[kind](sizes[-1], 24, 2, bidirectional=bidirectional, batch_first=batch_first).eval()
    assert layers(offload(model, noise(*sizes), dtype=dtype)) == 2 * (1 + bidirectional)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("read", ["output", "last", "all", "whole"])
def test_states_in_and_out(kind: str, read: str, dtype: torch.dtype | None) -> None:
    """What is read of the results, one by one or as the tuple that it is."""
    torch.manual_seed(0)
    network = NETWORKS[kind](9, 8, 2, bidirectional=True, bias=False)

    def forward(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
        result = m[0](x, (h, c) if kind == "lstm" else h.tanh())
        output, states = result
        if read == "whole":
            return m[0](output[..., :9], states)
        return {"output": output, "last": states[-1], "all": (states, output)}[read]

    found = offload(net(forward, network), noise(5, 3, 9), noise(4, 3, 8), noise(4, 3, 8, seed=1), dtype=dtype)
    assert layers(found) == (8 if read == "whole" else 4)


@pytest.mark.parametrize("kind", NETWORKS)
def test_states_of_another_batch_are_refused(kind: str) -> None:
    """As those of the batch before, where the last batch of a text is smaller; the region takes the next one."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Any:
        return m[0](x, (h, c) if kind == "lstm" else h.tanh())[0]

    def states(samples: int, width: int = 8) -> tuple[Tensor, ...]:
        return tuple(torch.randn(1, samples, width) for _ in range(2))

    model = net(forward, NETWORKS[kind](9, 8))
    fast = zendnn_cffi.optimize(model, tune="off")
    right = torch.randn(5, 3, 9), *states(3)
    fast(*right)
    for x, given in (((5, 2, 9), states(3)), ((5, 3, 9), states(3, 7)), ((5, 3, 8), states(3))):
        for call in (model, fast):
            with pytest.raises(RuntimeError, match=r"Expected hidden|input.size\(-1\)"):
                call(torch.randn(x), *given)
    assert_close(fast(*right), model(*right))
    assert layers(zendnn_cffi.explain(fast)) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_projections_compute_in_float32(dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LSTM with projections")
        network = nn.LSTM(17, 24, 2, proj_size=9, bidirectional=True, batch_first=True).eval()
        network(noise(1, 1, 17))  # PyTorch warns once
    model = net(lambda m, x: m[0](x), network)
    gm = zendnn_cffi.optimize(model, dtype=dtype, tune="off")
    with torch.no_grad():
        for ours, expected in zip(tensors(gm(noise(3, 5, 17))), tensors(model(noise(3, 5, 17))), strict=True):
            assert_close(ours, expected, dtype=dtype, k=24)
    assert layers(zendnn_cffi.explain(gm)) == 4
    check_regions(gm)


@pytest.mark.parametrize("kind", NETWORKS)
def test_without_a_batch(kind: str) -> None:
    torch.manual_seed(0)
    assert layers(offload(NETWORKS[kind](9, 8, bidirectional=True, batch_first=True).eval(), noise(5, 9))) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("given", [False, True])
def test_steps_of_cells_are_one_region(kind: str, given: bool, dtype: torch.dtype | None) -> None:
    """As a decoder has them: each step reads the one before."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor, h: Tensor) -> Any:
        state: Any = None
        if given:
            state = (h, h) if kind == "lstm" else h.tanh()
        outputs = []
        for _ in range(3):
            state = m[0](x, state)
            x = m[1](state[0] if kind == "lstm" else state)
            outputs.append(x)
        return torch.cat(outputs), state

    found = offload(net(forward, CELLS[kind](9, 8), nn.Linear(8, 9)), noise(3, 9), noise(3, 8), dtype=dtype)
    assert layers(found) == 3


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("native", [False, True])
def test_a_model_in_bfloat16_keeps_its_cell_states(native: bool) -> None:
    torch.manual_seed(0)
    model = nn.LSTM(16, 24, 2).eval()
    wide, x = copy.deepcopy(model).double(), noise(5, 3, 16)
    h, c = noise(2, 3, 24), noise(2, 3, 24, seed=1)
    expected = tensors(wide(x.double(), (h.double(), c.double())))
    if native:
        model, x, h, c = model.bfloat16(), x.bfloat16(), h.bfloat16(), c.bfloat16()
    gm = zendnn_cffi.optimize(model, (x, (h, c)), dtype=None if native else torch.bfloat16, tune="off")
    with torch.no_grad():
        for ours, e in zip(tensors(gm(x, (h, c))), expected, strict=True):
            assert ours.dtype == x.dtype
            assert_close(ours, e, dtype=torch.bfloat16, k=24)
    assert layers(zendnn_cffi.explain(gm)) == 2


class Speech(nn.Module):
    """Convolution, two kinds of networks, a linear layer, states among the results."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.lstm = nn.LSTM(16, 12, 2, batch_first=True, bidirectional=True, dropout=0.5)
        self.gru = nn.GRU(24, 10)
        self.out = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Any:
        y, (h, c) = self.lstm(self.conv(x).relu().transpose(1, 2))
        z, last = self.gru(y.transpose(0, 1))
        return self.out(z).log_softmax(-1), h, c, last


@pytest.mark.parametrize("entry", ["symbolic", "export", "compile"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_entry(entry: str, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, x = Speech().eval(), noise(2, 8, 11)
    if entry == "compile":
        backend.register()
        torch.compiler.reset()
        with torch._dynamo.config.patch(allow_rnn=True):
            fast: Any = torch.compile(model, backend="zendnn", options={"dtype": dtype, "tune": "off"})
            with torch.no_grad():
                fast(x)
        (module,) = backend.compiled_modules()[-1:]
    else:
        example = (x,) if entry == "export" else None
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch.export's of _flat_weights among them
            fast = module = zendnn_cffi.optimize(model, example, dtype=dtype, tune="off")
    with torch.no_grad():
        for inputs in (x, noise(3, 8, 11), noise(2, 8, 7)):
            for ours, e in zip(tensors(fast(inputs)), tensors(model(inputs)), strict=True):
                assert ours.shape == e.shape
                assert_close(ours, e, dtype=dtype, k=64, scale=1.0)
    assert len(module.regions()) == 1
    assert kinds(zendnn_cffi.explain(module)).count("recurrent_layer") == 5 * (1 if entry == "compile" else 3)


class Passes(nn.Module):
    """An argument of forward handed on: a state, or none."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Any, state: Any = None) -> Any:
        return self.network(torch.relu(x), state)


STATES: dict[str, Any] = {
    "gru": (lambda: nn.GRU(6, 5), noise(1, 3, 5)),
    "lstm": (lambda: nn.LSTM(6, 5), (noise(1, 3, 5), noise(1, 3, 5, seed=1))),
    "rnn": (lambda: nn.RNN(6, 5, bidirectional=True), noise(2, 3, 5)),
    "gru_cell": (lambda: nn.GRUCell(6, 5), noise(3, 5)),
    "lstm_cell": (lambda: nn.LSTMCell(6, 5), (noise(3, 5), noise(3, 5, seed=1))),
}


@pytest.mark.parametrize("order", [("none", "some"), ("some", "none")], ids="-".join)
@pytest.mark.parametrize("case", STATES)
def test_states_that_may_be_none(case: str, order: tuple[str, str], tmp_path: Any) -> None:
    """Each of both is a kind of calls: a graph for each, in a file, too."""
    torch.manual_seed(0)
    make, state = STATES[case]
    model, x = Passes(make()).eval(), noise(*((3, 6) if "cell" in case else (4, 3, 6)))
    gm: Any = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        calls = {"none": (x, None), "some": (x, state)}
        for name in 2 * order:
            for ours, expected in zip(tensors(gm(*calls[name])), tensors(model(*calls[name])), strict=True):
                assert_close(ours, expected, k=6)
        assert all(region.lowered for region in gm.regions().values()) and len(gm.regions()) == 2
        zendnn_cffi.save(gm, tmp_path / "m")
        loaded = zendnn_cffi.load(tmp_path / "m")
        for call in calls.values():
            for ours, expected in zip(tensors(loaded(*call)), tensors(model(*call)), strict=True):
                assert_close(ours, expected, k=6)


@pytest.mark.parametrize("case", ["gru", "lstm"])
def test_states_of_other_kinds_are_pytorchs(case: str) -> None:
    torch.manual_seed(0)
    make, state = STATES[case]
    model, x = Passes(make()).eval(), noise(4, 3, 6)
    gm = zendnn_cffi.optimize(model, tune="off")
    gm(x, state)
    one = [*state] if case == "lstm" else nn.Parameter(state)  # a list; a parameter, whose gradient is asked for
    for ours, expected in zip(tensors(gm(x, one)), tensors(model(x, one)), strict=True):
        assert_close(ours, expected, k=6)
    wrong: Any = torch.stack(state) if case == "lstm" else (state, state)
    for module in (model, gm):
        with pytest.raises((TypeError, AttributeError, RuntimeError)):
            module(x, wrong)


REFUSALS = {
    "hooks": lambda network: network.register_forward_hook(lambda *_: None),
    "weights computed anew": lambda network: nn.utils.parametrizations.weight_norm(network, "weight_hh_l0"),
    "a forward of its own": lambda network: setattr(network, "forward", network.forward),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_near_misses_stay_modules(reason: str) -> None:
    torch.manual_seed(0)
    network = nn.GRU(6, 5)
    REFUSALS[reason](network)
    model = net(lambda m, x: m[1](m[0](x)[0]), network, nn.Linear(5, 4))
    gm: Any = compile_graph(model)
    with torch.no_grad():
        assert_close(gm(noise(4, 3, 6)), model(noise(4, 3, 6)), k=6)
    assert not any(node.target is ops.recurrent for r in gm.regions().values() for node in r.graph.nodes)


@pytest.mark.needs("avx512")
def test_the_rival_is_pytorch(torch_is_fastest: list[Candidate]) -> None:
    """Where it is faster, it computes the layer, with cell states and in reverse."""
    torch.manual_seed(0)
    found = offload(nn.LSTM(9, 8, bidirectional=True).eval(), noise(5, 3, 9), tune="full")
    assert len([name for name in fallbacks(found) if "recurrent_layer" in name]) == 2
    assert {candidate.implementation for candidate in torch_is_fastest} >= {"torch", "brgemm"}


def test_gradients_flow_as_in_eager() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(6, 5).eval(), noise(4, 3, 6).requires_grad_()
    gm = zendnn_cffi.optimize(model, tune="off")
    gm(x)[0].sum().backward()
    ours, x.grad = x.grad, None
    model(x)[0].sum().backward()
    assert ours is not None and x.grad is not None
    torch.testing.assert_close(ours, x.grad)


def test_saved_and_loaded(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = Speech().eval(), noise(2, 8, 11)
    for dtype in DTYPES:
        gm = zendnn_cffi.optimize(model, (x,), dtype=dtype, tune="off")
        with torch.no_grad():
            expected = tensors(gm(x))
            zendnn_cffi.save(gm, tmp_path / "speech.safetensors")
            again = zendnn_cffi.load(tmp_path / "speech.safetensors")
            for ours, e in zip(tensors(again(x)), expected, strict=True):
                assert torch.equal(ours, e)


def test_new_weights_are_packed_again() -> None:
    torch.manual_seed(0)
    model, x = nn.GRU(6, 5).eval(), noise(4, 3, 6)
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        gm(x)
        for parameter in model.parameters():
            parameter.mul_(0.5)
        for _ in range(3):
            assert_close(gm(x)[0], model(x)[0], k=6)
    assert layers(zendnn_cffi.explain(gm)) >= 1
