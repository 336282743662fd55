"""Multi-head attention and encoder layers in parts: equal to eager, and in the engine alike by both entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.pipeline import build
from fx_passes.region.options import RegionOptions
from fx_passes.region.region import RegionFactory
from fx_passes.trace.guards import Arguments
from fx_passes.trace.trace import trace
from tests.support.lowering import noise
from tests.tolerance import assert_close
from zendnn_cffi import backend

BATCH, LENGTH, KEYS, WIDTH, HEADS = 3, 5, 7, 12, 4


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    backend.register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    """nn.MultiheadAttention of one input, or of two, called with these options."""

    def __init__(self, batch_first: bool, call: dict[str, Any], *, first: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **options)
        self.call, self.first = call, first

    def forward(self, x: Tensor, keys: Tensor | None = None, **masks: Tensor) -> Any:
        keys = x if keys is None else keys
        results = self.attention(x, keys, keys, **masks, **self.call)
        return results[0] if self.first or results[1] is None else results


def sequence(batch_first: bool, length: int = LENGTH, width: int = WIDTH) -> Tensor:
    return noise(BATCH, length, width) if batch_first else noise(length, BATCH, width)


def padding(length: int = LENGTH) -> Tensor:
    return torch.arange(length) >= torch.tensor([[length], [2], [1]])


def later() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def encoder_layer(batch_first: bool, **options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 20, batch_first=batch_first, **options)


NO_WEIGHTS = {"need_weights": False}

# name -> (model, arguments by position, masks by name, linear layers, attentions) for batch_first or not
CASES: dict[str, Any] = {
    "self": lambda b: (Attention(b, NO_WEIGHTS), (sequence(b),), {}, 2, 1),
    "weights not read": lambda b: (Attention(b, {}, first=True), (sequence(b),), {}, 2, 1),
    "weights read": lambda b: (Attention(b, {}), (sequence(b),), {}, 2, 0),
    "weights of each head": lambda b: (Attention(b, {"average_attn_weights": False}), (sequence(b),), {}, 2, 0),
    "two inputs": lambda b: (Attention(b, NO_WEIGHTS), (sequence(b), sequence(b, KEYS)), {}, 4, 1),
    "other widths": lambda b: (Attention(b, NO_WEIGHTS, kdim=6, vdim=6), (sequence(b), sequence(b, KEYS, 6)), {}, 4, 1),
    "no bias": lambda b: (Attention(b, NO_WEIGHTS, bias=False), (sequence(b),), {}, 2, 1),
    "added keys": lambda b: (
        Attention(b, NO_WEIGHTS, add_bias_kv=True, add_zero_attn=True), (sequence(b),), {}, 2, 1
    ),
    "no batch": lambda b: (Attention(b, NO_WEIGHTS), (noise(LENGTH, WIDTH),), {}, 4, 1),
    "padding": lambda b: (Attention(b, NO_WEIGHTS), (sequence(b),), {"key_padding_mask": padding()}, 2, 1),
    "padding of keys": lambda b: (
        Attention(b, {}, first=True), (sequence(b), sequence(b, KEYS)), {"key_padding_mask": padding(KEYS)}, 3, 0
    ),
    "a mask": lambda b: (Attention(b, NO_WEIGHTS), (sequence(b),), {"attn_mask": later()}, 2, 1),
    "a mask of numbers": lambda b: (
        Attention(b, NO_WEIGHTS), (sequence(b),), {"attn_mask": noise(LENGTH, LENGTH)}, 2, 1
    ),
    "a mask of each head": lambda b: (
        Attention(b, NO_WEIGHTS), (sequence(b),), {"attn_mask": later().expand(BATCH * HEADS, -1, -1).clone()}, 2, 1
    ),
    "both masks": lambda b: (
        Attention(b, NO_WEIGHTS), (sequence(b),), {"attn_mask": later(), "key_padding_mask": padding()}, 2, 1
    ),
    "causal": lambda b: (
        Attention(b, NO_WEIGHTS | {"is_causal": True}), (sequence(b),), {"attn_mask": later()}, 2, 1
    ),
    "layer": lambda b: (encoder_layer(b), (sequence(b),), {}, 4, 1),
    "layer, normalization first": lambda b: (
        encoder_layer(b, norm_first=True, activation="gelu"), (sequence(b),), {}, 4, 1
    ),
    "layer of odd heads": lambda b: (
        nn.TransformerEncoderLayer(15, 3, 21, batch_first=b), (sequence(b, width=15),), {}, 4, 1
    ),
    "layer, padding": lambda b: (encoder_layer(b), (sequence(b),), {"src_key_padding_mask": padding()}, 4, 1),
    "layer, a mask": lambda b: (encoder_layer(b), (sequence(b),), {"src_mask": later()}, 4, 1),
    "layer, both masks": lambda b: (
        encoder_layer(b), (sequence(b),), {"src_mask": later(), "src_key_padding_mask": padding()}, 4, 1
    ),
    "encoder": lambda b: (
        nn.TransformerEncoder(encoder_layer(b), 2, enable_nested_tensor=False), (sequence(b),), {}, 8, 2
    ),
    "decoder": lambda b: (
        nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 20, batch_first=b), 2),
        (sequence(b), sequence(b, KEYS)), {"tgt_mask": later(), "tgt_is_causal": True}, 16, 4,
    ),
    "transformer": lambda b: (
        nn.Transformer(WIDTH, HEADS, 1, 1, 20, batch_first=b),
        (sequence(b, KEYS), sequence(b)), {"tgt_mask": later(), "tgt_is_causal": True}, 12, 3,
    ),
}  # fmt: skip


def tensors(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def offloaded(modules: Any) -> Counter[str]:
    """Nodes of all modules by what computes them; those outside of regions as "outside", but for masks and sizes."""
    found: Counter[str] = Counter()
    for module in modules:
        for node in zendnn_cffi.explain(module).nodes:
            attention = "scaled_dot_product_attention" in node.source or node.became == "attention"
            kind = "attention" if attention else node.became
            found["outside " + kind if not node.region and kind in ("attention", "torch") else kind] += 1
    return found


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "length first"])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_eager_and_offloaded_alike(case: str, batch_first: bool) -> None:
    model, args, kwargs, linears, attentions = CASES[case](batch_first)
    model.eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    before = {id(module) for module in backend.compiled_modules()}
    with torch.no_grad():
        expected = tensors(model(*args, **kwargs))
        fast = build(trace(model, Arguments(args, kwargs)), make_region=RegionFactory(RegionOptions(tune="off")))
        compiled = torch.compile(model, backend="zendnn", options={"tune": "off"})
        for module in (fast, compiled):
            for mine, theirs in zip(tensors(module(*args, **kwargs)), expected, strict=True):
                assert_close(mine, theirs, k=64)
    behind = [module for module in backend.compiled_modules() if id(module) not in before]
    for modules in ([fast], behind):
        found = offloaded(modules)
        assert (found["inner_product"], found["attention"], found["outside attention"]) == (linears, attentions, 0)


@pytest.mark.parametrize("norm_first", (True, False))
def test_layers_of_what_is_transposed_lie_in_order(norm_first: bool) -> None:
    """As what PyTorch's operator returns, of which a view may follow; its Python code adds to src as that lies."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 20, batch_first=True, norm_first=norm_first)
    model, x = nn.Sequential(layer, nn.Flatten()).eval(), noise(LENGTH, BATCH, WIDTH).transpose(0, 1)
    for example in (x, x.contiguous()):
        fast = zendnn_cffi.optimize(layer.eval(), (example,), tune="off")
        viewed = zendnn_cffi.optimize(model, (example,), tune="off")
        with torch.no_grad():
            assert fast(x).stride() == layer(x).stride()
            assert_close(viewed(x), layer(x).view(BATCH, -1), k=64)
        found = offloaded([fast])
        assert (found["inner_product"], found["attention"], found["outside attention"]) == (4, 1, 0)


def test_sizes_stay_free_through_torch_compile() -> None:
    model = encoder_layer(True).eval()
    compiled = torch.compile(model, backend="zendnn", options={"tune": "off"}, dynamic=True)
    with torch.no_grad():
        for batch, length in ((3, 5), (2, 9), (4, 6)):
            x = noise(batch, length, WIDTH)
            assert_close(compiled(x), model(x), k=64)
    assert offloaded(backend.compiled_modules()[-1:])["inner_product"] == 4 * 3  # one program for each shape


def test_weights_that_are_read_are_computed_once() -> None:
    """Of two attentions in one exported model, the one whose weights are returned is PyTorch's own code."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y, weights = self.a(x, x, x)
            return self.b(y, y, y)[0], weights

    model, x = Two().eval(), sequence(True)
    gm = zendnn_cffi.optimize(model, (x,), tune="off")
    with torch.no_grad():
        for mine, theirs in zip(gm(x), model(x), strict=True):
            assert_close(mine, theirs, k=64)
    became = Counter(node.became for node in zendnn_cffi.explain(gm).nodes)
    assert (became["softmax"], became["attention"], became["inner_product"]) == (1, 1, 4)


def test_a_row_of_which_a_mask_leaves_nothing_is_zero() -> None:
    """PyTorch itself answers 0 where gradients are on, and NaN by its fast path: ours is the first."""
    model, x = Attention(True, NO_WEIGHTS).eval(), sequence(True)
    nothing = torch.tensor([[False] * LENGTH, [True] * LENGTH, [False] * LENGTH])
    expected = model(x, key_padding_mask=nothing).detach()
    assert not expected.isnan().any()
    compiled = torch.compile(model, backend="zendnn", options={"tune": "off"})
    with torch.no_grad():
        assert_close(compiled(x, key_padding_mask=nothing), expected, k=64)


def test_what_has_no_body_stays_one_call() -> None:
    """A mask of another number of dimensions than the operator's kind of mask has: eager's own error."""
    layer = encoder_layer(True).eval()

    def call(x: Tensor, mask: Tensor) -> Any:
        weights = [layer.get_parameter(name) for name in NAMES]
        return torch._transformer_encoder_layer_fwd(
            x, WIDTH, HEADS, *weights[:4], False, False, 1e-5, *weights[4:], mask, 1
        )

    compiled = torch.compile(call, backend="zendnn", options={"tune": "off"})
    x = sequence(True)
    with torch.no_grad():
        assert_close(compiled(x, padding()), call(x, padding()), k=64)
        with pytest.raises(RuntimeError):
            compiled(x, padding()[:, None])


NAMES = ("self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight", "self_attn.out_proj.bias",
         "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "linear1.weight", "linear1.bias",
         "linear2.weight", "linear2.bias")  # fmt: skip


@pytest.mark.parametrize("name, exports", {"weights read": 2, "weights not read": 1, "padding of keys": 1}.items())
def test_is_exported_again_where_weights_are_read_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, exports: int
) -> None:
    model, args, masks, _, _ = CASES[name](True)
    asked, export = [], torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        asked.append(args)
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    trace(model.eval(), Arguments(args, masks))
    assert len(asked) == exports
