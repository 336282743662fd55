"""What all functions share: numpy, out=, refused tensors, the cache, threads, memory."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.tolerance import assert_close
from tests.zendnn_cffi.functional.support import randn
from zendnn_cffi import functional as zf

W, B = randn(4, 3, 3, 3), randn(4)
# name -> function of one image batch [2, 3, 6, 6] and out, whose result has the shape of ORACLE's
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "convolution": lambda x, out=None: zf.convolution(x, _like(x, W), _like(x, B), out=out),
    "deconvolution": lambda x, out=None: zf.deconvolution(x, _like(x, W[:3]), out=out),
    "inner_product": lambda x, out=None: zf.inner_product(x, _like(x, randn(5, 6)), out=out),
    "matmul": lambda x, out=None: zf.matmul(x, _like(x, randn(6, 5)), out=out),
    "eltwise": lambda x, out=None: zf.eltwise(x, "relu", out=out),
    "binary": lambda x, out=None: zf.binary(x, 2.0, "mul", out=out),
    "softmax": lambda x, out=None: zf.softmax(x, 1, out=out),
    "log_softmax": lambda x, out=None: zf.log_softmax(x, -1, out=out),
    "prelu": lambda x, out=None: zf.prelu(x, _like(x, torch.rand(3)), out=out),
    "pooling": lambda x, out=None: zf.pooling(x, "max", 2, out=out),
    "resampling": lambda x, out=None: zf.resampling(x, "linear", 9, out=out),
    "reduction": lambda x, out=None: zf.reduction(x, "mean", (2, 3), out=out),
    "batch_norm": lambda x, out=None: zf.batch_norm(x, _like(x, torch.zeros(3)), _like(x, torch.ones(3)), out=out),
    "layer_norm": lambda x, out=None: zf.layer_norm(x, 6, out=out),
    "lrn": lambda x, out=None: zf.lrn(x, 3, out=out),
    "shuffle": lambda x, out=None: zf.shuffle(x, 3, out=out),
    "reorder": lambda x, out=None: zf.reorder(x, out=out),
    "gemm": lambda x, out=None: zf.gemm(x[0, 0], _like(x, randn(6, 5)), out=out),
    "embedding_bag": lambda x, out=None: zf.embedding_bag(x[0, 0], _like(x, torch.tensor([[1, 2], [3, 3]])), out=out),
}
NAMES = list(FUNCTIONS)


def _like(x: Any, tensor: torch.Tensor) -> Any:
    return tensor.numpy() if isinstance(x, np.ndarray) else tensor


def call(name: str, x: Any, out: Any = None) -> Any:
    torch.manual_seed(0)
    return FUNCTIONS[name](x, out=out)


def test_every_function_is_tried() -> None:
    assert set(zf.__all__) - {"PackedWeights", "cache_info", "clear_cache", "set_cache_capacity"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_arrays_in_arrays_out(name: str) -> None:
    x = randn(2, 3, 6, 6)
    expected = call(name, x)
    array = x.numpy().copy()
    result = call(name, array)
    assert isinstance(result, np.ndarray) and isinstance(expected, torch.Tensor)
    assert np.array_equal(result, expected.numpy())
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(call(name, array), expected.numpy())
    out = np.zeros_like(expected.numpy())
    assert call(name, array, out) is out and np.array_equal(out, expected.numpy())
    assert np.array_equal(array, x.numpy())


@pytest.mark.parametrize("name", NAMES)
def test_out_receives_the_result(name: str) -> None:
    x = randn(2, 3, 6, 6)
    expected = call(name, x)
    out = torch.full_like(expected, 7)
    version = out._version
    assert call(name, x, out) is out and torch.equal(out, expected)
    assert out._version > version  # autograd sees the write
    for wrong, error, message in (
        (torch.empty(expected.shape, dtype=torch.float64), TypeError, "out must be float32|dtype must be"),
        (torch.empty(*expected.shape, 1), ValueError, "out must have shape"),
        (torch.empty(1).expand(expected.shape), ValueError, "overlapping view"),
        (torch.empty(expected.shape, requires_grad=True), ValueError, "requires grad"),
        (torch.empty(expected.shape, device="meta"), ValueError, "meta"),
        ("out", TypeError, "out must be"),
    ):
        with pytest.raises(error, match=message):
            call(name, x, wrong)
    locked = np.zeros(tuple(expected.shape), np.float32)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        call(name, x, locked)


@pytest.mark.parametrize("name", NAMES)
def test_out_may_not_overlap_an_input(name: str) -> None:
    shape = call(name, randn(2, 3, 6, 6)).shape
    memory = randn(2 * 2 * 3 * 9 * 9)
    x, out = memory[: 2 * 3 * 36].view(2, 3, 6, 6), memory[7 : 7 + shape.numel()].view(shape)
    with pytest.raises(ValueError, match="out shares memory with"):
        call(name, x, out)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda x: x.double(), TypeError, "float64"),
        (lambda x: x.to("meta"), ValueError, "meta tensor"),
        (lambda x: x.to_sparse(), ValueError, "to_dense"),
        (lambda x: x.requires_grad_(), ValueError, "no_grad"),
        (lambda x: torch.complex(x, x), TypeError, "complex64"),
        (lambda x: torch.complex(x, x).conj().imag, ValueError, "resolve_neg"),
        (lambda x: x.numpy()[..., ::-1], ValueError, r"negative strides: pass \w+\.copy\(\)"),
        (lambda x: x.numpy().astype(">f4"), TypeError, "byte order"),
        (lambda x: x.numpy().astype("f8"), TypeError, "float64"),
        (lambda x: np.ma.masked_array(x.numpy()), TypeError, "masked"),
        (
            lambda x: np.zeros(2 * 3 * 36 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(2, 3, 6, 6),
            ValueError,
            "alignment",
        ),
        (lambda x: x.tolist(), TypeError, "torch tensor or a numpy array"),
        (lambda x: None, TypeError, "torch tensor or a numpy array"),
        (lambda x: torch._efficientzerotensor((2, 3, 6, 6)), ValueError, "no data"),
    ],
)
def test_inputs_that_are_refused(spoil: Callable[[torch.Tensor], Any], error: type[Exception], message: str) -> None:
    x = spoil(randn(2, 3, 6, 6))
    for function in (
        lambda: zf.convolution(x, W),
        lambda: zf.eltwise(x, "relu"),
        lambda: zf.pooling(x, "max", 2),
        lambda: zf.binary(randn(1), x, "add"),
        lambda: zf.reduction(x, "sum", 0),
    ):
        with pytest.raises(error, match=message):
            function()


def test_parameters_are_taken_without_grad_mode() -> None:
    layer = torch.nn.Conv2d(3, 4, 3)
    with pytest.raises(ValueError, match=r"weights requires grad.*torch.no_grad\(\)"):
        zf.convolution(randn(1, 3, 6, 6), layer.weight)
    x = randn(1, 3, 6, 6)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(
                zf.convolution(x, layer.weight, layer.bias), layer.double()(x.double()), dtype=torch.float32, k=27
            )
            layer.float()


def test_expanded_inputs_are_read_rightly() -> None:
    x = randn(1, 3, 6, 6).expand(4, 3, 6, 6)
    assert_close(zf.convolution(x, W), F.conv2d(x.double(), W.double()), k=27)
    overlapping = torch.arange(12.0).as_strided((3, 4), (2, 1))
    assert torch.equal(zf.eltwise(overlapping, "square"), overlapping**2)


class TestCache:
    def test_finds_repeated_calls_and_stays_bounded(self) -> None:
        zf.clear_cache()
        x = randn(2, 3)
        zf.eltwise(x, "relu")
        before = zf.cache_info()
        zf.eltwise(randn(2, 3), "relu")
        after = zf.cache_info()
        assert after["hits"] == before["hits"] + 1 and after["size"] == before["size"] == 1
        capacity = before["capacity"]
        try:
            zf.set_cache_capacity(3)
            for n in range(1, 9):
                zf.eltwise(randn(n), "relu")
            assert zf.cache_info()["size"] == 3
            zf.set_cache_capacity(0)
            assert torch.equal(zf.eltwise(x, "relu"), x.relu()) and zf.cache_info()["size"] == 0
        finally:
            zf.set_cache_capacity(capacity)
        for wrong in (-1, "x", True, None):
            with pytest.raises(ValueError, match="capacity"):
                zf.set_cache_capacity(wrong)  # type: ignore[arg-type]

    def test_follows_the_thread_count(self) -> None:
        x = randn(2, 16, 14, 14)
        w = randn(16, 16, 3, 3)
        before = torch.get_num_threads()
        try:
            for threads in (1, 2, 3, 1):
                torch.set_num_threads(threads)
                assert_close(zf.convolution(x, w, padding=1), F.conv2d(x.double(), w.double(), padding=1), k=144)
        finally:
            torch.set_num_threads(before)


def test_threads_at_once_get_their_own_results() -> None:
    x = [randn(2, 16, 14, 14) for _ in range(4)]
    w = randn(16, 16, 3, 3)
    expected = [F.conv2d(t.double(), w.double(), padding=1).relu() for t in x]
    threads_of_torch, failures = torch.get_num_threads(), []

    def work(i: int) -> None:
        try:
            torch.set_num_threads(threads_of_torch)
            for _ in range(30):
                assert_close(zf.convolution(x[i], w, padding=1, post_ops=[("eltwise", "relu")]), expected[i], k=144)
                assert torch.equal(zf.eltwise(x[i], "relu"), x[i].relu())
        except BaseException as error:  # reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_repeated_calls_do_not_grow() -> None:
    def resident_kib() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4

    x, w, a = randn(1, 3, 6, 6), randn(4, 3, 3, 3), randn(8, 8)

    def calls(count: int) -> None:
        for _ in range(count):
            zf.convolution(x, w)
            zf.matmul(a, a)
            zf.gemm(a, a, post_ops=[("eltwise", "relu")])

    calls(300)
    growth = []
    for _ in range(3):  # what else the process does may take memory meanwhile; a leak grows each time
        before = resident_kib()
        calls(1500)
        growth.append(resident_kib() - before)
    assert min(growth) < 2048


def test_results_repeat_to_the_bit() -> None:
    x, w = randn(2, 16, 14, 14), randn(16, 16, 3, 3)
    first = zf.convolution(x, w, padding=1)
    assert all(torch.equal(zf.convolution(x, w, padding=1), first) for _ in range(20))
