"""Post-ops and attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zendnn_cffi
from zendnn_cffi import Attr, Memory, MemoryDesc, PostOps, Primitive, PrimitiveDesc, descriptors
from zendnn_cffi.engine.library import load
from zendnn_cffi.primitives import attributes
from zendnn_cffi.primitives.attributes import (
    ARG_ATTR_OUTPUT_SCALES,
    ARG_ATTR_ZERO_POINTS,
    ARG_DST,
    ARG_SRC,
    ARG_WEIGHTS,
    arg_post_op,
)
from zendnn_cffi.primitives.known_problems import known_problem

F32, BF16 = torch.float32, torch.bfloat16
DESC = MemoryDesc((2, 3), F32)


def test_numbers_are_the_declared_ones() -> None:
    lib = zendnn_cffi.lib
    for name, value in attributes.ELTWISE.items():
        assert getattr(lib, f"zendnn_eltwise_{name}") == value
    for name, value in attributes.BINARY.items():
        assert getattr(lib, f"zendnn_binary_{name}") == value
    for name in [n for n in dir(attributes) if n.startswith("ARG_") and "POST_OP" not in n]:
        assert getattr(lib, f"ZENDNN_{name}") == getattr(attributes, name)
    assert arg_post_op(0) == lib.ZENDNN_ARG_ATTR_MULTIPLE_POST_OP_BASE | lib.ZENDNN_ARG_SRC_1
    assert arg_post_op(2, ARG_WEIGHTS) == 3 * lib.ZENDNN_ARG_ATTR_MULTIPLE_POST_OP_BASE | lib.ZENDNN_ARG_WEIGHTS


def test_post_ops_are_values() -> None:
    short = PostOps().eltwise("relu")
    long = short.binary("add", DESC).sum(0.5).prelu(2).depthwise(stride=2)
    assert len(short) == 1 and len(long) == 5 and short != long
    assert long == PostOps().eltwise("relu").binary("add", MemoryDesc((2, 3), F32)).sum(0.5).prelu(2).depthwise(
        stride=2
    )
    assert hash(long) == hash(PostOps(long.entries)) and [e[0] for e in long] == [
        "eltwise",
        "binary",
        "sum",
        "prelu",
        "depthwise",
    ]
    assert Attr(long) == Attr(long) and hash(Attr(long)) == hash(Attr(long)) and Attr(long) != Attr(short)
    assert [e[1] for e in PostOps().eltwise("hardsigmoid")] == ["linear", "clip"]


def test_output_scales_and_zero_points_quantize() -> None:
    x = torch.randn(2, 3)
    q = torch.zeros(2, 3, dtype=torch.uint8)
    src, dst = MemoryDesc.from_tensor(x), MemoryDesc.from_tensor(q)
    zero, one = torch.tensor([7], dtype=torch.int32), torch.tensor([20.0])
    args = {
        ARG_SRC: Memory(src, x),
        ARG_DST: Memory(dst, q),
        ARG_ATTR_ZERO_POINTS | ARG_DST: Memory(MemoryDesc((1,), torch.int32), zero),
    }
    expected = ((x * 20).round() + 7).clamp(0, 255).to(torch.uint8)
    Primitive(PrimitiveDesc.reorder(src, dst, Attr(output_scales=20.0, zero_points={ARG_DST: 0}))).execute(args)
    assert torch.equal(q, expected)
    q.zero_()
    args[ARG_ATTR_OUTPUT_SCALES] = Memory(MemoryDesc((1,), F32), one)
    primitive = Primitive(PrimitiveDesc.reorder(src, dst, Attr(output_scales="runtime", zero_points={ARG_DST: 0})))
    primitive.execute(args)
    assert torch.equal(q, expected)
    del args[ARG_ATTR_OUTPUT_SCALES]
    with pytest.raises(ValueError, match="missing output scales"):
        primitive.execute(args)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PostOps().eltwise("nothing"), "relu"),
        (lambda: PostOps().eltwise("relu", "x"), "alpha"),  # type: ignore[arg-type]
        (lambda: PostOps().binary("add", torch.zeros(2)), "MemoryDesc"),  # type: ignore[arg-type]
        (lambda: PostOps().sum(dtype=torch.float64), "float64"),
        (lambda: PostOps().prelu(-1), "mask"),
        (lambda: PostOps().depthwise(kernel=0), "kernel"),
        (lambda: PostOps([("eltwise", "relu", 0.0, 0.0, 1.0)] * 33), "at most 32"),
        (lambda: Attr(PostOps([("nothing",)])), "unknown post-op"),
        (lambda: Attr("relu"), "PostOps"),  # type: ignore[arg-type]
        (lambda: Attr(scratchpad="mine"), "'user' or 'library'"),
        (lambda: Attr(output_scales="x"), "runtime"),
        (lambda: Attr(output_scales=[1.0, 2.0]), "output_scales_mask"),
        (lambda: Attr(output_scales=[]), "output_scales"),
        (lambda: Attr(zero_points={99: 0}), "ARG_SRC"),
        (lambda: Attr(scales={ARG_SRC: (0, torch.int8)}), "float32 or bfloat16"),
        (lambda: Attr(woq_scales=(2, (1,), F32)), "groups must have 2"),  # type: ignore[arg-type]
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


class Op:
    """Enough of an OpDesc for known_problem."""

    def __init__(self, primitive: str, width: int = 16, weights: MemoryDesc | None = None, **params: Any) -> None:
        self.kind, self.params = primitive, params
        self.descs = {"src": MemoryDesc((9, width), F32), "weights": weights}


NHWC, NCHW = MemoryDesc((2, 16, 8, 8), F32, "nhwc"), MemoryDesc((2, 16, 8, 8), F32)
SINGLE = MemoryDesc((1, DESC.dims[1]), F32)
IMAGES, FILTERS = MemoryDesc((2, 24, 5, 5), F32, "nhwc"), MemoryDesc((24, 24, 1, 1), F32, "any")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attr(PostOps().binary("add", MemoryDesc((1, 3, 1, 1), F32))), r"\[1, 3, 1, 1\], which is not"),
        (lambda: Attr(PostOps().binary("add", MemoryDesc((2, 24, 6, 6), F32))), r"\[2, 24, 6, 6\], which is not"),
        (lambda: Attr(PostOps().binary("mul", MemoryDesc((24,), F32))), r"\[24\], which is not broadcast"),
        (lambda: Attr(PostOps().eltwise("relu").prelu(2**6)), "post-op 1: prelu has the mask 64"),
        (lambda: Attr(output_scales=[0.5, 2.0], output_scales_mask=2), "2 output scales.*has 24"),
        (lambda: Attr(output_scales=0.5, output_scales_mask=2), "1 output scales.*has 24"),
        (lambda: Attr(output_scales=[0.5] * 24, output_scales_mask=2**5), "24 output scales"),
    ],
)
def test_post_ops_and_scales_are_as_many_as_the_result_has(make: Callable[[], Attr], message: str) -> None:
    """The library looks at none of these sizes, and reads as if they were right."""
    products = descriptors.convolution(IMAGES, FILTERS, None, IMAGES)
    for describe in (
        lambda: PrimitiveDesc(products, make()),
        lambda: PrimitiveDesc.every(products, make()),
        lambda: PrimitiveDesc.reorder(IMAGES, MemoryDesc(IMAGES.dims, F32), make()),
    ):
        with pytest.raises(ValueError, match=message):
            describe()


ROW, COLUMN, ONE = (PostOps().binary("add", MemoryDesc(dims, F32)) for dims in (SINGLE.dims, (DESC.dims[0], 1), (1, 1)))
HALF = PostOps().binary("add", MemoryDesc((2, 3), BF16))
BLOCKS = MemoryDesc((2, 16, 8, 8), BF16, "nChw16c")
ANY = MemoryDesc((3, 3), F32, "any")
ROWS = MemoryDesc((2, 16, 8, 8), F32, strides=(2048, 128, 16, 1))
CHANNELS = MemoryDesc((2, 48, 8, 8), F32).submemory((2, 16, 8, 8), (0, 16, 0, 0))
SLICE = MemoryDesc((2, 48, 8, 8), F32, "nhwc").submemory((2, 16, 8, 8), (0, 16, 0, 0))


@pytest.mark.parametrize(
    ("kind", "params", "chain", "implementation", "src", "dst", "problem"),
    [
        ("convolution", {}, PostOps(), "brgconv:avx512_core", NHWC, NHWC, None),
        ("convolution", {}, PostOps(), "jit:avx2", NHWC, SLICE, "densely"),
        ("pooling", {}, PostOps(), "jit:avx512_core", NHWC, SLICE, "densely"),
        ("convolution", {}, PostOps(), "ref:any", NHWC, SLICE, None),
        ("convolution", {}, PostOps(), "jit:avx2", NHWC, ROWS, "densely"),
        ("pooling_v2", {}, PostOps(), "jit:avx2", NHWC, ROWS, "densely"),
        ("convolution", {}, PostOps(), "jit:avx2", NHWC, CHANNELS, None),
        ("shuffle", {}, PostOps(), "jit:avx512_core_bf16", BLOCKS, BLOCKS, "writes beyond"),
        ("shuffle", {}, PostOps(), "ref:any", BLOCKS, BLOCKS, None),
        ("shuffle", {}, PostOps(), "jit:avx512_core", NHWC, NHWC, None),
        ("matmul", {"weights": ANY}, PostOps(), "zendnn", DESC, DESC, "by their address"),
        ("matmul", {"weights": DESC}, PostOps(), "zendnn", DESC, DESC, None),
        ("matmul", {"weights": ANY}, PostOps(), "brg:avx512_core", DESC, DESC, None),
        ("inner_product", {"weights": ANY}, PostOps(), "zendnn", DESC, DESC, None),
        ("inner_product", {}, HALF, "zendnn", DESC, DESC, "beyond its end"),
        ("convolution", {}, PostOps(), "x64:gemm:jit", NHWC, NHWC, "wrong numbers"),
        ("convolution", {}, PostOps(), "x64:gemm:jit", NCHW, NCHW, None),
        ("convolution", {}, PostOps(), "zendnn", NHWC, NHWC, "aborts"),
        ("matmul", {}, PostOps().eltwise("relu"), "zendnn", DESC, DESC, None),
        ("matmul", {}, PostOps().eltwise("relu", 0.1), "zendnn", DESC, DESC, "alpha"),
        ("matmul", {}, PostOps().eltwise("relu", 0.0, 0.0, 2.0), "zendnn", DESC, DESC, "scale"),
        ("matmul", {}, PostOps().binary("sub", DESC), "zendnn", DESC, DESC, "sub"),
        ("inner_product", {}, PostOps().prelu(2), "zendnn", DESC, DESC, "prelu"),
        ("matmul", {}, PostOps().eltwise("relu", 0.1).eltwise("relu"), "brg:avx512_core", DESC, DESC, "relu"),
        ("matmul", {}, PostOps().eltwise("relu").eltwise("relu"), "brg:avx512_core", DESC, DESC, None),
        ("matmul", {}, PostOps().eltwise("relu", 0.1).eltwise("relu"), "ref:any", DESC, DESC, None),
        ("inner_product", {}, PostOps().prelu(2), "ref:any", DESC, DESC, "prelu"),
        ("inner_product", {}, ROW, "zendnn", DESC, DESC, "beyond its end"),
        ("inner_product", {}, ONE, "zendnn", DESC, DESC, "beyond its end"),
        ("inner_product", {}, ONE, "zendnn", SINGLE, SINGLE, "beyond its end"),
        ("inner_product", {}, ROW, "zendnn", SINGLE, SINGLE, None),
        ("inner_product", {}, COLUMN, "zendnn", DESC, DESC, None),
        ("inner_product", {}, PostOps().binary("add", DESC), "zendnn", DESC, DESC, None),
        ("inner_product", {}, ROW, "brgemm:avx512_core", DESC, DESC, None),
        ("matmul", {}, ROW, "zendnn", DESC, DESC, None),
        ("matmul", {}, PostOps().sum(2.0).sum(0.5), "brg:avx512_core", DESC, DESC, "scale of one"),
        ("matmul", {}, PostOps().sum(2.0).sum(2.0), "brg:avx512_core", DESC, DESC, None),
        ("matmul", {}, PostOps().sum(2.0).sum(0.5), "ref:any", DESC, DESC, None),
        (
            "embedding_bag",
            {"kind": "max", "padding_idx": -1, "width": 48},
            PostOps(),
            "avx512:any",
            DESC,
            DESC,
            "maxima",
        ),
        (
            "embedding_bag",
            {"kind": "max", "padding_idx": 3, "width": 64},
            PostOps(),
            "avx512:any",
            DESC,
            DESC,
            "maxima",
        ),
        ("embedding_bag", {"kind": "max", "padding_idx": -1, "width": 64}, PostOps(), "avx512:any", DESC, DESC, None),
    ],
)
def test_known_problems(
    kind: str, params: Any, chain: PostOps, implementation: str, src: Any, dst: Any, problem: str | None
) -> None:
    found = known_problem(Op(kind, **params), chain, implementation, src, dst)  # type: ignore[arg-type]
    assert found is None if problem is None else found is not None and problem in found


KEPT = MemoryDesc((2, 16, 8, 8), torch.uint8, "nhwc")
SUM = PostOps().binary("add", MemoryDesc((2, 16, 8, 8), F32, "nhwc"))


@pytest.mark.parametrize(
    ("kind", "chain", "implementation", "attributes", "has_bias", "problem"),
    [
        ("convolution", PostOps(), "jit_uni_int8:avx2", {}, False, "saturates"),
        ("convolution", PostOps(), "jit_int8:avx512_core", {}, False, "saturates"),
        ("inner_product", PostOps(), "brgemm:avx512_core", {}, False, "saturates"),
        ("convolution", PostOps(), "jit_int8:avx512_core_vnni", {}, False, None),
        ("convolution", PostOps(), "ref_int8:any", {}, False, None),
        ("pooling", PostOps(), "jit_int:avx2", {}, False, None),
        ("convolution", SUM, "x64:gemm_s8u8s32:jit", {}, False, "binary post-ops"),
        ("convolution", SUM, "jit_int8:avx512_core_vnni", {}, False, None),
        ("matmul", PostOps(), "brg:avx512_core_vnni", {"scales": {ARG_SRC: (0, F32)}}, False, "ignores scales"),
        ("matmul", PostOps(), "zendnn", {"scales": {ARG_SRC: (0, F32)}}, False, None),
        ("matmul", PostOps(), "zendnn", {"output_scales": 0.5}, True, "bias after"),
        ("matmul", PostOps(), "zendnn", {"output_scales": 0.5}, False, None),
        ("matmul", PostOps(), "brg:avx512_core_vnni", {"output_scales": 0.5}, True, None),
    ],
)
def test_known_problems_of_integers(
    kind: str,
    chain: PostOps,
    implementation: str,
    attributes: Any,
    has_bias: bool,
    problem: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With VNNI, of which some names say nothing."""
    library = load()
    isa = library.const("cpu_isa_avx512_core_vnni")
    monkeypatch.setattr(library, "fn", lambda _: lambda: isa)
    op = Op(kind, strides=(1, 1), padding_l=(0, 0), padding_r=(0, 0), dilation=(1, 1))
    op.descs = {"src": KEPT, "weights": MemoryDesc((8, 16, 1, 1), torch.int8), "bias": DESC if has_bias else None}
    attr = Attr(chain, **attributes)
    found = known_problem(op, chain, implementation, KEPT, KEPT, attr)  # type: ignore[arg-type]
    assert found is None if problem is None else found is not None and problem in found


@pytest.mark.parametrize("implementation", ["x64:gemm:jit", "zendnn"])
def test_products_of_integers_may_saturate_where_there_is_no_vnni(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = Op("matmul")
    op.descs = {"src": MemoryDesc((9, 16), torch.uint8), "weights": MemoryDesc((16, 4), torch.int8), "bias": None}
    library = load()
    for name, saturates in (("cpu_isa_avx2", True), ("cpu_isa_avx512_core_vnni", False)):
        isa = library.const(name)
        monkeypatch.setattr(library, "fn", lambda _, isa=isa: lambda: isa)
        found = known_problem(op, PostOps(), implementation, None, None)  # type: ignore[arg-type]
        assert ("saturates" in str(found)) == saturates
