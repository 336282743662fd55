"""Padding masks of nn.TransformerEncoder: what PyTorch leaves out, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fx_passes.trace.padding import left_out
from tests.support.graphs import compile_graph, count, image, model_of, outside


def _encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options.get("norm_first"))


def _padded(*lengths: int) -> Tensor:
    return torch.arange(5) >= torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("options", [{}, {"norm_first": True}], ids=["nested", "not nested"])
def test_padded_positions_are_as_in_eager(options: dict[str, Any]) -> None:
    """Where PyTorch leaves them out, they are 0."""
    encoder = _encoder(**options)
    encoder.norm = nn.LayerNorm(16)
    model = model_of(lambda m, x, padding: m.e(x, src_key_padding_mask=padding), e=encoder)
    x = image(3, 5, 16)
    gm = compile_graph(model, (x, _padded(5, 3, 1)))
    assert not gm.leaves and count(gm)["attention"] == 2
    followed = torch.tensor([[True, False, False, False, True], [False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        for padding in (_padded(5, 3, 1), _padded(2, 4, 4), _padded(5, 5, 5), followed):
            assert gm._source[0].arrange((x, padding), {}) is not None
            torch.testing.assert_close(gm(x, padding), model(x, padding))


@pytest.mark.parametrize("frozen", [True, False])
def test_padded_positions_where_gradients_are_enabled(frozen: bool) -> None:
    """PyTorch computes them there, unless no parameter wants a gradient: such calls are its own."""
    model = model_of(
        lambda m, x, padding: m.e(x, src_key_padding_mask=padding), e=_encoder().requires_grad_(not frozen)
    )
    x, padding = image(2, 5, 16), _padded(5, 3)
    gm = compile_graph(model, (x, padding))
    assert gm._source[0].arrange((x, padding), {}) is None
    torch.testing.assert_close(gm(x, padding), model(x, padding))
    with torch.no_grad():
        assert gm._source[0].arrange((x, padding), {}) is not None
        torch.testing.assert_close(gm(x, padding), model(x, padding))


def test_padding_of_numbers_leaves_the_encoder_whole() -> None:
    model = model_of(lambda m, x, padding: m.e(x, src_key_padding_mask=padding), e=_encoder())
    x, padding = image(2, 5, 16), torch.zeros(2, 5).masked_fill(_padded(5, 3), -torch.inf)
    gm = compile_graph(model, (x, padding))
    assert outside(gm)["e"] == 1
    with torch.no_grad():
        torch.testing.assert_close(gm(x, padding), model(x, padding))


def test_what_is_left_out() -> None:
    assert torch.equal(left_out(_padded(5, 3, 0)), _padded(5, 3, 0))
    followed = torch.tensor([[True, False, False], [False, False, True]])
    assert not left_out(followed).any()
