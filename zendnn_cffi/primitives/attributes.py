"""Post-operations and attributes of primitives, and the ids under which execution arguments are passed.

Source: zendnn.h and zendnn_types.h of ZenDNN 5.1, groups zendnn_api_attributes and zendnn_api_primitives_common
(argument ids differ from oneDNN's: these are the values the library accepts).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch

from zendnn_cffi.errors import check
from zendnn_cffi.primitives import checks
from zendnn_cffi.primitives.handles import Immutable, NotCopyable, native, new_handle
from zendnn_cffi.primitives.memory import MemoryDesc, data_type, pad

ARG_SRC = ARG_SRC_0 = 1
ARG_SRC_1 = ARG_SRC_ITER = 2
ARG_SRC_2 = ARG_SRC_ITER_C = 3
ARG_SRC_3 = 4
ARG_DST = 17
ARG_DST_ITER = 18
ARG_DST_ITER_C = 19
ARG_WEIGHTS = ARG_SCALE_SHIFT = 33
ARG_WEIGHTS_ITER = 34
ARG_WEIGHTS_PROJECTION = 36
ARG_BIAS = 41
ARG_MEAN = 49
ARG_VARIANCE = 50
ARG_SCALE = 51
ARG_SHIFT = 52
ARG_WORKSPACE = 64
ARG_SCRATCHPAD = 80
ARG_ATTR_OUTPUT_SCALES = 513
ARG_ATTR_WOQ_SCALES = 517
ARG_ATTR_SCALES = 4096
ARG_ATTR_ZERO_POINTS = 8192
ARG_ATTR_POST_OP_DW = 16384
ARG_ATTR_POST_OP_BASE = 32768

MAX_POST_OPS = 32
RUNTIME = "runtime"
_RUNTIME_F32 = struct.unpack("f", struct.pack("I", 0x7FC000D0))[0]
_RUNTIME_S32 = -(2**31)

# Eltwise kinds, zendnn_alg_kind_t; kind(alpha, beta) as in the table of docs/low-level.md
ELTWISE = {
    "relu": 31,
    "pow": 32,
    "tanh": 47,
    "gelu_erf": 48,
    "elu": 63,
    "round": 64,
    "square": 79,
    "logsigmoid": 80,
    "abs": 95,
    "mish": 96,
    "sqrt": 111,
    "hardswish": 112,
    "linear": 127,
    "bounded_relu": 143,
    "soft_relu": 159,
    "logistic": 175,
    "exp": 191,
    "gelu_tanh": 207,
    "swish": 223,
    "log": 239,
    "clip": 255,
    "clip_v2": 12,
}
BINARY = {
    "add": 131056,
    "mul": 131057,
    "max": 131058,
    "min": 131059,
    "div": 131060,
    "sub": 131061,
    "ge": 131062,
    "gt": 131063,
    "le": 131064,
    "lt": 131065,
    "eq": 131066,
    "ne": 131067,
}
COMPARISONS = frozenset({"ge", "gt", "le", "lt", "eq", "ne"})


def arg_post_op(index: int, arg: int = ARG_SRC_1) -> int:
    """Return the argument id of post-op ``index``: its second source (binary) or, with ARG_WEIGHTS, its weights
    (prelu).
    """
    return ARG_ATTR_POST_OP_BASE * (index + 1) | arg


def kind_value(table: Mapping[str, int], kind: str, name: str) -> int:
    """Return the number of an algorithm name. Raises ValueError listing the names there are."""
    value = table.get(kind) if isinstance(kind, str) else None
    if value is None:
        raise ValueError(f"{name} must be one of {', '.join(table)}; got {kind!r}")
    return value


class PostOps(Immutable):
    """Operations applied to a primitive's result, in order: immutable, each method returns a longer chain.

    Entries are tuples: ("eltwise", kind, alpha, beta, scale), ("sum", scale, dtype), ("binary", kind, MemoryDesc),
    ("prelu", mask), ("depthwise", weights_dtype, bias_dtype, dst_dtype, kernel, stride, padding). At most 32.
    """

    __slots__ = ("_hash", "entries")
    entries: tuple[tuple[Any, ...], ...]
    _hash: int | None

    def __init__(self, entries: Sequence[tuple[Any, ...]] = ()) -> None:
        if not isinstance(entries, Sequence) or not all(isinstance(entry, tuple) for entry in entries):
            raise TypeError(f"entries must be a sequence of tuples, got {entries!r}: use the methods of PostOps")
        self._set(entries=tuple(entries), _hash=None)
        if len(self.entries) > MAX_POST_OPS:
            raise ValueError(f"a primitive takes at most {MAX_POST_OPS} post-ops, got {len(self.entries)}")

    def _with(self, entry: tuple[Any, ...]) -> PostOps:
        return PostOps((*self.entries, entry))

    def eltwise(self, kind: str, alpha: float = 0.0, beta: float = 0.0, scale: float = 1.0) -> PostOps:
        """Append x -> scale * kind(x; alpha, beta). "hardsigmoid", which the library lacks, becomes two entries: linear
        and clip.
        """
        if kind == "hardsigmoid":
            return self.eltwise("linear", 1 / 6, 0.5).eltwise("clip", 0.0, 1.0, scale)
        kind_value(ELTWISE, kind, "kind")
        return self._with(
            (
                "eltwise",
                kind,
                checks.as_float(alpha, "alpha"),
                checks.as_float(beta, "beta"),
                checks.as_float(scale, "scale"),
            )
        )

    def sum(self, scale: float = 1.0, dtype: torch.dtype | None = None) -> PostOps:
        """Append x -> x + scale * (what dst held before). dtype reads dst as another type of the same width (s8 as
        u8).
        """
        if dtype is not None:
            data_type(dtype)
        return self._with(("sum", checks.as_float(scale, "scale"), dtype))

    def binary(self, kind: str, desc: MemoryDesc) -> PostOps:
        """Append x -> kind(x, other); other (argument ``arg_post_op(i)``) has dst's rank, each dim equal to dst's or
        1.
        """
        kind_value(BINARY, kind, "kind")
        if not isinstance(desc, MemoryDesc):
            raise TypeError(f"desc must be a MemoryDesc, got {type(desc).__name__}")
        return self._with(("binary", kind, desc))

    def prelu(self, mask: int) -> PostOps:
        """Append x -> x > 0 ? x : w * x, with f32 weights (``arg_post_op(i, ARG_WEIGHTS)``); mask bit d set: w varies
        along d.
        """
        return self._with(("prelu", checks.as_int(mask, "mask", minimum=0, maximum=2**checks.MAX_RANK - 1)))

    def depthwise(
        self,
        weights_dtype: torch.dtype = torch.float32,
        bias_dtype: torch.dtype | None = torch.float32,
        dst_dtype: torch.dtype = torch.float32,
        *,
        kernel: int = 3,
        stride: int = 1,
        padding: int = 1,
    ) -> PostOps:
        """Append a depthwise convolution to a 1x1 convolution; arguments ``ARG_ATTR_POST_OP_DW | ARG_WEIGHTS`` and ``|
        ARG_BIAS``.
        """
        data_type(weights_dtype, "weights_dtype")
        data_type(dst_dtype, "dst_dtype")
        if bias_dtype is not None:
            data_type(bias_dtype, "bias_dtype")
        sizes = tuple(
            checks.as_int(v, n, minimum=m, maximum=1024)
            for v, n, m in ((kernel, "kernel", 1), (stride, "stride", 1), (padding, "padding", 0))
        )
        return self._with(("depthwise", weights_dtype, bias_dtype, dst_dtype, *sizes))

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.entries)

    def __eq__(self, other: object) -> bool:
        return self.entries == other.entries if isinstance(other, PostOps) else NotImplemented

    def __hash__(self) -> int:
        if self._hash is None:
            self._set(_hash=hash(self.entries))
        return cast(int, self._hash)

    def __repr__(self) -> str:
        return "PostOps(" + ", ".join(f"{e[0]}{e[1:]}" for e in self.entries) + ")"

    def _handle(self) -> Any:
        """Return a new ``zendnn_post_ops_t`` with these entries."""
        n = native()
        lib = n.lib
        handle = new_handle(
            lib.zendnn_post_ops_create, lib.zendnn_post_ops_destroy, "zendnn_post_ops_t", "creating post-ops"
        )
        for index, entry in enumerate(self.entries):
            check(self._append(lib, n.null, handle, entry), f"appending post-op {index}, {entry[0]}{entry[1:]}")
        return handle

    @staticmethod
    def _append(lib: Any, null: Any, handle: Any, entry: tuple[Any, ...]) -> int:
        match entry:
            case ("eltwise", kind, alpha, beta, scale):
                return int(lib.zendnn_post_ops_append_eltwise(handle, scale, ELTWISE[kind], alpha, beta))
            case ("sum", scale, None):
                return int(lib.zendnn_post_ops_append_sum(handle, scale))
            case ("sum", scale, dtype):
                return int(lib.zendnn_post_ops_append_sum_v2(handle, scale, data_type(dtype)))
            case ("binary", kind, desc):
                return int(lib.zendnn_post_ops_append_binary(handle, BINARY[kind], desc.ptr))
            case ("prelu", mask):
                return int(lib.zendnn_post_ops_append_prelu(handle, mask))
            case ("depthwise", weights, bias, dst, kernel, stride, padding):
                return int(
                    lib.zendnn_post_ops_append_dw(
                        handle,
                        data_type(weights),
                        0 if bias is None else data_type(bias),
                        data_type(dst),
                        kernel,
                        stride,
                        padding,
                        0,
                        0,
                        null,
                    )
                )
        raise ValueError(f"unknown post-op {entry!r}: build chains with the methods of PostOps")


class Attr(Immutable, NotCopyable):
    """Attributes of a primitive; immutable, owns a ``zendnn_primitive_attr_t``.

    post_ops       PostOps
    scratchpad     "user" (default): the primitive's working memory is an argument, which ``Primitive.execute`` supplies
                   when it is left out; "library": the library keeps it per thread, and the primitive then runs only in
                   the thread that created it
    output_scales  one float, a sequence of floats (per channel, with output_scales_mask), or "runtime" (argument
                   ARG_ATTR_OUTPUT_SCALES)
    zero_points    {ARG_SRC or ARG_DST: mask}, values given at execution (argument ``ARG_ATTR_ZERO_POINTS | arg``,
                   int32)
    scales         {argument id: (mask, dtype)} for int8 matmul, values given at execution (``ARG_ATTR_SCALES | arg``)
    woq_scales     (mask, (group_k, group_n), dtype) for matmul with 4-bit weights, values at execution
                   (ARG_ATTR_WOQ_SCALES)
    """

    __slots__ = (
        "handle", "key", "output_scales", "output_scales_mask", "post_ops", "runtime_args", "scales_key", "scratchpad"
    )  # fmt: skip
    post_ops: PostOps
    scratchpad: str
    output_scales: tuple[float, ...] | str | None
    output_scales_mask: int
    runtime_args: Mapping[int, tuple[Any, ...]]  # values given at execution: argument id -> (mask, dtype, ...)
    handle: Any
    key: tuple[Any, ...]
    scales_key: tuple[Any, ...]  # what changes numbers beside post-ops; empty where they stay as they are

    def __init__(
        self,
        post_ops: PostOps | None = None,
        scratchpad: str = "user",
        output_scales: Any = None,
        *,
        output_scales_mask: int = 0,
        zero_points: Mapping[int, int] | None = None,
        scales: Mapping[int, tuple[int, torch.dtype]] | None = None,
        woq_scales: tuple[int, tuple[int, int], torch.dtype] | None = None,
    ) -> None:
        if post_ops is not None and not isinstance(post_ops, PostOps):
            raise TypeError(f"post_ops must be a PostOps, got {type(post_ops).__name__}")
        if not isinstance(scratchpad, str) or scratchpad not in ("user", "library"):
            raise ValueError(f"scratchpad must be 'user' or 'library', got {scratchpad!r}")
        lib = native().lib
        self._set(
            post_ops=post_ops if post_ops is not None else _NO_POST_OPS,
            scratchpad=scratchpad,
            runtime_args={},
            output_scales_mask=_mask(output_scales_mask, "output_scales_mask"),
            handle=new_handle(
                lib.zendnn_primitive_attr_create,
                lib.zendnn_primitive_attr_destroy,
                "zendnn_primitive_attr_t",
                "creating attributes",
            ),
        )
        if scratchpad == "user":
            check(lib.zendnn_primitive_attr_set_scratchpad_mode(self.handle, 1), "asking for a user scratchpad")
        if self.post_ops.entries:
            check(lib.zendnn_primitive_attr_set_post_ops(self.handle, self.post_ops._handle()), "setting post-ops")
        output_key = self._set_output_scales(output_scales)
        for arg, mask in _by_argument(zero_points, "zero_points", "a mask"):
            self._set_zero_points(arg, mask)
        for arg, entry in _by_argument(scales, "scales", "(mask, dtype)"):
            self._set_scales(arg, *_parts(entry, f"the scales of argument {arg}", "(mask, dtype)"))
        if woq_scales is not None:
            self._set_woq_scales(*_parts(woq_scales, "woq_scales", "(mask, (group_k, group_n), dtype)"))
        frozen = tuple(sorted(self.runtime_args.items(), key=lambda item: item[0]))
        scales_key = (output_key, self.output_scales_mask, frozen)
        self._set(
            output_scales=output_key,
            key=(self.post_ops, scratchpad, *scales_key),
            scales_key=scales_key if any(scales_key) else (),
            runtime_args=MappingProxyType(self.runtime_args),
        )

    def _will_be_given(self, arg: int, *what: Any) -> None:
        self._set(runtime_args={**self.runtime_args, arg: what})

    def _set_output_scales(self, scales: Any) -> tuple[float, ...] | str | None:
        if scales is None:
            return None
        n = native()
        if isinstance(scales, str):
            if scales != RUNTIME:
                raise ValueError(f"output_scales must be numbers or 'runtime', got {scales!r}")
            values: tuple[float, ...] = (_RUNTIME_F32,)
            self._will_be_given(ARG_ATTR_OUTPUT_SCALES, self.output_scales_mask, torch.float32)
        else:
            sequence = scales.tolist() if hasattr(scales, "tolist") else scales
            values = (
                tuple(checks.as_float(v, "output_scales") for v in sequence)
                if isinstance(sequence, Sequence)
                else (checks.as_float(sequence, "output_scales"),)
            )
        if not values or len(values) > 1 and not self.output_scales_mask:
            raise ValueError(
                f"{len(values)} output_scales need an output_scales_mask saying along which dims they vary (2: "
                "channels)"
            )
        array = n.ffi.new("float[]", values)
        check(
            n.lib.zendnn_primitive_attr_set_output_scales(self.handle, len(values), self.output_scales_mask, array),
            "setting output scales",
        )
        return RUNTIME if isinstance(scales, str) else values

    def _set_zero_points(self, arg: int, mask: int) -> None:
        if arg not in (ARG_SRC, ARG_WEIGHTS, ARG_DST):
            raise ValueError(f"zero_points are for ARG_SRC, ARG_WEIGHTS or ARG_DST, got argument {arg!r}")
        mask = _mask(mask, "the zero point mask")
        n = native()
        value = n.ffi.new("int32_t[1]", [_RUNTIME_S32])
        check(
            n.lib.zendnn_primitive_attr_set_zero_points(self.handle, arg, 1, mask, value),
            f"setting zero points of argument {arg}",
        )
        self._will_be_given(ARG_ATTR_ZERO_POINTS | arg, mask, torch.int32)

    def _set_scales(self, arg: int, mask: int, dtype: torch.dtype) -> None:
        if arg not in (ARG_SRC, ARG_WEIGHTS, ARG_DST):
            raise ValueError(f"scales are for ARG_SRC, ARG_WEIGHTS or ARG_DST, got argument {arg!r}")
        if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"scales must be float32 or bfloat16, got {dtype!r}")
        mask = _mask(mask, "the scales mask")
        n = native()
        check(
            n.lib.zendnn_primitive_attr_set_scales_mask(self.handle, arg, mask, 0, n.null, data_type(dtype)),
            f"setting scales of argument {arg}",
        )
        self._will_be_given(ARG_ATTR_SCALES | arg, mask, dtype)

    def _set_woq_scales(self, mask: int, groups: Sequence[int], dtype: torch.dtype) -> None:
        if not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"woq_scales must be float32 or bfloat16, got {dtype!r}")
        groups = checks.as_dims(groups, "woq_scales groups", rank=2, minimum=1)
        mask = _mask(mask, "the woq_scales mask")
        check(
            native().lib.zendnn_primitive_attr_set_woq_weight_scale(
                self.handle, mask, 2, pad(groups), data_type(dtype)
            ),
            "setting 4-bit weight scales",
        )
        self._will_be_given(ARG_ATTR_WOQ_SCALES, mask, dtype, groups)

    def __eq__(self, other: object) -> bool:
        return self.key == other.key if isinstance(other, Attr) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Attr({self.post_ops!r}, scratchpad={self.scratchpad!r})"


def _mask(value: Any, name: str) -> int:
    return checks.as_int(value, name, minimum=0, maximum=2**checks.MAX_RANK - 1)


def _by_argument(given: Any, name: str, what: str) -> list[tuple[int, Any]]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must map argument ids such as ARG_SRC to {what}, got {checks.shown(given)}")
    return list(given.items())


def _parts(entry: Any, name: str, form: str) -> Sequence[Any]:
    if not isinstance(entry, (tuple, list)) or len(entry) != form.replace("(group_k, group_n)", "g").count(",") + 1:
        raise TypeError(f"{name} must be {form}, got {checks.shown(entry)}")
    return entry


_NO_POST_OPS = PostOps()
