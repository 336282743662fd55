"""Products of 8-bit integers: each implementation that is not known to be wrong, against sums in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from zendnn_cffi import Attr, Memory, MemoryDesc, PostOps, Primitive, PrimitiveDesc, descriptors
from zendnn_cffi.primitives.attributes import ARG_ATTR_ZERO_POINTS, ARG_BIAS, ARG_DST, ARG_SRC, ARG_WEIGHTS

U8, S8, F32 = torch.uint8, torch.int8, torch.float32
SOURCES = [(U8, 8, 8), (S8, 8, 8), (U8, 7, 8), (U8, 8, 7)]  # dtype, and how many bits it and the weights use
LIMITS = {U8: (0, 255), S8: (-128, 127)}


NARROW = {U8: (0, 127), S8: (-64, 64)}


def integers(*shape: int, dtype: torch.dtype, seed: int = 0, bits: int = 8) -> torch.Tensor:
    """All integers of dtype, the extreme ones often: sums that saturate anywhere would show."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (LIMITS if bits == 8 else NARROW)[dtype]
    wide = torch.randint(low - 60, high + 60, shape, generator=generator)
    return wide.clamp(low, high).to(dtype)


def execute(pd: PrimitiveDesc, args: dict[int, torch.Tensor], dst: MemoryDesc, before: torch.Tensor) -> torch.Tensor:
    """What pd makes of args, weights packed as it wants; dst holds `before`."""
    memories = {}
    for arg, tensor in args.items():
        memory = Memory(MemoryDesc.from_tensor(tensor), tensor)
        want = pd.weights_desc if arg == ARG_WEIGHTS else memory.desc
        assert want is not None
        if memory.desc != want:
            packed = Memory(want, torch.zeros(want.size_bytes, dtype=torch.uint8))
            Primitive(PrimitiveDesc.reorder(memory.desc, want)).execute({ARG_SRC: memory, ARG_DST: packed})
            memory = packed
        memories[arg] = memory
    result = before.clone(memory_format=torch.preserve_format)
    Primitive(pd).execute({**memories, ARG_DST: Memory(dst, result)})
    return result


def right(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    if dtype == F32:
        return bool(torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-4 * float(expected.abs().max())))
    rounded = expected.round().clamp(*LIMITS[dtype])
    assert rounded.unique().numel() > 20
    return int((found.double() - rounded).abs().max()) <= 1


POST_OPS = {
    "none": PostOps(),
    "sum, relu": PostOps().sum(0.5).eltwise("relu"),
    "clip": PostOps().eltwise("clip", -40.0, 50.0),
}


@pytest.mark.parametrize("post_ops", POST_OPS)
@pytest.mark.parametrize("zero_points", [(0, 0), (7, 0), (0, 90), (7, 90)])
@pytest.mark.parametrize("dst", [U8, S8, F32])
@pytest.mark.parametrize(("src", "bits", "weights_bits"), SOURCES)
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolution(
    kernel: int,
    src: torch.dtype,
    bits: int,
    weights_bits: int,
    dst: torch.dtype,
    zero_points: tuple[int, int],
    post_ops: str,
) -> None:
    if dst == F32:
        zero_points = zero_points[0], 0
    x = integers(2, 16, 7, 6, dtype=src, bits=bits).contiguous(memory_format=torch.channels_last)
    w = integers(17, 16, kernel, kernel, dtype=S8, seed=1, bits=weights_bits)
    bias = torch.arange(17.0) * 500
    before = integers(2, 17, 7, 6, dtype=S8 if dst == F32 else dst, seed=2).to(dst)
    before = before.contiguous(memory_format=torch.channels_last)
    scales = torch.linspace(0.5, 2, 17) / (kernel * 20000)
    real = F.conv2d(x.double() - zero_points[0], w.double(), bias.double(), padding=kernel // 2)
    expected = real * scales.double().view(-1, 1, 1) * 100
    scales = scales * 100
    if post_ops == "sum, relu":
        expected = (expected + 0.5 * before.double()).relu()
    elif post_ops == "clip":
        expected = expected.clamp(-40, 50)
    expected = expected + zero_points[1]
    points = {ARG_SRC: zero_points[0], ARG_DST: zero_points[1]}
    attr = Attr(
        POST_OPS[post_ops],
        output_scales=scales.tolist(),
        output_scales_mask=2,
        zero_points={arg: 0 for arg, point in points.items() if point},
    )
    have, leave = MemoryDesc(x.shape, src, "nhwc"), MemoryDesc(before.shape, dst, "nhwc")
    weights, wide = MemoryDesc(w.shape, S8, "any"), MemoryDesc((17,), F32)
    used = {"src_bits": bits, "weights_bits": weights_bits}
    op = descriptors.convolution(have, weights, wide, leave, padding_l=kernel // 2, **used)
    args = {ARG_SRC: x, ARG_WEIGHTS: w, ARG_BIAS: bias}
    args |= {ARG_ATTR_ZERO_POINTS | a: torch.tensor([p], dtype=torch.int32) for a, p in points.items() if p}
    _all_right(PrimitiveDesc(op, attr), args, leave, before, expected, dst)


@pytest.mark.parametrize("product", ["inner_product", "matmul"])
@pytest.mark.parametrize("dst", [U8, S8, F32])
@pytest.mark.parametrize(("src", "bits", "weights_bits"), SOURCES)
def test_matrix_product(src: torch.dtype, bits: int, weights_bits: int, dst: torch.dtype, product: str) -> None:
    x, w = integers(9, 48, dtype=src, bits=bits), integers(17, 48, dtype=S8, seed=1, bits=weights_bits)
    bias, before = torch.arange(17.0) * 500, torch.zeros(9, 17, dtype=dst)
    scales = torch.linspace(0.5, 2, 17) / 300
    expected = (x.double() @ w.double().t() + bias.double()) * scales.double()
    attr = Attr(output_scales=scales.tolist(), output_scales_mask=2)
    have, leave = MemoryDesc((9, 48), src), MemoryDesc((9, 17), dst)
    weights, row = (w.t().contiguous(), bias.view(1, 17)) if product == "matmul" else (w, bias)
    describe: Any = getattr(descriptors, product)
    used = {"src_bits": bits, "weights_bits": weights_bits}
    op = describe(have, MemoryDesc(weights.shape, S8, "any"), MemoryDesc(row.shape, F32), leave, **used)
    args = {ARG_SRC: x, ARG_WEIGHTS: weights, ARG_BIAS: row}
    _all_right(PrimitiveDesc(op, attr), args, leave, before, expected, dst)


@pytest.mark.parametrize("weights", ["as they lie", "transposed"])
@pytest.mark.parametrize("dst", [torch.int32, F32])
@pytest.mark.parametrize("src", [U8, S8])
def test_matrix_product_of_weights_in_a_known_layout(src: torch.dtype, dst: torch.dtype, weights: str) -> None:
    """The library's own implementation takes these, and saturates without VNNI."""
    x, w = integers(9, 64, dtype=src), integers(64, 17, dtype=S8, seed=1)
    w = w if weights == "as they lie" else w.t().contiguous().t()
    before, expected = torch.zeros(9, 17, dtype=dst), x.double() @ w.double()
    leave = MemoryDesc((9, 17), dst)
    pd = PrimitiveDesc(descriptors.matmul(MemoryDesc((9, 64), src), MemoryDesc.from_tensor(w), None, leave))
    names = [each.implementation for each in pd.implementations()]
    assert names
    for each in pd.implementations():
        assert torch.equal(execute(each, {ARG_SRC: x, ARG_WEIGHTS: w}, leave, before).double(), expected), names


def _all_right(
    pd: PrimitiveDesc,
    args: dict[int, torch.Tensor],
    desc: MemoryDesc,
    before: torch.Tensor,
    expected: torch.Tensor,
    dst: torch.dtype,
) -> None:
    """Every implementation, but where it refuses to run; at least one that is no reference, or VNNI is not there.

    Of 7 bits there is one without VNNI.
    """
    names = {}
    for each in pd.implementations():
        names[each.implementation] = right(execute(each, args, desc, before), expected, dst)
    assert names and all(names.values()), names
    everything = {each.implementation: each.known_problem or "" for each in pd.implementations(everything=True)}
    fast = [name for name in names if not name.startswith("ref")]
    saturate = [name for name, problem in everything.items() if "saturates" in problem]
    assert fast or saturate
    assert pd.op is not None and not (saturate and {"src_bits", "weights_bits"} & pd.op.params.keys())


@pytest.mark.parametrize("whose", ["src_bits", "weights_bits"])
@pytest.mark.parametrize(("dtype", "bits"), [(S8, 7), (F32, 7), (U8, 6), (U8, 9)])
def test_other_numbers_of_bits_are_refused(dtype: torch.dtype, bits: int, whose: str) -> None:
    matrix = MemoryDesc((4, 8), dtype)
    with pytest.raises(ValueError, match=f"{whose} must be 8, or 7 for a uint8 src"):
        descriptors.inner_product(matrix, MemoryDesc((3, 8), S8), None, MemoryDesc((4, 3), F32), **{whose: bits})
