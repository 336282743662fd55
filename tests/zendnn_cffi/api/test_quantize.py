"""quantize(): right to a few steps, in integers where it says so; bad input is refused before anything is exported."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.lower.products import row_scaled_linear
from tests.support.cpu import take_away
from tests.support.lowering import net, noise, tensors
from tests.support.mixed_precision import Dense
from tests.support.quantized import ran
from zendnn_cffi.api.quantization import pt2e
from zendnn_cffi.api.quantization.padding import write_out_padding
from zendnn_cffi.api.quantization_report import QuantizationReport, powers, sqnr_db


class Net(nn.Module):
    """A residual block between a stem and a classifier, with batch normalizations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(32, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        x = F.relu(self.body(x) + x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Named(nn.Module):
    """Arguments by name, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(24, 48), nn.Linear(48, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
        y = torch.relu(self.a(x))
        return {"y": self.b(y) * scale, "sum": y.sum(-1)}


class Attending(nn.Module):
    """Attention of four heads between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.before(x).view(*x.shape[:2], 12, 8).transpose(1, 2).chunk(3, 1)
        return self.behind(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], tuple[str, ...]]] = {
    "convolutions": (Net, lambda n: noise(n, 3, 32, 32), ("stem.0", "body.0")),
    "by name": (Named, lambda n: {"x": noise(n, 24), "scale": noise(1)}, ("a",)),
    "by position": (Named, lambda n: (noise(n, 24), noise(1)), ("a",)),
}


def called(module: Any, inputs: Any) -> Any:
    with torch.no_grad():
        if isinstance(inputs, dict):
            return module(**inputs)
        return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


@pytest.mark.parametrize("batch", (1, 4))
@pytest.mark.parametrize("name", MODELS)
def test_static(name: str, batch: int) -> None:
    make, inputs, quantized = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    data = [inputs(batch) for _ in range(3)]
    module, report, converted = zendnn_cffi.quantize(model, data, tune="off", compare=False)
    assert sqnr_db(called(model, data[0]), called(module, data[0])) == report.sqnr_db > 25
    assert sqnr_db(called(converted, data[0]), called(module, data[0])) > 30
    assert {row.module for row in report.layers if row.computes_in == "int8"} >= set(quantized)
    assert any(dtype in (torch.uint8, torch.int8) for _, dtype, _ in ran(module))
    assert all(row.sqnr_db > 20 for row in report.layers) and report.float_ms is None
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()) and not model.training
    if batch > 1 or name == "convolutions":  # a batch of 1 cannot be told from a scale's size
        other = inputs(3)  # the batch is free
        assert sqnr_db(called(model, other), called(module, other)) > 20


class Recurrent(nn.Module):
    """A recurrent network before a classifier."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.sequence, self.head = kind(24, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.sequence(x)[0])


def test_floats_that_nobody_reads_are_gone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval()
    fast, _, converted = zendnn_cffi.quantize(model, [noise(4, 256) for _ in range(3)], tune="off", compare=False)
    for module in (fast, converted):
        assert all(value.dtype == torch.int8 for value in module.state_dict().values() if value.numel() > 256)
    zendnn_cffi.save(fast, tmp_path / "m")
    assert (tmp_path / "m").stat().st_size < 0.8 * sum(p.numel() * 4 for p in model.parameters())
    assert torch.equal(zendnn_cffi.load(tmp_path / "m")(noise(4, 256)), fast(noise(4, 256)))


@pytest.mark.parametrize(("weights", "inputs"), [(2.0**-20, 1.0), (1.0, 2.0**-20), (2.0**-20, 2.0**-20)])
@pytest.mark.parametrize("case", ["linear", "linear, dynamic", "convolution"])
def test_small_numbers_have_all_bits(case: str, weights: float, inputs: float) -> None:
    """Torchao's least scale for x86 is 2^-12: there nothing would be left of these."""
    dynamic = case == "linear, dynamic"
    if dynamic and inputs < 1.0:
        inputs = 2.0**-10  # PyTorch takes rows below 1e-5 for such
    torch.manual_seed(0)
    layer = nn.Conv2d(24, 16, 3, bias=False) if case == "convolution" else nn.Linear(24, 16, False)
    model = nn.Sequential(layer).eval()
    x = noise(8, 24, 5, 5) if case == "convolution" else noise(8, 24)
    small = copy.deepcopy(model)
    with torch.no_grad():
        next(small.parameters()).mul_(weights)
        usual, found = (
            sqnr_db(m(given), zendnn_cffi.quantize(m, [given], dynamic=dynamic, tune="off").module(given))
            for m, given in ((model, x), (small, x * inputs))
        )
    assert usual > 30 and abs(found - usual) < 0.5


@pytest.mark.parametrize("dynamic", (False, True))
def test_a_normalization_of_vectors(dynamic: bool) -> None:
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8)).eval()
    x = noise(16)
    fast, report, _ = zendnn_cffi.quantize(model, [noise(16) for _ in range(4)], dynamic=dynamic, compare=False)
    assert sqnr_db(model(x), fast(x)) > 20 and len(report.layers) == 1


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_outputs_stay_float() -> None:
    x = noise(2, 16)
    for model in (nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 0)), nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 0))):
        fast, report, _ = zendnn_cffi.quantize(model.eval(), [x] * 3, compare=False)
        assert fast(x).shape == (2, 0) and any(layer.computes_in != "int8" for layer in report.layers)


@pytest.mark.parametrize(
    ("model", "dynamic"),
    ((Recurrent(), False), (nn.TransformerEncoderLayer(24, 4, 48, batch_first=True), False), (Recurrent(), True)),
    ids=("lstm", "attention", "dynamic"),
)
def test_other_batches_than_those_of_the_calibration(model: nn.Module, dynamic: bool) -> None:
    calibration = [noise(2, 7, 24) for _ in range(4)]
    fast, report, converted = zendnn_cffi.quantize(model.eval(), calibration, dynamic=dynamic)
    assert report.layers
    with torch.no_grad():
        for batch in (1, 2, 5):
            x = noise(batch, 7, 24)
            assert sqnr_db(model(x), converted(x)) > 20
            torch.testing.assert_close(fast(x), converted(x), atol=0.05, rtol=0.0)


@pytest.mark.parametrize("shape", [(1, 3, 32, 32), (2, 1, 32, 32)], ids=str)
def test_a_first_input_that_is_expanded(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), noise(*shape).expand(2, 3, 32, 32)
    module, report, _ = zendnn_cffi.quantize(model, [x, noise(2, 3, 32, 32)], tune="off", compare=False)
    assert {row.computes_in for row in report.layers} == {"int8"}
    assert sqnr_db(called(model, x), called(module, x)) > 25


@pytest.mark.parametrize("kind", (nn.LSTM, nn.GRU, nn.RNN))
def test_sequences_of_other_lengths(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind).eval()
    module, report, _ = zendnn_cffi.quantize(model, [noise(2, 7, 24)], tune="off", compare=False)
    assert [row.computes_in for row in report.layers] == ["int8"]
    for shape in ((2, 7, 24), (1, 1, 24), (3, 12, 24)):
        x = noise(*shape)
        assert sqnr_db(called(model, x), called(module, x)) > 25


def test_the_report_compares_times_and_is_drawn(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, report, _ = zendnn_cffi.quantize(Net().eval(), [noise(1, 3, 32, 32)], tune="off")
    assert report.float_ms and report.int8_ms and math.isfinite(report.sqnr_db)
    text = str(report)
    assert "stem.0" in text and "layers in int8" in text and "times the speed" in text
    assert report.draw(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert isinstance(module, torch.fx.GraphModule)


def test_it_is_saved_with_its_integers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = noise(2, 3, 32, 32)
    module, _, converted = zendnn_cffi.quantize(Net().eval(), [x], tune="off", compare=False)
    zendnn_cffi.save(module, tmp_path / "m")
    loaded = zendnn_cffi.load(tmp_path / "m")
    assert torch.equal(called(loaded, x), called(module, x)) and ran(loaded) == ran(module)
    torch.export.save(torch.export.export(converted, (x,)), tmp_path / "m.pt2")
    again = zendnn_cffi.optimize(tmp_path / "m.pt2", tune="off")
    assert sqnr_db(called(module, x), called(again, x)) > 30  # steps may differ where layers compute in float


def test_it_is_copied_and_says_what_writes_it() -> None:
    torch.manual_seed(0)
    x = noise(2, 3, 32, 32)
    found = zendnn_cffi.quantize(Net().eval(), [x], tune="off", compare=False)
    copied = copy.deepcopy(found)
    assert torch.equal(called(copied.module, x), called(found.module, x)) and ran(copied.module) == ran(found.module)
    assert torch.equal(called(copied.converted, x), called(found.converted, x)) and copied.report == found.report
    for what in (found, found.module):
        with pytest.raises(pickle.PicklingError, match=r"zendnn_cffi\.save"):
            pickle.dumps(what)
    assert pickle.loads(pickle.dumps(found.report)) == found.report


def test_names_come_in_any_order() -> None:
    torch.manual_seed(0)
    model = Named().eval()
    data = [{"x": noise(4, 24), "scale": noise(1)}, {"scale": noise(1), "x": noise(4, 24, seed=1)}]
    module, report, _ = zendnn_cffi.quantize(model, data, budget=20.0, tune="off", compare=False)
    assert report.verified_db and report.verified_db > 20
    assert all(sqnr_db(called(model, x), called(module, x)) > 20 for x in data)


@pytest.mark.needs("vnni")
def test_dynamic() -> None:
    torch.manual_seed(0)
    model, x = Named().eval(), (noise(4, 24), noise(1))
    module, report, _ = zendnn_cffi.quantize(model, [x], dynamic=True, tune="off", compare=False)
    assert sqnr_db(called(model, x), called(module, x)) == report.sqnr_db > 25
    assert report.layers and all(layer.computes_in == "int8" for layer in report.layers)


@pytest.mark.needs("vnni")
def test_pieces_of_a_dense_network_are_integers() -> None:
    """They were float32 between the normalizations, as the relu behind one hid what it is for."""
    torch.manual_seed(0)
    model, x = Dense(3).eval(), noise(2, 3, 24, 24)
    module, report, converted = zendnn_cffi.quantize(model, [x], tune="off", compare=False)
    norms = converted.graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default)
    assert [norm.args[0].target for norm in norms] == [torch.ops.quantized_decomposed.dequantize_per_tensor.default] * 3
    assert all(layer.computes_in == "int8" for layer in report.layers)
    assert sqnr_db(called(model, x), called(module, x)) > 25
    assert sqnr_db(called(converted, x), called(module, x)) > 35
    layouts = {row.name: row.layout for row in zendnn_cffi.explain(module).nodes}
    assert all("uint8" in layouts[name] for name in ("cat", "cat_1", "batch_norm_1", "batch_norm_2"))


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("case", ["alone", "relu", "sum", "sum and relu", "pooling", "concatenation"])
def test_dynamic_leaves_convolutions_in_float(case: str) -> None:
    """torchao's quantizer chose scales of their inputs in each call, too, which PyTorch computed."""
    forms: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
        "alone": lambda m, x: m[0](x),
        "relu": lambda m, x: F.relu(m[0](x)),
        "sum": lambda m, x: m[0](x) + x,
        "sum and relu": lambda m, x: F.relu(m[0](x) + x),
        "pooling": lambda m, x: F.max_pool2d(F.relu(m[0](x)), 2),
        "concatenation": lambda m, x: torch.cat([m[0](x), m[0](x)], 1),
    }
    model = net_of(lambda m, x: m[1](forms[case](m, x).mean((2, 3))[:, :4]), nn.Conv2d(4, 4, 1), nn.Linear(4, 6))
    x = noise(2, 4, 9, 9)
    module, report, converted = zendnn_cffi.quantize(model, [x], dynamic=True, tune="off", compare=False)
    assert sum("choose_qparams" in str(node.target) for node in converted.graph.nodes) == 1
    computes_in = {layer.kind: layer.computes_in for layer in report.layers}
    assert computes_in == {"conv2d": "float32", "linear": "int8"}
    assert sqnr_db(called(model, x), called(module, x)) > 30


def test_a_layer_that_computes_in_float_is_not_reported_as_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_scaled_linear, "optimized_implementations", lambda *args, **kwargs: [])  # as without VNNI
    model = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 8)).eval()
    _, report, _ = zendnn_cffi.quantize(model, [noise(4, 16)], dynamic=True, tune="off", compare=False)
    assert [layer.computes_in for layer in report.layers] == ["plain PyTorch"] * 2


def test_seven_bits_without_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those, sums of two products fit into 16 bits: layers are in int8 there, too."""
    take_away("vnni", monkeypatch)
    torch.manual_seed(0)
    model, data = Net().eval(), [noise(2, 3, 32, 32, seed=seed) for seed in range(3)]
    module, report, converted = zendnn_cffi.quantize(model, data, tune="off", compare=False)
    ops = torch.ops.quantized_decomposed
    values = converted.graph.find_nodes(op="call_function", target=ops.quantize_per_tensor.default)
    weights = converted.graph.find_nodes(op="call_function", target=ops.dequantize_per_channel.default)
    assert values and {tuple(node.args[3:6]) for node in values} == {(0, 255, torch.uint8)}
    assert weights and {tuple(node.args[4:7]) for node in weights} == {(-63, 63, torch.int8)}
    assert [layer.computes_in for layer in report.layers] == ["int8"] * 3
    assert sqnr_db(called(model, data[0]), called(module, data[0])) == report.sqnr_db > 24
    assert report.bits == 7 and "weights of 7 bits" in str(report)
    assert sqnr_db(called(converted, data[0]), called(module, data[0])) > 30


def test_scales_of_a_call_without_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are int8, of which no kernel is exact there: weights keep their 8 bits."""
    take_away("vnni", monkeypatch)
    model, x = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8)).eval(), noise(6, 64)
    module, report, converted = zendnn_cffi.quantize(model, [x], dynamic=True, tune="off", compare=False)
    assert report.bits == 8 and "int8" not in {layer.computes_in for layer in report.layers}
    assert sqnr_db(model(x), module(x)) > 30 and sqnr_db(converted(x), module(x)) > 40


def test_attention_stays_float_without_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is exact of two values of 8 bits there, so rounding them would gain nothing."""
    take_away("vnni", monkeypatch)
    model, x = Attending().eval(), noise(2, 12, 32)
    _, report, _ = zendnn_cffi.quantize(model, [x], tune="off", compare=False)
    assert {layer.kind for layer in report.layers} == {"linear"}


def test_layers_that_nobody_reads_are_dropped() -> None:
    class Unread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.tanh = nn.Linear(16, 8), nn.Linear(8, 8), nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.first(x)
            self.tanh(self.second(y))
            return y

    _, report, _ = zendnn_cffi.quantize(Unread().eval(), [noise(4, 16)], dynamic=True, tune="off", compare=False)
    assert len(report.layers) == 1


def net_of(fn: Callable[..., torch.Tensor], *layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return net(fn, *layers)


NUMBERS = {
    "a linear layer and a number": lambda m, x: m[0](x) + 2.0,
    "a number and a linear layer": lambda m, x: 1 + m[0](x),
    "then relu": lambda m, x: F.relu(m[0](x) + 3),
    "in place": lambda m, x: m[0](x).add_(1),
    "a convolution and a number": lambda m, x: m[0](x) + 1,
    "a gate": lambda m, x: F.relu6(m[0](x) + 3) / 6,
}


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("dynamic", (False, True))
@pytest.mark.parametrize("case", NUMBERS)
def test_numbers_that_are_added_to_a_layer(case: str, dynamic: bool) -> None:
    """The quantizer looked for a residual sum there, and raised AssertionError."""
    is_image = case in ("a convolution and a number", "a gate")
    layers = (nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1)) if is_image else (nn.Linear(16, 16), nn.Linear(16, 4))
    model = net_of(lambda m, x: m[1](NUMBERS[case](m, x)), *layers)
    data = [noise(2, 4, 9, 9) if is_image else noise(4, 16)]
    module, report, converted = zendnn_cffi.quantize(model, data, dynamic=dynamic, tune="off", compare=False)
    assert sqnr_db(called(converted, data[0]), called(module, data[0])) > 30
    in_integers = [layer.computes_in == "int8" for layer in report.layers]
    assert in_integers == [not (is_image and dynamic)] * 2


PADDED: dict[str, Callable[[], nn.Module]] = {
    "reflect": lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"),
    "circular": lambda: nn.Conv2d(4, 8, (3, 5), padding=(1, 2), padding_mode="circular"),
    "same": lambda: nn.Conv2d(4, 8, 3, padding="same", dilation=2),
    "same, of an even window": lambda: nn.Conv2d(4, 8, (2, 4), padding="same"),
    "valid": lambda: nn.Conv2d(4, 8, 3, padding="valid", stride=2),
}


@pytest.mark.parametrize("case", PADDED)
def test_convolutions_that_pad_otherwise(case: str) -> None:
    """The quantizer raised ValueError: no aten conv2d operator."""
    model = net_of(lambda m, x: m[1](F.relu(m[0](x))), PADDED[case](), nn.Conv2d(8, 4, 1))
    data = [noise(2, 4, 9, 11)]
    module, report, converted = zendnn_cffi.quantize(model, data, tune="off", compare=False)
    assert sqnr_db(called(model, data[0]), called(converted, data[0])) > 25
    assert sqnr_db(called(converted, data[0]), called(module, data[0])) > 30
    assert [row.computes_in for row in report.layers] == ["int8"] * 2


@pytest.mark.parametrize("case", ("same, of an even window", "same", "valid"))
def test_padding_is_written_out_exactly(case: str) -> None:
    model, x = net_of(lambda m, x: m[0](x), PADDED[case]()), noise(2, 4, 9, 11)
    exported = torch.export.export(model, (x,), strict=True).module()
    write_out_padding(exported)
    assert not exported.graph.find_nodes(op="call_function", target=torch.ops.aten.conv2d.padding)
    torch.testing.assert_close(exported(x), model(x))


class Branch(nn.Linear):
    """A layer whose numbers decide what is computed."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x if x.sum() > 0 else -x)
        return y


@pytest.mark.parametrize(
    "model, calibration, error, message",
    (
        (nn.Linear(3, 3), [], ValueError, "training mode"),
        (nn.Linear(3, 3).eval(), [], ValueError, "calibration is empty"),
        (nn.Linear(3, 3).eval(), torch.ones(3), TypeError, "an iterable of inputs"),
        (nn.Linear(3, 3).eval(), 3, TypeError, "an iterable of inputs"),
        (nn.Linear(3, 3).eval(), ["x"], TypeError, "tensors, sequences or mappings, got str"),
        ("model", [torch.ones(3)], TypeError, "must be a torch.nn.Module or .*, got str"),
        (
            nn.Linear(3, 3).eval(),
            [(torch.ones(1, 3), 5)],
            ValueError,
            r"no call of Linear: too many .* Leave out labels",
        ),
        (nn.Linear(3, 3).eval(), [torch.ones(1, 4)], ValueError, "Linear itself fails .*: mat1 and mat2 shapes"),
        (nn.Linear(3, 3).eval(), [torch.ones(1, 3).double()], ValueError, "calibration input 1 fails .* same dtype"),
        (nn.Linear(3, 3).eval(), [torch.ones(1, 3), torch.full((1, 3), math.nan)], ValueError, "input 2 holds NaN"),
        (nn.Linear(3, 3).eval(), [torch.ones(2, 3), torch.ones(2, 4)], ValueError, "calibration input 2 fails in"),
        (
            nn.Linear(3, 3).eval().bfloat16(),
            [torch.ones(1, 3)],
            ValueError,
            "bfloat16: call model.float",
        ),
        (Branch(), [torch.ones(1, 3)], ValueError, "torch.export cannot follow Branch"),
    ),
)
def test_bad_input(model: Any, calibration: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zendnn_cffi.quantize(model, calibration)


@pytest.mark.parametrize("dynamic", (False, True))
def test_calls_of_other_kinds_are_named(dynamic: bool) -> None:
    """A graph is for one kind of calls. Normalizations are smoothed before observers see the inputs."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        z: torch.Tensor = m[1](m[0](x))
        return z if y is None else z + y

    model = net_of(forward, nn.LayerNorm(3), nn.Linear(3, 3))
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="calibration input 2 fails in the graph that the first one gave: TypeError"):
        zendnn_cffi.quantize(model, [(x, x), (x,)], dynamic=dynamic)


@pytest.mark.needs("vnni")
def test_example_inputs_tell_which_sizes_are_free() -> None:
    """torch.export takes a batch of 1 for fixed, and calibration inputs often are such."""
    model = net_of(lambda m, x: m[1](torch.relu(m[0](x))), nn.Linear(24, 48), nn.Linear(48, 8))
    calibration = [noise(1, 24, seed=seed) for seed in range(4)]
    for example in (noise(3, 24), (noise(3, 24),), {"x": noise(3, 24)}):
        fast = zendnn_cffi.quantize(model, calibration, example_inputs=example, compare=False).module
        with torch.no_grad():
            assert sqnr_db(fast(noise(5, 24)), model(noise(5, 24))) > 25
        assert {dtype for kind, dtype, _ in ran(fast) if kind in ("matmul", "inner_product")} == {torch.uint8}
    with pytest.raises(ValueError, match="itself fails on example_inputs"):
        zendnn_cffi.quantize(model, calibration, example_inputs=noise(3, 25))
    with pytest.raises(TypeError, match="got int"):
        zendnn_cffi.quantize(model, calibration, example_inputs=3)


@pytest.mark.parametrize("in_place", (True, False))
@pytest.mark.parametrize("options", ({}, {"accuracy": lambda model: -float(model(noise(3, 24)).isnan().sum())}))
def test_buffers_that_forward_writes_are_left_as_they_were(in_place: bool, options: dict[str, Any]) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(24, 8)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if in_place:
                self.calls.add_(1)
            else:
                self.calls = self.calls + 1
            y: torch.Tensor = self.layer(x)
            return y

    model = Counting().eval()
    buffer, limits = model.calls, {"max_drop": 0.0} if options else {}
    calibration = [noise(2, 24, seed=seed) for seed in range(4)]
    zendnn_cffi.quantize(model, calibration, compare=False, **options, **limits)
    assert model.calls is buffer and model.calls.item() == 0


@pytest.mark.parametrize("options", ({}, {"budget": 20.0}), ids=str)
def test_tables_that_look_ups_shorten_are_left_as_they_were(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 16, max_norm=1.0), nn.Linear(16, 8)).eval()
    before = model[0].weight.detach().clone()
    words = torch.randint(0, 30, (2, 7))
    module, _, converted = zendnn_cffi.quantize(model, [words], tune="off", compare=False, **options)
    for each in (model, converted, module):
        assert torch.equal(each.state_dict()["0.weight"], before)
    expected = called(copy.deepcopy(model), words)
    assert sqnr_db(expected, called(module, words)) > 25 and sqnr_db(expected, called(converted, words)) > 25


def test_another_default_device() -> None:
    """As of who makes large models on it; torchao's observers would lie there."""
    model, x = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), torch.randn(4, 16)
    with torch.device("meta"):
        fast = zendnn_cffi.quantize(model, [x], tune="off").module
    assert sqnr_db(model(x), fast(x)) > 20


def test_masks_may_hold_minus_infinity() -> None:
    model = net_of(lambda m, x, mask: m[1]((m[0](x) + mask).softmax(-1)), nn.Linear(4, 4), nn.Linear(4, 4))
    x, mask = noise(2, 4), torch.tensor([0.0, 0.0, -math.inf, 0.0])
    found = zendnn_cffi.quantize(model, [(x, mask)], tune="off", compare=False)
    assert found.report.sqnr_db > 20


def test_without_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.quantization.pt2e", None)
    with pytest.raises(ImportError, match="pip install torchao"):
        zendnn_cffi.quantize(nn.Linear(3, 3).eval(), [torch.ones(1, 3)])


def test_decibels() -> None:
    x = torch.tensor([3.0, 4.0])
    assert sqnr_db(x, x + torch.tensor([0.0, 0.5])) == pytest.approx(20.0)
    assert sqnr_db({"a": x, "n": 3}, {"a": x.clone(), "n": 3}) == math.inf
    assert sqnr_db(torch.zeros(2), x) == -math.inf
    assert "m: 0 of 0 layers" in str(QuantizationReport("m", (), 30.0))


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("dynamic", [False, True])
def test_projections_of_multihead_attention_are_quantized(dynamic: bool) -> None:
    """torchao's quantizer finds linear layers by their module, and these have none."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.last = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.attention(x, x, x, need_weights=False)[0])

    torch.manual_seed(0)
    x = noise(2, 9, 32)
    fast, report, _ = zendnn_cffi.quantize(Block().eval(), [x], dynamic=dynamic, tune="off", compare=False)
    assert len(report.layers) == 4 - dynamic and {layer.computes_in for layer in report.layers} == {"int8"}
    assert report.sqnr_db > 25
    linear = [dtype for kind, dtype, _ in ran(fast) if kind in ("inner_product", "matmul") and dtype != torch.float32]
    assert len(linear) == 4 - dynamic  # queries and keys, too, where scales are constants


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", ({}, {"norm_first": True}, {"activation": "gelu", "batch_first": False}))
def test_encoder_layers_are_quantized(options: dict[str, Any], dynamic: bool) -> None:
    """PyTorch's fast path is one operator for the whole layer, which was left float without a word."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, **{"batch_first": True} | options).eval()
    x = noise(2, 9, 32)
    fast, report, _ = zendnn_cffi.quantize(model, [x], dynamic=dynamic, tune="off", compare=False)
    kinds = ["linear", "scaled_dot_product_attention", "linear", "linear", "linear"]
    assert [layer.kind for layer in report.layers] == [kind for kind in kinds if not dynamic or kind == "linear"]
    assert {layer.computes_in for layer in report.layers} == {"int8"}
    assert sqnr_db(called(model, x), called(fast, x)) > 30


@pytest.mark.parametrize("batch_first", (False, True))
@pytest.mark.parametrize("read", (False, True))
def test_a_view_of_what_attention_returns(read: bool, batch_first: bool) -> None:
    """PyTorch's fast path gives results in order; exported without it, the view was refused."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        y, weights = m[0](x, x, x, need_weights=read)
        return (y.view(-1, 16), weights) if read else y.view(-1, 16)

    x, model = noise(2, 5, 16), net_of(forward, nn.MultiheadAttention(16, 4, batch_first=batch_first))
    with torch.no_grad():
        expected = model(x)
    module, report, converted = zendnn_cffi.quantize(model, [x], tune="off", compare=False)
    for found in (called(module, x), called(converted, x), zendnn_cffi.optimize(model, (x,), tune="off")(x)):
        for mine, theirs in zip(tensors(found), tensors(expected), strict=True):
            assert mine.stride() == theirs.stride() and sqnr_db(theirs, mine) > 30
    assert [row.computes_in for row in report.layers if row.kind == "linear"] == ["int8"] * 2
    assert "forward" not in model.get_submodule("m.0").__dict__


@pytest.mark.parametrize("budget", (None, 20.0))
def test_layers_that_are_joined_are_reported_where_they_compute(budget: float | None) -> None:
    """Queries, keys and values of one input are one product, under a name of its own: they were "plain PyTorch"."""

    def attend(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m[i](x).unflatten(-1, (4, 8)).transpose(1, 2) for i in range(3))
        found: torch.Tensor = m[3](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return found

    model, x = net_of(attend, *(nn.Linear(32, 32) for _ in range(4))), noise(2, 9, 32)
    module, report, _ = zendnn_cffi.quantize(model, [x], attention=False, budget=budget, tune="off", compare=False)
    assert [row.kind for row in report.layers] == ["linear"] * 4
    assert [row.computes_in for row in report.layers] == ["int8"] * 4 and "4 of 4 layers in int8" in str(report)
    products = [dtype for kind, dtype, _ in ran(module) if kind in ("inner_product", "matmul")]
    assert products.count(torch.uint8) == 2


def test_nothing_is_printed_of_what_torchao_and_torch_export_try(run_python: Any) -> None:
    """torchao tells of libraries for GPUs, torch.export of sizes it cannot compare, at length."""
    code = """
import torch, zendnn_cffi
from torch import nn
halves = lambda: (nn.Conv2d(4, 4, 3, padding=1), nn.MaxPool2d(3, 2, ceil_mode=True))
model = nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3), *halves(), *halves(), *halves(), nn.Conv2d(4, 4, 1)).eval()
images = torch.randn(2, 3, 64, 64)
zendnn_cffi.quantize(model, [images], compare=False, tune="off")[0](images)
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")


class Remembering(nn.Module):
    """A cell that keeps its last result and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(32, 32)
        self.register_buffer("last", torch.zeros(2, 32))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> Any:
        self.count.add_(1)
        self.last.copy_(torch.tanh(self.cell(x + self.last)))
        return self.last.clone(), self.count.clone()


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"budget": 20.0}, {"compare": False}], ids=str)
def test_what_a_model_remembers_of_calibration_is_forgotten(options: dict[str, Any]) -> None:
    """The quantized modules begin as the model stands, count for themselves, and leave its buffers alone."""
    torch.manual_seed(0)
    model = Remembering().eval()
    with torch.no_grad():
        model(noise(2, 32))
        before = model.last.clone()
        found = zendnn_cffi.quantize(model, [noise(2, 32, seed=n) for n in range(3)], tune="off", **options)
        assert torch.equal(model.last, before) and int(model.count) == 1
        assert 20 < found.report.sqnr_db < 200
        for module in (found.module, found.converted):
            reference = copy.deepcopy(model)
            for number in range(2, 5):
                x = noise(2, 32, seed=number)
                (last, count), (expected, _) = module(x), reference(x)
                assert int(count) == number
                assert sqnr_db(expected, last) > 20
        assert torch.equal(model.last, before) and int(model.count) == 1


class Window(nn.Module):
    """Buffers in one memory: one is written to, another is read."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(32, 32)
        whole = torch.zeros(2, 2, 32)
        self.register_buffer("whole", whole)
        self.register_buffer("first", whole[0])

    def forward(self, x: torch.Tensor) -> Any:
        y = self.cell(x + self.first)
        self.whole.copy_(torch.stack((torch.tanh(y), y)))
        return y


def test_buffers_in_one_memory_stay_so() -> None:
    torch.manual_seed(0)
    model = Window().eval()
    with torch.no_grad():
        found = zendnn_cffi.quantize(model, [noise(2, 32, seed=n) for n in range(3)], tune="off", compare=False)
        assert not model.whole.any()
        reference = copy.deepcopy(model)
        for number in range(3):
            x = noise(2, 32, seed=number)
            assert sqnr_db(reference(x), found.converted(x)) > 20


@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"budget": 20.0}], ids=str)
def test_a_class_that_its_bias_masks_stays_masked(options: dict[str, Any]) -> None:
    """Minus infinity in a bias: the mean that rounding shifts was NaN there, and so was every probability."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    masked: Any = model[2]
    masked.bias.data[0] = -math.inf
    x = noise(8, 16)
    found = zendnn_cffi.quantize(model, [x], tune="off", compare=False, **options)
    with torch.no_grad():
        expected = model(x)
        for module in (found.module, found.converted):
            assert torch.equal(module(x).isinf(), expected.isinf()) and not module(x).isnan().any()
            assert sqnr_db(expected, module(x)) > 25
    assert all(25 < row.sqnr_db < 200 for row in found.report.layers) and found.report.sqnr_db > 25


def test_a_model_that_takes_a_lock() -> None:
    """As SegFormer's backbone takes one, which torch.export follows where it runs the model's code."""
    lock = threading.Lock()

    def forward(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        with lock:
            return m[0](x).relu()

    model = net(forward, nn.Conv2d(3, 8, 3))
    images = [noise(2, 3, 9, 9, seed=seed) for seed in range(3)]
    fast, report, converted = zendnn_cffi.quantize(model, images, tune="off", compare=False)
    assert [layer.computes_in for layer in report.layers] == ["int8"]
    for shape in ((1, 3, 9, 9), (5, 3, 12, 7)):
        x = noise(*shape, seed=7)
        torch.testing.assert_close(fast(x), converted(x), atol=1e-4, rtol=1e-4)
        assert sqnr_db(model(x), fast(x)) > 25
    assert len(fast.regions()) == 1 and not lock.locked()


@pytest.mark.parametrize(
    ("expected", "actual", "powers_of_both"),
    [
        ([1.0, math.inf, math.nan], [1.5, math.inf, math.nan], (1.0, 0.25)),
        ([1.0, math.inf], [1.0, 2.0], (1.0, math.inf)),
        ([1.0, 2.0], [1.0, math.nan], (5.0, math.inf)),
        ([math.inf, 1.0], [-math.inf, 1.0], (1.0, math.inf)),
    ],
)
def test_numbers_that_are_not_finite_are_noise_where_one_side_has_them(
    expected: list[float], actual: list[float], powers_of_both: tuple[float, float]
) -> None:
    assert powers(torch.tensor(expected), torch.tensor(actual)) == powers_of_both
    assert (sqnr_db(torch.tensor(expected), torch.tensor(actual)) == -math.inf) == math.isinf(powers_of_both[1])


@pytest.mark.parametrize("seconds", (0.0, 60.0))
def test_sizes_that_take_too_long_to_follow_are_the_examples(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """DaViT's padded windows took torch.export more than 14 minutes."""
    monkeypatch.setattr(pt2e, "_SECONDS", seconds)
    monkeypatch.setattr(pt2e, "_LONGEST", 1.0)

    def windows(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        return m[1](m[0](x.unflatten(1, (4, x.shape[1] // 4))).relu()).flatten(1, 2)

    model = net_of(windows, nn.Linear(8, 16), nn.Linear(16, 8))
    fast, report, converted = zendnn_cffi.quantize(model, [noise(2, 16, 8)], tune="off", compare=False)
    assert [row.computes_in for row in report.layers] == ["int8"] * 2
    for batch in (1, 2, 3):
        x = noise(batch, 16, 8)
        assert sqnr_db(called(converted, x), called(fast, x)) > 30
    assert sqnr_db(called(model, x), called(fast, x)) > 20
    longer = noise(2, 20, 8)
    if seconds:
        assert sqnr_db(called(model, longer), called(fast, longer)) > 20
    else:
        with pytest.raises(AssertionError, match="size.*16"):
            fast(longer)
