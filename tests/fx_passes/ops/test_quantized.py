"""quantize and dequantize in every spelling of PyTorch's: the same numbers, dtypes and strides, and nothing is left."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torchao.quantization.quant_primitives  # noqa: F401 - registers the operators
from torch import Tensor, nn

from fx_passes import ops
from fx_passes.graph.graph import is_call
from fx_passes.graph.inference import dtype as dtype_of
from fx_passes.ops.quantized import Axis, plain_axis
from fx_passes.pipeline import compile_graph
from tests.support.quantized import decomposed

U8, S8 = torch.uint8, torch.int8
SCALE, ZERO = torch.tensor([0.03]), torch.tensor([7])
SCALES, ZEROS = torch.rand(4) + 0.01, torch.randint(-5, 5, (4,))
ROWS, ROW_ZEROS = torch.rand(2, 4, 1, dtype=torch.float64) + 0.01, torch.randint(-5, 5, (2, 4, 1))
LOW, HIGH = torch.tensor(-128), torch.tensor(127)

QUANTIZE: dict[str, Callable[[Tensor], Tensor]] = {
    "quantize_per_tensor.default": lambda x: decomposed.quantize_per_tensor.default(x, 0.03, 7, 0, 255, U8),
    "quantize_per_tensor.tensor": lambda x: decomposed.quantize_per_tensor.tensor(x, SCALE, ZERO, 0, 127, U8),
    "quantize_per_tensor.tensor2": lambda x: decomposed.quantize_per_tensor.tensor2(x, SCALE, ZERO, LOW, HIGH, S8),
    "quantize_per_channel.default": lambda x: decomposed.quantize_per_channel.default(
        x, SCALES, ZEROS, 1, -128, 127, S8
    ),
    "quantize_per_token.default": lambda x: decomposed.quantize_per_token.default(x, ROWS, ROW_ZEROS, -128, 127, S8),
}
DEQUANTIZE: dict[str, Callable[[Tensor], Tensor]] = {
    "dequantize_per_tensor.default": lambda q: decomposed.dequantize_per_tensor.default(q, 0.03, 7, -128, 127, S8),
    "dequantize_per_tensor.tensor": lambda q: decomposed.dequantize_per_tensor.tensor(
        q, SCALE, ZERO, -128, 127, S8, out_dtype=torch.bfloat16
    ),
    "dequantize_per_tensor.tensor2": lambda q: decomposed.dequantize_per_tensor.tensor2(q, SCALE, ZERO, LOW, HIGH, S8),
    "dequantize_per_channel.default": lambda q: decomposed.dequantize_per_channel.default(
        q, SCALES, None, 1, -128, 127, S8, out_dtype=torch.bfloat16
    ),
    "dequantize_per_token.default": lambda q: decomposed.dequantize_per_token.default(
        q, ROWS, ROW_ZEROS, -128, 127, S8, torch.float32
    ),
}


SIZES = {"a block": (2, 4, 5), "channels": (2, 1, 5), "rows": (1, 1, 5), "groups": (2, 2, 5), "each": (1, 1, 1)}


class Affine(nn.Module):
    """torchao's operators by blocks of these sizes; both write what torch.export keeps."""

    def __init__(self, sizes: tuple[int, ...], zero_point_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes, self.dtype = list(sizes), dtype
        blocks = [n // size for n, size in zip((2, 4, 5), sizes, strict=True)]
        self.register_buffer("scale", torch.rand(blocks).to(dtype) + 0.02)
        zero_point = None if zero_point_dtype is None else torch.randint(-5, 5, blocks).to(zero_point_dtype)
        self.register_buffer("zero_point", zero_point)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        torchao = torch.ops.torchao
        if self.zero_point is not None:
            x = torchao.quantize_affine(x, self.sizes, self.scale, self.zero_point, S8, -127, None)
        return torchao.dequantize_affine(x, self.sizes, self.scale, self.zero_point, S8, output_dtype=self.dtype)


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_point", [torch.int32, torch.int8, None])
@pytest.mark.parametrize("sizes", SIZES)
def test_affine(sizes: str, zero_point: torch.dtype | None, dtype: torch.dtype, exported: bool) -> None:
    x = torch.randn(2, 4, 5).to(dtype)
    x = x if zero_point is not None else torch.randint(-128, 128, (2, 4, 5), dtype=S8)
    model = Affine(SIZES[sizes], zero_point, dtype)
    gm = compile_graph(model, (x,) if exported else None)
    calls = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert calls == ([ops.dequantize] if zero_point is None else [ops.quantize, ops.dequantize])
    expected, found = model(x), gm(x)
    assert found.dtype == expected.dtype and torch.equal(found, expected) and found.stride() == expected.stride()


def test_blocks_that_do_not_fill_a_tensor_are_refused() -> None:
    with pytest.raises(ValueError, match="does not consist of blocks"):
        ops.dequantize(torch.zeros(4, 6, dtype=S8), torch.ones(2, 1), None, (3, 6), torch.float32)


@pytest.mark.parametrize(
    ("sizes", "axis"),
    [((2, 4), None), ((1, 4), 0), ((2, 1), 1), ((1, 1), (1, 1)), ((1, 2), (1, 2)), ((2, 4, 1), (2, 4, 1)), (0, 0)],
)
def test_blocks_that_are_another_axis(sizes: Axis, axis: Axis) -> None:
    assert plain_axis(sizes, (2, 4)) == axis


class Spelled(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_every_overload_has_an_example() -> None:
    names = itertools.product(("", "de"), ("tensor", "channel", "token"))
    packets = [getattr(decomposed, f"{de}quantize_per_{what}") for de, what in names]
    overloads = {
        f"{packet._qualified_op_name.rpartition('::')[2]}.{form}" for packet in packets for form in packet.overloads()
    }
    assert QUANTIZE.keys() | DEQUANTIZE.keys() == overloads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spelling", [*QUANTIZE, *DEQUANTIZE])
def test_spelling(spelling: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 4, 5).to(dtype) if spelling in QUANTIZE else torch.randint(-128, 128, (2, 4, 5), dtype=S8)
    model = Spelled({**QUANTIZE, **DEQUANTIZE}[spelling]).eval()
    gm = compile_graph(model)
    (node,) = (node for node in gm.graph.nodes if node.op == "call_function")
    assert is_call(node, ops.quantize if spelling in QUANTIZE else ops.dequantize)
    expected, found = model(x), gm(x)
    assert dtype_of(node, gm) == found.dtype == expected.dtype
    assert torch.equal(found, expected) and found.stride() == expected.stride()


@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_numbers_that_integers_stand_for_come_back(axis: int | None) -> None:
    integers = torch.randint(-128, 128, (2, 3, 4), dtype=S8)
    scale = 0.25 if axis is None else torch.rand(integers.shape[axis]) + 0.1
    zero_point = 3 if axis is None else torch.arange(integers.shape[axis])
    values = ops.dequantize(integers, scale, zero_point, axis, torch.float32)
    assert torch.equal(ops.quantize(values, scale, zero_point, axis, -128, 127, S8), integers)
