"""Weights that are computed from parameters: once, where nothing else decides them; anew, where something does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, prune

import zendnn_cffi
from fx_passes.pipeline import compile_graph
from tests.support.graphs import check, check_equal, image, model_of, outside
from tests.support.lowering import offload
from tests.tolerance import assert_close


def standardized(m: Any, weight: Tensor) -> Tensor:
    """Weight standardization as networks without normalizers write it."""
    gain, flat = (m.gain.weight * 0.3).view(-1), weight.reshape(1, 4, -1)
    return F.batch_norm(flat, None, None, weight=gain, training=True, momentum=0.0).reshape_as(weight)


def by_moments(m: Any, weight: Tensor) -> Tensor:
    """The same as BiT writes it: a function with two results."""
    variance, mean = torch.var_mean(weight, dim=[1, 2, 3], keepdim=True, unbiased=False)
    return (weight - mean) / torch.sqrt(variance + 1e-10)


WEIGHTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "standardized": standardized,
    "by moments": by_moments,
    "a norm": lambda m, w: torch._weight_norm(w, w.sum((1, 2, 3), keepdim=True)),
    "a singular value": lambda m, w: w / torch.linalg.matrix_norm(w.flatten(1), 2),
    "another dtype between": lambda m, w: w.to(torch.float64).exp().type_as(w),
    "masked": lambda m, w: torch.where(w > 0, w, w.new_zeros(()) * 2),
    "stacked": lambda m, w: torch.stack([w[:2], w[2:].flip(0)]).reshape(4, 3, 3, 3),
}


def model(weight: Callable[[Any, Tensor], Tensor], inplace: bool = False) -> nn.Module:
    """A convolution with that weight, batch normalization and an activation, perhaps in place, behind it."""
    return model_of(
        lambda m, x: m.r(m.n(F.conv2d(x, weight(m, m.c.weight), m.c.bias))) * 2.0,
        c=nn.Conv2d(3, 4, 3), n=nn.BatchNorm2d(4), r=nn.ReLU(inplace=inplace), gain=nn.Conv2d(1, 4, 1, bias=False),
    )  # fmt: skip


@pytest.mark.parametrize("exported", (False, True))
@pytest.mark.parametrize("inplace", (False, True))
@pytest.mark.parametrize("kind", WEIGHTS)
def test_nothing_is_left_outside(kind: str, inplace: bool, exported: bool) -> None:
    eager, x = model(WEIGHTS[kind], inplace), image()
    gm = compile_graph(eager, (x,) if exported else None)
    check_equal(eager, gm, x)
    assert not outside(gm)


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", ("standardized", "by moments"))
def test_the_engine_computes_it(kind: str, dtype: torch.dtype | None) -> None:
    """By one convolution that has batch normalization and activation in it."""
    found = offload(model(WEIGHTS[kind]).float(), image().float(), dtype=dtype)
    assert [node.became for node in found.nodes] == ["convolution"]
    assert found.nodes[0].post_ops[0] == "relu"


@pytest.mark.parametrize("kind", ("standardized", "by moments"))
def test_new_parameters_are_noticed(kind: str) -> None:
    eager, x = model(WEIGHTS[kind]).float(), image().float()
    fast = zendnn_cffi.optimize(eager, tune="off")
    other = {name: value + 0.25 for name, value in eager.state_dict().items()}
    with torch.inference_mode():
        before = fast(x)
        eager.load_state_dict(other)
        fast.load_state_dict(other)
        assert not torch.allclose(before, eager(x), atol=1e-3)
        for module in (fast, copy.deepcopy(fast)):
            assert_close(module(x), eager(x), k=27)


def test_torch_compile_does_not_take_it_for_training() -> None:
    """Nor computes it in each call."""
    eager, x = model(standardized).float(), image().float()
    compiled = torch.compile(eager, backend="zendnn", options={"tune": "off"})
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_close(compiled(x), eager(x), k=27)
        assert {r.kind for r in zendnn_cffi.profile(compiled, x).records} == {"convolution", "reorder"}
    torch._dynamo.reset()


def test_torch_compile_still_leaves_training_alone() -> None:
    eager, x = model(standardized).float(), image().float()
    eager.n.train()
    compiled = torch.compile(copy.deepcopy(eager), backend="zendnn")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(compiled(x), eager(x))
        with pytest.raises(TypeError, match="region"):
            zendnn_cffi.profile(compiled, x)
    torch._dynamo.reset()


ANEW: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "random numbers": lambda m, w: F.dropout(w, 0.5, True),
    "random numbers by a method": lambda m, w: w * torch.bernoulli(torch.sigmoid(w)),
    "running statistics": lambda m, w: F.batch_norm(w, m.n.running_mean[:3], m.n.running_var[:3], training=True),
    "somebody writes to the parameter": lambda m, w: w.mul_(1.25).exp(),
    "somebody writes to the result": lambda m, w: w.exp().cumsum(0).add_(m.c.bias.sum()),
}


@pytest.mark.parametrize("kind", ANEW)
def test_computed_in_each_call(kind: str) -> None:
    """Random numbers, running statistics and written parameters are what they would be in eager PyTorch."""
    eager, x = model(ANEW[kind]), image()
    gm = compile_graph(copy.deepcopy(eager))
    with torch.no_grad():
        for seed in (1, 2):
            torch.manual_seed(seed)
            expected = eager(x)
            torch.manual_seed(seed)
            torch.testing.assert_close(gm(x), expected, rtol=1e-10, atol=1e-12)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(gm.state_dict()[name], value)


def test_what_depends_on_the_input_stays() -> None:
    """A weight that is modulated by the input is no constant."""
    gm = check(model(lambda m, w: w), image())
    assert not outside(gm)
    modulated = model_of(lambda m, x: F.conv2d(x, torch.cumsum(m.c.weight * x.mean(), 0)), c=nn.Conv2d(3, 4, 3))
    assert outside(check(modulated, image()))["cumsum"] == 1


def test_a_parametrized_module() -> None:
    """Weight norm, as wav2vec 2.0 has it."""
    eager = nn.Sequential(parametrizations.weight_norm(nn.Conv1d(4, 6, 3), dim=2), nn.ReLU()).eval()
    found = offload(eager, torch.randn(2, 4, 11))
    assert [node.became for node in found.nodes] == ["convolution"]


def pruned(layer: nn.Module, *names: str) -> nn.Module:
    for name in names:
        prune.random_unstructured(layer, name, 0.5)
    return layer


BY_HOOKS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: nn.utils.weight_norm(nn.Conv1d(4, 6, 3)),
    "weight_norm of the whole": lambda: nn.utils.weight_norm(nn.Conv1d(4, 6, 3), dim=None),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Conv1d(4, 6, 3)),
    "pruned": lambda: pruned(nn.Conv1d(4, 6, 3), "weight"),
    "pruned twice": lambda: pruned(nn.Conv1d(4, 6, 3), "weight", "bias", "weight"),
    "pruned and normed": lambda: pruned(nn.utils.weight_norm(nn.Conv1d(4, 6, 3)), "bias"),
}


@pytest.mark.parametrize("kind", BY_HOOKS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_hooks_compute(kind: str) -> None:
    """The styles before parametrizations: a hook sets the weight before each forward."""
    torch.manual_seed(0)
    layer = BY_HOOKS[kind]().eval()
    eager = nn.Sequential(layer, nn.ReLU(), nn.Conv1d(6, 4, 1)).eval()
    x = torch.randn(2, 4, 11)
    found = offload(eager, x)
    assert [node.became for node in found.nodes] == ["convolution", "convolution"]
    fast = zendnn_cffi.optimize(eager, tune="off")
    with torch.no_grad():
        for scale in (1.0, 2.0):  # a changed parameter is another weight
            for parameter in eager.parameters():
                parameter.mul_(scale)
            for _ in range(3):
                assert_close(fast(x), eager(x))
        assert_close(copy.deepcopy(fast)(x), eager(x))
    assert list(fast.state_dict()) == list(eager.state_dict())
    assert all(not isinstance(value, fx.Proxy) for value in fast.get_submodule("0").__dict__.values())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_other_hooks_beside_them_are_called() -> None:
    layer, calls = nn.utils.weight_norm(nn.Conv1d(4, 6, 3)), []
    layer.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape))
    eager = nn.Sequential(layer, nn.ReLU()).eval()
    gm = compile_graph(eager)
    x = torch.randn(2, 4, 11)
    calls.clear()
    with torch.no_grad():
        torch.testing.assert_close(gm(x), eager(x))
    assert calls == [x.shape, x.shape]


def test_dtype_of_a_parameter_is_a_number() -> None:
    gm = check(model_of(lambda m, x: m.c(x.to(m.c.weight.dtype)), c=nn.Conv2d(3, 4, 3)), image())
    assert not any(node.target is getattr for node in gm.graph.nodes)
