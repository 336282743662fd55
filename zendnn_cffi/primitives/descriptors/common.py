"""What the operation descriptors share: the descriptor object, tables of numbers, filling and checking.

Source: zendnn_types.h of ZenDNN 5.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

import torch

from zendnn_cffi.primitives import checks
from zendnn_cffi.primitives.handles import native
from zendnn_cffi.primitives.memory import MemoryDesc, dense_strides

INFERENCE = 96  # zendnn_forward_inference
INT8 = (torch.int8, torch.uint8)
KINDS = {
    "reorder": 1,
    "shuffle": 2,
    "convolution": 5,
    "deconvolution": 6,
    "eltwise": 7,
    "softmax": 8,
    "pooling": 9,
    "lrn": 10,
    "batch_normalization": 11,
    "layer_normalization": 12,
    "inner_product": 13,
    "rnn": 14,
    "binary": 16,
    "logsoftmax": 17,
    "matmul": 18,
    "resampling": 19,
    "pooling_v2": 20,
    "reduction": 21,
    "prelu": 22,
    "softmax_v2": 23,
    "embedding_bag": 24,
}
ALGORITHMS = {"direct": 1, "winograd": 2, "auto": 3}
POOLING = {"max": 511, "avg_include_padding": 767, "avg_exclude_padding": 1023}
RESAMPLING = {"nearest": 196592, "linear": 196593}
REDUCTION = {
    "max": 196594,
    "min": 196595,
    "sum": 196596,
    "mul": 196597,
    "mean": 196598,
    "norm_lp_max": 196599,
    "norm_lp_sum": 196600,
    "norm_lp_power_p_max": 196601,
    "norm_lp_power_p_sum": 196602,
}
EMBEDDING_BAG = {"sum": 16384, "mean": 16385, "max": 16386}
LRN = {"across_channels": 2815, "within_channel": 3071}
F32, S32 = 3, 4
NORM_GLOBAL_STATS, NORM_RELU, NORM_SCALE, NORM_SHIFT = 1, 4, 8, 16


class OpDesc:
    """A filled operation descriptor: ``ptr`` is the C struct, ``kind`` the primitive's name.

    descs   the memory descriptors given, by role ("src", "weights", "bias", "dst", ...)
    params  the other arguments, hashable, by name
    made_by  name of the function that made it, its positional and its keyword arguments: they make it again
    """

    __slots__ = ("descs", "kind", "made_by", "params", "ptr")

    def __init__(
        self, kind: str, ptr: Any, descs: dict[str, MemoryDesc | None], params: dict[str, Any] | None = None
    ) -> None:
        self.kind = kind
        self.ptr = ptr
        self.descs = descs
        self.params = params or {}
        self.made_by: tuple[str, tuple[Any, ...], Mapping[str, Any]] | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """A hashable value: equal keys make equal primitives."""
        return (self.kind, tuple(self.descs.items()), tuple(self.params.items()))

    @property
    def content(self) -> bytes:
        """The bytes of the C struct; of a reorder, which has none, those of its descriptors."""
        if self.ptr is None:
            return b"".join(desc.key for desc in self.descs.values() if desc is not None)
        return bytes(native().ffi.buffer(self.ptr))

    def __repr__(self) -> str:
        parts = [f"{name} {desc!r}"[: len(name) + 120] for name, desc in self.descs.items() if desc is not None]
        parts += [f"{name}={value}" for name, value in self.params.items()]
        return f"OpDesc({self.kind}: {', '.join(parts)})"


_P = ParamSpec("_P")
MAKERS: dict[str, Callable[..., OpDesc]] = {}
"""The functions that describe an operation, by name."""


def describing(function: Callable[_P, OpDesc]) -> Callable[_P, OpDesc]:
    """Let the descriptors that function makes know its name and arguments."""

    @functools.wraps(function)
    def describe(*args: _P.args, **kwargs: _P.kwargs) -> OpDesc:
        op = function(*args, **kwargs)
        op.made_by = function.__name__, args, kwargs
        return op

    MAKERS[function.__name__] = describe
    return describe


def fill(
    kind: str,
    descs: dict[str, MemoryDesc | None],
    *,
    params: dict[str, Any] | None = None,
    _fields: Mapping[str, MemoryDesc | None] | None = None,
    **values: Any,
) -> OpDesc:
    """Return an OpDesc of a zeroed struct with the given fields; descs go to fields named <role>_desc unless _fields
    says where.
    """
    ptr = native().ffi.new(f"zendnn_{kind}_desc_t *")
    ptr.primitive_kind = KINDS[kind]
    for name, value in values.items():
        setattr(ptr, name, value)
    for name, desc in (_fields or {f"{role}_desc": desc for role, desc in descs.items()}).items():
        if desc is not None:
            setattr(ptr, name, desc.ptr[0])
    return OpDesc(kind, ptr, descs, params)


def need(**descs: Any) -> None:
    """Check that each is a MemoryDesc without empty dimensions: primitives on empty memory are undefined (matmul
    divides by zero).
    """
    for name, desc in descs.items():
        if not isinstance(desc, MemoryDesc):
            raise TypeError(f"{name} must be a MemoryDesc, got {type(desc).__name__}")
        if 0 in desc.dims:
            raise ValueError(f"{name} has an empty dimension, {list(desc.dims)}: there is nothing to compute")


def need_layout(desc: MemoryDesc, name: str) -> None:
    if desc.is_any:
        raise ValueError(f"{name} must have a layout: this primitive does not choose one for 'any'")


def need_written(desc: MemoryDesc, name: str) -> None:
    """Check that a result's elements have addresses of their own: kernels write rows as if they lay apart."""
    if desc.strides is None:
        return
    reach = 0
    for step, size in sorted((s, n) for s, n in zip(desc.strides, desc.dims, strict=True) if n > 1):
        if step <= reach:
            raise ValueError(f"{name} has strides {desc.strides}, by which elements of the result share an address")
        reach += step * (size - 1)


def need_rank(desc: MemoryDesc, rank: int, name: str) -> None:
    if desc.ndim != rank:
        raise ValueError(f"{name} must have {rank} dimensions, got {desc}")


def need_equal(got: Any, expected: Any, what: str, *about: Any) -> None:
    """Raise ValueError unless both are equal. about: what `what` has {} for, written out only then."""
    if got != expected:
        raise ValueError(f"{what.format(*about) if about else what}: got {got}, expected {expected}")


def need_bias(bias: MemoryDesc | None, dims: tuple[int, ...]) -> None:
    if bias is not None:
        need(bias=bias)
        need_equal(bias.dims, dims, "bias dims against the output channels")
        need_dense_bias(bias)


def need_dense_bias(bias: MemoryDesc) -> None:
    """Check that a bias is dense: the library reads it so, whatever its strides say."""
    if bias.strides is not None and any(
        step != dense for step, dense, n in zip(bias.strides, dense_strides(bias.dims), bias.dims, strict=True) if n > 1
    ):
        raise ValueError(f"bias has strides {bias.strides}, which the library ignores: make it dense and row-major")


def need_broadcastable(desc: MemoryDesc, to: MemoryDesc, name: str) -> None:
    need(**{name: desc})
    need_rank(desc, to.ndim, name)
    for i, (d, t) in enumerate(zip(desc.dims, to.dims, strict=False)):
        if d not in (1, t):
            raise ValueError(f"dim {i} of {name} is {d}: it must be 1 or {t}")


def normal_axis(axis: Any, desc: MemoryDesc) -> int:
    axis = checks.as_int(axis, "axis", minimum=-desc.ndim, maximum=desc.ndim - 1)
    return axis % desc.ndim


def accumulator(src: MemoryDesc) -> int:
    return S32 if src.dtype in INT8 or src.dtype == torch.int32 else F32


Window = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def window_of(
    spatial: int, strides: Any, dilation: Any, padding_l: Any, padding_r: Any, negative_right: bool = False
) -> Window:
    strides = checks.as_dims(strides, "strides", rank=spatial, minimum=1)
    dilation = checks.as_dims(dilation, "dilation", rank=spatial, minimum=1)
    padding_l = checks.as_dims(padding_l, "padding_l", rank=spatial)
    padding_r = (
        padding_l
        if padding_r is None
        else checks.as_dims(padding_r, "padding_r", rank=spatial, minimum=-(2**31) if negative_right else 0)
    )
    for name, values in (
        ("strides", strides),
        ("dilation", dilation),
        ("padding_l", padding_l),
        ("padding_r", padding_r),
    ):
        if max(values) >= 2**31:
            raise ValueError(f"{name} {values} does not fit the library's 32-bit arithmetic")
    return strides, dilation, padding_l, padding_r


def window_output(size: int, kernel: int, stride: int, dilation: int, left: int, right: int, axis: int) -> int:
    reach = (kernel - 1) * dilation + 1
    if size + left + right < reach:
        raise ValueError(
            f"the kernel reaches over {reach} elements in spatial dim {axis}, src with padding has "
            f"{size + left + right}"
        )
    return (size + left + right - reach) // stride + 1


def conv_weights(weights: MemoryDesc, spatial: int) -> tuple[int, int, int, tuple[int, ...]]:
    """Return (groups, outputs per group, inputs per group, kernel)."""
    if weights.ndim == spatial + 2:
        return 1, weights.dims[0], weights.dims[1], weights.dims[2:]
    if weights.ndim == spatial + 3:
        return weights.dims[0], weights.dims[1], weights.dims[2], weights.dims[3:]
    raise ValueError(f"weights must have {spatial + 2} dimensions, or {spatial + 3} with groups first, got {weights}")
