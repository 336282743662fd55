"""Rules say of shapes, strides and dtypes what eager does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_map_only

from fx_passes import ops
from fx_passes.candidates.shapes.rules import RULES, infer
from fx_passes.candidates.shapes.spec import TensorSpec, Unclear, channels_last, is_contiguous, row_major

F32, BF16 = torch.float32, torch.bfloat16
SAME = {"stride": (1, 1), "padding_l": (1, 1), "padding_r": (1, 1), "dilation": (1, 1), "groups": 1}
HALF = {"stride": (2, 2), "padding_l": (0, 1), "padding_r": (1, 1), "dilation": (1, 1), "groups": 1}
POOL = {"kernel": (3, 2), "stride": (2, 2), "padding_l": (1, 0), "padding_r": (1, 0), "dilation": (1, 1)}
UP = {"stride": (2, 2), "padding": (0, 1), "output_padding": (1, 0), "dilation": (1, 1), "groups": 1}


def tensor(*shape: int, dtype: torch.dtype = F32) -> TensorSpec:
    return row_major(shape, dtype)


SCAN = tensor(2, 8, 5), tensor(8, 3), tensor(2, 8, 5), tensor(2, 5, 3), tensor(2, 5, 3)


def last(*shape: int, dtype: torch.dtype = F32) -> TensorSpec:
    return channels_last(shape, dtype)


def vector(n: int) -> TensorSpec:
    return row_major((n,), F32)


def norms(n: int) -> list[TensorSpec]:
    return [vector(n)] * 4


# operation -> calls of it that a rule has to be clear of, on operands as layers of common models meet them
X, Y, TOKENS = tensor(2, 8, 9, 7), last(2, 8, 9, 7), tensor(2, 5, 8)
HEADS = TensorSpec((2, 4, 5, 8), F32, (160, 8, 32, 1))
IDS = row_major((2, 5), torch.int64)


def gated(kind: str, count: int) -> tuple[TensorSpec, ...]:
    """The weights of layers with 8 inputs and 6 hidden numbers, biases included."""
    rows = 6 * ops.GATES[kind]
    return (tensor(rows, 8), tensor(rows, 6), vector(rows), vector(rows)) * count


CLEAR: dict[Callable[..., Any], list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    ops.size: [((X,), {}), ((X, -1), {})],
    ops.rank: [((X,), {})],
    ops.eltwise: [((src, kind), {}) for src in (X, Y, TOKENS, HEADS, vector(3)) for kind in ops.ELTWISE],
    ops.binary: [
        ((a, b, kind), {})
        for kind in ops.BINARY
        for a, b in ((X, X), (Y, Y), (X, tensor(2, 8, 1, 1)), (Y, tensor(2, 8, 1, 1)), (TOKENS, vector(8)), (X, Y))
    ]
    + [((2, 3, "mul"), {}), ((X, 2.0, "mul"), {}), ((1, Y, "sub"), {})],
    ops.prelu: [((X, vector(8)), {}), ((Y, vector(1)), {})],
    ops.quantize: [((src, 0.1, 3, None, 0, 255, torch.uint8), {}) for src in (X, Y, TOKENS, tensor(2, 8, dtype=BF16))]
    + [((X, vector(8), row_major((8,), torch.int64), 1, -128, 127, torch.int8), {})],
    ops.dequantize: [
        ((replace(src, dtype=torch.uint8), 0.1, 3, None, dtype), {}) for src in (X, Y, TOKENS) for dtype in (F32, BF16)
    ]
    + [((tensor(4, 8, 3, 3, dtype=torch.int8), vector(4), row_major((4,), torch.int64), 0, F32), {})],
    ops.choose_scale: [((src, 0, 255, 2.0**-12, torch.uint8, False), {}) for src in (X, TOKENS)],
    ops.choose_row_scales: [((src, "nearest", -128, 127, 1e-7), {}) for src in (X, TOKENS)],
    ops.quantize_rows_by: [((TOKENS, tensor(3, *TOKENS.shape[:-1], 1), -128, 127, torch.int8), {})],
    ops.dequantize_rows_by: [
        ((replace(TOKENS, dtype=torch.int8), tensor(3, *TOKENS.shape[:-1], 1), dtype), {}) for dtype in (F32, BF16)
    ],
    ops.quantize_by: [((src, vector(4), 0, 255, torch.uint8), {}) for src in (X, Y, TOKENS)],
    ops.rotary: [((tensor(2, 4, 5, 8), tensor(5, 8), tensor(5, 8)), {"interleaved": i}) for i in (False, True)],
    ops.fold_bn_weight: [((tensor(4, 8, 3, 3), vector(4), vector(4), 1e-5), {})],
    ops.fold_bn_deconv_weight: [((tensor(8, 4, 3, 3), vector(4), None, 1e-5, 1), {})],
    ops.fold_pre_bn_weight: [((tensor(4, 8, 3, 3), vector(8), vector(8), 1e-5), {})],
    ops.fold_bn_bias: [((None, *norms(4), 1e-5, tensor(4, 8, 3, 3)), {}), ((vector(4), *norms(4), 1e-5, TOKENS), {})],
    ops.scale_channels: [((tensor(8, 2, 3, 3), vector(8)), {})],
    ops.add_channels: [((None, vector(1), tensor(8, 2)), {}), ((vector(8), vector(8), tensor(8, 2)), {})],
    ops.no_bias: [((tensor(8, 2, dtype=BF16),), {})],
    ops.convolution: [
        ((src, weight, vector(4)), options)
        for src in (X, Y)
        for weight in (tensor(4, 8, 3, 3), last(4, 8, 3, 3), tensor(4, 8, 1, 1), last(4, 8, 1, 1))
        for options in (SAME, HALF)
    ]
    + [
        ((tensor(2, 8, 9), tensor(4, 8, 3)), dict(SAME, stride=(1,), padding_l=(1,), padding_r=(1,), dilation=(2,))),
        ((X, tensor(8, 1, 3, 3)), dict(SAME, groups=8)),
        ((last(2, 8, 1, 1), last(4, 8, 1, 1)), dict(SAME, padding_l=(0, 0), padding_r=(0, 0))),
    ],
    ops.deconvolution: [((src, tensor(8, 4, 3, 2), vector(4)), UP) for src in (X, Y)],
    ops.pool: [
        ((src, kind), {**POOL, "ceil_mode": ceil})
        for src in (X, Y)
        for kind in ("max", "avg_include_padding", "avg_exclude_padding")
        for ceil in (False, True)
    ],
    ops.adaptive_pool: [
        ((src, kind, size), {}) for src in (X, Y) for kind in ("avg", "max") for size in ((1, 1), (3, None))
    ],
    ops.resample: [
        ((X, kind, *size), {}) for kind in ("nearest", "bilinear") for size in (((5, 4), None), (None, (2.0, 3.0)))
    ],
    ops.pad: [((src, (1, 2, 0, 1)), {}) for src in (X, Y, TOKENS)],
    ops.linear: [((TOKENS, tensor(4, 8), vector(4)), {}), ((tensor(3, 8), tensor(4, 8)), {})],
    ops.row_scaled_linear: [
        ((replace(TOKENS, dtype=torch.int8), tensor(3, *TOKENS.shape[:-1], 1), tensor(4, 8), bias), {"dtype": dtype})
        for bias, dtype in ((vector(4), None), (replace(vector(4), dtype=torch.bfloat16), torch.bfloat16))
    ],
    ops.int4_linear: [
        ((replace(src, dtype=dtype), row_major((16, 16), torch.uint8), tensor(1, 16, 2, dtype=dtype), 32, 64, bias), {})
        for src in (tensor(2, 5, 32), tensor(3, 32))
        for dtype, bias in ((F32, None), (F32, vector(16)), (BF16, row_major((16,), BF16)))
    ],
    ops.dynamic_linear: [((replace(TOKENS, dtype=torch.uint8), vector(4), tensor(4, 8), vector(4)), {})],
    ops.matmul: [((tensor(5, 8), tensor(8, 3)), {}), ((HEADS, TensorSpec((2, 4, 8, 5), F32, (160, 8, 1, 32))), {})],
    ops.attention: [
        ((HEADS, HEADS, HEADS, mask), {}) for mask in (None, tensor(2, 1, 1, 5), tensor(1, 1, 5, 5, dtype=torch.bool))
    ]
    + [((HEADS, HEADS, HEADS), {"is_causal": True})],
    ops.cached_attention: [((tensor(2, 4, 1, 8), HEADS, HEADS), {})],
    ops.recurrent: [
        ((src, None, gated(kind, layers * 2), kind), {"layers": layers, "bidirectional": True, "batch_first": first})
        for src in (TOKENS, tensor(5, 8))
        for kind in ops.GATES
        for layers, first in ((1, False), (1, True))
    ],
    ops.recurrent_layer: [
        ((TOKENS, None, None, gated(kind, 1), kind), {"reverse": reverse, "with_cell": kind == "lstm"})
        for kind in ops.GATES
        for reverse in (False, True)
    ],
    ops.holding: [((tensor(24, 8),), {})],
    ops.recurrent_cell: [
        ((src, None, gated(kind, 1), kind), {}) for src in (tensor(2, 8), vector(8)) for kind in ops.GATES
    ],
    ops.selective_scan: [
        ((*SCAN, state), {"with_state": last}) for state in (None, tensor(2, 8, 3)) for last in (False, True)
    ],
    ops.selective_scan_and_state: [((*SCAN, state), {}) for state in (None, tensor(2, 8, 3))],
    ops.batch_norm: [((src, *norms(8)), {"eps": 1e-5}) for src in (X, Y)],
    ops.layer_norm: [((src, (8,), vector(8), vector(8)), {"eps": 1e-5}) for src in (TOKENS, HEADS)],
    ops.group_norm: [((X, 2, vector(8), vector(8)), {"eps": 1e-5})],
    ops.softmax: [((TOKENS, -1), {}), ((HEADS, 1), {}), ((TOKENS, -1, True), {})],
    ops.rms_norm: [((TOKENS, vector(8)), {"eps": 1e-6}), ((TOKENS, None), {"eps": None})],
    ops.l2_normalize: [((TOKENS, -1), {"eps": 1e-12})],
    ops.reduce: [
        ((src, kind, (2, 3), keep), {}) for src in (X, Y) for kind in ops.REDUCTIONS for keep in (True, False)
    ],
    ops.embedding: [((tensor(10, 8), IDS), {})],
    ops.take_rows: [((TOKENS, IDS), {}), ((HEADS, IDS), {})],
    ops.concat: [(((X, X), 1), {}), (((Y, Y), 1), {}), (((TOKENS, tensor(2, 1, 8)), 1), {})],
    ops.roll: [
        ((X, (2,), (1,)), {}),
        ((Y, (-2, 4), (2, -1)), {}),
        ((TOKENS, (7,), (1,)), {}),
        ((HEADS, (1,), (2,)), {}),
    ],
    ops.grow: [((tensor(2, 4, 5, 8), tensor(2, 4, 1, 8), 2), {})],
    ops.write_at: [((tensor(2, 4, 5, 8), torch.tensor([3]), tensor(2, 4, 1, 8), 2), {})],
    ops.reshape: [((X, (2, -1)), {}), ((Y, (2, -1)), {}), ((HEADS, (2, 4, 40)), {})],
    ops.reshape_as: [((X, tensor(2, 8, 63)), {})],
    ops.flatten: [((X, 1), {}), ((Y, 1), {}), ((last(1, 8, 1, 1), 1), {}), ((X, 0, 0), {}), ((TOKENS,), {})],
    ops.unflatten: [((TOKENS, -1, (2, -1)), {})],
    ops.contiguous: [((X,), {}), ((Y,), {})],
    ops.permute: [((X, (0, 2, 3, 1)), {})],
    ops.transpose: [((TOKENS, 1, 2), {})],
    ops.narrow: [((X, 1, 2, 5), {}), ((X, 1, -3, None), {})],
    ops.index: [((TOKENS, (slice(None), 0)), {}), ((TOKENS, (Ellipsis, None)), {})],
    ops.unsqueeze: [((TOKENS, 1), {})],
    ops.expand: [((tensor(1, 1, 8), (2, -1, 8)), {})],
    ops.chunk: [((Y, 2, 1), {})],
    ops.weighted_samples: [
        (([X, Y], [tensor(2, 5, 3, 2), tensor(2, 5, 1, 2)], tensor(2, 1, 5, 4), corners), {})
        for corners in (False, True)
    ],
    ops.split_at: [((Y, (1,), 1), {})],
    ops.split: [((X, (3, 5), 1), {}), ((X, 3, 1), {})],
}


def name_of(operation: Callable[..., Any]) -> str:
    return operation.__name__


def on_tensors(target: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What target makes of tensors like these, tensors as TensorSpecs."""

    def zeros(spec: TensorSpec) -> torch.Tensor:
        return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device="cpu").zero_()

    with torch.no_grad():
        args, kwargs = tree_map_only(TensorSpec, zeros, (tuple(args), kwargs))
        return tree_map_only(torch.Tensor, TensorSpec.of, target(*args, **kwargs))


def test_every_rule_has_calls_that_it_is_clear_of() -> None:
    assert CLEAR.keys() == RULES.keys()
    assert RULES.keys() <= ops.VOCABULARY


@pytest.mark.parametrize("operation", CLEAR, ids=name_of)
def test_the_rule_is_clear_and_says_what_eager_does(operation: Callable[..., Any]) -> None:
    for args, kwargs in CLEAR[operation]:
        assert infer(operation, args, kwargs) == on_tensors(operation, args, kwargs), (args, kwargs)


@st.composite
def specs(draw: st.DrawFn, like: TensorSpec, resized: bool = True) -> TensorSpec:
    """A tensor of as many dimensions, of other small sizes now and then (resized), in strides that views have."""
    shape = list(like.shape)
    for dim in range(len(shape)) if resized else ():
        if draw(st.integers(0, 3)) == 0:
            shape[dim] = draw(st.sampled_from((1, 2, size := shape[dim], size)))
    order = draw(st.permutations(range(len(shape))))
    order = draw(st.sampled_from((tuple(range(len(shape))), tuple(order))))
    steps, step = [0] * len(shape), 1
    for dim in reversed(order):
        steps[dim] = step
        step *= shape[dim] + draw(st.sampled_from((0, 0, 0, 1, shape[dim])))
    dtype = draw(st.sampled_from((like.dtype, like.dtype, like.dtype, BF16))) if like.dtype == F32 else like.dtype
    return TensorSpec(tuple(shape), dtype, tuple(steps))


# PyTorch's functions read beyond weights that are too small.
_UNCHECKED = ops.recurrent, ops.recurrent_layer, ops.recurrent_cell


@st.composite
def varied_calls(draw: st.DrawFn, operation: Callable[..., Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call that the rule is clear of, on operands of other strides, sizes and dtypes now and then."""
    args, kwargs = draw(st.sampled_from(CLEAR[operation]))
    src = args[0]

    def varied(spec: TensorSpec) -> TensorSpec:
        resized = operation not in _UNCHECKED or spec is src
        return draw(specs(spec, resized)) if draw(st.booleans()) else spec

    return tree_map_only(TensorSpec, varied, tuple(args)), kwargs


def test_one_channel_in_the_strides_of_channels_last_is_left_to_the_body() -> None:
    """It is contiguous as well, and the operators of a quantize do not agree on what it is."""
    rest = 0.1, 3, None, 0, 255, torch.uint8
    with pytest.raises(Unclear):
        infer(ops.quantize, (TensorSpec((1, 1, 9, 7), torch.float32, (63, 1, 7, 1)), *rest), {})
    several = channels_last((1, 5, 9, 7), torch.float32), *rest
    assert infer(ops.quantize, several, {}) == on_tensors(ops.quantize, several, {})


@settings(max_examples=50, deadline=None)
@pytest.mark.parametrize("operation", sorted(ops.ROW_MAJOR, key=name_of), ids=name_of)
@given(st.data())
def test_what_declares_row_major_results_has_them_whatever_the_operands(
    operation: Callable[..., Any], data: st.DataObject
) -> None:
    args, kwargs = data.draw(varied_calls(operation))
    try:
        found = on_tensors(operation, args, kwargs)
    except Exception:
        return  # eager refuses it, so no graph has it
    assert is_contiguous(found)


@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize(
    "operation", [o for o in CLEAR if o not in ops.CONSTANT], ids=lambda operation: operation.__name__
)
@given(st.data())
def test_a_rule_is_right_or_unclear_whatever_the_operands(operation: Callable[..., Any], data: st.DataObject) -> None:
    args, kwargs = data.draw(varied_calls(operation))
    try:
        found = infer(operation, args, kwargs)
    except (Unclear, RuntimeError, ValueError, IndexError):
        return  # the body is asked, and says what is wrong
    try:
        expected = on_tensors(operation, args, kwargs)
    except Exception:
        return  # eager refuses it, so no graph has it
    assert found == expected


def test_rows_of_one_number_lie_as_their_scales_do() -> None:
    """A stride that is never taken is still the result's."""
    (_, chosen, *rest), _ = CLEAR[ops.quantize_rows_by][0]
    src, transposed = TensorSpec((2, 5, 1), F32, (5, 1, 1)), replace(chosen, strides=(10, 1, 2, 10))
    assert on_tensors(ops.quantize_rows_by, (src, transposed, *rest), {}).strides == (5, 1, 5)
    with pytest.raises(Unclear):
        infer(ops.quantize_rows_by, (src, transposed, *rest), {})
    assert infer(ops.quantize_rows_by, (src, chosen, *rest), {}).strides == (5, 1, 1)


@pytest.mark.parametrize("strides", [(32, 8, 8, 1), (32, 8, 1, 1), (32, 8, 32, 1), (32, 1, 8, 1)], ids=str)
def test_attention_of_one_token_is_right_or_unclear(strides: tuple[int, ...]) -> None:
    """Whatever the stride of the one token."""
    operands = (TensorSpec((2, 4, 1, 8), F32, strides), HEADS, HEADS)
    try:
        found = infer(ops.cached_attention, operands, {})
    except Unclear:
        assert strides != (32, 8, 8, 1)  # the usual one is clear
    else:
        assert found == on_tensors(ops.cached_attention, operands, {})
