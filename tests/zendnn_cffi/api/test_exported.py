"""optimize() of exported programs: the program, its module, the file."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi

TOLERANCE = 1e-5


class Model(nn.Module):
    """A convolution with batch normalization and dropout, keyword arguments, results in structures."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(16, 4)
        self.register_buffer("scale", torch.full((16,), 2.0))

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> dict[str, Any]:
        features = torch.relu(self.norm(self.conv(x)))
        y = self.head(self.drop(features.mean((2, 3)) * self.scale))
        return {"logits": y if shift is None else y + shift, "both": (features, y)}


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    made = Model()
    with torch.no_grad():
        made(torch.randn(8, 3, 8, 8))  # statistics
    return made.eval()


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(batch))


def export(model: nn.Module, free: bool = False, **kwargs: Tensor) -> torch.export.ExportedProgram:
    shapes = {"x": {0: torch.export.Dim("n", min=1, max=64)}, **dict.fromkeys(kwargs)} if free else None
    return torch.export.export(model, (images(),), kwargs, dynamic_shapes=shapes)


def difference(a: Any, b: Any) -> float:
    """The largest difference of two results of Model."""
    assert a.keys() == b.keys() == {"logits", "both"}
    assert type(a["both"]) is type(b["both"]) is tuple
    pairs = ((a["logits"], b["logits"]), *zip(a["both"], b["both"], strict=True))
    return max(float((x - y).abs().max()) for x, y in pairs)


def offloaded(fast: Any) -> list[str]:
    """Kinds of the nodes that primitives compute, in order."""
    return [node.became for node in zendnn_cffi.explain(fast).nodes if node.implementation not in ("", "view", "torch")]


@pytest.mark.parametrize("given", ["program", "module", "file"])
@torch.no_grad()
def test_an_exported_program_is_what_its_model_would_be(given: str, model: Model, tmp_path: Path) -> None:
    program = export(model)
    where = tmp_path / "model.pt2"
    torch.export.save(program, where)
    made: Any = {"program": program, "module": program.module(), "file": where}[given]
    fast = zendnn_cffi.optimize(made, tune="off")
    expected = zendnn_cffi.optimize(model, tune="off")
    assert difference(fast(images()), model(images())) <= TOLERANCE
    expected(images())
    assert {"convolution", "inner_product"} <= set(offloaded(fast))
    assert offloaded(fast) == offloaded(expected)
    assert fast.state_dict().keys() == model.state_dict().keys()


def test_the_path_may_be_a_string(model: Model, tmp_path: Path) -> None:
    torch.export.save(export(model), tmp_path / "model.pt2")
    fast = zendnn_cffi.optimize(str(tmp_path / "model.pt2"), tune="off")
    with torch.no_grad():
        assert difference(fast(images()), model(images())) <= TOLERANCE


@torch.no_grad()
def test_calls_that_the_export_is_not_made_for_raise_as_there(model: Model) -> None:
    program = export(model)
    fast = zendnn_cffi.optimize(program, tune="off")
    for wrong in (images(3), images()[:, :2]):
        with pytest.raises(Exception, match=r".") as plain:
            program.module()(wrong)
        with pytest.raises(type(plain.value)):
            fast(wrong)


@torch.no_grad()
def test_sizes_that_the_export_leaves_free_are_free(model: Model) -> None:
    fast = zendnn_cffi.optimize(export(model, free=True), tune="off")
    for batch in (1, 2, 5):
        assert difference(fast(images(batch)), model(images(batch))) <= TOLERANCE
    assert zendnn_cffi.cache_info().programs >= 3
    assert "convolution" in offloaded(fast)


@torch.no_grad()
def test_keyword_arguments_stay_keyword_arguments(model: Model) -> None:
    shift = torch.ones(4)
    fast = zendnn_cffi.optimize(export(model, shift=shift), tune="off")
    assert difference(fast(images(), shift=2 * shift), model(images(), shift=2 * shift)) <= TOLERANCE
    assert "convolution" in offloaded(fast)


@torch.no_grad()
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy])
def test_it_can_be_copied(again: Callable[[Any], Any], model: Model, recwarn: pytest.WarningsRecorder) -> None:
    fast = zendnn_cffi.optimize(export(model), tune="off")
    recwarn.clear()
    other = again(fast)
    assert not recwarn.list  # PyTorch warns of a class that its own graphs hold
    assert difference(other(images()), model(images())) <= TOLERANCE
    assert "convolution" in offloaded(other)


@pytest.mark.parametrize("how", [pickle.dumps, lambda fast: torch.save(fast, io.BytesIO())])
@pytest.mark.parametrize("release", [False, True])
def test_it_cannot_be_pickled_and_says_what_writes_it(
    release: bool, how: Callable[[Any], Any], model: Model, tmp_path: Path
) -> None:
    """As PyTorch's exported modules cannot: the error named a local function of theirs."""
    fast: Any = zendnn_cffi.optimize(export(model), tune="off", release_weights=release)
    with torch.no_grad():
        fast(images())
    with pytest.raises(pickle.PicklingError, match=r"zendnn_cffi\.save\(module, path\) writes it"):
        how(fast)
    zendnn_cffi.save(fast, tmp_path / "m")
    loaded = zendnn_cffi.load(tmp_path / "m")
    with torch.no_grad():
        for other in (loaded, pickle.loads(pickle.dumps(loaded))):
            assert difference(other(images()), model(images())) <= TOLERANCE


@torch.no_grad()
def test_changed_weights_are_noticed(model: Model) -> None:
    fast = zendnn_cffi.optimize(export(model), tune="off")
    fast(images())
    other = Model().eval()
    fast.load_state_dict(other.state_dict())
    for _ in range(3):
        assert difference(fast(images()), other(images())) <= TOLERANCE


def test_the_program_is_not_changed(model: Model) -> None:
    program = export(model)
    before = str(program.graph)
    zendnn_cffi.optimize(program, tune="off")
    module = program.module()
    code = str(module.graph)
    zendnn_cffi.optimize(module, tune="off")
    assert (str(program.graph), str(module.graph)) == (before, code)


def test_dropout_of_a_training_export_stays_what_it_is(model: Model) -> None:
    """Its modes are written into its operators: it cannot be switched, and is no ordinary model in training mode."""
    program = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(), (torch.ones(3, 4),))
    fast = zendnn_cffi.optimize(program, tune="off")
    with torch.no_grad():
        torch.manual_seed(1)
        expected = program.module()(torch.ones(3, 4))
        torch.manual_seed(1)
        assert torch.allclose(fast(torch.ones(3, 4)), expected)


def test_other_things_are_refused_by_name(tmp_path: Path, model: Model) -> None:
    with pytest.raises(FileNotFoundError, match=r"torch\.export\.save"):
        zendnn_cffi.optimize(tmp_path / "nowhere.pt2")
    (tmp_path / "text.pt2").write_text("no program")
    with pytest.raises(ValueError, match="holds no exported program"):
        zendnn_cffi.optimize(tmp_path / "text.pt2")
    for other in (3, None, torch.ones(2), lambda x: x):
        with pytest.raises(TypeError, match="ExportedProgram"):
            zendnn_cffi.optimize(other)
    with pytest.raises(ValueError, match="training mode"):
        zendnn_cffi.optimize(torch.fx.symbolic_trace(model).train())


class Batch(nn.Module):
    """Arguments in a dictionary that is in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, batch: list[dict[str, Tensor]], *, more: dict[str, Tensor]) -> Tensor:
        (parts,) = batch
        return torch.relu(self.first(parts["a"]) - self.second(parts["b"])) + more["x"] * 2 - more["y"]


def test_keys_of_dictionaries_may_come_in_any_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Batch().eval()
    a, b, x, y = torch.randn(3, 8), torch.randn(3, 8), torch.randn(3, 16), torch.randn(3, 16)
    exported = torch.export.export(model, ([{"a": a, "b": b}],), {"more": {"x": x, "y": y}})
    fast: Any = zendnn_cffi.optimize(exported, tune="off")
    expected = model([{"a": a, "b": b}], more={"x": x, "y": y})
    fast([{"a": a, "b": b}], more={"x": x, "y": y})
    zendnn_cffi.save(fast, tmp_path / "m")
    fast([{"b": b, "a": a}], more={"y": y, "x": x})
    assert not fast._calls_of_others
    for module in (fast, zendnn_cffi.load(tmp_path / "m")):
        torch.testing.assert_close(module([{"b": b, "a": a}], more={"y": y, "x": x}), expected)
        asking = a.clone().requires_grad_()  # as plain PyTorch
        torch.testing.assert_close(module([{"b": b, "a": asking}], more={"y": y, "x": x}), expected)
        for keys in ({"a": a}, {"a": a, "c": b}):
            with pytest.raises((ValueError, AssertionError, KeyError, RuntimeError)):
                module([keys], more={"x": x, "y": y})


def test_a_model_that_reads_the_order_of_keys_gets_it(tmp_path: Path) -> None:
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, parts: dict[str, Tensor]) -> Tensor:
            first, second = parts.values()
            return torch.relu(self.layer(first)) - second

    torch.manual_seed(0)
    model, a, b = Ordered().eval(), torch.randn(3, 8), torch.randn(3, 8)
    fast = zendnn_cffi.optimize(model, ({"a": a, "b": b},), tune="off")
    for _ in range(2):
        for parts in ({"a": a, "b": b}, {"b": b, "a": a}):
            torch.testing.assert_close(fast(parts), model(parts).detach())
