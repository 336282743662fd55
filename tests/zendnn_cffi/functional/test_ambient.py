"""Defaults and modes around a call: the same numbers, or a refusal that names the mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.zendnn_cffi.functional.support import randn
from tests.zendnn_cffi.functional.test_call import NAMES, call
from zendnn_cffi import functional as zf


@contextlib.contextmanager
def _default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class _Fakes(TorchFunctionMode):
    """Answers every function of PyTorch with a tensor without data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.Tensor.__new__(torch.Tensor)


class _Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# name -> (what is around the call, which must make no difference)
AMBIENT: dict[str, Callable[[], Any]] = {
    "device meta": lambda: torch.device("meta"),
    "default device meta": lambda: _default_device("meta"),
    "default dtype float64": _default_dtype,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic algorithms": _deterministic,
    "function mode": _Fakes,
}


@pytest.mark.parametrize("ambient", AMBIENT)
@pytest.mark.parametrize("kind", ["eltwise", "matmul", "gemm", "embedding_bag", "table max", "post-ops", "packed"])
def test_defaults_make_no_difference(kind: str, ambient: str) -> None:
    function = _calls()[kind]
    expected = function()
    zf.clear_cache()
    with AMBIENT[ambient]():
        result = function()
    assert type(result) is torch.Tensor and result.device.type == "cpu" and result.dtype == expected.dtype
    assert torch.equal(result, expected)


def _calls() -> dict[str, Callable[[], torch.Tensor]]:
    """Calls that make tensors of their own: results, workspaces, constants, packed weights."""
    x, w, c = randn(6, 16), randn(16, 24), randn(1, 24)
    image, kernel, bias = randn(2, 16, 7, 7), randn(8, 16, 3, 3), randn(16)[::2]
    table, indices, offsets = randn(9, 17), torch.tensor([3, 1, 8, 3, 0, 2]), torch.tensor([0, 2, 2, 5])
    chain = [("scale", 0.5), ("eltwise", "clip", -1.0, 1.0), ("binary", "add", randn(6, 24)), ("bias", randn(24))]
    return {
        "eltwise": lambda: zf.eltwise(x, "gelu_erf"),
        "matmul": lambda: zf.matmul(x, w, post_ops=[("binary", "mul", 2.0), ("binary", "add", c)]),
        "gemm": lambda: zf.gemm(x, w, alpha=0.5, post_ops=chain),
        "embedding_bag": lambda: zf.embedding_bag(table, indices, offsets, "mean", padding_idx=3),
        "table max": lambda: zf.embedding_bag(table, indices, offsets, "max", padding_idx=3),
        "post-ops": lambda: zf.convolution(image, kernel, bias, padding=1, post_ops=[("eltwise", "relu", 0.1)]),
        "packed": lambda: zf.gemm(x, zf.PackedWeights(w)),
    }


@pytest.mark.parametrize("name", NAMES)
def test_no_function_computes_under_a_mode_that_fakes(name: str) -> None:
    x = randn(2, 3, 6, 6)
    call(name, x)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(TypeError, match="FakeTensorMode"):
        call(name, x)


@pytest.mark.parametrize(
    ("ambient", "named"),
    [
        (lambda f, x: torch.vmap(f)(x), "vmap"),
        (lambda f, x: torch.func.grad(lambda t: f(t).sum())(x), "grad"),
        (lambda f, x: torch.func.jvp(f, (x,), (x,)), "jvp"),
        (lambda f, x: torch.func.functionalize(f)(x), "functionalize"),
        (lambda f, x: make_fx(f)(x), "ProxyTorchDispatchMode"),
        (lambda f, x: torch.jit.trace(f, x), "torch.jit.trace"),
    ],
)
def test_transforms_and_tracers_are_refused_by_name(ambient: Callable[..., Any], named: str) -> None:
    for function in (lambda x: zf.eltwise(x, "relu"), lambda x: zf.gemm(x, x.t()), lambda x: zf.PackedWeights(x)):
        with pytest.raises(TypeError, match=named):
            ambient(function, randn(4, 5))


def test_modes_and_dual_tensors_are_refused_by_name() -> None:
    x = randn(4, 5)
    with _Seen(), pytest.raises(TypeError, match="_Seen"):
        zf.eltwise(x, "relu")
    with forward_ad.dual_level(), pytest.raises(TypeError, match="forward-mode"):
        zf.eltwise(forward_ad.make_dual(x, x), "relu")


def test_tensors_without_plain_memory_are_refused_by_name() -> None:
    class Meaning(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError

    class Plain(torch.Tensor):
        pass

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2, 2))
    for wrong, error, message in (
        (fake, TypeError, "src is a FakeTensor"),
        (torch.ones(2, 2).as_subclass(Meaning), TypeError, "src is a Meaning"),
        (torch.nn.UninitializedParameter(), ValueError, "src is an uninitialized parameter"),
    ):
        with torch.no_grad(), pytest.raises(error, match=message):
            zf.eltwise(wrong, "relu")
    x = randn(3, 4)
    assert type(zf.eltwise(x.as_subclass(Plain), "relu")) is torch.Tensor


def test_torch_compile_leaves_calls_out() -> None:
    torch._dynamo.reset()
    x, w = randn(4, 8), randn(3, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        return zf.inner_product(x * 2, w, post_ops=[("eltwise", "relu")]) + 1

    compiled = torch.compile(function, backend="eager")
    zf.clear_cache()
    for _ in range(2):
        assert torch.equal(compiled(x), function(x))


def test_storage_that_is_gone_is_refused() -> None:
    for size_bytes in (0, 4, 4 * 5):
        x = randn(4, 5)
        x.untyped_storage().resize_(size_bytes)
        with pytest.raises(ValueError, match="src.*(no data|storage)"):
            zf.eltwise(x, "relu")
        with pytest.raises(ValueError, match="out.*(no data|storage)"):
            zf.eltwise(randn(4, 5), "relu", out=x)
    row = torch.zeros(100)[90:]
    row.untyped_storage().resize_(4 * 95)
    with pytest.raises(ValueError, match=r"bias needs 40 bytes, its storage has 20"):
        zf.inner_product(randn(2, 3), randn(10, 3), row)
