"""Layouts, attributes and primitives as JSON, made again by the functions that check them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fx_passes.candidates.layouts import GrowingDesc, Numerics, OpaqueDesc, Quantized
from fx_passes.saved.errors import FileError
from fx_passes.saved.layouts import Layouts, NoForm, decode_descriptor, encode_descriptor
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, Attr, PostOps
from zendnn_cffi.primitives.lpgemm import PackedLayout
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc

f32, bf16 = torch.float32, torch.bfloat16
kept = MemoryDesc((2, 32, 9, 9), torch.uint8, "nhwc")
image, blocked = (MemoryDesc((2, 32, 9, 9), f32, tag) for tag in ("nhwc", "nChw16c"))


@pytest.mark.parametrize(
    "desc",
    (
        MemoryDesc((3, 4), f32),
        MemoryDesc((3, 4), bf16, strides=(9, 2)),
        MemoryDesc((2, 32, 5, 5), f32, "nChw16c"),
        MemoryDesc((2, 30, 5, 5), bf16, "nChw16c"),
        MemoryDesc((64, 32, 3, 3), f32, "ABcd16b16a"),
        MemoryDesc((64, 32, 3, 3), f32, "any"),
        MemoryDesc((0, 3), f32),
        OpaqueDesc((2, 3), torch.int64, (3, 1)),
        GrowingDesc((2, 3), f32, (3, 1)),
        PackedLayout((8, 16), f32),
    ),
)
def test_layouts_come_back(desc: Any) -> None:
    layouts = Layouts()
    assert [layouts.place(desc), layouts.place(desc)] == [0, 0] and len(layouts.written) == 1
    found = Layouts(json.loads(json.dumps(layouts.written))).at(0)
    assert found == desc and type(found) is type(desc)


def test_layouts_of_integers_come_back() -> None:
    layouts = Layouts()
    desc = Quantized(MemoryDesc((2, 32, 5, 5), torch.uint8, "nhwc"), Numerics(torch.uint8, 0.1, 7))
    place = layouts.place(desc)
    assert layouts.place(desc) == place and layouts.place(desc.desc) != place
    found = Layouts(json.loads(json.dumps(layouts.written))).at(place)
    assert found == desc and type(found) is Quantized


@pytest.mark.parametrize("inner", (0, 2, -1, "x", None))
@pytest.mark.parametrize(
    "numerics", (["tuple", ["dtype", "int8"], 0.1, 7], ["tuple", ["dtype", "uint8"], -0.1, 7], ["tuple"])
)
def test_layouts_that_are_none_of_integers_are_refused(inner: Any, numerics: Any) -> None:
    layouts = Layouts()
    layouts.place(MemoryDesc((2, 3), torch.uint8))
    with pytest.raises(FileError, match=r"layout 1 "):
        Layouts([*layouts.written, ["quantized", inner, numerics]]).at(1)


@pytest.mark.needs("avx512")
def test_what_has_no_name_has_no_form() -> None:
    winograd = PrimitiveDesc(
        descriptors.convolution(
            blocked, MemoryDesc((32, 32, 3, 3), f32, "any"), None, blocked, padding_l=1, algorithm="winograd"
        )
    ).weights_desc
    for desc in (winograd, image.submemory((1, 32, 9, 9), (1, 0, 0, 0))):
        with pytest.raises(NoForm):
            Layouts().place(desc)


NONE = ["strided", ["tuple", -1], ["dtype", "float32"], ["tuple", 1]]


@pytest.mark.parametrize("written", ([], [1], ["tag", ["tuple", 1]], NONE, ["aocl"], ["x"]))
def test_layouts_that_are_none_are_refused(written: Any) -> None:
    with pytest.raises(FileError, match="layout 0 cannot be read"):
        Layouts([written]).at(0)


@pytest.mark.parametrize("place", (1, -1, 10**9))
def test_layouts_that_are_not_there(place: int) -> None:
    with pytest.raises(FileError, match="there is no layout"):
        Layouts([["aocl"]]).at(place)


def primitives() -> dict[str, Callable[[], PrimitiveDesc]]:
    """One of each kind that lowering uses."""
    matrix, weights = MemoryDesc((6, 32), f32), MemoryDesc((16, 32), f32, "any")
    bias, result = MemoryDesc((16,), f32), MemoryDesc((6, 16), f32)
    other = MemoryDesc((2, 32, 1, 1), f32)
    chain = Attr(PostOps().eltwise("relu").binary("add", other).sum(0.5))
    any_weights = MemoryDesc((32, 32, 3, 3), f32, "any")
    return {
        "convolution": lambda: PrimitiveDesc(
            descriptors.convolution(image, any_weights, None, image, padding_l=1), chain
        ),
        "winograd": lambda: PrimitiveDesc(
            descriptors.convolution(blocked, any_weights, None, blocked, padding_l=1, algorithm="winograd")
        ),
        "inner_product": lambda: PrimitiveDesc(descriptors.inner_product(matrix, weights, bias, result)),
        "eltwise": lambda: PrimitiveDesc(descriptors.eltwise("gelu_erf", matrix)),
        "binary": lambda: PrimitiveDesc(descriptors.binary("mul", image, other, image)),
        "softmax": lambda: PrimitiveDesc(descriptors.softmax(matrix, -1)),
        "layer_normalization": lambda: PrimitiveDesc(descriptors.layer_normalization(matrix, 1e-5, shift=False)),
        "batch_normalization": lambda: PrimitiveDesc(descriptors.batch_normalization(image, 1e-5)),
        "pooling": lambda: PrimitiveDesc(
            descriptors.pooling("max", image, MemoryDesc((2, 32, 4, 4), f32, "nhwc"), kernel=2, strides=2)
        ),
        "reduction": lambda: PrimitiveDesc(descriptors.reduction("mean", image, other)),
        "resampling": lambda: PrimitiveDesc(
            descriptors.resampling("linear", image, MemoryDesc((2, 32, 18, 18), f32, "nhwc"))
        ),
        "integers": lambda: PrimitiveDesc(
            descriptors.convolution(kept, MemoryDesc((32, 32, 3, 3), torch.int8, "any"), None, kept, padding_l=1),
            Attr(output_scales=[0.1] * 32, output_scales_mask=2, zero_points={ARG_SRC: 0, ARG_DST: 0}),
        ),
        "to integers": lambda: PrimitiveDesc.reorder(image, kept, Attr(output_scales=3.0, zero_points={ARG_DST: 0})),
        "reorder": lambda: PrimitiveDesc.reorder(image, MemoryDesc(image.dims, bf16, "nChw16c")),
    }


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.needs("avx512")] * (n == "winograd")) for n in primitives()]
)
def test_primitives_come_back(name: str) -> None:
    pd, layouts = primitives()[name](), Layouts()
    data = json.loads(json.dumps(encode_descriptor(pd, layouts)))
    found = decode_descriptor(data, Layouts(json.loads(json.dumps(layouts.written))))
    assert found.implementation == pd.implementation and found.attr == pd.attr
    assert found.expected_args == pd.expected_args
    assert pd.op is not None and found.op is not None and found.op.key == pd.op.key


def test_every_implementation_is_told_apart() -> None:
    for pd in primitives()["convolution"]().implementations():
        layouts = Layouts()
        data = encode_descriptor(pd, layouts)
        found = decode_descriptor(data, layouts)
        assert (found.implementation, found.weights_desc) == (pd.implementation, pd.weights_desc)


@pytest.mark.parametrize("place, value", ((0, "nothing"), (0, "reduction_numbers"), (4, "jit:other"), (5, "- - -")))
def test_another_implementation_is_refused(place: int, value: Any) -> None:
    layouts = Layouts()
    data = encode_descriptor(primitives()["convolution"](), layouts)
    data[place] = value
    with pytest.raises(FileError):
        decode_descriptor(data, layouts)


@pytest.mark.parametrize("count, mask", ((31, 2), (1, 2), (33, 2)))
def test_scales_that_end_before_the_channels_do_are_refused(count: int, mask: int) -> None:
    layouts = Layouts()
    data = encode_descriptor(primitives()["integers"](), layouts)
    *others, (tag, _, _, masks) = data
    scales = [tag, ["tuple", *[0.1] * count], mask, masks]
    with pytest.raises(FileError, match=f"{count} output scales with mask {mask}"):
        decode_descriptor([*others, scales], layouts)
