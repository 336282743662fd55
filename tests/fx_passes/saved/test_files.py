"""save and load: the same answers to the last bit, without tracing, measuring or packing."""

from __future__ import annotations

import copy
import functools
import io
import logging
import os
import pickle
import subprocess
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import zendnn_cffi
from fx_passes.saved.errors import FileError, NotSaved
from tests.support.int8_tensors import CONFIGS
from tests.support.int8_tensors import block as int8_block
from tests.support.lowering import net, noise


class Block(nn.Module):
    """Convolutions with a residual sum, a gate and a concatenation, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.body = nn.Conv2d(32, 32, 3, padding=1)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 32, 1), nn.Sigmoid())
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = F.relu(self.body(x) + x)
        y = torch.cat([y * self.gate(y), x], 1)
        return self.head(y.mean((2, 3)))


class Outputs(nn.Module):
    """Inputs by name with a default, results in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(16, 24)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor, scale: float = 2.0, flag: bool = False) -> Any:
        both = self.a(x), torch.relu(self.b(x)) * scale
        return {"first": both[0], "others": [both[1], None]} if not flag else OrderedDict(first=both[0])


def block() -> nn.Module:
    torch.manual_seed(0)
    model = Block().eval()
    model.stem[1].running_mean.uniform_(-1, 1)
    return model


def attention() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, bool]] = {
    "convolutions": (block, lambda: (noise(2, 3, 17, 19),), False),
    "one image": (block, lambda: (noise(1, 3, 32, 32),), False),
    "attention by export": (attention, lambda: (noise(2, 9, 32),), True),
    "normalization": (
        lambda: net(lambda m, x: F.softmax(m[0](x), -1), nn.LayerNorm(24)),
        lambda: (noise(5, 24),),
        False,
    ),
    "channels last": (lambda: block().to(memory_format=torch.channels_last), lambda: (noise(2, 3, 16, 16),), False),
    "one row": (lambda: net(lambda m, x: torch.tanh(m[0](x)), nn.Linear(96, 80)), lambda: (noise(1, 96),), False),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 8)).eval(),
        lambda: (torch.arange(12).view(3, 4),),
        True,
    ),
}


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("dtype", (None, torch.bfloat16))
@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_module_answers_the_same_to_the_last_bit(
    name: str, dtype: torch.dtype | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, inputs, exported = MODELS[name]
    model, args = make(), inputs()
    fast = zendnn_cffi.optimize(model, args if exported else None, dtype=dtype, tune="off")
    with torch.no_grad():
        expected = fast(*args)
        zendnn_cffi.save(fast, tmp_path / "model.safetensors")
        loaded = zendnn_cffi.load(tmp_path / "model.safetensors")
        assert all(not region.lowered for region in loaded.regions().values())
        assert torch.equal(loaded(*args), expected)
    assert "cannot be used" not in caplog.text
    pairs = zip(fast.regions().values(), loaded.regions().values(), strict=True)
    for region, again in pairs:
        assert [found.nodes for found in region.lowered.values()] == [found.nodes for found in again.lowered.values()]
    assert any(region.lowered for region in loaded.regions().values())
    state = loaded.state_dict()
    assert list(state) == list(model.state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(state[key], value) and state[key].stride() == value.stride(), key
    assert str(zendnn_cffi.explain(loaded)) == str(zendnn_cffi.explain(fast))


def test_nothing_is_chosen_measured_or_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = zendnn_cffi.optimize(block(), tune="off"), noise(1, 3, 32, 32)
    expected = fast(x)
    zendnn_cffi.save(fast, tmp_path / "m")
    for name in (
        "fx_passes.region.variants.choose_variant",
        "fx_passes.plan.prepack.prepack",
        "fx_passes.search.measure.Bench.check_and_time",
        "fx_passes.trace.trace.trace",
    ):
        monkeypatch.setattr(name, lambda *args, **kwargs: 1 / 0)
    assert torch.equal(zendnn_cffi.load(tmp_path / "m")(x), expected)


def test_arguments_and_results_keep_their_form(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Outputs().eval(), noise(3, 16)
    fast = zendnn_cffi.optimize(model, tune="off")
    fast(x)
    zendnn_cffi.save(fast, tmp_path / "m")
    loaded = zendnn_cffi.load(tmp_path / "m")
    for args, kwargs in (((x,), {}), ((x, 3.0), {}), ((), {"x": x, "scale": 0.5})):
        expected, found = model(*args, **kwargs), loaded(*args, **kwargs)
        assert type(found) is dict and found["others"][1] is None
        torch.testing.assert_close(found["first"], expected["first"])
        torch.testing.assert_close(found["others"][0], expected["others"][0])
    assert loaded.a.weight is loaded.b.weight  # ties stay
    with pytest.raises(ValueError, match="saved for other arguments"):
        loaded(x, flag=True)


class Ordered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 24)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.a(x)
        return OrderedDict(out=y, pair=(torch.relu(y), None))


def test_an_ordered_dictionary_stays_one(tmp_path: Path) -> None:
    fast, x = zendnn_cffi.optimize(Ordered().eval(), tune="off"), noise(3, 16)
    expected = fast(x)
    zendnn_cffi.save(fast, tmp_path / "m")
    found = zendnn_cffi.load(tmp_path / "m")(x)
    assert type(found) is type(expected) is OrderedDict and found["pair"][1] is None
    assert torch.equal(found["out"], expected["out"]) and torch.equal(found["pair"][0], expected["pair"][0])


def test_other_inputs_are_lowered_by_their_first_call(tmp_path: Path) -> None:
    model = block()
    fast = zendnn_cffi.optimize(model, tune="off")
    fast(noise(1, 3, 32, 32))
    zendnn_cffi.save(fast, tmp_path / "m")
    loaded = zendnn_cffi.load(tmp_path / "m")
    for shape in ((3, 3, 32, 32), (1, 3, 15, 40)):
        x = noise(*shape)
        torch.testing.assert_close(loaded(x), model(x), atol=1e-5, rtol=1e-5)
    (region,) = loaded.regions().values()
    assert len(region.lowered) == 2 and all(region.lowered.values())


def test_each_number_of_threads_that_it_was_called_with(tmp_path: Path) -> None:
    fast, x, before = zendnn_cffi.optimize(block(), tune="off"), noise(1, 3, 32, 32), torch.get_num_threads()
    expected = {}
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            expected[threads] = fast(x)
        zendnn_cffi.save(fast, tmp_path / "m")
        assert torch.get_num_threads() == 2
        loaded = zendnn_cffi.load(tmp_path / "m")
        (region,) = loaded.regions().values()
        known = region.known
        for threads, result in expected.items():
            torch.set_num_threads(threads)
            assert torch.equal(loaded(x), result) and known.used == threads
    finally:
        torch.set_num_threads(before)


def test_written_weights_are_noticed_and_packed_again(tmp_path: Path) -> None:
    model, x = block(), noise(1, 3, 32, 32)
    fast = zendnn_cffi.optimize(model, tune="off")
    fast(x)
    zendnn_cffi.save(fast, tmp_path / "m")
    loaded = zendnn_cffi.load(tmp_path / "m")
    loaded(x)
    with torch.no_grad():
        for m in (model, loaded):
            m.body.weight.mul_(-0.5)
    for _ in range(3):
        torch.testing.assert_close(loaded(x), model(x), atol=1e-5, rtol=1e-5)
    again = zendnn_cffi.load(tmp_path / "m")
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again(x), model(x), atol=1e-5, rtol=1e-5)
    with torch.no_grad():  # the file is as it was
        model.body.weight.mul_(-2.0)
    torch.testing.assert_close(zendnn_cffi.load(tmp_path / "m")(x), model(x), atol=1e-5, rtol=1e-5)


def test_it_copies_pickles_and_saves_again(tmp_path: Path) -> None:
    fast, x = zendnn_cffi.optimize(block(), tune="off"), noise(1, 3, 32, 32)
    expected = fast(x)
    zendnn_cffi.save(fast, tmp_path / "m")
    loaded = zendnn_cffi.load(tmp_path / "m")
    for again in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))):
        torch.testing.assert_close(again(x), expected, atol=1e-5, rtol=1e-5)
    loaded(x)
    zendnn_cffi.save(loaded, tmp_path / "second")
    assert torch.equal(zendnn_cffi.load(tmp_path / "second")(x), expected)
    zendnn_cffi.save(loaded, tmp_path / "m")  # over the file that it is mapped from
    assert torch.equal(loaded(x), expected) and torch.equal(zendnn_cffi.load(tmp_path / "m")(x), expected)


def test_gradients_are_plain_pytorchs(tmp_path: Path) -> None:
    model = block()
    fast, x = zendnn_cffi.optimize(model, tune="off"), noise(1, 3, 32, 32)
    fast(x)
    zendnn_cffi.save(fast, tmp_path / "m")
    loaded = zendnn_cffi.load(tmp_path / "m")
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loaded(ours).sum().backward()
    model(theirs).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4)


def test_any_reader_finds_the_parameters(tmp_path: Path) -> None:
    model = block()
    fast = zendnn_cffi.optimize(model, tune="off")
    fast(noise(1, 3, 32, 32))
    zendnn_cffi.save(fast, tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value)
    assert any(name.startswith("zendnn_cffi.packed.") for name in found)


def test_another_kind_of_cpu_packs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = block(), noise(1, 3, 32, 32)
    fast = zendnn_cffi.optimize(model, tune="off")
    fast(x)
    monkeypatch.setattr("fx_passes.saved.document.machine", lambda: "5.1-zen9-avx4096")
    zendnn_cffi.save(fast, tmp_path / "m")
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING, "zendnn_cffi.saved"):
        loaded = zendnn_cffi.load(tmp_path / "m")
    assert "saved on 5.1-zen9-avx4096" in caplog.text
    torch.testing.assert_close(loaded(x), model(x), atol=1e-5, rtol=1e-5)
    (region,) = loaded.regions().values()
    assert region.known is None and all(region.lowered.values())


class Shared(nn.Module):
    """One convolution under two names; the graph of torch.export reads the second."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Conv2d(3, 3, 1)] * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.parts[1](self.parts[0](x)))


def test_a_module_with_two_names_is_loaded(tmp_path: Path) -> None:
    model, x = Shared().eval(), noise(1, 3, 8, 8)
    model.parts[0].register_buffer("shift", torch.ones(1))
    fast = zendnn_cffi.optimize(model, (x,), tune="off")
    fast(x)
    zendnn_cffi.save(fast, tmp_path / "m")
    loaded = zendnn_cffi.load(tmp_path / "m")
    torch.testing.assert_close(loaded(x), model(x), atol=1e-5, rtol=1e-5)
    assert loaded.state_dict().keys() == model.state_dict().keys()


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


class Foreign(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _twice(x)


class Holder(nn.Module):
    """A convolution before a submodule that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.foreign = nn.Conv2d(3, 32, 3), Foreign()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.foreign(F.relu(self.conv(x)))


def test_code_is_refused_with_what_to_do(tmp_path: Path) -> None:
    fast = zendnn_cffi.optimize(Holder().eval(), tune="off")
    fast(noise(1, 3, 16, 16))
    with pytest.raises(NotSaved, match=r"submodule foreign \(Foreign\) stays plain PyTorch"):
        zendnn_cffi.save(fast, tmp_path / "m")
    assert not any(tmp_path.iterdir())
    foreign = zendnn_cffi.optimize(Foreign().eval())
    with pytest.raises(NotSaved, match="call it once before"):
        zendnn_cffi.save(foreign, tmp_path / "m")
    foreign(noise(1, 3, 16, 16))
    with pytest.raises(NotSaved, match="plain PyTorch as a whole"):
        zendnn_cffi.save(foreign, tmp_path / "m")
    with pytest.raises(TypeError, match="what zendnn_cffi.optimize returned, or .* alone, got Linear"):
        zendnn_cffi.save(nn.Linear(2, 2), tmp_path / "m")  # type: ignore[arg-type]


class Branching(nn.Module):
    """torch.export gives a graph of it, for the sizes that go one way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.layer(x if x.shape[0] < 100 else x + 1)}


def test_a_module_that_was_never_called_is_saved_for_calls_like_its_example(tmp_path: Path) -> None:
    model = Branching().eval()
    zendnn_cffi.save(zendnn_cffi.optimize(model, {"x": noise(4, 16)}, tune="off"), tmp_path / "m")
    loaded = zendnn_cffi.load(tmp_path / "m")
    for rows in (4, 5, 4):
        x = noise(rows, 16)
        torch.testing.assert_close(loaded(x=x), model(x))
    assert [node.became for node in zendnn_cffi.explain(loaded).nodes if node.computes] == ["inner_product"] * 2
    with pytest.raises(
        ValueError, match=r"saved for other arguments.*x: float32 of 2 dimensions\), of sizes such as \[4, 16\]"
    ):
        loaded(x=noise(200, 16))


def test_copies_of_a_loaded_module_warn_of_nothing(tmp_path: Path) -> None:
    """Structures of arguments, of which PyTorch warns where they are unpickled."""
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True).eval(), noise(2, 5, 16)
    zendnn_cffi.save(zendnn_cffi.optimize(layer, (x, x, x), tune="off"), tmp_path / "m")
    loaded = zendnn_cffi.load(tmp_path / "m")
    for again in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            copied = again(loaded)
        torch.testing.assert_close(copied(x, x, x), loaded(x, x, x))


@pytest.mark.parametrize("path", (b"m", 3, io.BytesIO()), ids=("bytes", "int", "file"))
def test_paths_are_texts(path: Any) -> None:
    fast = zendnn_cffi.optimize(nn.Linear(4, 4).eval(), tune="off")
    for call in (lambda: zendnn_cffi.save(fast, path), lambda: zendnn_cffi.load(path)):
        with pytest.raises(TypeError, match="path must be the path of a file, as text or a pathlib.Path, got"):
            call()


def test_folders_are_no_files(tmp_path: Path) -> None:
    fast = zendnn_cffi.optimize(nn.Linear(4, 4).eval(), tune="off")
    with pytest.raises(FileError, match="is a folder"):
        zendnn_cffi.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder .*nowhere'.*nowhere/m'"):
        zendnn_cffi.save(fast, tmp_path / "nowhere" / "m")


@pytest.mark.parametrize(("threads", "error"), ((2, TypeError), ("2", TypeError), ([], ValueError), ([0], ValueError)))
def test_numbers_of_threads_are_a_list(threads: Any, error: type[Exception], tmp_path: Path) -> None:
    fast = zendnn_cffi.optimize(nn.Linear(4, 4).eval(), tune="off")
    with pytest.raises(error, match="threads"):
        zendnn_cffi.save(fast, tmp_path / "m", threads=threads)


def test_what_is_no_saved_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="zendnn_cffi.save writes such files"):
        zendnn_cffi.load(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(FileError, match="no whole safetensors file"):
        zendnn_cffi.load(tmp_path / "text")
    torch.save({"a": torch.ones(2)}, tmp_path / "pickle")
    with pytest.raises(FileError, match="no whole safetensors file"):
        zendnn_cffi.load(tmp_path / "pickle")
    with pytest.raises(FileError):
        zendnn_cffi.load(tmp_path)


def test_another_process_starts_from_it(tmp_path: Path) -> None:
    """Without the model's code, and without PyTorch's compiler."""
    fast, x = zendnn_cffi.optimize(block(), tune="off"), noise(1, 3, 32, 32)
    torch.save((x, fast(x)), tmp_path / "expected")
    zendnn_cffi.save(fast, tmp_path / "m")
    code = """
import sys, torch, zendnn_cffi
x, expected = torch.load(sys.argv[2])
fast = zendnn_cffi.load(sys.argv[1])
assert torch.equal(fast(x), expected)
assert "torch._dynamo" not in sys.modules
print("equal")
"""
    command = [sys.executable, "-c", code, str(tmp_path / "m"), str(tmp_path / "expected")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr


UNWANTED = """
torch._dynamo torch.export sympy numpy.random sqlite3 statistics html
fx_passes.trace.trace fx_passes.trace.symbolic fx_passes.trace.export fx_passes.normalize fx_passes.fold fx_passes.fuse
fx_passes.lower.rules fx_passes.lower.windows fx_passes.layout.assign fx_passes.search
fx_passes.region.compile fx_passes.region.variants fx_passes.report fx_passes.pipeline
zendnn_cffi.functional zendnn_cffi.backend zendnn_cffi.api zendnn_cffi.serving zendnn_cffi.cli
"""


def test_a_convolutional_network_starts_without_the_compiler(tmp_path: Path) -> None:
    """Importing it takes longer than the rest of such a start."""
    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 4)).eval()
    fast = zendnn_cffi.optimize(model, tune="off")
    expected = fast(torch.ones(1, 3, 16, 16)).tolist()
    zendnn_cffi.save(fast, tmp_path / "m")
    code = f"""
import sys, torch
given = set(sys.modules)
import zendnn_cffi
fast = zendnn_cffi.load(sys.argv[1])
assert fast(torch.ones(1, 3, 16, 16)).tolist() == {expected}
assert [region.known.used for region in fast.regions().values()] == [1]
print([name for name in {UNWANTED.split()} if name in sys.modules and name not in given])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


class Step(nn.Module):
    """A decoding step: keys and values that grow by what it adds, and the attention over them."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.both(x).chunk(3, -1))
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return F.scaled_dot_product_attention(q, keys, values), keys, values


@pytest.mark.parametrize("tokens", (1, 3))
def test_a_decoder_with_a_growing_cache_goes_on_where_it_was_saved(
    tokens: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def call(length: int) -> tuple[torch.Tensor, ...]:
        return noise(1, tokens, 32), noise(1, 2, length, 16), noise(1, 2, length, 16)

    torch.manual_seed(0)
    model = Step().eval()
    with torch.no_grad():
        exported = torch.export.export(model, call(5), dynamic_shapes=(None, *({2: torch.export.Dim.AUTO},) * 2))
        fast = zendnn_cffi.optimize(exported, tune="off")
        for length in (5, 6):
            fast(*call(length))
        zendnn_cffi.save(fast, tmp_path / "one")
        zendnn_cffi.save(zendnn_cffi.load(tmp_path / "one"), tmp_path / "two")
        for path in (tmp_path / "one", tmp_path / "two"):
            loaded = zendnn_cffi.load(path)
            for length in (7, 5, 64, 3):
                args = call(length)
                for actual, expected in zip(loaded(*args), model(*args), strict=True):
                    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
            with pytest.raises(ValueError, match="saved for other arguments"):
                loaded(noise(2, tokens, 32), noise(2, 2, 5, 16), noise(2, 2, 5, 16))
            with pytest.raises(ValueError, match="saved for other arguments"):
                loaded(noise(1, tokens, 32), noise(1, 3, 5, 16), noise(1, 3, 5, 16))
            (region,) = loaded.regions().values()
            assert region.known.used == 1
    assert "cannot be used" not in caplog.text


SavedInt8 = tuple[nn.Module, torch.Tensor, torch.Tensor, Path]  # the model, an input, the result, the file


@pytest.fixture(scope="module")
def saved_int8(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], SavedInt8]:
    """saved_int8(config, asks) -> a quantized model with its file; made once."""
    folder = tmp_path_factory.mktemp("int8")

    @functools.cache
    def make(config: str, asks: bool) -> SavedInt8:
        model, x = int8_block(config, asks=asks), noise(3, 64)
        fast = zendnn_cffi.optimize(model, (x,), tune="off")
        with torch.no_grad():
            expected = fast(x)
            path = folder / f"{config}, {asks}.safetensors"
            zendnn_cffi.save(fast, path)
        return model, x, expected, path

    return make


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_layers_of_torchao(saved_int8: Callable[[str, bool], SavedInt8], config: str, asks: bool) -> None:
    """What an Int8Tensor is made of is saved, under its name."""
    model, x, expected, path = saved_int8(config, asks)
    with torch.no_grad():
        again = zendnn_cffi.load(path)
        assert torch.equal(again(x), expected)
        assert {"up.weight.qdata", "up.weight.scale"} <= again.state_dict().keys()
        torch.testing.assert_close(again(x[:2]), model(x[:2]), atol=1e-4, rtol=1e-4)
        with pytest.raises((TypeError, ValueError, RuntimeError), match=r"dtype|other arguments|quantized layer"):
            again(x.bfloat16())
        again.get_buffer("up.weight.scale").mul_(2)
        layer: Any = model.up
        layer.weight.scale.mul_(2)
        for _ in range(2):
            torch.testing.assert_close(again(x), model(x), atol=1e-3, rtol=1e-3)


def test_layers_of_torchao_need_no_torchao(saved_int8: Callable[[str, bool], SavedInt8]) -> None:
    """One process loads all of them: importing PyTorch takes longer than a file."""
    paths = [str(saved_int8(config, asks)[-1]) for config in CONFIGS for asks in (False, True)]
    program = """
import sys, zendnn_cffi
for path in sys.argv[1:]:
    zendnn_cffi.load(path)
    assert "torchao" not in sys.modules, path
print(len(sys.argv) - 1)
"""
    found = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True)
    assert found.stdout == f"{len(paths)}\n", found.stderr


@pytest.mark.parametrize("how", ["loaded", "copied", "pickled", "written to", "released"])
def test_saved_again_without_a_call_it_is_the_same_file(how: str, tmp_path: Path) -> None:
    """What a file has programs for stays in it, though the process that saves it again calls it with other inputs."""
    inputs = [noise(1, 3, 32, 32), noise(2, 3, 24, 32)]
    fast = zendnn_cffi.optimize(block(), tune="off", release_weights=how == "released")
    expected = [fast(x) for x in inputs]
    zendnn_cffi.save(fast, tmp_path / "m")
    loaded: Any = zendnn_cffi.load(tmp_path / "m")
    if how == "copied":
        loaded = copy.deepcopy(loaded)
    elif how == "pickled":
        loaded = pickle.loads(pickle.dumps(loaded))
    elif how == "written to":
        loaded.load_state_dict(loaded.state_dict())
    if how != "released":
        loaded(inputs[1])
    zendnn_cffi.save(loaded, tmp_path / "again")
    again = zendnn_cffi.load(tmp_path / "again")
    (region,) = again.regions().values()
    known = region.known
    for used, (x, result) in enumerate(zip(inputs, expected, strict=True), 1):
        torch.testing.assert_close(again(x), result)
        assert known.used == used


def test_saved_again_for_another_number_of_threads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fast, x, before = zendnn_cffi.optimize(block(), tune="off"), noise(1, 3, 32, 32), torch.get_num_threads()
    expected = fast(x)
    zendnn_cffi.save(fast, tmp_path / "m")
    with caplog.at_level(logging.WARNING, "zendnn_cffi.saved"):
        zendnn_cffi.save(zendnn_cffi.load(tmp_path / "m"), tmp_path / "one", threads=[1])
    assert not caplog.records
    loaded = zendnn_cffi.load(tmp_path / "one")
    (region,) = loaded.regions().values()
    known = region.known
    try:
        torch.set_num_threads(1)
        torch.testing.assert_close(loaded(x), expected)
        assert known.used == 1
    finally:
        torch.set_num_threads(before)


def test_saved_on_another_kind_of_cpu_it_is_saved_for_the_same_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, x = zendnn_cffi.optimize(block(), tune="off"), noise(1, 3, 32, 32)
    expected = fast(x)
    monkeypatch.setattr("fx_passes.saved.document.machine", lambda: "5.1-zen9-avx4096")
    zendnn_cffi.save(fast, tmp_path / "m")
    monkeypatch.undo()
    zendnn_cffi.save(zendnn_cffi.load(tmp_path / "m"), tmp_path / "here")
    loaded = zendnn_cffi.load(tmp_path / "here")
    (region,) = loaded.regions().values()
    known = region.known
    torch.testing.assert_close(loaded(x), expected)
    assert known.used == 1


_WITHOUT_A_LIBRARY = """
import sys, warnings, torch, zendnn_cffi
folder = sys.argv[1]
x, expected = torch.load(folder + "/expected")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loaded = zendnn_cffi.load(folder + "/m")
assert any("runs in plain PyTorch" in str(each.message) for each in caught)
torch.testing.assert_close(loaded(x), expected)
try:
    zendnn_cffi.load(folder + "/released")
except zendnn_cffi.LibraryError as error:
    assert "packed weights alone" in str(error) and "no such file" in str(error)
else:
    raise AssertionError("released parameters are nowhere")
"""


def test_without_a_library_it_is_plain_pytorch(tmp_path: Path) -> None:
    model, x = block(), noise(1, 3, 32, 32)
    for name, releases in (("m", False), ("released", True)):
        fast = zendnn_cffi.optimize(model, tune="off", release_weights=releases)
        fast(x)
        zendnn_cffi.save(fast, tmp_path / name)
    torch.save((x, block()(x).detach()), tmp_path / "expected")
    subprocess.run(
        [sys.executable, "-c", _WITHOUT_A_LIBRARY, str(tmp_path)], cwd=Path(__file__).parents[3], check=True,
        env=os.environ | {"ZENDNN_CFFI_LIBRARY": str(tmp_path / "nowhere.so")},
    )  # fmt: skip


def test_another_number_of_threads_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Two(nn.Module):  # two regions
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.second(torch.sort(F.relu(self.first(x))).values))

    torch.manual_seed(0)
    model, x, before = Two().eval(), noise(4, 16), torch.get_num_threads()
    fast = zendnn_cffi.optimize(model, tune="off")
    fast(x)
    zendnn_cffi.save(fast, tmp_path / "m", threads=[2, 3])
    loaded = zendnn_cffi.load(tmp_path / "m")
    assert len(loaded.regions()) == 2
    try:
        for threads in (2, 1, 1):
            torch.set_num_threads(threads)
            with caplog.at_level(logging.WARNING, "zendnn_cffi.saved"):
                torch.testing.assert_close(loaded(x), model(x))
                torch.testing.assert_close(loaded(noise(5, 16)), model(noise(5, 16)))  # other inputs: nothing to tell
    finally:
        torch.set_num_threads(before)
    (told,) = [record.getMessage() for record in caplog.records if "threads" in record.getMessage()]
    assert told.startswith("saved for 2, 3 threads, called with 1:") and "threads=[2, 3, 1]" in told
