"""What is returned behaves like the model: state, copies, pickles, modes."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from fx_passes.memoize.watched import changes_functions
from fx_passes.module import OptimizedModule
from fx_passes.pipeline import PlainRegion, compile_graph
from fx_passes.trace.traced import WHOLE
from tests.support.graphs import check_equal, image, model_of


class Net(nn.Module):
    """Picklable: convolution, norm, a tied layer, buffers of both kinds, a root parameter."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.rand(1))
        self.a = nn.Conv2d(3, 4, 3)
        self.n = nn.BatchNorm2d(4)
        self.b = nn.Linear(5, 5)
        self.tied = self.b
        self.register_buffer("offset", torch.rand(1))
        self.register_buffer("hidden", torch.rand(1), persistent=False)
        self.double().eval()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.tied(self.b(self.n(self.a(x)).relu_())) * self.scale + self.offset + self.hidden}


class Sizes(Net):
    """Traced by torch.export only."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x if x.shape[0] < 10 else x[:10])


@pytest.fixture(params=["symbolic", "export"])
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, OptimizedModule]:
    if request.param == "export":
        return Sizes(), compile_graph(Sizes(), (image(),))
    return Net(), compile_graph(Net())


def _pickled(gm: OptimizedModule) -> Any:
    return pickle.loads(pickle.dumps(gm))


def _saved(gm: OptimizedModule) -> Any:
    file = io.BytesIO()
    torch.save(gm, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, _pickled, _saved])
def test_copies(pair: tuple[nn.Module, OptimizedModule], again: Any) -> None:
    model, gm = pair
    copied = again(gm)
    assert isinstance(copied, OptimizedModule) and copied.regions().keys() == gm.regions().keys()
    check_equal(model, copied, image())
    assert copied.regions().keys() and all(copied.regions()[n] is not r for n, r in gm.regions().items())
    if again is not copy.copy:
        with torch.no_grad():
            copied.a.weight.zero_()
        check_equal(model, gm, image())
    check_equal(model, again(gm), image())


def test_state_is_the_model_s(pair: tuple[nn.Module, OptimizedModule]) -> None:
    model, gm = pair
    assert list(gm.state_dict()) == list(model.state_dict())
    assert dict(gm.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert dict(gm.named_buffers()).keys() == dict(model.named_buffers()).keys()
    for name, value in model.state_dict().items():
        assert torch.equal(gm.state_dict()[name], value)
    nn.Module.load_state_dict(model, gm.state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_changes_the_result_and_not_the_model(
    pair: tuple[nn.Module, OptimizedModule], assign: bool
) -> None:
    _, gm = pair
    source, other = type(gm._source[0].root)(), type(gm._source[0].root)(seed=1)
    gm = compile_graph(source, (image(),))
    before = copy.deepcopy(source.state_dict())
    told = []
    for region in gm.regions().values():
        region.invalidate = lambda: told.append(True)  # type: ignore[assignment]
    assert (
        str(gm.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)) == "<All keys matched successfully>"
    )
    other.hidden = source.hidden
    check_equal(other, gm, image())
    assert told and all(torch.equal(v, before[k]) for k, v in source.state_dict().items())


class Views(nn.Module):
    """A layer, and a transposed view of its weight in a buffer, an attribute or a list."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.layer, self.place = nn.Linear(8, 8), place
        view = self.layer.weight.detach().t()
        if place == "buffer":
            self.register_buffer("view", view, persistent=False)
        else:
            self.view = view if place == "attribute" else [view]

    def forward(self, x: torch.Tensor) -> Any:
        return torch.relu(self.layer(x)) @ (self.view[0] if self.place == "list" else self.view)


@pytest.mark.parametrize("place", ["buffer", "attribute", "list"])
def test_views_of_weights_have_what_was_loaded(place: str) -> None:
    model, other, x = Views(place).eval(), Views(place).eval(), torch.randn(4, 8)
    gm = compile_graph(model, (x,))
    with torch.no_grad():
        before = model(x)
        gm(x)
        gm.load_state_dict(other.state_dict())
        torch.testing.assert_close(gm(x), other(x))
        torch.testing.assert_close(gm(x), other(x))
        assert gm.regions() and torch.equal(model(x), before)


def test_modes(pair: tuple[nn.Module, OptimizedModule]) -> None:
    _, gm = pair
    assert gm.eval() is gm and not gm.training and gm.train(False) is gm
    with pytest.raises(RuntimeError, match="train the original model"):
        gm.train()


@torch.no_grad()
def test_eval_reaches_layers_that_were_put_in_training() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Dropout(0.9))).eval(), torch.randn(6, 8)
    gm = compile_graph(model)
    kept = gm(x)
    gm.get_submodule("1").train()
    assert not torch.equal(gm(x), kept)
    assert gm.eval() is gm and not any(module.training for module in gm.get_submodule("1").modules())
    assert torch.equal(gm(x), kept)


def test_conversions_reach_every_parameter_and_tell_the_regions() -> None:
    model = Net()
    gm = compile_graph(model)
    told = []
    for region in gm.regions().values():
        region.invalidate = lambda: told.append(True)  # type: ignore[assignment]
    assert gm.float() is gm and told
    assert {p.dtype for p in gm.parameters()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    torch.testing.assert_close(gm(image().float())["y"], copy.deepcopy(model).float()(image().float())["y"])


def test_it_is_a_readable_graph_module() -> None:
    gm = compile_graph(Net())
    assert isinstance(gm, torch.fx.GraphModule) and type(gm).__name__ == "Net"
    assert "zen_region_0" in gm.print_readable(print_output=False)
    assert isinstance(gm.get_submodule("zen_region_0"), PlainRegion) and gm.get_submodule("a").kernel_size == (3, 3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_modes(mode: Any) -> None:
    model = Net()
    gm = compile_graph(model)
    with mode():
        torch.testing.assert_close(gm(image())["y"], model(image())["y"])


@pytest.mark.parametrize("backend", ("eager", "zendnn"))
def test_torch_compile_of_a_model_around_it(backend: str) -> None:
    """TorchDynamo cannot follow what notices changes: it breaks its graph there, and compiles none of it."""
    torch._dynamo.reset()
    model = Net()
    outer = nn.ModuleDict({"inner": compile_graph(model), "last": nn.ReLU()})
    compiled = torch.compile(lambda x: outer["last"](outer["inner"](x)["y"]) * 2, backend=backend)
    with torch.no_grad():
        for size in ((2, 3, 9, 7), (1, 3, 8, 7), (2, 3, 9, 7)):
            torch.testing.assert_close(compiled(image(*size)), model(image(*size))["y"].relu() * 2)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.relu else result


def test_modes_that_functions_go_through() -> None:
    model = model_of(lambda m, x: torch.relu(m.a(x)) + torch.ones(4), a=nn.Linear(4, 4))
    gm = compile_graph(model)
    x = image(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(gm(x), model(x))
        before = gm(x)
        with Doubling():
            torch.testing.assert_close(gm(x), model(x))
            assert not torch.allclose(gm(x), before)
        with torch.device("cpu"):
            assert not changes_functions() and torch.equal(gm(x), before)
        with torch.device("meta"):
            assert changes_functions()


def test_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = Net()
        gm = compile_graph(model)
        torch.testing.assert_close(gm(image())["y"], model(image())["y"])


def test_the_graph_becomes_code_once_and_not_after_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    python_code = fx.Graph.python_code
    monkeypatch.setattr(fx.Graph, "python_code", lambda *a, **k: written.append(1) or python_code(*a, **k))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    gm = compile_graph(model)
    assert len(written) <= 4  # the empty graph, the traced one, and what the passes left
    x = torch.randn(1, 3, 5, 5)
    assert torch.allclose(gm(x), model(x), atol=1e-6)


@torch.no_grad()
def without_gradients(y: torch.Tensor) -> torch.Tensor:
    return y * 2


def in_part(m: Any, x: torch.Tensor) -> Any:
    y = m.a(x)
    with torch.no_grad():
        z = m.b(y)
    return y + z


def in_inference_mode(m: Any, x: torch.Tensor) -> Any:
    with torch.inference_mode():
        return m.a(x)


GRADIENTS: dict[str, Any] = {
    "a decorated helper": lambda m, x: without_gradients(m.a(x)),
    "the whole forward": torch.no_grad()(lambda m, x: m.b(m.a(x))),
    "a part": in_part,
    "inference mode": in_inference_mode,
    "detached": lambda m, x: m.b(m.a(x).detach()),
}


@pytest.mark.parametrize("by_example", [False, True])
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_that_forward_leaves_out_stay_out(case: str, by_example: bool) -> None:
    """Where an input asks for gradients, results track them where eager's do, for parameters also."""
    model = model_of(GRADIENTS[case], a=nn.Linear(5, 5), b=nn.Linear(5, 5))
    gm = compile_graph(model, (image(2, 5),) if by_example else None)
    for asks in (True, False, True):
        x = image(2, 5).requires_grad_(asks)
        found, expected = gm(x), model(x)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        assert found.requires_grad == (expected.requires_grad and (asks or WHOLE in gm.leaves))
    if found.requires_grad:
        theirs, ours = (
            torch.autograd.grad(y.sum(), [x, *owner.parameters()], allow_unused=True)
            for y, owner in ((expected, model), (found, gm))
        )
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)
