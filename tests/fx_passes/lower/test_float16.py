"""float16: float32 inside of regions on every CPU, as nobody has fast kernels for it; float16 at the boundary."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.layouts import row_major
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.rules import lower_graph
from fx_passes.search import measure
from tests.support.lowering import behind_convolution, net, noise, offload, oracle, tensors
from tests.support.small_networks import NETWORKS, images, linear_by_torch, rows
from tests.tolerance import assert_close

F16 = torch.float16
LARGEST = torch.finfo(F16).max
EVERY = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(F16)  # of the dtype's numbers


def halved(name: str) -> tuple[nn.Module, Tensor]:
    """A network and its input in float16."""
    torch.manual_seed(0)
    model, x = NETWORKS[name]()
    return model.half(), x.half()


def layers_of(fast: Any) -> list[Any]:
    return [n for n in zendnn_cffi.explain(fast).nodes if n.became in ("convolution", "inner_product", "matmul")]


@pytest.mark.parametrize("tune", ["off", "full"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_in_float16_is_computed_in_float32(name: str, tune: str) -> None:
    """Nearer to float64 than eager, in its dtype; no implementation is refused for numbers that are better."""
    model, x = halved(name)
    fast = zendnn_cffi.optimize(model, (x,), tune=tune)
    with torch.no_grad():
        ours, theirs, expected = fast(x), model(x), oracle(model, (x,))[0]
    assert ours.dtype == F16 and (ours - expected).norm() <= (theirs - expected).norm()
    assert_close(ours, expected, k=144, scale=float(expected.abs().max()))
    layers = layers_of(fast)
    assert len(layers) == sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules()) or tune == "full"
    assert all("float32" in node.layout for node in layers) and (layers or tune == "full")  # else by what was faster
    assert not any("right numbers" in node.reason for node in zendnn_cffi.explain(fast).nodes)


@pytest.mark.parametrize("name", NETWORKS)
def test_by_torch_compile(name: str) -> None:
    model, x = halved(name)
    fast = torch.compile(model, backend="zendnn", options={"tune": "off"})
    with torch.no_grad():
        ours, expected = fast(x), oracle(model, (x,))[0]
    assert ours.dtype == F16
    assert_close(ours, expected, k=144, scale=float(expected.abs().max()))
    assert len(layers_of(fast)) >= 2


@pytest.mark.needs("bf16")
@pytest.mark.parametrize("name", NETWORKS)
def test_bfloat16_where_it_is_asked_for(name: str) -> None:
    """As of a float32 model: inputs and outputs stay as they were."""
    model, x = halved(name)
    fast = zendnn_cffi.optimize(model, (x,), dtype=torch.bfloat16, tune="off")
    with torch.no_grad():
        ours, expected = fast(x), oracle(model, (x,))[0]
    assert ours.dtype == F16
    assert_close(ours, expected, dtype=torch.bfloat16, k=144, scale=float(expected.abs().max()))
    assert not all("float32" in node.layout for node in layers_of(fast))


def _arranged(x: Tensor, order: str) -> Tensor:
    """The same numbers in other strides."""
    if order == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    if order == "transposed":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if order == "every second":
        return torch.stack((x, x), -1).flatten(-2)[..., ::2]
    return x


@pytest.mark.parametrize("order", ["as it is", "channels_last", "transposed", "every second"])
@pytest.mark.parametrize("channels", [1, 16, 17])
def test_every_number_keeps_its_bits_through_a_region(channels: int, order: str) -> None:
    """A relu of all of them in any strides, subnormals, infinities and the largest as well."""
    places = (EVERY.numel() + channels - 1) // channels
    x = F.pad(EVERY, (0, places * channels - EVERY.numel())).view(1, channels, 1, places)
    x = _arranged(x[:, :, :, : places // 2 * 2].reshape(1, channels, 2, -1).contiguous(), order)
    fast: Any = zendnn_cffi.optimize(net(lambda m, x: F.leaky_relu(m[0](x), 0.5), nn.Identity()), (x,), tune="off")
    with torch.no_grad():
        ours = fast(x)
    assert [node.became for node in zendnn_cffi.explain(fast).nodes] == ["eltwise"]
    expected = F.leaky_relu(x.double(), 0.5).half()
    assert ours.dtype == F16 and torch.equal(ours.nan_to_num(nan=7), expected.nan_to_num(nan=7))


def test_what_is_too_large_is_infinite_at_the_boundary_alone() -> None:
    """Between, float32 has room: a sum that comes back into the range is a number, where eager has an infinity."""
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.data.copy_(torch.eye(4) * 4)
    model = net(lambda m, x: (F.relu(m[0](x)) * 4, F.relu(m[0](x)) * 0.25), layer).half()
    x = torch.tensor([[LARGEST, 1.0, -LARGEST, 2.5]], dtype=F16)
    fast: Any = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        large, small = fast(x)
    assert large.tolist() == [[float("inf"), 16.0, 0.0, 40.0]]
    assert small.tolist() == [[LARGEST, 1.0, 0.0, 2.5]]


def test_masks_of_the_smallest_number_hide() -> None:
    """As Transformers writes them: the dtype's smallest number is added to scores."""

    def fn(m: Any, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in m[0](x).chunk(3, -1))
        scores = q @ k.transpose(2, 3) / 8**0.5 + mask
        y = torch.softmax(scores, -1, dtype=torch.float32).to(x.dtype) @ v
        return m[1](y.transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model = net(fn, nn.Linear(16, 48), nn.Linear(16, 16)).half()
    mask = torch.full((7, 7), torch.finfo(F16).min, dtype=F16).triu(1)[None, None]
    found = offload(model, noise(2, 7, 16, dtype=F16), mask)
    became = [node.became for node in found.nodes]
    assert became.count("matmul") == 2 and became.count("softmax") == 1 and "torch" not in became


SEQUENCES = {
    "lstm": lambda: nn.LSTM(9, 12, batch_first=True),
    "gru": lambda: nn.GRU(9, 12, batch_first=True),
    "projected": lambda: nn.LSTM(9, 12, proj_size=5, batch_first=True),
}


@pytest.mark.parametrize("kind", SEQUENCES)
def test_recurrent_layers(kind: str) -> None:
    torch.manual_seed(0)
    layer = SEQUENCES[kind]()
    model = net(lambda m, x: m[0](x)[0], layer).half()
    found = offload(model, noise(2, 6, 9, dtype=F16), k=48)
    assert "recurrent_layer" in [node.became for node in found.nodes]


def test_lookups_and_bags() -> None:
    torch.manual_seed(0)
    places = torch.randint(0, 11, (3, 5))

    def fn(m: Any, i: Tensor) -> Tensor:
        return torch.cat((m[2](F.relu(m[0](i).sum(1))), m[1](i)), 1)

    model = net(fn, nn.Embedding(11, 16), nn.EmbeddingBag(11, 16, mode="sum"), nn.Linear(16, 16)).half()
    fast: Any = zendnn_cffi.optimize(model, (places,), tune="off")
    with torch.no_grad():
        ours, expected = fast(places), oracle(model, (places,))[0]
    assert ours.dtype == F16 and "inner_product" in [node.became for node in zendnn_cffi.explain(fast).nodes]
    assert_close(ours, expected, k=16)


def test_float16_beside_float32() -> None:
    """Each conversion of the model's own is one; a sum of both is eager's, in float32."""
    torch.manual_seed(0)

    def fn(m: Any, x: Tensor, y: Tensor) -> Tensor:
        return m[1](F.relu(m[0](x)).float() + y)

    model = net(fn, nn.Linear(8, 16).half(), nn.Linear(16, 4))
    x, y = noise(3, 8, dtype=F16), noise(3, 16)
    fast: Any = zendnn_cffi.optimize(model, (x, y), tune="off")
    with torch.no_grad():
        ours, expected = fast(x, y), oracle(model, (x, y))[0]
    assert ours.dtype == torch.float32 and len(layers_of(fast)) == 2
    assert_close(ours, expected, dtype=F16, k=16)


def test_pytorchs_product_of_one_row_is_a_rival() -> None:
    """It reads half the memory. Of more rows, and of convolutions, it is none."""
    assert linear_by_torch((1, 64), F16) == linear_by_torch((1, 1, 64), F16) == [F16]
    assert linear_by_torch((2, 64), F16) == []


def test_a_reference_that_overflows_is_no_fault_of_a_candidate() -> None:
    """What a float32 result has beyond float16's range is infinite in the reference."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(ops.eltwise, (x, "exp"), {}))
    (operation,), values = lower_graph(graph, [TensorSpec((4, 512), F16, (512, 1))], {})
    bench = measure.Bench(operation, values)
    bench.operands[0].mul_(20)
    bench.expected = bench.operands[0].exp()
    assert bench.expected.isinf().any()
    found = [bench.check_and_time(c) for c in operation.candidates if c.dst == row_major((4, 512), torch.float32)]
    assert found and all(result.right for result in found)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_saved_and_loaded(name: str, release: bool, tmp_path: Path) -> None:
    model, x = halved(name)
    fast: Any = zendnn_cffi.optimize(model, (x,), tune="off", release_weights=release)
    with torch.no_grad():
        expected = tensors(fast(x))[0]
        zendnn_cffi.save(fast, tmp_path / "net.safetensors")
        assert torch.equal(zendnn_cffi.load(tmp_path / "net.safetensors")(x), expected)
        assert torch.equal(copy.deepcopy(fast)(x), expected)


def test_weights_written_in_place_are_packed_again() -> None:
    model, x = halved("images")
    fast: Any = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        fast(x)
        for parameter in model.parameters():
            parameter.mul_(0.5)
        fast(x)
        ours = fast(x)
    assert_close(ours, oracle(model, (x,))[0], k=144)


def test_an_input_in_float16_to_a_model_in_float32_is_refused_as_by_eager() -> None:
    model, x = images()
    fast: Any = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        fast(x)
        for call in (model, fast):
            with pytest.raises(RuntimeError, match="same"):
                call(x.half())


_SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9))
FUNCTIONS = {
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: torch.softmax(x, 1),
    "mean": lambda x: x.mean((2, 3)),
    "clamp": lambda x: x.clamp(-0.5, 0.75),
    "pool": lambda x: F.max_pool2d(x, 3, 1, 1),
    "permute": lambda x: x.permute(0, 2, 3, 1).flatten(1),
    "shuffle": lambda x: F.interpolate(x, scale_factor=2),
    "chunk": lambda x: torch.cat([part.tanh() for part in x.chunk(2, 1)], 1),
}


@settings(max_examples=40, deadline=None)
@given(_SHAPES, st.sampled_from(sorted(FUNCTIONS)), st.sampled_from(["as it is", "channels_last"]))
def test_functions_behind_a_convolution(shape: tuple[int, int, int, int], name: str, order: str) -> None:
    n, out, height, width = shape
    torch.manual_seed(0)
    model = behind_convolution(FUNCTIONS[name], out).half()
    found = offload(model, _arranged(noise(n, 3, height, width, dtype=F16), order), k=27)
    assert "convolution" in [node.became for node in found.nodes]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 33), st.integers(1, 40), st.sampled_from(["layer", "rms", "none"]))
def test_rows_of_any_size(samples: int, length: int, size: int, norm: str) -> None:
    torch.manual_seed(0)
    norms = {"layer": nn.LayerNorm(size), "rms": nn.RMSNorm(size), "none": nn.Identity()}
    model = net(lambda m, x: m[1](m[0](x)).relu() + 1, norms[norm], nn.Linear(size, 2 * size + 1)).half()
    found = offload(model, noise(samples, length, size, dtype=F16) + 3, scale=None)
    assert [node.became for node in found.nodes].count("inner_product") == 1


def test_rows_in_a_model_called_in_float16_and_in_float32() -> None:
    """Two signatures of one region."""
    model, x = rows()
    fast: Any = zendnn_cffi.optimize(net(lambda m, x: F.gelu(x).transpose(1, 2) * 2, nn.Identity()), (x,), tune="off")
    with torch.no_grad():
        for given in (x, x.half(), x):
            ours = fast(given)
            assert ours.dtype == given.dtype
            assert_close(ours, F.gelu(given.double()).transpose(1, 2) * 2)
