"""Fused attention and encoder layers written out: equal numbers, and what has no plain form stays."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.normalize.transformers import _WRITERS, write_out_transformers
from fx_passes.region.region import ZenRegion, living_regions
from tests.support.lowering import noise


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    """The result of nn.MultiheadAttention alone; masks by name."""

    def __init__(self, *shape: int, cross: bool = False, masks: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__()
        self.attention, self.cross, self.masks = nn.MultiheadAttention(*shape, **options), cross, masks or {}

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        key = y if self.cross else x
        return self.attention(x, key, key, need_weights=False, **self.masks)[0]


def causal(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    mask = torch.ones(n, n, dtype=torch.bool).triu(1)
    return mask if dtype == torch.bool else torch.zeros(n, n, dtype=dtype).masked_fill(mask, float("-inf"))


def padding(batch: int, n: int) -> torch.Tensor:
    mask = torch.zeros(batch, n, dtype=torch.bool)
    mask[0, n - 2 :] = True
    return mask


def captured(model: nn.Module, *inputs: torch.Tensor) -> tuple[fx.GraphModule, list[Any], Any]:
    """What TorchDynamo captures of the call, the inputs of that, and its result."""
    found: list[Any] = []

    def keep(gm: fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found[:] = [gm, args]
            return gm.forward(*args)

        return run

    with torch.no_grad():
        result = torch.compile(model, backend=keep)(*inputs)
    gm, args = found
    for node in gm.graph.nodes:
        if "example_value" in node.meta:
            node.meta["val"] = node.meta["example_value"]
    return gm, list(args), result


def fused(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function" and node.target in _WRITERS]


X, Y = (2, 7, 24), (2, 5, 24)
WRITTEN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "batch first": (lambda: Attention(24, 3, batch_first=True), X, Y),
    "batch second": (lambda: Attention(24, 4), X, Y),
    "without a bias": (lambda: Attention(24, 4, bias=False), X, Y),
    "one head, one token": (lambda: Attention(24, 1, batch_first=True), (1, 1, 24), Y),
    "no batch": (lambda: Attention(24, 2), (7, 24), (5, 24)),
    "no batch, across": (lambda: Attention(24, 2, cross=True), (7, 24), (5, 24)),
    "across": (lambda: Attention(24, 3, cross=True, batch_first=True), X, Y),
    "across, of other sizes": (lambda: Attention(24, 3, cross=True, kdim=10, vdim=10), X, (5, 7, 10)),
    "causal, boolean": (lambda: Attention(24, 3, batch_first=True, masks={"attn_mask": causal(7, torch.bool)}), X, Y),
    "causal, numbers": (lambda: Attention(24, 3, masks={"attn_mask": causal(2)}), X, Y),
    "causal, by hint": (
        lambda: Attention(24, 3, batch_first=True, masks={"attn_mask": causal(7), "is_causal": True}), X, Y
    ),
    "a mask for each head": (
        lambda: Attention(24, 3, batch_first=True, masks={"attn_mask": torch.randn(6, 7, 7)}), X, Y
    ),
    "padding": (lambda: Attention(24, 3, batch_first=True, masks={"key_padding_mask": padding(2, 7)}), X, Y),
    "padding and causal": (
        lambda: Attention(
            24, 3, batch_first=True,
            masks={"key_padding_mask": padding(2, 7), "attn_mask": causal(7, torch.bool)}
        ), X, Y
    ),
    "encoder layer": (lambda: First(nn.TransformerEncoderLayer(24, 3, 40, batch_first=True)), X, Y),
    "encoder layer, gelu, norm first": (
        lambda: First(nn.TransformerEncoderLayer(24, 3, 40, batch_first=True, norm_first=True, activation="gelu")), X, Y
    ),
    "encoder layer, batch second": (lambda: First(nn.TransformerEncoderLayer(24, 3, 40)), X, Y),
    "encoder layer, causal": (
        lambda: First(nn.TransformerEncoderLayer(24, 3, 40, batch_first=True), src_mask=causal(7)), X, Y
    ),
    "encoder": (
        lambda: First(
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(24, 3, 40, batch_first=True), 2, enable_nested_tensor=False
            )
        ), X, Y
    ),
    "decoder": (lambda: Both(nn.TransformerDecoderLayer(24, 3, 40, batch_first=True)), X, Y),
}  # fmt: skip


class First(nn.Module):
    def __init__(self, layer: nn.Module, **masks: Any) -> None:
        super().__init__()
        self.layer, self.masks = layer, masks

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layer(x, **self.masks)


class Both(First):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layer(x, y)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_out_computes_the_same(name: str) -> None:
    make, x, y = WRITTEN[name]
    gm, args, expected = captured(make().eval(), noise(*x), noise(*y))
    assert fused(gm)
    again = write_out_transformers(copy.deepcopy(gm))
    assert not fused(again)
    with torch.no_grad():
        (found,) = again(*args)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", (None, torch.bfloat16))
@pytest.mark.parametrize("name", WRITTEN)
def test_both_entries_run_it_in_regions(name: str, dtype: torch.dtype | None) -> None:
    make, x, y = WRITTEN[name]
    model, inputs = make().eval(), (noise(*x), noise(*y))
    before = set(living_regions())
    zendnn_cffi.backend.register()
    compiled = torch.compile(model, backend="zendnn", options={"tune": "off", "dtype": dtype})
    with torch.no_grad():
        found, expected = compiled(*inputs), copy.deepcopy(model).double()
        expected.masks = {k: v.double() if is_number(v) else v for k, v in expected.masks.items()}
        oracle = expected(*(t.double() for t in inputs))
    tolerance = 3e-2 if dtype else 1e-5
    assert (found.double() - oracle).abs().max() <= tolerance * oracle.abs().max()
    regions: list[ZenRegion] = [r for r in living_regions() if r not in before]
    assert any(node.target is ops.attention for region in regions for node in region.graph.nodes)
    kinds = {node.kind for region in regions for node in nodes_of(region) if node.implementation != "torch"}
    assert "inner_product" in kinds  # attention is PyTorch's where that is the better estimate


def is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def nodes_of(region: ZenRegion) -> list[Any]:
    return [node for lowered in region.lowered.values() if lowered is not None for node in lowered.nodes]


class Weights(Attention):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.attention(x, x, x)


STAY: dict[str, Callable[[], nn.Module]] = {
    "weights are read": lambda: Weights(24, 3, batch_first=True),
    "added keys": lambda: Attention(24, 3, add_bias_kv=True),
    "a key of zeros": lambda: Attention(24, 3, add_zero_attn=True),
}


@pytest.mark.parametrize("name", STAY)
def test_what_has_no_plain_form_stays(name: str) -> None:
    gm, _, _ = captured(STAY[name]().eval(), noise(*X), noise(*Y))
    before = str(gm.graph)
    assert fused(gm) and str(write_out_transformers(gm).graph) == before


def test_dropout_in_training_stays() -> None:
    model = Attention(24, 3, dropout=0.5, batch_first=True).train()
    gm, _, _ = captured(model, noise(*X), noise(*Y))
    assert fused(write_out_transformers(gm)) == [F.multi_head_attention_forward]


def test_a_mask_of_padding_in_a_fused_layer_stays() -> None:
    """A sample of nothing but padding is 0 there."""
    e, x = 24, noise(2, 7, 24)
    weights = noise(3 * e, e), noise(3 * e), noise(e, e), noise(e)
    rest = noise(e), noise(e), noise(e), noise(e), noise(40, e), noise(40), noise(e, 40), noise(e)

    def fn(a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch._transformer_encoder_layer_fwd(a, e, 3, *weights, False, False, 1e-5, *rest, mask, 1)

    gm, _, _ = captured(fn, x, padding(2, 7))  # type: ignore[arg-type]
    assert fused(write_out_transformers(gm)) == [torch._transformer_encoder_layer_fwd]


def test_the_native_operator_of_attention() -> None:
    """As a user may call it."""
    e, x, z = 24, noise(2, 7, 24), noise(2, 7, 24)
    weights = noise(3 * e, e), noise(3 * e), noise(e, e), noise(e)

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch._native_multi_head_attention(a, b, b, e, 3, *weights, None, False)[0]  # type: ignore[no-any-return]

    gm, args, expected = captured(fn, x, z)  # type: ignore[arg-type]
    assert fused(gm) == [torch._native_multi_head_attention]
    again = write_out_transformers(gm)
    assert not fused(again)
    torch.testing.assert_close(again(*args)[0], expected, atol=1e-4, rtol=1e-4)
