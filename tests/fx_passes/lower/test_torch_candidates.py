"""PyTorch as a candidate: right numbers in every layout, chosen when measured faster, and said to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes.candidates.candidates import Candidate
from fx_passes.candidates.layouts import channels_of_a_block, row_major
from fx_passes.lower.torch_into import post_ops_into
from fx_passes.ops.pointwise import apply_post_ops
from fx_passes.region.compile import _why_torch
from fx_passes.search.measure import is_rival
from tests.support.lowering import net, noise, offload
from zendnn_cffi.engine.loaded import Library

CASES: dict[str, Callable[[Any], Any]] = {
    **{f.__name__: (lambda y, f=f: f(y.mean((2, 3), keepdim=True) + y)) for f in
       (F.relu, F.leaky_relu, F.gelu, torch.sigmoid, torch.tanh, F.hardswish, F.hardsigmoid, F.elu, F.mish, F.silu)},
    "relu6": lambda y: F.relu6(F.max_pool2d(y, 2)),
    "exp": lambda y: F.max_pool2d(y, 2).exp(),
    "sqrt": lambda y: F.max_pool2d(y, 2).abs().sqrt(),
    "square": lambda y: F.max_pool2d(y, 2).square(),
    "add": lambda y: F.max_pool2d(y, 2) + F.avg_pool2d(y, 2),
    "sub": lambda y: F.max_pool2d(y, 2) - F.avg_pool2d(y, 2),
    "rsub": lambda y: F.avg_pool2d(y, 2) - F.max_pool2d(y, 2) * 2,
    "div": lambda y: F.max_pool2d(y, 2) / (F.avg_pool2d(y, 2).abs() + 1),
    "maximum": lambda y: torch.maximum(F.max_pool2d(y, 2), F.avg_pool2d(y, 2)),
    "number": lambda y: F.max_pool2d(y, 2) * 3 + 1,
    "twice": lambda y: (z := F.max_pool2d(y, 2)) * z,
    "gate": lambda y: F.max_pool2d(y, 2) * y.mean((2, 3), keepdim=True),
    "softmax": lambda y: y.softmax(-1),
    "log_softmax": lambda y: F.log_softmax(y, -1),
    "concat": lambda y: torch.cat([F.max_pool2d(y, 2), F.avg_pool2d(y, 2)], 1),
    "concat twice": lambda y: torch.cat([z := F.max_pool2d(y, 2), z], 1),
    "adaptive": lambda y: F.adaptive_avg_pool2d(y, 1),
    "resample": lambda y: F.interpolate(y, scale_factor=2),
    "sum": lambda y: y.sum((1, 2, 3)),
}  # fmt: skip


@pytest.mark.needs("avx512")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, None) for name in CASES] + [(name, torch.bfloat16) for name in ("gelu", "gate", "softmax", "concat")],
)
def test_used_where_faster(name: str, dtype: torch.dtype | None, torch_is_fastest: list[Candidate]) -> None:
    model = net(lambda m, x: CASES[name](m[0](x)), nn.Conv2d(3, 16, 3, padding=1))
    found = offload(model, noise(2, 3, 6, 8), dtype=dtype, tune="full", scale=30.0 if dtype else None)
    rivals = [c for c in torch_is_fastest if is_rival(c)]
    assert rivals
    assert found.nodes[0].became == "convolution"
    won = [node for node in found.nodes if node.reason.startswith("plain PyTorch measured faster (0 us against ")]
    assert won and all(node.became == "torch" for node in won)


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    ("channels", "dim", "blocked"), ((16, 1, True), (48, -3, True), (17, 1, False), (16, 2, False))
)
def test_concatenation_of_blocks(
    channels: int, dim: int, blocked: bool, dtype: torch.dtype | None, torch_is_fastest: list[Candidate]
) -> None:
    """In blocks of channels, too: one row of blocks a sample. All candidates measured are compared in numbers."""
    convs = (nn.Conv2d(3, channels, 3), nn.Conv2d(3, channels if dim == 2 else 32, 3))
    offload(net(lambda m, x: torch.cat((m[0](x), m[1](x)), dim), *convs), noise(3, 3, 6, 8), dtype=dtype, tune="full")
    found = [c for c in torch_is_fastest if is_rival(c) and len(c.srcs) == 2 and c.dst.inner_blocks]
    assert bool(found) == blocked
    assert all(desc.inner_blocks == ((1, channels_of_a_block()),) for c in found for desc in (*c.srcs, c.dst))


@pytest.mark.needs("avx512")
def test_batch_norm_prelu_and_layer_norm(torch_is_fastest: list[Candidate]) -> None:
    torch.manual_seed(0)  # with one of twenty, rows are so even that eager's rounding is as large as the tolerance
    model = net(
        lambda m, x: m[3](m[2](F.relu(m[1](F.max_pool2d(m[0](x), 2))))),
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.PReLU(16),
        nn.LayerNorm(32),
    )
    found = offload(model, noise(2, 3, 6, 64), tune="full", k=100, allow_winograd=False)
    assert sum(node.reason.startswith("plain PyTorch measured faster") for node in found.nodes) == 4


@pytest.mark.parametrize(
    "wide", (pytest.param(True, marks=pytest.mark.needs("avx512")), False), ids=("AVX-512", "AVX2")
)
def test_layers_with_weights_have_rivals_without_avx512(
    wide: bool, torch_is_fastest: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Library, "runs", lambda self, instructions: wide)
    layers = (nn.Conv2d(8, 12, 3, padding=1, groups=2), nn.ConvTranspose2d(12, 8, 2, stride=2), nn.Linear(10, 7))
    model = net(lambda m, x: F.gelu(m[2](m[1](F.relu(m[0](x))))), *layers)
    found = offload(model, noise(2, 8, 3, 5), tune="full", k=100)
    won = {node.became for node in found.nodes if node.reason.startswith("plain PyTorch measured faster")}
    assert [node.became for node in found.nodes[:3]] == (
        ["convolution", "torch", "inner_product"] if wide else ["torch"] * 3
    )
    assert won == {"torch"}


def test_weights_of_the_moment_have_no_rival(
    torch_is_fastest: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of two activations is none of PyTorch's here, whatever the vectors."""
    monkeypatch.setattr(Library, "runs", lambda self, instructions: False)
    model = net(lambda m, x: m[0](x) @ m[1](x).mT, nn.Linear(6, 8), nn.Linear(6, 8))
    found = offload(model, noise(2, 3, 6), tune="full")
    assert "matmul" in {node.became for node in found.nodes}


def test_not_a_candidate_without_measuring() -> None:
    model = net(lambda m, x: F.max_pool2d(m[0](x), 2).exp(), nn.Conv2d(3, 16, 3, padding=1))
    found = offload(model, noise(2, 3, 6, 8), tune="off")
    assert not any(node.reason for node in found.nodes)


@pytest.mark.parametrize(
    ("others_ns", "says"),
    [([9e3, 8e3], "faster (5 us against 8 us)"), ([4e3], "faster inside the network"), ([], "(5 us)")],
)
def test_why_pytorch(others_ns: list[float], says: str) -> None:
    """One that is slower alone may have won inside the network."""
    desc = row_major((1, 4), torch.float32)
    assert _why_torch(Candidate("torch", (desc,), desc, (), cost_ns=5e3), others_ns).endswith(says)


@pytest.mark.parametrize(
    "post_ops",
    [
        (("eltwise", "relu", 0.0, 0.0),),
        (("eltwise", "swish", 1.0, 0.0), ("binary", "add", "other")),
        (("binary", "mul", "row"), ("eltwise", "gelu_erf", 0.0, 0.0)),
        (("binary", "sub", "other", True), ("binary", "mul", 2.0), ("eltwise", "linear", 0.5, 1.0)),
        (("eltwise", "abs", 0.0, 0.0), ("prelu", "slope")),
    ],
    ids=("relu", "swish add", "row gelu", "reversed numbers", "prelu"),
)
def test_the_last_post_op_writes(post_ops: tuple[Any, ...]) -> None:
    """In place of what nobody else has, up to the last; the result is what the operation's body returns."""
    known = {"other": noise(2, 4, 5, seed=3), "row": noise(1, 4, 1, seed=4), "slope": noise(4, seed=5)}
    real = [tuple(known.get(part, part) if isinstance(part, str) else part for part in entry) for entry in post_ops]
    out, given = torch.full((2, 4, 5), float("nan")), noise(2, 4, 5)
    expected = apply_post_ops(given.clone(), real)
    others = {name: value.clone() for name, value in known.items()}
    post_ops_into(given, real, out)
    assert torch.equal(out, expected) and all(torch.equal(known[name], others[name]) for name in known)
