"""What is given to the handle objects and to parameters in place of what belongs there: taken, or refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from zendnn_cffi import (
    Attr,
    Engine,
    Memory,
    MemoryDesc,
    PostOps,
    Primitive,
    PrimitiveDesc,
    Stream,
    descriptors,
    optimize,
)
from zendnn_cffi import functional as zf
from zendnn_cffi.primitives import checks
from zendnn_cffi.primitives.attributes import ARG_ATTR_OUTPUT_SCALES, ARG_DST, ARG_SRC
from zendnn_cffi.primitives.handles import native

X = torch.randn(2, 4, 6, 6)
INTS: dict[str, Callable[[int], Any]] = {
    "int": int,
    "numpy integer": np.int64,
    "small numpy integer": np.uint8,
    "0-d tensor": lambda v: torch.tensor(v),
    "0-d array": lambda v: np.array(v),
}
TAKE_INTS: dict[str, Callable[[Any], Any]] = {
    "stride": lambda v: zf.convolution(X, torch.ones(4, 4, 2, 2), stride=v),
    "groups": lambda v: zf.shuffle(X, v),
    "normalized_shape": lambda v: zf.layer_norm(X[..., :2], v),
    "dims": lambda v: zf.reduction(X, "sum", v),
    "dim": lambda v: zf.softmax(X, v),
    "kernel": lambda v: zf.pooling(X, "max", v),
    "size": lambda v: zf.resampling(X, "linear", v),
    "padding_idx": lambda v: zf.embedding_bag(X[0, 0], torch.tensor([[1, 2]]), padding_idx=v),
}
NO_INTS = (True, 2.0, "2", torch.tensor(2.0), torch.tensor(True), np.array(2.5), torch.ones(1, device="meta")[0], None)


@pytest.mark.parametrize("form", INTS)
@pytest.mark.parametrize("parameter", TAKE_INTS)
def test_integers_are_taken_in_every_form(parameter: str, form: str) -> None:
    function = TAKE_INTS[parameter]
    assert torch.equal(function(INTS[form](2)), function(2))


@pytest.mark.parametrize("parameter", TAKE_INTS)
def test_what_is_no_integer_is_refused_by_name(parameter: str) -> None:
    optional = parameter in ("dims", "padding_idx", "size")  # None says something there
    for wrong in NO_INTS[: -1 if optional else None]:
        with pytest.raises((TypeError, ValueError), match=parameter):
            TAKE_INTS[parameter](wrong)
    for wrong in (torch.ones(1, 1, dtype=torch.int64), np.ones((2, 2), np.int64), itertools.count(1), {2, 3}, {2: 3}):
        with pytest.raises(TypeError, match=parameter):
            TAKE_INTS[parameter](wrong)


def test_sequences_of_integers_may_be_arrays() -> None:
    for sizes in ([2, 3], (np.int32(2), torch.tensor(3)), torch.tensor([2, 3]), np.array([2, 3]), torch.Size([2, 3])):
        assert checks.as_dims(sizes, "sizes", rank=2) == (2, 3)
    with pytest.raises(ValueError, match="sizes must have 2 values"):
        checks.as_dims(torch.tensor([2]), "sizes", rank=2)
    with pytest.raises(TypeError, match=r"sizes\[0\] must be an integer"):
        checks.as_dims(np.array([2.0, 3.0]), "sizes", rank=2)


def test_numbers_are_taken_in_every_form() -> None:
    expected = zf.eltwise(X, "linear", 2.5, 1.0)
    for alpha in (2.5, np.float32(2.5), np.array(2.5), torch.tensor(2.5), torch.tensor(2.5, requires_grad=True)):
        assert torch.equal(zf.eltwise(X, "linear", alpha, 1.0), expected)
        assert torch.equal(zf.binary(X, np.float32(2.5), "mul"), X * 2.5)
    for wrong in ("1", True, torch.ones(1), torch.ones((), device="meta"), 1j, None, object()):
        with pytest.raises((TypeError, ValueError), match="alpha"):
            zf.eltwise(X, "linear", wrong, 1.0)
    with pytest.raises(ValueError, match="scale_factor must be one number or 2, got 3"):
        zf.resampling(X, "linear", scale_factor=[1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("relu", lambda v: zf.batch_norm(X, torch.zeros(4), torch.ones(4), relu=v)),
        ("keepdim", lambda v: zf.reduction(X, "sum", 1, v)),
        ("ceil_mode", lambda v: zf.pooling(X, "max", 2, ceil_mode=v)),
        ("include_last_offset", lambda v: _bag(v)),
        ("log", lambda v: descriptors.softmax(MemoryDesc.from_tensor(X), 1, v)),
        ("scale", lambda v: descriptors.batch_normalization(MemoryDesc.from_tensor(X), 1e-5, scale=v)),
        ("shift", lambda v: descriptors.layer_normalization(MemoryDesc.from_tensor(X), 1e-5, shift=v)),
        ("allow_winograd", lambda v: optimize(torch.nn.ReLU().eval(), allow_winograd=v)),
        ("release_weights", lambda v: optimize(torch.nn.ReLU().eval(), release_weights=v)),
        ("everything", lambda v: list(PrimitiveDesc(_relu()).implementations(everything=v))),
    ],
)
def test_flags_are_true_or_false_only(name: str, function: Callable[[Any], Any]) -> None:
    for flag in (False, True, np.bool_(True)):
        function(flag)
    for wrong in (0, 1, "no", [], None, torch.tensor(True), np.array([True])):
        with pytest.raises(TypeError, match=f"{name} must be True or False"):
            function(wrong)


def _bag(include_last: Any) -> Any:
    return zf.embedding_bag(X[0, 0], torch.tensor([1, 2]), torch.tensor([0, 2]), include_last_offset=include_last)


def _relu() -> descriptors.OpDesc:
    return descriptors.eltwise("relu", MemoryDesc.from_tensor(X))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Primitive(PrimitiveDesc(_relu())).execute(None), "args must map argument ids"),  # type: ignore[arg-type]
        (lambda: Primitive(PrimitiveDesc(_relu())).execute({"src": None}), "argument ids such as ARG_SRC"),  # type: ignore[dict-item]
        (lambda: Primitive(PrimitiveDesc(_relu())).execute({}, "cpu"), "stream must be a Stream"),  # type: ignore[arg-type]
        (lambda: PrimitiveDesc(_relu(), engine="cpu"), "engine must be an Engine"),  # type: ignore[arg-type]
        (lambda: Memory(MemoryDesc.from_tensor(X), X, engine="cpu"), "engine must be an Engine"),  # type: ignore[arg-type]
        (lambda: Stream("cpu"), "engine must be an Engine"),  # type: ignore[arg-type]
        (lambda: Engine("cpu", None), "index must be an integer"),  # type: ignore[arg-type]
        (lambda: Attr(zero_points=[ARG_DST]), "zero_points must map argument ids"),  # type: ignore[arg-type]
        (lambda: Attr(scales=[ARG_DST]), "scales must map argument ids"),  # type: ignore[arg-type]
        (lambda: Attr(scales={ARG_SRC: 0}), r"scales of argument 1 must be \(mask, dtype\)"),  # type: ignore[dict-item]
        (lambda: Attr(woq_scales=(2, torch.float32)), "woq_scales must be"),  # type: ignore[arg-type]
        (lambda: Attr(output_scales=object()), "output_scales must be a number"),
        (lambda: PostOps([["sum", 1.0, None]]), "entries must be a sequence of tuples"),  # type: ignore[list-item]
        (lambda: MemoryDesc.wrap(None), "ptr must be a zendnn_memory_desc_t"),
        (lambda: MemoryDesc.wrap(native().ffi.new("int *")), "ptr must be a zendnn_memory_desc_t"),
        (lambda: zf.reorder(X, dtype="float32"), "dtype must be one of"),  # type: ignore[arg-type]
        (lambda: zf.gemm(X[0, 0], X[0, 0], out_dtype=[1]), "out_dtype must be"),  # type: ignore[arg-type]
        (lambda: zf.PackedWeights(X[0, 0], src_dtype=[1]), "src_dtype must be"),  # type: ignore[arg-type]
    ],
)
def test_wrong_kinds_of_objects_are_refused_by_name(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        wrong()


def test_descriptors_and_attributes_cannot_be_changed() -> None:
    desc = MemoryDesc((2, 3), torch.float32)
    same, key = MemoryDesc((2, 3), torch.float32), hash(desc)
    chain, attr = PostOps().eltwise("relu"), Attr(zero_points={ARG_DST: 0})
    for value, name in ((desc, "dims"), (desc, "dtype"), (desc, "ptr"), (chain, "entries"), (attr, "runtime_args")):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(value, name, None)
        with pytest.raises(AttributeError, match="immutable"):
            delattr(value, name)
    desc.ptr.dims[0] = 7
    desc.ptr.ndims = 1
    assert desc == same and hash(desc) == key == hash(same) and desc.dims == (2, 3) and desc.size_bytes == 24
    with pytest.raises(TypeError):
        attr.runtime_args[1] = ()  # type: ignore[index]
    assert attr == Attr(zero_points={ARG_DST: 0}) and attr != Attr()


def test_scales_and_slopes_are_as_many_as_the_mask_says() -> None:
    """The library reads them without asking for their number, type or strides."""
    src, dst = MemoryDesc((2, 4, 3, 3), torch.float32), MemoryDesc((2, 4, 3, 3), torch.int8)
    x, y = torch.randn(2, 4, 3, 3), torch.empty(2, 4, 3, 3, dtype=torch.int8)
    attr = Attr(output_scales="runtime", output_scales_mask=2)
    primitive = Primitive(PrimitiveDesc.reorder(src, dst, attr))
    args = {ARG_SRC: Memory(src, x), ARG_DST: Memory(dst, y)}
    scales = torch.tensor([1.0, 2.0, 3.0, 4.0])
    primitive.execute({**args, ARG_ATTR_OUTPUT_SCALES: Memory(MemoryDesc((4,), torch.float32), scales)})
    assert torch.equal(y, (x * scales.view(-1, 1, 1)).round().clamp(-128, 127).to(torch.int8))
    strided = MemoryDesc((4,), torch.float32, strides=(2,))
    for desc, data in (
        (MemoryDesc((3,), torch.float32), scales),
        (MemoryDesc((4,), torch.int32), torch.ones(4, dtype=torch.int32)),
        (strided, torch.ones(8)),
    ):
        with pytest.raises(ValueError, match="output scales is .*, the primitive needs 4 dense float32 numbers"):
            primitive.execute({**args, ARG_ATTR_OUTPUT_SCALES: Memory(desc, data)})
