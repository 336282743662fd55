"""Element-wise functions of one and two tensors, softmax, parametric relu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zendnn_cffi.functional._arrays import FLOATS, dense_layout
from zendnn_cffi.functional._call import Call, first_fast
from zendnn_cffi.functional._kernel import Kernel
from zendnn_cffi.functional._operation import operation
from zendnn_cffi.primitives import allocation, checks, descriptors
from zendnn_cffi.primitives.attributes import ARG_SRC, ARG_SRC_1, ARG_WEIGHTS, BINARY, ELTWISE, Attr, kind_value
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc


@operation
def eltwise(src: Any, kind: str, alpha: float = 0.0, beta: float = 0.0, *, out: Any = None) -> Any:
    """Return kind(src; alpha, beta) for every element; the names and their parameters are those of
    ``attributes.ELTWISE``.

    src      any shape, float32 or bfloat16, any strides
    out      may be src itself
    Returns  shape and dtype of src; dense in the same order of dimensions
    Raises   TypeError, ValueError for arguments that do not fit
    """
    call = Call()
    x = call.take(src, "src", FLOATS)
    alpha, beta = checks.as_float(alpha, "alpha"), checks.as_float(beta, "beta")
    steps = [(kind, alpha, beta)]
    if isinstance(kind, str) and kind == "hardsigmoid":  # the library's only missing one
        steps = [("linear", 1 / 6, 0.5), ("clip", 0.0, 1.0)]
    kind_value(ELTWISE, steps[0][0], "kind")
    call.add(ARG_SRC, x)
    result = call.output(out, x.shape, x.dtype, like=x, in_place="src")
    if x.numel() == 0:
        return call.result()

    for step in steps:

        def build(layouts: dict[int, MemoryDesc], attr: Attr, step: tuple[str, float, float] = step) -> Kernel:
            name, *numbers = step
            return Kernel(PrimitiveDesc(descriptors.eltwise(name, dense_layout(result), *numbers), attr), layouts)

        call.run(("eltwise", *step), build)
        call.add(ARG_SRC, result)  # in place from here on
    return call.result()


@operation
def binary(a: Any, b: Any, kind: str, *, post_ops: Sequence[tuple[Any, ...]] = (), out: Any = None) -> Any:
    """Return post_ops(kind(a, b)) element by element, with torch's broadcasting; kinds are those of
    ``attributes.BINARY``.

    a, b     float32, bfloat16 (of which the result has a's dtype), any strides; one of them may be a Python number
    out      may be a itself where a has the result's shape
    Returns  the broadcast shape; comparisons give 0 and 1 in a's dtype
    Raises   TypeError, ValueError for arguments that do not fit
    """
    call = Call()
    kind_value(BINARY, kind, "kind")
    x, y = _pair(call, a, b)
    rank = max(x.dim(), y.dim(), 1)
    x, y = (t.reshape((1,) * (rank - t.dim()) + tuple(t.shape)) for t in (x, y))
    if any(p != q and 1 not in (p, q) for p, q in zip(x.shape, y.shape, strict=False)):
        raise ValueError(f"a and b have shapes {list(x.shape)} and {list(y.shape)}, which do not broadcast together")
    shape = tuple(q if p == 1 else p for p, q in zip(x.shape, y.shape, strict=False))
    if tuple(x.shape) != shape and x.numel():
        x = x.expand(shape).contiguous()  # the library broadcasts its second source only
    scalar = all(checks.is_number(v) or v.ndim == 0 for v in (a, b))
    call.add(ARG_SRC, x)
    call.add(ARG_SRC_1, y)
    call.add_post_ops(post_ops, shape, without_prelu="binary")
    call.adopt_post_tensors()
    result = call.output(out, () if scalar else shape, x.dtype, like=None if scalar else x, in_place="a")
    if result.numel() == 0:
        return call.result()

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        def attempt(first: MemoryDesc, second: MemoryDesc) -> Kernel:
            return Kernel(
                PrimitiveDesc(descriptors.binary(kind, first, second, first), attr), layouts, reads_dst=call.reads_dst
            )

        row_major = MemoryDesc(shape, x.dtype)
        return first_fast(
            [
                lambda: attempt(dense_layout(x), dense_layout(y)),
                lambda: attempt(row_major, MemoryDesc(y.shape, y.dtype)),
            ]
        )

    return call.run(("binary", kind), build)


def _pair(call: Call, a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Check both operands; a number becomes a tensor of the other's dtype."""
    if checks.is_number(a) and checks.is_number(b):
        raise TypeError("a and b are both numbers: at least one must be a tensor or an array")
    if checks.is_number(a):
        y = call.take(b, "b", FLOATS)
        return allocation.filled((1,) * max(y.dim(), 1), checks.as_float(a, "a"), y.dtype), y
    x = call.take(a, "a", FLOATS)
    if checks.is_number(b):
        return x, allocation.filled((1,), checks.as_float(b, "b"), torch.float32)
    return x, call.take(b, "b", FLOATS)


@operation
def softmax(src: Any, dim: int, *, out: Any = None) -> Any:
    """Return the softmax of src along dim.

    src      at least 1 dimension, float32 or bfloat16, any strides
    out      may be src itself
    Returns  shape and dtype of src
    Raises   TypeError, ValueError for arguments that do not fit
    """
    return _softmax(src, dim, False, out)


@operation
def log_softmax(src: Any, dim: int, *, out: Any = None) -> Any:
    """Return the logarithm of the softmax of src along dim; otherwise as ``softmax``."""
    return _softmax(src, dim, True, out)


def _softmax(src: Any, dim: Any, log: bool, out: Any) -> Any:
    call = Call()
    x = call.take(src, "src", FLOATS)
    if x.dim() == 0:
        raise ValueError("src must have at least one dimension")
    axis = checks.as_int(dim, "dim", minimum=-x.dim(), maximum=x.dim() - 1) % x.dim()
    call.add(ARG_SRC, x)
    result = call.output(out, x.shape, x.dtype, like=x, in_place="src")
    if result.numel() == 0:
        return call.result()

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        def attempt(desc: MemoryDesc) -> Kernel:
            return Kernel(PrimitiveDesc(descriptors.softmax(desc, axis, log), attr), layouts)

        inner = [i for i in range(x.dim()) if i != axis] + [
            axis
        ]  # the fast implementation needs the axis dense and last
        packed = MemoryDesc([x.shape[i] for i in inner], x.dtype).permute([inner.index(i) for i in range(x.dim())])
        return first_fast([lambda: attempt(dense_layout(x)), lambda: attempt(packed)])

    return call.run(("softmax", axis, log), build)


@operation
def prelu(src: Any, weight: Any, *, out: Any = None) -> Any:
    """Return x > 0 ? x : weight * x, as torch.nn.functional.prelu.

    src      [N, C, ...] (or any shape with a one-element weight), float32 or bfloat16, any strides
    weight   [C] (dim 1 of src) or one element, dtype of src
    out      may be src itself
    Returns  shape and dtype of src
    Raises   TypeError, ValueError for arguments that do not fit
    """
    call = Call()
    x = call.take(src, "src", FLOATS)
    w = call.take_dense(weight, "weight", (x.dtype,))
    channels = x.shape[1] if x.dim() > 1 else 1
    if w.dim() > 1 or w.numel() not in (1, channels):
        raise ValueError(f"weight must have 1 or {channels} elements (dim 1 of src), got shape {list(w.shape)}")
    rank = max(x.dim(), 1)
    w = w.reshape([w.numel() if i == 1 else 1 for i in range(rank)] if rank > 1 else (1,))
    call.add(ARG_SRC, x)
    call.add(ARG_WEIGHTS, w)
    result = call.output(out, x.shape, x.dtype, like=x, in_place="src")
    if result.numel() == 0:
        return call.result()

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        def attempt(desc: MemoryDesc) -> Kernel:
            return Kernel(PrimitiveDesc(descriptors.prelu(desc, MemoryDesc(w.shape, x.dtype, "any")), attr), layouts)

        return first_fast(
            [lambda: attempt(dense_layout(x)), lambda: attempt(MemoryDesc(dense_layout(x).dims, x.dtype))]
        )

    return call.run(("prelu",), build)
