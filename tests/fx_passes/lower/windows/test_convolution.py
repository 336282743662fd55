"""Convolutions through the engine: shapes, layouts, post-ops, residuals."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.lowering import kinds, net, noise, offload

DTYPES = (None, torch.bfloat16)
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SPATIAL = {1: (23,), 2: (9, 8), 3: (5, 6, 7)}

ELTWISE = {
    "relu": F.relu,
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "elu": lambda x: F.elu(x, 0.7),
    "relu6": F.relu6,
    "clamp": lambda x: torch.clamp(x, -0.5, 0.25),
    "affine": lambda x: x * 0.5 + 2,
    "rsub": lambda x: 1 - x,
    "exp": torch.exp,
    "square": torch.square,
    "abs": torch.abs,
    "mish": F.mish,
    "div": lambda x: x / 3,
}
BINARY = {
    "add": operator.add,
    "sub": operator.sub,
    "rsub": lambda a, b: b - a,
    "mul": operator.mul,
    "div": lambda a, b: a / (b.abs() + 1),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("c", "o", "batch"), ((1, 1, 1), (3, 17, 2), (17, 3, 5), (16, 32, 1), (17, 33, 2)))
def test_channels_and_batch(c: int, o: int, batch: int, dtype: torch.dtype | None) -> None:
    found = offload(net(lambda m, x: m[0](x), nn.Conv2d(c, o, 3, padding=1)), noise(batch, c, 9, 8), dtype=dtype)
    assert kinds(found) == ["convolution"]
    assert not found.nodes[0].implementation.startswith("ref")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", CONV)
@pytest.mark.parametrize(
    "arguments",
    (
        {"kernel_size": 1},
        {"kernel_size": 3, "bias": False},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 3, "dilation": 2, "padding": 2},
        {"kernel_size": 3, "groups": 3},
        {"kernel_size": 3, "padding": "same"},
        {"kernel_size": 5, "padding": "valid"},
    ),
    ids=lambda a: ",".join(f"{k}={v}" for k, v in a.items()),
)
def test_arguments(rank: int, arguments: dict[str, object], dtype: torch.dtype | None) -> None:
    conv = CONV[rank](6, 21, **arguments)
    found = offload(net(lambda m, x: m[0](x), conv), noise(2, 6, *SPATIAL[rank]), dtype=dtype)
    assert kinds(found) == ["convolution"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("c", "multiplier", "kernel"), ((1, 1, 3), (3, 1, 3), (17, 1, 5), (16, 1, 3), (5, 2, 3)))
def test_depthwise(c: int, multiplier: int, kernel: int, dtype: torch.dtype | None) -> None:
    conv = nn.Conv2d(c, c * multiplier, kernel, 1 + c % 2, kernel // 2, groups=c)
    found = offload(net(lambda m, x: F.relu6(m[0](x)), conv), noise(2, c, 9, 8), dtype=dtype)
    assert set(kinds(found)) <= {"convolution", "eltwise"}


@pytest.mark.needs("avx512")  # else PyTorch is a candidate, and may be taken
@pytest.mark.parametrize("pads", ((1, 0, 0, 2), (0, 3, 1, 0)))
def test_asymmetric_padding(pads: tuple[int, ...]) -> None:
    found = offload(net(lambda m, x: m[0](F.pad(x, pads)), nn.Conv2d(3, 17, 3)), noise(2, 3, 8, 7))
    assert kinds(found) == ["convolution"]


@pytest.mark.needs("avx512")
def test_winograd_is_used_and_can_be_refused() -> None:
    model = net(lambda m, x: m[1](m[0](x)), *(nn.Conv2d(64, 64, 3, padding=1) for _ in range(2)))
    x = noise(1, 64, 32, 32)
    assert any("wino" in n.implementation for n in offload(model, x).nodes)
    assert not any("wino" in n.implementation for n in offload(model, x, allow_winograd=False).nodes)


@pytest.mark.parametrize("memory_format", (torch.contiguous_format, torch.channels_last))
def test_input_layouts(memory_format: torch.memory_format) -> None:
    x = noise(2, 17, 8, 7).contiguous(memory_format=memory_format)
    assert kinds(offload(net(lambda m, x: m[0](x), nn.Conv2d(17, 5, 3)), x)) == ["convolution"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ELTWISE)
def test_eltwise_post_op(name: str, dtype: torch.dtype | None) -> None:
    convs = nn.Conv2d(5, 17, 3), nn.Conv2d(17, 4, 1)  # 17: a block of 16 and a padded one
    found = offload(net(lambda m, x: m[1](ELTWISE[name](m[0](x))), *convs), noise(2, 5, 8, 7), dtype=dtype)
    assert set(kinds(found)) <= {"convolution", "eltwise"}


SHAPES = ((2, 17, 8, 7), (1, 17, 1, 1), (17, 1, 1), (2, 17, 1, 1), (), (1,), (17, 8, 7), (7,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, SHAPES[0]) for name in BINARY] + [(name, shape) for name in ("add", "rsub") for shape in SHAPES[1:]],
    ids=str,
)
def test_binary_post_op(name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    model = net(lambda m, x, y: m[1](F.relu(BINARY[name](m[0](x), y))), nn.Conv2d(5, 17, 1), nn.Conv2d(17, 4, 1))
    found = offload(model, noise(2, 5, 8, 7), noise(*shape), dtype=dtype)
    assert "convolution" in kinds(found)
    if len(shape) == 4:
        assert "torch" not in kinds(found)


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, None) for name in BINARY] + [("add", torch.bfloat16), ("div", torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("side", ("conv first", "conv second"))
def test_residual_of_two_branches(name: str, side: str, dtype: torch.dtype | None) -> None:
    def fn(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        a, b = m[0](x), F.relu(m[1](x))
        return m[2](F.relu(BINARY[name](a, b) if side == "conv first" else BINARY[name](b, a)))

    model = net(fn, nn.Conv2d(5, 17, 3, padding=1), nn.Conv2d(5, 17, 3, padding=1), nn.Conv2d(17, 4, 1))
    found = offload(model, noise(2, 5, 8, 7), dtype=dtype)
    assert "torch" not in kinds(found)


def sums(found: object) -> int:
    """How many convolutions add into their residual's memory."""
    return sum("sum" in str(getattr(n, "post_ops", "")) for n in found.nodes)  # type: ignore[attr-defined]


def test_residual_in_place() -> None:
    """A residual that nobody reads later is added to in place, and one that is read later is not."""

    def block(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        a = F.relu(m[0](x))
        return F.relu(m[1](a) + m[2](a))

    convs = [nn.Conv2d(16, 16, 3, padding=1) for _ in range(4)]
    assert kinds(offload(net(block, *convs), noise(2, 16, 8, 7))) == ["convolution"] * 3

    def read_later(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        a = m[0](x)
        b = F.relu(m[1](x) + a)
        return m[2](b) * a

    assert "torch" not in kinds(offload(net(read_later, *convs), noise(2, 16, 8, 7)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "fn",
    (
        lambda m, x: m[0](x) + x,
        lambda m, x: x + m[0](x),
        lambda m, x: m[0](m[1](x)) + m[1](x),
        lambda m, x: (lambda a: m[0](a) + a)(F.relu(m[1](x))),
        lambda m, x: (lambda a: m[0](a) + a + a)(m[1](x)),
        lambda m, x: (lambda a: a + a)(m[0](x)),
        lambda m, x: (lambda a: a * a)(m[0](x)),
        lambda m, x: (lambda a: a - a)(m[0](x)),
        lambda m, x: (lambda a: (m[0](a) + a, a))(m[1](x)),
        lambda m, x: (lambda a: (m[0](a) + m[2](a).transpose(2, 3).transpose(2, 3), a))(m[1](x)),
        lambda m, x: (lambda a: m[0](a.reshape(2, 16, 8, 8)) + a.reshape(2, 16, 8, 8))(m[1](x)),
        lambda m, x: (lambda a: m[0](a) + a.reshape(2, 16, 64).reshape(2, 16, 8, 8))(m[1](x)),
        lambda m, x: (lambda a: m[0](a) + a.transpose(2, 3))(m[1](x)),
        lambda m, x: (lambda a: (m[0](x) + a, a.flatten(1)))(m[1](x)),
        lambda m, x: (lambda a: (m[0](x) + a.flatten(1).reshape(2, 16, 8, 8), a))(m[1](x)),
        lambda m, x: (lambda a: (a, a))(m[0](x)),
        lambda m, x: (lambda a: (a, a.flatten(1), x))(m[0](x)),
        lambda m, x: (lambda a: (a.flatten(1), a))(F.relu(m[0](x))),
        lambda m, x: (lambda a: (a, m[1](a), F.relu(m[2](a) + a)))(m[0](x)),
        lambda m, x: (F.relu(x).flatten(1), m[0](x)),
        lambda m, x: (m[0](x) + m[1](x)) + (m[2](x) + x),
        lambda m, x: (lambda a, b: F.relu(m[2](a) + b) + F.relu(m[2](b) + a))(m[0](x), m[1](x)),
    ),
)  # fmt: skip
def test_sharing(fn: object, dtype: torch.dtype | None) -> None:
    """Values read twice, by their own reader, as views, as outputs: nothing that is read later may be overwritten."""
    model = net(fn, *(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)))  # type: ignore[arg-type]
    found = offload(model, noise(2, 16, 8, 8), dtype=dtype)
    assert "torch" not in kinds(found)


class WithConstants(nn.Module):
    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 17, 3, padding=1), nn.Conv2d(17, 4, 1)
        for i, shape in enumerate(shapes):
            self.register_buffer(f"c{i}", noise(*shape, seed=i))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        for i in range(3):
            c = getattr(self, f"c{i}", None)
            if c is not None:
                y = (y + c, y * c, c - y)[i]
        return self.last(F.relu(y))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shapes",
    (
        ((2, 17, 8, 7),),
        ((17, 1, 1), (1, 17, 1, 1)),
        ((), (1,), (17, 1, 1)),
        ((7,), (8, 1)),
        ((17, 8, 7), (1, 17, 8, 7), (17, 8, 7)),
    ),
    ids=str,
)
def test_constants_as_operands(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype | None) -> None:
    found = offload(WithConstants(*shapes).eval(), noise(2, 3, 8, 7), dtype=dtype)
    assert "convolution" in kinds(found)


def test_region_inputs_as_residuals_are_never_overwritten() -> None:
    model = net(lambda m, x, y: F.relu(m[0](x) + y), nn.Conv2d(16, 16, 1))
    x, y = noise(2, 16, 8, 8), noise(2, 16, 8, 8, seed=1)
    assert kinds(offload(model, x, y)) == ["convolution"]
    same = noise(2, 16, 8, 8).contiguous(memory_format=torch.channels_last)
    assert kinds(offload(model, same, same)) == ["convolution"]


def test_long_chains_are_split() -> None:
    def fn(m: nn.ModuleList, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = m[0](x)
        for _ in range(20):
            z = torch.tanh(z * 0.9 + y)
        return z

    found = offload(net(fn, nn.Conv2d(3, 17, 1)), noise(2, 3, 5, 5), noise(1, 17, 1, 1))
    assert "torch" not in kinds(found)


def test_prelu_after_convolution() -> None:
    for slopes in (1, 17):
        prelu = nn.PReLU(slopes)
        prelu.weight.data.copy_(noise(slopes))
        found = offload(net(lambda m, x: m[1](m[0](x)), nn.Conv2d(3, 17, 3), prelu), noise(2, 3, 8, 7))
        assert kinds(found) == ["convolution", "prelu"]


def test_shared_weights_and_modules() -> None:
    """One module at two places, and one parameter in two modules."""
    a, b = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, bias=False)
    b.weight = a.weight
    found = offload(net(lambda m, x: m[0](F.relu(m[0](x))) + m[1](x), a, b), noise(1, 16, 9, 9))
    assert kinds(found) == ["convolution"] * 3


@pytest.mark.parametrize(
    ("model", "shape", "why"),
    (
        (net(lambda m, x: m[0](x), nn.Conv2d(3, 4, 3)), (3, 8, 8), "batch"),
        (net(lambda m, x: m[0](x), nn.ConvTranspose2d(3, 4, 3)), (3, 8, 8), "batch"),
    ),
)
def test_what_stays_plain_says_why(model: nn.Module, shape: tuple[int, ...], why: str) -> None:
    found = offload(model, noise(*shape))
    assert [n.became for n in found.nodes] == ["torch"]
    assert why in found.nodes[0].reason


def test_weights_computed_at_run_time_stay_plain() -> None:
    model = net(lambda m, x, w: F.relu(F.conv2d(m[0](x), w)), nn.Conv2d(3, 5, 1))
    found = offload(model, noise(1, 3, 6, 6), noise(4, 5, 2, 2))
    assert sorted(kinds(found))[:1] == ["convolution"] and "torch" in kinds(found)


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("taps", "length", "became"), ((31, 40, "torch"), (15, 40, "convolution"), (31, 3, "convolution")), ids=str
)
def test_a_reference_implementation_alone_is_left_to_pytorch(
    taps: int, length: int, became: str, dtype: torch.dtype | None
) -> None:
    """Depthwise ones of many taps, as Conformers have them; not where a call takes longer than the loops do."""
    conv = nn.Conv1d(24 if length > 3 else 2, 24 if length > 3 else 2, taps, groups=24 if length > 3 else 2)
    model = net(lambda m, x: m[1](F.silu(m[0](F.pad(x, (taps - 1, 0))))), conv, nn.Conv1d(conv.out_channels, 16, 1))
    found = offload(model, noise(2, conv.in_channels, length), dtype=dtype, tune="off")
    assert kinds(found)[-1] == "convolution" and [kind for kind in kinds(found) if kind in ("torch", became)]
    assert ("torch" in kinds(found)) == (became == "torch")
    assert not any(node.implementation.startswith("ref") for node in found.nodes if length > 3)
