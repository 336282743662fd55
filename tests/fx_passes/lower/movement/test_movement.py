"""Concatenation, slices, reshapes and permutations."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from fx_passes import ops
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.rules import lower_graph
from fx_passes.search.measure import CHECK_ONLY, Bench
from tests.support.lowering import fallbacks, kinds, net, noise, offload

DTYPES = (None, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("widths", ((16, 32), (3, 17), (17, 16, 1), (16, 3), (1, 1)), ids=str)
@pytest.mark.parametrize("last", (1, 3))
def test_concat_of_channels(widths: tuple[int, ...], batch: int, last: int, dtype: torch.dtype | None) -> None:
    convs = [nn.Conv2d(5, w, 3, padding=1) for w in widths]
    model = net(lambda m, x: m[-1](torch.cat([F.relu(c(x)) for c in list(m)[:-1]], 1)), *convs,
                nn.Conv2d(sum(widths), 4, last))  # fmt: skip
    found = offload(model, noise(batch, 5, 8, 7), dtype=dtype)
    assert sorted(kinds(found)) == ["concat", *["convolution"] * (len(widths) + 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", (1, 3))
@pytest.mark.parametrize(
    "fn",
    (
        lambda m, x: (lambda a: torch.cat([a, a], 1))(m[0](x)),
        lambda m, x: (lambda a: torch.cat([a, x, a], 1))(m[0](x)),
        lambda m, x: torch.cat([x, x], 1) + m[0](torch.cat([x, x], 1)[:, :16]).repeat(1, 2, 1, 1),
        lambda m, x: (lambda a: m[2](torch.cat([a, m[1](a)], 1)) + a)(m[0](x)),
        lambda m, x: (lambda a, b: (torch.cat([a, b], 1), a, b))(m[0](x), m[1](x)),
        lambda m, x: (lambda a, b: m[2](torch.cat([a, b], 1)) + m[2](torch.cat([b, a], 1)))(m[0](x), m[1](x)),
        lambda m, x: (lambda a: m[2](torch.cat([F.relu(a), torch.tanh(a)], 1)) * a)(m[0](x)),
        lambda m, x: (lambda a: (lambda c: m[2](torch.cat([c[:, :16], m[1](c[:, 16:])], 1)))(torch.cat([a, x], 1)))(
            m[0](x)
        ),
        lambda m, x: torch.cat([m[0](x) + m[1](x), m[1](x)], 1),
        lambda m, x: (lambda a: torch.cat([torch.cat([a, m[1](a)], 1), x], 1))(m[0](x)),
        lambda m, x: (lambda a: torch.cat([m[1](a) + a, a], 1))(m[0](x)),
        lambda m, x: (lambda a: torch.cat([a, m[1](x) + a], 1))(m[0](x)),
        lambda m, x: torch.cat([m[0](x), m[1](x)], 0),
        lambda m, x: torch.cat([m[0](x), m[1](x)], 2) + torch.cat([m[0](x), m[1](x)], -2),
        lambda m, x: torch.cat([m[0](x), m[1](x)], -1),
        lambda m, x: torch.cat([m[0](x).flatten(1), m[1](x).flatten(1)], 1),
        lambda m, x: torch.cat([m[0](x).permute(0, 2, 3, 1), m[1](x).permute(0, 2, 3, 1)], 3),
        lambda m, x: (lambda c: (c, m[2](c)))(torch.cat([m[0](x), m[1](x)], 1)),
        lambda m, x: (lambda c: (c[:, 3:20], m[2](c)))(torch.cat([m[0](x), m[1](x)], 1)),
    ),
)
def test_concat_sharing(fn: object, batch: int, dtype: torch.dtype | None) -> None:
    convs = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1), nn.Conv2d(32, 16, 1)
    found = offload(net(fn, *convs), noise(batch, 16, 6, 6), dtype=dtype)  # type: ignore[arg-type]
    assert "concat" in kinds(found)


def test_dense_block() -> None:
    """Every piece is read by all later concatenations."""

    def fn(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        features = [m[0](x)]
        for layer in list(m)[1:]:
            features.append(F.relu(layer(torch.cat(features, 1))))
        return torch.cat(features, 1)

    for growth in (16, 5):
        convs = [nn.Conv2d(3, growth, 3, padding=1)]
        convs += [nn.Conv2d(growth * i, growth, 3, padding=1) for i in range(1, 5)]
        for batch in (1, 2):
            found = offload(net(fn, *convs), noise(batch, 3, 6, 5))
            assert kinds(found).count("convolution") == 5 and "torch" not in kinds(found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("fn", "torch_calls"),
    (
        (lambda m, x: (lambda p: m[1](p[1]) + p[0])(m[0](x).chunk(2, 1)), 0),
        (lambda m, x: (lambda p: p[1] * torch.sigmoid(p[0]))(m[0](x).chunk(2, 1)), 0),
        (lambda m, x: (lambda p: m[1](p[-1]))(torch.split(m[0](x), (16, 16), 1)), 0),
        (lambda m, x: (lambda p: p[0] + p[1] * p[2])(torch.split(m[0](x)[:, :30], 10, 1)), 0),
        (lambda m, x: (lambda p: m[1](p[0]) + p[-1])(torch.tensor_split(m[0](x), (16,), 1)), 0),
        (lambda m, x: (lambda p: p[1] * p[2])(m[0](x).tensor_split([3, 16, 29], dim=-3)), 0),
        (lambda m, x: (lambda p: m[1](p[1]))(torch.tensor_split(m[0](x), indices=(-16,), dim=1)), 0),
        (lambda m, x: torch.tensor_split(m[0](x), (40, 20), 1), None),
        (lambda m, x: m[0](x).tensor_split(3, 1), None),
        (lambda m, x: m[1](m[0](x)[:, 16:]), 0),
        (lambda m, x: m[1](m[0](x)[:, 3:19]) + m[0](x)[:, -16:], 0),
        (lambda m, x: m[0](x)[:, :, 1:-1, 2:], None),
        (lambda m, x: m[0](x)[:, :, ::2], None),
        (lambda m, x: m[1](m[0](x)[:, :16, 1::2, ::2]), None),
        (lambda m, x: m[1](m[0](x)[:, ::2, :5][:, :, ::2]), None),
        (lambda m, x: m[1](m[0](x[:, :, :5])[:, 16:])[:, :, ::2] * 2, None),
        (lambda m, x: torch.tanh(m[0](x).transpose(2, 3)[:, :, ::2]), None),
        (lambda m, x: m[0](x)[0], None),
        (lambda m, x: m[0](x)[:, 3:3], None),
        (lambda m, x: m[0](x).chunk(3, 1)[2], 0),
        (lambda m, x: (lambda p: (p[0], p[1]))(m[0](x).chunk(2, 1)), 0),
        (lambda m, x: (lambda p: (p[0].flatten(1), m[1](p[1])))(m[0](x).chunk(2, 1)), 0),
    ),
)
def test_slices(fn: object, torch_calls: int | None, dtype: torch.dtype | None) -> None:
    model = net(fn, nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(16, 16, 1))  # type: ignore[arg-type]
    found = offload(model, noise(2, 3, 6, 5), dtype=dtype)
    assert "convolution" in kinds(found)
    if torch_calls is not None:
        assert kinds(found).count("torch") == torch_calls


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", (6, 32))
@pytest.mark.parametrize(
    "fn",
    (
        lambda m, x: m[0](x).flatten(1),
        lambda m, x: m[0](x).flatten(2),
        lambda m, x: m[0](x).reshape(x.size(0), -1),
        lambda m, x: m[0](x).view(x.shape[0], 2, -1, 6, 5).transpose(1, 2).reshape(x.shape[0], -1, 6, 5) + m[0](x),
        lambda m, x: m[0](x).permute(0, 2, 3, 1),
        lambda m, x: m[0](x).permute(0, 2, 3, 1).permute(0, 3, 1, 2) + m[0](x),
        lambda m, x: torch.tanh(m[0](x).permute(0, 2, 3, 1)),
        lambda m, x: (lambda a: (a, a.permute(1, 0, 2, 3), a.flatten(2).transpose(1, 2)))(m[0](x)),
        lambda m, x: m[0](x).flatten(2).transpose(1, 2).softmax(-1).transpose(1, 2).reshape(x.size(0), -1, 6, 5),
        lambda m, x: m[0](x).unsqueeze(0).squeeze(0) * 2,
        lambda m, x: m[0](x).flatten(),
        lambda m, x: m[0](x).mean((2, 3)).unsqueeze(-1).unsqueeze(-1).expand(-1, -1, 6, 5) * m[0](x),
        lambda m, x: m[0](x).mean((2, 3), keepdim=True).expand(-1, -1, 6, 5),
        lambda m, x: m[0](x).contiguous().view(-1, 5),
        lambda m, x: m[0](x).unflatten(1, (2, -1)),
        lambda m, x: m[0](x).flatten(1).reshape_as(m[0](x)) * 2,
        lambda m, x: m[0](x).unflatten(1, (2, -1)).view_as(m[0](x)) * 2,
        lambda m, x: (m[0](x).transpose(1, 2) * 2).reshape_as(m[0](x)),
        lambda m, x: m[0](x).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) + m[0](x),
        lambda m, x: m[0](x).flatten(2).transpose(1, 2).unflatten(-2, (x.shape[2], -1)).permute(0, 3, 1, 2) * 2,
    ),
)
def test_views(fn: object, channels: int, dtype: torch.dtype | None) -> None:
    model = net(fn, nn.Conv2d(3, channels, 3, padding=1))  # type: ignore[arg-type]
    assert "convolution" in kinds(offload(model, noise(2, 3, 6, 5), dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shuffle(dtype: torch.dtype | None) -> None:
    """A ShuffleNet unit: chunk, convolutions, concatenation, channel shuffle."""

    def shuffle(x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.size()
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)

    def fn(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for i in (0, 3):
            a, b = x.chunk(2, 1)
            x = shuffle(torch.cat((a, F.relu(m[i + 2](m[i + 1](F.relu(m[i](b)))))), 1))
        return x

    parts: list[nn.Module] = []
    for _ in range(2):
        parts += [nn.Conv2d(24, 24, 1), nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.Conv2d(24, 24, 1)]
    found = offload(net(fn, *parts), noise(2, 48, 6, 5), dtype=dtype)
    assert kinds(found).count("convolution") == 6 and not fallbacks(found)


def test_outputs_are_views_of_nothing() -> None:
    """A result may be written to without changing another: each output has memory of its own, as values in eager."""
    import zendnn_cffi

    model = net(lambda m, x: (lambda a: (a, a.flatten(1), a))(m[0](x)), nn.Conv2d(3, 5, 1))
    gm = zendnn_cffi.optimize(model, tune="off")
    x = noise(2, 3, 4, 4)
    first, flat, _ = gm(x)
    kept = flat.clone()
    again = gm(x)[0]
    first.zero_()
    assert torch.equal(again.flatten(1), kept)


PIECES = [
    (ops.split_at, (9, 2, 18), 2),  # a piece that begins before the one in front of it ends
    (ops.split_at, (20, 4), 2),
    (ops.split_at, (-30, 3, -8), -1),
    (ops.split_at, (5, 21), 1),
    (ops.chunk, 3, -1),
    (ops.split, [4, 12, 16], -2),
]


@pytest.mark.parametrize(("cut", "how", "index"), PIECES, ids=[f"{cut.__name__} {how} {i}" for cut, how, i in PIECES])
def test_every_copy_of_a_piece_is_right(cut: Any, how: Any, index: int) -> None:
    graph = fx.Graph()
    pieces = graph.call_function(cut, (graph.placeholder("x"), how, 1))
    graph.output(graph.call_function(operator.getitem, (pieces, index)))
    (operation,), values = lower_graph(graph, [TensorSpec.of(noise(2, 32, 6, 5))], {})
    copies = [candidate for candidate in operation.candidates if candidate.calls]
    bench = Bench(operation, values)
    assert copies and all(bench.check_and_time(candidate, CHECK_ONLY).right for candidate in copies)


@pytest.mark.parametrize(
    "fn",
    (
        lambda m, x: m[0](x).sum().reshape(1, 1) * 2,
        lambda m, x: m[0](x).sum().view(1) + 1,
        lambda m, x: m[0](x).sum().flatten() * 2,
        lambda m, x: m[0](x).sum().permute(()) * 2,
        lambda m, x: m[0](x).sum().transpose(0, -1) * m[0](x),
        lambda m, x: m[0](x).sum()[None] * 2,
        lambda m, x: m[0](x).sum().unsqueeze(-1) + 1,
        lambda m, x: torch.tanh(m[0](x).reshape(*[1] * 12, -1) * 2).reshape(2, -1),
        lambda m, x: torch.tanh(m[0](x)[(None,) * 9].transpose(0, -1)),
        lambda m, x: m[0](x).reshape(*[1] * 9, 2, 4, 6, 5).unsqueeze(0).flatten(0, 9).flatten(1) * 2,
    ),
)
def test_one_number_and_many_dimensions(fn: object) -> None:
    """The library has tensors of 1 to 12 dimensions."""
    found = offload(net(fn, nn.Conv2d(3, 4, 3, padding=1)), noise(2, 3, 6, 5))  # type: ignore[arg-type]
    assert "convolution" in kinds(found)
