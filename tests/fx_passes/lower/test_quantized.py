"""Values kept as integers: what runs on them, and that it is at most a step from the graph in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zendnn_cffi
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.lower.quantized import used_bits
from fx_passes.pipeline import compile_graph
from fx_passes.region.batch import is_batchwise
from tests.support.cpu import take_away
from tests.support.lowering import behind_convolution, noise
from tests.support.quantized import Integers, Weight, decomposed, kept, optimized, ran, real, reorders, through

U8, S8, F32 = torch.uint8, torch.int8, torch.float32
POST_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda y: F.hardtanh(y, -0.5, 1.5),
    "leaky": lambda y: F.leaky_relu(y, 0.1),
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "affine": lambda y: y * 0.5 + 0.25,
    "silu, halved": lambda y: F.silu(y) * 0.5,
}


def convolution(weight: Weight, x: Tensor, **window: Any) -> Tensor:
    return (F.conv1d, F.conv2d, F.conv3d)[weight.spatial - 1](x, weight(), weight.bias, **window)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("dtype", [U8, S8])
@pytest.mark.parametrize("zero_point", [0, 5])
@pytest.mark.parametrize("post_op", POST_OPS)
def test_a_convolution_reads_and_writes_integers(post_op: str, zero_point: int, dtype: torch.dtype) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        y = convolution(w[0], through(x, 0.02, zero_point, dtype), padding=1)
        return kept(POST_OPS[post_op](y), 0.02, zero_point, dtype)

    fast = optimized(Integers(forward, Weight(17, 16, 3, 3)), noise(2, 16, 9, 8))
    ((kind, source, implementation),) = ran(fast)
    assert (kind, source) == ("convolution", dtype) and not implementation.startswith("ref")
    assert F32 not in {target for _, target in reorders(fast)}


@pytest.mark.needs("vnni")
@pytest.mark.parametrize(
    ("shape", "weight", "window"),
    [
        ((1, 3, 17, 15), (8, 3, 7, 7), {"stride": 2, "padding": 3}),
        ((2, 16, 9, 8), (32, 16, 1, 1), {}),
        ((1, 16, 9, 8), (16, 16, 1, 1), {"stride": 2}),
        ((1, 16, 9, 8), (16, 1, 3, 3), {"padding": 1, "groups": 16}),
        ((1, 32, 9, 8), (32, 8, 3, 3), {"padding": 1, "groups": 4}),
        ((1, 16, 9, 8), (16, 16, 3, 3), {"padding": 2, "dilation": 2}),
        ((2, 16, 23), (17, 16, 3), {"padding": 1}),
        ((1, 8, 5, 6, 7), (16, 8, 3, 3, 3), {"padding": 1}),
    ],
)
@pytest.mark.parametrize("zero_point", [0, 100])
def test_windows(shape: tuple[int, ...], weight: tuple[int, ...], window: dict[str, Any], zero_point: int) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        return convolution(w[0], through(x, 0.02, zero_point), **window)

    fast = optimized(Integers(forward, Weight(*weight)), noise(*shape), steps=1e-4)
    ((kind, source, implementation),) = ran(fast)
    assert (kind, source) == ("convolution", U8)
    assert not implementation.startswith(("ref", "x64:gemm"))  # chosen by estimate: gemm is up to 100 times slower


def program_of(fast: Any) -> Any:
    """The one program of the one region."""
    (lowered,) = next(iter(fast.regions().values())).lowered.values()
    return lowered.program


def post_ops_of(fast: Any) -> list[list[str]]:
    """The names of the post-ops of each convolution that ran."""
    calls = [call for call in program_of(fast).calls if call.kind == "convolution"]
    return [[entry[0] for entry in call.primitive.pd.attr.post_ops] for call in calls]


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual_zero_point", [0, 9])
@pytest.mark.parametrize("relu", [False, True])
def test_a_residual_is_added_as_integers_with_its_own_scale(relu: bool, residual_zero_point: int, bias: bool) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        q = kept(convolution(w[0], through(x, 0.02, 128)), 0.03, residual_zero_point)
        y = through(F.relu(convolution(w[1], real(q, 0.03, residual_zero_point))), 0.02)
        y = convolution(w[2], y, padding=1) + real(q, 0.03, residual_zero_point)
        return kept(F.relu(y) if relu else y, 0.04, 0 if relu else 90)

    weights = Weight(16, 16, 1, 1), Weight(16, 16, 1, 1, seed=1), Weight(16, 16, 3, 3, bias=bias)
    fast = optimized(Integers(forward, *weights), noise(2, 16, 9, 8), steps=2.0)
    assert [(kind, source) for kind, source, _ in ran(fast)] == [("convolution", U8)] * 3
    last = [call for call in program_of(fast).calls if call.kind == "convolution"][-1]
    (entry,) = [entry for entry in last.primitive.pd.attr.post_ops if entry[0] == "sum"]
    assert entry[1] == pytest.approx(0.03 / 0.04)
    assert F32 not in {target for _, target in reorders(fast)}


@pytest.mark.needs("vnni")
def test_a_residual_that_is_the_source_too_is_not_written_over() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        q = kept(convolution(w[0], through(x, 0.02, 128)), 0.03, 100)
        return kept(convolution(w[1], real(q, 0.03, 100), padding=1) + real(q, 0.03, 100), 0.04, 90)

    fast = optimized(Integers(forward, Weight(16, 16, 1, 1), Weight(16, 16, 3, 3)), noise(2, 16, 9, 8))
    assert [source for _, source, _ in ran(fast)] == [U8, U8]
    assert "sum" not in post_ops_of(fast)[1]


@pytest.mark.needs("vnni")
def test_a_residual_that_is_read_later_is_not_written_over() -> None:
    def forward(w: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        q = kept(F.relu(convolution(w[0], through(x, 0.02, 128))), 0.03)
        y = through(convolution(w[1], real(q, 0.03), padding=1) + real(q, 0.03), 0.04, 90)
        return y, convolution(w[2], real(q, 0.03))

    model = Integers(forward, Weight(16, 16, 1, 1), Weight(16, 16, 3, 3), Weight(16, 16, 1, 1, seed=1))
    fast = optimized(model, noise(1, 16, 9, 8), steps=2.0, scale=0.04)
    assert {kind for kind, _, _ in ran(fast)} >= {"convolution"}
    assert [source for kind, source, _ in ran(fast) if kind == "convolution"].count(U8) == 3


@pytest.mark.needs("vnni")
def test_who_reads_the_numbers_before_rounding_gets_them() -> None:
    def forward(w: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = convolution(w[0], through(x, 0.02, 128))
        return kept(y, 0.2, 100), y  # steps of 0.2: rounded numbers would be far off

    fast = optimized(Integers(forward, Weight(16, 16, 1, 1)), noise(1, 16, 9, 8))
    model = Integers(lambda w, x: forward(w, x)[1], Weight(16, 16, 1, 1))
    x = noise(1, 16, 9, 8)
    with torch.no_grad():
        torch.testing.assert_close(fast(x)[1], model(x), atol=1e-4, rtol=1e-4)
    assert ran(fast)[0][:2] == ("convolution", U8)


def _two_scales(w: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = convolution(w[0], through(x, 0.02, 128))
    return kept(y, 0.02, 100), kept(y, 0.04, 100)


def _zero_is_none_of_them(w: Any, x: Tensor) -> Tensor:
    return decomposed.quantize_per_tensor.default(convolution(w[0], through(x, 0.02, 128)), 0.02, 60, 70, 127, U8)


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("forward", [_two_scales, _zero_is_none_of_them])
def test_results_that_no_one_scale_says_are_written_as_real_numbers(forward: Callable[..., Any]) -> None:
    fast = optimized(Integers(forward, Weight(16, 16, 1, 1)), noise(1, 16, 9, 8))
    (call,) = [call for call in program_of(fast).calls if call.kind == "convolution"]
    assert (call.dtype, call.primitive.pd.dst_desc.dtype) == (U8, F32)


class Unsigned(Weight):
    """Weights with a zero point, which no kernel takes."""

    def __init__(self, *shape: int) -> None:
        super().__init__(*shape)
        self.zero_points += 1


class Columns(Weight):
    """A scale for each input channel."""

    def forward(self) -> Tensor:
        return decomposed.dequantize_per_channel.default(self.integers, self.scales, None, 1, -128, 127, S8)


@pytest.mark.parametrize("weight", [Unsigned(16, 16, 1, 1), Columns(16, 16, 1, 1)])
def test_weights_that_kernels_do_not_take_are_real_numbers(weight: Weight) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        return kept(convolution(w[0], through(x, 0.02, 128)), 0.02, 100)

    assert [source for _, source, _ in ran(optimized(Integers(forward, weight), noise(1, 16, 9, 8)))] == [F32]


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("kind", ["max", "average", "adaptive", "global mean"])
@pytest.mark.parametrize("zero_point", [0, 100])
def test_pooling_reads_and_writes_integers(kind: str, zero_point: int) -> None:
    pool = {
        "max": lambda x: F.max_pool2d(x, 3, 2, 1),
        "average": lambda x: F.avg_pool2d(x, 2),
        "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1),
        "global mean": lambda x: x.mean((2, 3)),
    }[kind]

    def forward(w: Any, x: Tensor) -> Tensor:
        y = through(convolution(w[0], through(x, 0.02, 128)), 0.02, zero_point)
        return kept(pool(y), 0.02, zero_point)

    often = 0.3 if kind == "average" else 0.02  # means of four are often midway between two integers
    fast = optimized(Integers(forward, Weight(16, 16, 1, 1)), noise(2, 16, 8, 8), most_apart=often)
    assert [(kind, source) for kind, source, _ in ran(fast)] == [("convolution", U8), ("pooling", U8)]
    assert F32 not in {target for _, target in reorders(fast)}


def test_padding_that_counts_is_not_a_kept_zero() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        y = through(convolution(w[0], through(x, 0.02, 128)), 0.02, 100)
        return kept(F.avg_pool2d(y, 3, 1, 1), 0.02, 100)

    assert ("pooling", F32) in [
        call[:2] for call in ran(optimized(Integers(forward, Weight(16, 16, 1, 1)), noise(1, 16, 8, 8)))
    ]


def test_means_that_are_read_as_real_numbers_are_not_rounded() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        return F.avg_pool2d(through(convolution(w[0], through(x, 0.02, 128)), 0.2, 100), 2)

    fast = optimized(Integers(forward, Weight(16, 16, 1, 1)), noise(1, 16, 8, 8), steps=0.3, scale=0.2)
    assert ("pooling", F32) in [call[:2] for call in ran(fast)]


@pytest.mark.needs("vnni")
def test_pieces_of_one_scale_are_joined_as_integers() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        x = through(x, 0.02, 128)
        return kept(torch.cat([through(F.relu(convolution(each, x)), 0.02) for each in w], 1), 0.02)

    fast = optimized(Integers(forward, Weight(16, 16, 1, 1), Weight(16, 16, 1, 1, seed=1)), noise(1, 16, 8, 8))
    assert [source for kind, source, _ in ran(fast) if kind == "convolution"] == [U8, U8]
    assert F32 not in {target for _, target in reorders(fast)}


def test_pieces_of_several_scales_are_joined_as_real_numbers() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        x = through(x, 0.02, 128)
        pieces = [through(F.relu(convolution(each, x)), scale) for each, scale in zip(w, (0.02, 0.03), strict=True)]
        return kept(torch.cat(pieces, 1), 0.03)

    model = Integers(forward, Weight(16, 16, 1, 1), Weight(16, 16, 1, 1, seed=1))
    fast = optimized(model, noise(1, 16, 8, 8), most_apart=0.3)  # of the first piece, every second number is midway
    assert F32 in {target for _, target in reorders(fast)}


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("zero_point", [0, 100])
@pytest.mark.parametrize("shape", [(5, 24), (2, 5, 24)])
@pytest.mark.parametrize("post_op", ["none", "relu", "gelu"])
def test_a_linear_layer_reads_and_writes_integers(post_op: str, shape: tuple[int, ...], zero_point: int) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        y = F.linear(through(x, 0.02, zero_point), w[0](), w[0].bias)
        return kept(POST_OPS[post_op](y), 0.02, zero_point)

    fast = optimized(Integers(forward, Weight(17, 24)), noise(*shape))
    ((kind, source, implementation),) = ran(fast)
    assert kind in ("inner_product", "matmul") and source == U8 and not implementation.startswith("ref")
    assert kind == "matmul" or not zero_point  # inner_product has no zero points


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("shape", [(5, 24), (2, 5, 24), (2, 3, 5, 24)])
@pytest.mark.parametrize(("dtype", "zero_point"), [(U8, 0), (U8, 90), (S8, 0), (S8, -7)])
@pytest.mark.parametrize("rounded", [True, False])
def test_a_product_of_two_values(rounded: bool, dtype: torch.dtype, zero_point: int, shape: tuple[int, ...]) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        y = through(x, 0.02, zero_point, dtype) @ through(x.transpose(-2, -1), 0.03, 0, S8) * 0.25
        return kept(y, 0.05, 60) if rounded else y

    fast = optimized(Integers(forward), noise(*shape), steps=1.0 if rounded else 1e-3)
    ((kind, source, implementation),) = ran(fast)
    assert (kind, source) == ("matmul", dtype) and not implementation.startswith("ref")


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("shape", [(5, 24), (2, 5, 24), (2, 3, 5, 24)])
@pytest.mark.parametrize(
    ("dtypes", "zero_points"),
    [((U8, U8), (0, 0)), ((S8, U8), (0, 7)), ((U8, U8), (9, 128)), ((U8, S8), (0, 3)), ((U8, U8), (0, 255))],
)
@pytest.mark.parametrize("is_transposed", [True, False])
def test_a_second_operand_may_be_uint8_or_have_the_only_zero_point(
    is_transposed: bool, dtypes: tuple[torch.dtype, torch.dtype], zero_points: tuple[int, int], shape: tuple[int, ...]
) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        other = x.transpose(-2, -1) if is_transposed else x[..., :5]
        x = x if is_transposed else x[..., 5:10]
        return through(x, 0.02, zero_points[0], dtypes[0]) @ through(other, 0.03, zero_points[1], dtypes[1])

    fast = optimized(Integers(forward), noise(*shape), steps=1e-3)
    (source,) = [source for kind, source, _ in ran(fast) if kind == "matmul"]
    assert source == dtypes[0]


@pytest.mark.parametrize(("dtype", "zero_point"), [(U8, 0), (U8, 90), (S8, 3)])
def test_products_of_two_values_with_zero_points_are_of_real_numbers(dtype: torch.dtype, zero_point: int) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        return through(x, 0.02, 5) @ through(x.transpose(-2, -1), 0.03, zero_point, dtype)

    assert [source for _, source, _ in ran(optimized(Integers(forward), noise(2, 5, 24), steps=1e-3))] == [F32]


@pytest.mark.needs("vnni")
def test_attention_of_integers() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        q, k, v = (through(x.relu() if relu else x, 0.03, 0, U8 if relu else S8) for relu in (True, False, False))
        scores = (q @ k.transpose(-2, -1) * 0.2).softmax(-1)
        return through(scores, 1 / 255) @ v

    fast = optimized(Integers(forward), noise(2, 3, 17, 16), steps=0.05)
    found = [call for call in ran(fast) if call[0] in ("matmul", "softmax")]
    assert [(kind, source) for kind, source, _ in found] == [("matmul", U8), ("softmax", F32), ("matmul", U8)]
    (softmax,) = [call for call in program_of(fast).calls if call.kind == "softmax"]
    assert softmax.primitive.pd.dst_desc.dtype == U8


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_a_constant_scales_is_written_as_integers(dtype: torch.dtype | None) -> None:
    factors = torch.linspace(0.5, 2.0, 64)

    def forward(w: Any, x: Tensor) -> Tensor:
        y = F.layer_norm(x + F.relu(x), (64,))
        return F.linear(through(y * factors, 0.03, 120), w[0](), w[0].bias) + y

    fast = optimized(Integers(forward, Weight(64, 64)), noise(4, 9, 64), steps=0.2, dtype=dtype)
    primitives = [call for call in program_of(fast).calls if hasattr(call, "primitive")]
    assert [call.kind for call in primitives if call.primitive.pd.dst_desc.dtype == U8] == ["binary"]


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("query", "key"),
    [((U8, 0), (S8, 0)), ((U8, 90), (S8, 0)), ((S8, 3), (S8, 0)), ((U8, 0), (U8, 120)), ((S8, 0), (S8, 7))],
)
def test_queries_and_keys_of_attention_are_integers(
    query: tuple[torch.dtype, int], key: tuple[torch.dtype, int], causal: bool
) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        q, k = (through(y, 0.03, zero, dtype) for y, (dtype, zero) in ((x.flip(-1) * 0.7, query), (x, key)))
        return F.scaled_dot_product_attention(q, k, x, is_causal=causal)

    fast = optimized(Integers(forward), noise(2, 3, 17, 16), steps=2e-5)
    assert next(call for call in ran(fast) if call[0] == "matmul")[1] == query[0]


def test_attention_of_integers_that_both_have_zero_points_is_of_real_numbers() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(through(x.flip(-1), 0.03, 90), through(x, 0.03, 90), x)

    fast = optimized(Integers(forward), noise(2, 3, 17, 16), steps=2e-5)
    assert {source for kind, source, _ in ran(fast) if kind == "matmul"} <= {F32}


def test_a_softmax_whose_integers_are_not_counted_from_zero_is_rounded_behind() -> None:
    fast = optimized(Integers(lambda w, x: kept(x.relu().softmax(-1), 1 / 200, 5)), noise(6, 17))
    assert [call.primitive.pd.dst_desc.dtype for call in program_of(fast).calls if call.kind == "softmax"] in (
        [],
        [F32],
    )


@pytest.mark.needs("vnni")
def test_integers_are_seen_in_another_shape_without_a_copy() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        y = through(F.adaptive_avg_pool2d(through(F.relu(convolution(w[0], through(x, 0.02, 128))), 0.02), 1), 0.02)
        return F.linear(through(y.flatten(1), 0.02), w[1](), w[1].bias)

    fast = optimized(Integers(forward, Weight(16, 16, 1, 1), Weight(7, 16)), noise(2, 16, 8, 8), steps=1e-2)
    assert [source for _, source, _ in ran(fast)] == [U8] * 3
    assert len(reorders(fast)) <= 2  # the input, into integers and into channels last


@pytest.mark.needs("vnni")
def test_channels_are_parted_and_shuffled_as_integers() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        y = through(F.relu(convolution(w[0], through(x, 0.02, 128))), 0.02)
        n, c, height, width = y.shape
        first, second = y.view(n, 2, c // 2, height, width).transpose(1, 2).reshape(n, c, height, width).chunk(2, 1)
        return kept(torch.cat([first, through(F.relu(convolution(w[1], second)), 0.02)], 1), 0.02)

    fast = optimized(Integers(forward, Weight(32, 16, 1, 1), Weight(16, 16, 1, 1)), noise(2, 16, 8, 8))
    assert [source for kind, source, _ in ran(fast) if kind == "convolution"] == [U8, U8]
    assert F32 not in {target for _, target in reorders(fast)}


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_layers_that_are_not_quantized_stand_between(dtype: torch.dtype | None) -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        y = torch.softmax(convolution(w[0], through(x, 0.02, 128)), 1)
        return convolution(w[1], through(y, 0.004))

    model = Integers(forward, Weight(16, 16, 1, 1), Weight(16, 16, 3, 3))
    fast = optimized(model, noise(1, 16, 9, 8), steps=0.05, dtype=dtype)
    assert [source for kind, source, _ in ran(fast) if kind == "convolution"] == [U8, U8]


def test_a_batch_of_integers_may_be_computed_in_slices() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        return kept(F.relu(convolution(w[0], through(x, 0.02, 128))), 0.02)

    gm = compile_graph(Integers(forward, Weight(16, 16, 1, 1)))
    (region,) = gm.regions().values()
    values = RegionValues(region.graph, [TensorSpec.of(noise(4, 16, 8, 8))], region.constants)
    assert is_batchwise(region.graph, values)


def test_denormal_scales_stay_with_pytorch() -> None:
    """The inverse of such a scale is infinite: eager makes 0 of 0 * infinity, a kernel the largest integer."""
    model, x = behind_convolution(lambda y: kept(y.relu(), 1e-40, -128, torch.int8)), noise(1, 3, 6, 6)
    with torch.no_grad():
        assert torch.equal(zendnn_cffi.optimize(model, (x,), tune="off")(x), model(x))


def _extreme(limit: int, *shape: int) -> Weight:
    """Weights as large as 7 bits have them, but for one of each sign."""
    weight = Weight(*shape)
    signs = weight.integers.sign()
    weight.integers.copy_(64 * signs)
    weight.integers.view(-1)[:2] = torch.tensor([limit, -limit], dtype=S8)
    weight.scales.mul_(0.2)
    return weight


@pytest.mark.parametrize("product", ["convolution", "linear"])
@pytest.mark.parametrize(("limit", "computes"), [(64, U8), (65, F32), (127, F32)])
def test_weights_of_seven_bits_without_vnni(
    limit: int, computes: torch.dtype, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that add two products at 16 bits are exact of those alone."""
    take_away("vnni", monkeypatch)

    def forward(w: Any, x: Tensor) -> Tensor:
        y = through(x, 0.004)  # most numbers are 0 or 255
        return kept(
            F.conv2d(y, w[0](), w[0].bias) if product == "convolution" else F.linear(y, w[0](), w[0].bias), 0.02
        )

    shape, sizes = ((16, 16, 3, 3), (2, 16, 7, 6)) if product == "convolution" else ((16, 64), (9, 64))
    fast = optimized(Integers(forward, _extreme(limit, *shape)), noise(*sizes))
    assert {source for kind, source, _ in ran(fast) if kind != "eltwise"} == {computes}


@pytest.mark.parametrize(
    ("numbers", "src", "bits"),
    [([64, -64], U8, 7), ([65, 0], U8, 8), ([0, -65], U8, 8), ([-128, 0], U8, 8), ([1, 2], S8, 8), ([], U8, 8)],
)
def test_bits_that_weights_use(
    numbers: list[int], src: torch.dtype, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.tensor(numbers, dtype=S8)
    with monkeypatch.context() as without:
        take_away("vnni", without)
        assert used_bits(weight, src) == bits


@pytest.mark.needs("vnni")
def test_bits_of_weights_do_not_count_with_vnni() -> None:
    assert used_bits(torch.tensor([1, 2], dtype=S8), U8) == 8
