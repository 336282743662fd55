"""Linear layers of few rows by AOCL-BLIS: right numbers, what is refused, and that it runs where it is chosen."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zendnn_cffi
from fx_passes.candidates.candidates import Candidate, GemmTemplate, Operation
from fx_passes.lower.products import lpgemm
from fx_passes.lower.products.lpgemm import NAME
from fx_passes.region import compile, variants
from fx_passes.search.measure import TOLERANCE, Bench, fingerprint
from fx_passes.search.tuner import Tuner
from tests.fx_passes.lower.products.test_matrix_vector import lowered
from tests.support.cpu import take_away
from tests.support.lowering import net, noise, offload
from zendnn_cffi.engine.library import load
from zendnn_cffi.primitives.lpgemm import THREADS_VARIABLE, is_offered

BF16 = pytest.mark.needs("bf16")
DTYPES = (torch.float32, pytest.param(torch.bfloat16, marks=BF16))
COMPUTED = (torch.float32, torch.bfloat16)[: 1 + load().runs("cpu_isa_avx512_core_bf16")]
POST_OPS: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda y, z: y,
    "relu": lambda y, z: F.relu(y),
    "leaky": lambda y, z: F.leaky_relu(y, 0.3),
    "silu": lambda y, z: F.silu(y),
    "gelu": lambda y, z: F.gelu(y),
    "tanh gelu": lambda y, z: F.gelu(y, approximate="tanh"),
    "sigmoid": lambda y, z: torch.sigmoid(y),
    "clip": lambda y, z: torch.clamp(y, -0.5, 0.75),
    "factor": lambda y, z: y * 0.5,
    "gate": lambda y, z: F.silu(y) * z,
    "residual": lambda y, z: y + z,
    "residual and relu": lambda y, z: F.relu(z + y),
    "row": lambda y, z: F.gelu(y) + torch.linspace(-1, 1, y.shape[-1]),
}


def by_blis(operation: Operation) -> list[Candidate]:
    return [c for c in operation.candidates if c.implementation == NAME]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """AOCL-BLIS wherever it is a candidate."""
    lower = compile.lower_graph

    def only(*args: Any, **options: Any) -> Any:
        operations, values = lower(*args, **options)
        for operation in operations:
            operation.candidates = by_blis(operation) or operation.candidates
        return operations, values

    monkeypatch.setattr(compile, "lower_graph", only)
    yield


def names(gm: Any) -> list[str]:
    return [
        call.implementation for r in gm.regions().values() for low in r.lowered.values() for call in low.program.calls
    ]


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(2, 3), n=st.integers(1, 80), k=st.integers(1, 90), bias=st.booleans(), dtype=st.sampled_from(COMPUTED)
)
def test_same_numbers(m: int, n: int, k: int, bias: bool, dtype: torch.dtype) -> None:
    operation, values = lowered((m, k), n, bias, dtype)
    found = by_blis(operation)
    assert {c.dst.dtype for c in found} == {dtype, torch.float32}
    for candidate in found:
        result = Bench(operation, values).check_and_time(candidate)
        assert result.right and result.error <= TOLERANCE[dtype]


@settings(max_examples=60, deadline=None)
@given(m=st.integers(1, 40), n=st.integers(1, 80), k=st.integers(1, 90), bias=st.booleans())
def test_with_avx2_it_is_offered_for_all_rows_but_one(m: int, n: int, k: int, bias: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        take_away("avx512", patch)
        operation, values = lowered((m, k), n, bias, torch.float32)
        found = by_blis(operation)
    assert len(found) == (m > 1)
    for candidate in found:
        assert Bench(operation, values).check_and_time(candidate).right


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("batch", (1, 3))
@pytest.mark.parametrize("spatial", ((6,), (3, 5), (2, 3, 2)), ids=str)
def test_with_avx2_it_is_offered_for_convolutions_of_one_pixel(
    spatial: tuple[int, ...], batch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a normalization folded into its weights, a residual, and from a file."""
    take_away("avx512", monkeypatch)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(spatial) - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(spatial) - 1]
    layers = conv(19, 33, 1, bias=False), norm(33), conv(33, 33, 1)
    model = net(lambda m, x, z: F.relu(m[2](F.silu(m[1](m[0](x)))) + z), *layers)
    inputs = noise(batch, 19, *spatial), noise(batch, 33, *spatial)
    used = [node.implementation for node in offload(model, *inputs).nodes]
    assert used.count(NAME) == 2
    fast = zendnn_cffi.optimize(model, inputs, tune="off")
    with torch.no_grad():
        expected = fast(*inputs)
        zendnn_cffi.save(fast, tmp_path / "model.zendnn")
        loaded = zendnn_cffi.load(tmp_path / "model.zendnn")
        assert torch.equal(loaded(*inputs), expected) and names(loaded) == names(fast)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", POST_OPS)
@pytest.mark.parametrize(("m", "n", "k"), [(2, 33, 17), (3, 64, 48), (17, 1, 19)], ids=str)
def test_post_ops(name: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """The first product reads an input of the region; the second the arena, and writes an output."""
    layers = nn.Linear(k, n), nn.Linear(n, n)
    model = net(lambda m, x, z: m[1](POST_OPS[name](m[0](x), z)), *layers)
    found = offload(model, noise(m, k), noise(m, n, seed=5), dtype=None if dtype == torch.float32 else dtype)
    used = [node.implementation for node in found.nodes if node.became == "inner_product"]
    assert used == [NAME, NAME]


@pytest.mark.parametrize(
    ("shape", "n", "dtype", "post_ops"),
    [
        ((1, 64), 64, torch.float32, ()),  # one row: ZenDNN's kernels are faster
        pytest.param((4, 64), 64, torch.float32, (), marks=pytest.mark.needs("avx512")),
        pytest.param((2, 2, 64), 64, torch.bfloat16, (), marks=BF16),  # four rows
        ((2, 64), 64, torch.float32, (("eltwise", "abs", 0.0, 0.0),)),
        ((2, 64), 64, torch.float32, (("eltwise", "tanh", 0.0, 0.0),)),  # inexact near zero
        ((2, 64), 64, torch.float32, (("eltwise", "exp", 0.0, 0.0),)),
        ((2, 64), 64, torch.float32, (("eltwise", "relu", -0.5, 0.0),)),  # negates positive numbers
        pytest.param((2, 64), 64, torch.bfloat16, (("eltwise", "linear", 0.5, 1.0),), marks=BF16),  # misread
        ((2, 64), 64, torch.float32, tuple(("eltwise", kind, 0.0, 0.0) for kind in ("relu", "swish") * 4)),  # nine
    ],
    ids=str,
)
def test_no_candidate(shape: tuple[int, ...], n: int, dtype: torch.dtype, post_ops: Any) -> None:
    operation, _ = lowered(shape, n, dtype=dtype, post_ops=post_ops)
    assert operation.candidates and not by_blis(operation)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("combine", [lambda y, z: y - z, lambda y, z: y * z[:1], torch.minimum])
def test_operands_that_it_does_not_take(combine: Callable[[Any, Any], Any]) -> None:
    model = net(lambda m, x, z: combine(m[0](x), z), nn.Linear(16, 17))
    assert NAME not in [node.implementation for node in offload(model, noise(2, 16), noise(2, 17)).nodes]


def test_by_estimate_it_is_not_taken() -> None:
    model = net(lambda m, x: m[0](x), nn.Linear(64, 48))
    for shape in ((2, 64), (3, 64)):
        assert NAME not in [node.implementation for node in offload(model, noise(*shape)).nodes]


def test_it_is_measured() -> None:
    operation, values = lowered((2, 640), 480)
    tuner = Tuner("auto")
    tuner.price([operation], values)
    (candidate,) = by_blis(operation)
    found = tuner.database.get(fingerprint(candidate))
    assert found is not None and found.right and candidate.cost_ns <= found.time_ns


def test_all_that_it_computes_is_in_its_fingerprint() -> None:
    (candidate,) = (c for c in by_blis(lowered((2, 64), 48)[0]) if c.dst.dtype == torch.float32)
    (template,) = candidate.calls
    assert isinstance(template, GemmTemplate)
    gemm, (bias,) = template.gemm, template.gemm.post_ops
    others = [
        replace(gemm, sizes=(3, 64, 48)), replace(gemm, dtype=torch.bfloat16), replace(gemm, result=torch.bfloat16),
        replace(gemm, post_ops=()), replace(gemm, post_ops=(replace(bias, operand=torch.bfloat16),)),
        replace(gemm, post_ops=(replace(bias, kind="matrix_add"),)), replace(gemm, post_ops=(bias, bias)),
        replace(gemm, post_ops=(replace(bias, numbers=(1.0, 0.0)),)),
    ]  # fmt: skip
    found = {fingerprint(replace(candidate, calls=(replace(template, gemm=other),))) for other in (gemm, *others)}
    assert len(found) == 1 + len(others)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_not_offered(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the library lacks a function, the CPU its instructions, or a variable sets other threads."""
    library: Any = lpgemm.is_offered.__globals__["load"]()
    assert is_offered(dtype, dtype) and not is_offered(torch.int8, dtype)
    with monkeypatch.context() as patch:
        patch.setenv(THREADS_VARIABLE, "1")
        assert not is_offered(dtype, dtype)
    with monkeypatch.context() as patch:
        patch.setattr(library, "blis_lib", object())
        assert not is_offered(dtype, dtype)
        assert not by_blis(lowered((2, 64), 48, dtype=dtype)[0])
    with monkeypatch.context() as patch:
        patch.setattr(type(library), "fn", lambda self, name: lambda: library.const("cpu_isa_sse41"))
        assert not is_offered(dtype, dtype)


@pytest.mark.usefixtures("forced")
def test_weights_are_packed_once_for_two_programs_and_counted() -> None:
    layer = nn.Linear(64, 48)
    gm = zendnn_cffi.optimize(net(lambda m, x: m[0](x), layer), tune="off")
    for rows in (2, 3):
        torch.testing.assert_close(gm(noise(rows, 64)), layer(noise(rows, 64)).detach())
    assert names(gm) == [NAME, NAME]
    (region,) = gm.regions().values()
    shared = [{t.data_ptr() for t in low.program.constants} for low in region.lowered.values()]
    assert len(shared[0] & shared[1]) == 2, "the packed weights, and the bias where it lies"
    packed = [p for forms in region.weights.by_name().values() for p in forms if p.desc.format == "aocl"]
    assert len(packed) == 1 and packed[0].data.numel() == packed[0].desc.size_bytes >= 64 * 48 * 4
    assert zendnn_cffi.explain(gm).weights.packed_bytes == packed[0].desc.size_bytes


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("dtype", (None, pytest.param(torch.bfloat16, marks=BF16)), ids=str)
def test_released_weights_stay_plain_beside_it(dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "limit_transforms", lambda *args: None)
    model = net(lambda m, x: m[1](F.relu(m[0](x))), nn.Linear(64, 48), nn.Linear(48, 32))
    expected = model(noise(2, 64)).detach()
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is None else {"rtol": 3e-2, "atol": 3e-2}
    gm = zendnn_cffi.optimize(model, (noise(2, 64),), release_weights=True, tune="off", dtype=dtype)
    torch.testing.assert_close(gm(noise(2, 64)), expected, **tolerance)
    torch.testing.assert_close(gm(noise(7, 64)), model(noise(7, 64)).detach(), **tolerance)
    assert NAME in names(gm)


def test_released_weights_are_not_kept_twice_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed copies that no plain ones are made from count as additions, and are too many here."""
    monkeypatch.setattr(variants, "_CLEARLY_FASTER", 1e-9)  # so small a region may well be faster in plain PyTorch
    model = net(lambda m, x: m[0](x), nn.Linear(64, 48))
    gm = zendnn_cffi.optimize(model, (noise(2, 64),), release_weights=True, dtype=None)
    torch.testing.assert_close(gm(noise(2, 64)), model(noise(2, 64)).detach())
    assert NAME not in names(gm)


@pytest.mark.usefixtures("forced")
def test_changed_weights_copies_and_pickles() -> None:
    layer = nn.Linear(33, 47)
    gm = zendnn_cffi.optimize(nn.Sequential(layer, nn.ReLU()).eval(), tune="off")
    x = noise(2, 33)
    gm(x)
    with torch.no_grad():
        layer.weight.mul_(-2)
    expected = layer(x).relu().detach()
    for module in (gm, gm, copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        torch.testing.assert_close(module(x), expected)
        torch.testing.assert_close(module(x), expected)
    assert NAME in names(gm)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("threads", (1, 2))
def test_threads_call_one_module_at_once(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        layers = nn.Linear(130, 257), nn.Linear(257, 64)
        model = net(lambda m, x, z: m[1](F.gelu(m[0](x))) + z, *layers)
        gm = zendnn_cffi.optimize(model, tune="off")
        inputs = [(noise(2, 130, seed=i), noise(2, 64, seed=50 + i)) for i in range(4)]
        expected = [model(*pair).detach() for pair in inputs]
        gm(*inputs[0])
        assert names(gm).count(NAME) == 2
        wrong: list[float] = []

        def run(index: int) -> None:
            torch.set_num_threads(threads)
            for _ in range(30):
                error = float((gm(*inputs[index]) - expected[index]).abs().max())
                wrong.extend([error] if not error < 1e-4 else [])

        workers = [threading.Thread(target=run, args=(index,)) for index in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not wrong and torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_and_results_that_move(dtype: torch.dtype) -> None:
    """Each call has other memory; results of calls before stay what they were."""
    model = net(lambda m, x, z: F.gelu(m[0](x)) + z, nn.Linear(70, 33)).to(dtype)
    gm = zendnn_cffi.optimize(model, tune="off")
    pairs = [(noise(2, 70, seed=i).to(dtype), noise(2, 33, seed=50 + i).to(dtype)) for i in range(5)]
    pairs += [(pairs[0][0], pairs[3][1]), (pairs[4][0], pairs[3][1])]  # one of them stays where it was
    with torch.no_grad():
        results = [gm(*pair) for pair in pairs]
        assert names(gm) == [NAME]
        for result, pair in zip(results, pairs, strict=True):
            tolerance = 1e-5 if dtype == torch.float32 else 5e-2
            torch.testing.assert_close(result, model(*pair), atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("forced")
def test_profile_counts_its_work() -> None:
    gm = zendnn_cffi.optimize(net(lambda m, x: m[0](x), nn.Linear(64, 48)), tune="off")
    (record,) = (r for r in zendnn_cffi.profile(gm, noise(2, 64)).records if r.implementation == NAME)
    assert record.kind == "gemm" and record.flops == 2 * 2 * 64 * 48
