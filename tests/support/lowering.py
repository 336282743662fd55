"""Small models through optimize, compared with a float64 oracle, with every claim about their regions checked."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import zendnn_cffi
from fx_passes.report.explain import Explanation
from tests.support.programs import run_poisoned
from tests.tolerance import assert_close
from zendnn_cffi.runtime.program import Program


class Net(nn.Module):
    """fn(modules, *inputs) as a module that torch.fx can trace."""

    def __init__(self, fn: Callable[..., Any], modules: tuple[nn.Module, ...]) -> None:
        super().__init__()
        self.fn = fn
        self.m = nn.ModuleList(modules)


class _One(Net):
    def forward(self, x: Any) -> Any:
        return self.fn(self.m, x)


class _Two(Net):
    def forward(self, x: Any, y: Any) -> Any:
        return self.fn(self.m, x, y)


class _Three(Net):
    def forward(self, x: Any, y: Any, z: Any) -> Any:
        return self.fn(self.m, x, y, z)


def net(fn: Callable[..., Any], *modules: nn.Module) -> Net:
    """A module in evaluation mode that computes fn(modules, x[, y[, z]]); batch statistics made interesting."""
    model = {2: _One, 3: _Two, 4: _Three}[len(inspect.signature(fn).parameters)](fn, modules)
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.copy_(torch.randn(module.running_mean.shape, generator=generator))
            module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.5)
            if module.affine:
                module.weight.data.copy_(torch.rand(module.weight.shape, generator=generator) + 0.5)
                module.bias.data.copy_(torch.randn(module.bias.shape, generator=generator))
    return model.eval()


def behind_convolution(function: Callable[[Any], Any], out: int = 16) -> nn.Module:
    """A convolution, and function of what it computes."""
    return net(lambda m, x: function(m[0](x)), nn.Conv2d(3, out, 3, padding=1))


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal noise, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def tensors(result: Any) -> list[torch.Tensor]:
    """The tensors of a model's result."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for part in (result.values() if isinstance(result, dict) else result) for t in tensors(part)]


def oracle(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The model in float64."""
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        return tensors(wide(*(x.double() if x.is_floating_point() else x for x in inputs)))


def offload(
    model: nn.Module,
    *inputs: torch.Tensor,
    dtype: torch.dtype | None = None,
    k: int | None = None,
    scale: float | None = None,
    **options: Any,
) -> Explanation:
    """Optimize, run, and check everything that must always hold; return explain()'s findings.

    Results near the float64 oracle, eager's shapes, dtypes and strides; equal bits on the second call; inputs and
    parameters unchanged bit for bit; no warning; equal bits with dead arena bytes full of NaN.
    k      length of the longest sum (default: from the weights)
    scale  see assert_close
    """
    before = [x.clone() for x in inputs]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gm = zendnn_cffi.optimize(model, dtype=dtype, **{"tune": "off", **options})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "LSTM with projections")  # PyTorch's own, on CPUs with float16
        first, second, eager = tensors(gm(*inputs)), tensors(gm(*inputs)), tensors(model(*inputs))
    k = k or max((p[0].numel() for p in model.parameters() if p.ndim > 1), default=16)
    for ours, again, theirs, expected in zip(first, second, eager, oracle(model, inputs), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        steps = [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (ours, theirs)]
        assert steps[0] == steps[1] or not theirs.is_contiguous() or theirs.numel() == 0
        assert torch.equal(torch.nan_to_num(ours), torch.nan_to_num(again)), "two calls differ"
        wide = dtype if dtype is not None and theirs.dtype == torch.float32 else theirs.dtype
        if wide == torch.float64 and any(p.dtype == torch.float32 for p in model.parameters()):
            wide = torch.float32  # promoted late
        size = scale or max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
        assert_close(ours, expected, dtype=wide, k=k, scale=size)
    for given, kept in zip(inputs, before, strict=True):
        assert torch.equal(given.nan_to_num(), kept.nan_to_num()), "an input was changed"
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    check_regions(gm)
    return zendnn_cffi.explain(gm)


def relative_error(gm: nn.Module, model: nn.Module, x: torch.Tensor) -> float:
    """The largest error of any number of the result, as a part of that number in float64."""
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        return ((gm(x) - exact) / exact).abs().max().item()


def check_regions(gm: Any) -> None:
    """Run every program of gm on noise, plainly and with dead memory full of NaN: equal bits."""
    for region in gm.regions().values():
        for signature, lowered in region.lowered.items():
            if lowered is None or any("n" in shape for shape, *_ in signature[1:]):
                continue  # tests/fx_passes/lower/attention/test_caches.py has programs of growing inputs
            given = []
            for number, (shape, dtype, strides) in enumerate(signature[1:]):
                span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1 if math.prod(shape) else 0
                flat = torch.randn(span, generator=torch.Generator().manual_seed(number)).abs() + 0.25
                given.append(flat.to(dtype).as_strided(shape, strides))
            program = lowered.program
            if not isinstance(program, Program):  # slices of a large batch: see test_program.py
                continue
            plain, poisoned = program(given), run_poisoned(program, given)
            for a, b in zip(plain, poisoned, strict=True):
                assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)), "dead memory was read"
                assert torch.equal(a.isnan(), b.isnan()), "dead memory was read"


def kinds(explanation: Explanation) -> list[str]:
    """What each node became, views left out."""
    return [node.became for node in explanation.nodes if node.computes]


def fallbacks(explanation: Explanation) -> list[str]:
    """Names of the nodes inside regions that plain PyTorch computes."""
    return [node.name for node in explanation.nodes if node.became == "torch" and node.region]
