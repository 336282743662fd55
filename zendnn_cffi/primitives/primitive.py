"""Primitive descriptors and primitives: choosing an implementation, querying its layouts, executing it.

Source: zendnn.h of ZenDNN 5.1, group zendnn_api_primitives_common.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from zendnn_cffi.engine.library import load
from zendnn_cffi.errors import UnsupportedError, check
from zendnn_cffi.primitives import allocation, attributes, checks, primitive_cache
from zendnn_cffi.primitives.attributes import (  # noqa: F401  (the argument ids are part of this module's interface)
    ARG_ATTR_OUTPUT_SCALES,
    ARG_ATTR_POST_OP_DW,
    ARG_ATTR_SCALES,
    ARG_ATTR_WOQ_SCALES,
    ARG_ATTR_ZERO_POINTS,
    ARG_BIAS,
    ARG_DST,
    ARG_DST_ITER,
    ARG_DST_ITER_C,
    ARG_MEAN,
    ARG_SCALE,
    ARG_SCALE_SHIFT,
    ARG_SCRATCHPAD,
    ARG_SHIFT,
    ARG_SRC,
    ARG_SRC_0,
    ARG_SRC_1,
    ARG_SRC_2,
    ARG_SRC_3,
    ARG_VARIANCE,
    ARG_WEIGHTS,
    ARG_WEIGHTS_ITER,
    ARG_WEIGHTS_PROJECTION,
    ARG_WORKSPACE,
    Attr,
    PostOps,
    arg_post_op,
)
from zendnn_cffi.primitives.descriptors import NORM_GLOBAL_STATS, NORM_SCALE, NORM_SHIFT, OpDesc
from zendnn_cffi.primitives.handles import NotCopyable, native
from zendnn_cffi.primitives.known_problems import known_problem
from zendnn_cffi.primitives.labels import primitive_label, profiler
from zendnn_cffi.primitives.memory import Engine, Memory, MemoryDesc, Stream, default_stream, engine_or_shared, pin
from zendnn_cffi.primitives.verification import first_use

_QUERIES = {"src": 129, "weights": 131, "dst": 133, "workspace": 135, "scratchpad": 136, "exec_arg": 255}
_ITERATOR_ENDS = 4
_no_event: AbstractContextManager[Any] = nullcontext()
_PLAIN_ARGS = (
    ARG_SRC_0,
    ARG_SRC_1,
    ARG_SRC_2,
    ARG_SRC_3,
    ARG_DST,
    ARG_WEIGHTS,
    ARG_BIAS,
    ARG_MEAN,
    ARG_VARIANCE,
    ARG_SCALE,
    ARG_SHIFT,
    ARG_WORKSPACE,
    ARG_SCRATCHPAD,
)
_WRITTEN = frozenset((ARG_DST, ARG_DST_ITER, ARG_DST_ITER_C, ARG_WORKSPACE, ARG_SCRATCHPAD))
_RECURRENT_ARGS = (ARG_WEIGHTS_ITER, ARG_WEIGHTS_PROJECTION, ARG_DST_ITER, ARG_DST_ITER_C)
_NAMES = {
    ARG_SRC_0: "src",
    ARG_SRC_1: "src_1",
    ARG_SRC_2: "src_2",
    ARG_SRC_3: "src_3",
    ARG_DST: "dst",
    ARG_WEIGHTS: "weights",
    ARG_WEIGHTS_ITER: "weights_iter",
    ARG_WEIGHTS_PROJECTION: "projection",
    ARG_DST_ITER: "dst_iter",
    ARG_DST_ITER_C: "dst_iter_c",
    ARG_BIAS: "bias",
    ARG_MEAN: "mean",
    ARG_VARIANCE: "variance",
    ARG_SCALE: "scale",
    ARG_SHIFT: "shift",
    ARG_WORKSPACE: "workspace",
    ARG_SCRATCHPAD: "scratchpad",
    ARG_ATTR_OUTPUT_SCALES: "output scales",
    ARG_ATTR_WOQ_SCALES: "4-bit weight scales",
}


def arg_name(arg: int) -> str:
    """Return a readable name of an argument id."""
    if arg in _NAMES:
        return _NAMES[arg]
    if arg >= attributes.ARG_ATTR_POST_OP_BASE:
        index, inner = divmod(arg, attributes.ARG_ATTR_POST_OP_BASE)
        return f"{_NAMES.get(inner, inner)} of post-op {index - 1}"
    for base, name in (
        (ARG_ATTR_POST_OP_DW, "the depthwise post-op"),
        (ARG_ATTR_ZERO_POINTS, "zero points"),
        (ARG_ATTR_SCALES, "scales"),
    ):
        if arg & base:
            return f"{_NAMES.get(arg - base, arg - base)} ({name})"
    return f"argument {arg}"


class PrimitiveDesc(NotCopyable):
    """An operation with one implementation chosen for it: owns a ``zendnn_primitive_desc_t``.

    op_desc  OpDesc
    attr     Attr; None is Attr(): no post-ops, user scratchpad
    The first implementation is taken of which no wrong answers are known or found (``problem``). Raises
    UnsupportedError where there is none.
    """

    __slots__ = (
        "_descs",
        "_expected",
        "_implementation",
        "_key",
        "attr",
        "engine",
        "engine_handle",
        "handle",
        "num_threads",
        "op",
    )

    op: OpDesc | None

    def __init__(self, op_desc: OpDesc, attr: Attr | None = None, engine: Engine | None = None) -> None:
        _check_kinds(op_desc, attr)
        n = native()
        self._start(op_desc, attr or Attr(), engine_or_shared(engine))
        slot = n.ffi.new("zendnn_primitive_desc_t *")
        status = n.lib.zendnn_primitive_desc_create(slot, op_desc.ptr, self.attr.handle, self.engine_handle, n.null)
        if status:
            check(status, f"choosing an implementation for {op_desc} with {self.attr.post_ops}{_wants_avx512(op_desc)}")
        self._adopt(slot[0])
        if self.problem is not None:
            self._take_next()

    def _start(self, op: OpDesc | None, attr: Attr, engine: Engine) -> None:
        self.op, self.attr, self.engine, self.num_threads = op, attr, engine, torch.get_num_threads()
        self.engine_handle = engine.handle  # kept here: the engine may be closed before the primitive is made

    def _adopt(self, handle: Any) -> None:
        n = native()
        self._take(n.ffi.gc(handle, n.lib.zendnn_primitive_desc_destroy))

    def _take(self, handle: Any) -> None:
        self.handle = handle
        self._descs: dict[tuple[str, int], MemoryDesc | None] = {}
        self._implementation: str | None = None
        self._expected: dict[int, MemoryDesc] | None = None
        self._key: bytes | None = None

    def _take_next(self) -> None:
        refused = []
        for other in self.implementations(everything=True):
            problem = other.problem
            if problem is None:
                return self._take(other.handle)
            refused.append(f"{other.implementation} {problem}")
        raise UnsupportedError(
            f"choosing an implementation for {self.op} with {self.attr.post_ops}: none is known to be right "
            f"({'; '.join(refused)}). Use another layout, or fewer post-ops."
        )

    @classmethod
    def reorder(
        cls, src_desc: MemoryDesc, dst_desc: MemoryDesc, attr: Attr | None = None, engine: Engine | None = None
    ) -> PrimitiveDesc:
        """Return the descriptor of a copy between layouts and data types (arguments ARG_SRC, ARG_DST)."""
        for name, desc in (("src_desc", src_desc), ("dst_desc", dst_desc)):
            if not isinstance(desc, MemoryDesc):
                raise TypeError(f"{name} must be a MemoryDesc, got {type(desc).__name__}")
            if desc.is_any:
                raise ValueError(f"{name} leaves the layout open ('any'): a reorder needs both layouts")
        if src_desc.dims != dst_desc.dims:
            raise ValueError(
                f"src_desc has dims {list(src_desc.dims)}, dst_desc {list(dst_desc.dims)}: a reorder keeps them"
            )
        op = OpDesc("reorder", None, {"src": src_desc, "dst": dst_desc})
        _check_kinds(op, attr)
        n = native()
        pd = cls.__new__(cls)
        pd._start(op, attr or Attr(), engine_or_shared(engine))
        slot = n.ffi.new("zendnn_primitive_desc_t *")
        status = n.lib.zendnn_reorder_primitive_desc_create(
            slot, src_desc.ptr, pd.engine_handle, dst_desc.ptr, pd.engine_handle, pd.attr.handle
        )
        if status:
            check(status, f"choosing a reorder from {src_desc} to {dst_desc}")
        pd._adopt(slot[0])
        if (problem := pd.problem) is not None:
            raise UnsupportedError(f"reordering {src_desc} to {dst_desc}: {pd.implementation} {problem}")
        return pd

    def implementations(self, *, everything: bool = False) -> Iterator[PrimitiveDesc]:
        """Yield a PrimitiveDesc per implementation, best first; those with a problem only if ``everything``."""
        everything = checks.as_bool(everything, "everything")
        if self.op is None or self.op.ptr is None:
            yield self
            return
        yield from self._listed(self.op, self.attr, self.engine, everything)

    @classmethod
    def every(cls, op_desc: OpDesc, attr: Attr | None = None) -> list[PrimitiveDesc]:
        """Return what PrimitiveDesc(op_desc, attr).implementations() yields, in less time: the library chooses none
        first. Raises as PrimitiveDesc, but returns an empty list where no implementation is known to be right.
        """
        _check_kinds(op_desc, attr)
        return list(cls._listed(op_desc, attr or Attr(), engine_or_shared(None), False))

    @staticmethod
    def _listed(op: OpDesc, attr: Attr, engine: Engine, everything: bool) -> Iterator[PrimitiveDesc]:
        n = native()
        slot = n.ffi.new("zendnn_primitive_desc_iterator_t *")
        check(
            n.lib.zendnn_primitive_desc_iterator_create(slot, op.ptr, attr.handle, engine.handle, n.null),
            "listing the implementations of {}",
            op,
        )
        iterator = n.ffi.gc(slot[0], n.lib.zendnn_primitive_desc_iterator_destroy)
        found: dict[Hashable, PrimitiveDesc] = {}
        while True:
            pd = PrimitiveDesc.__new__(PrimitiveDesc)
            pd._start(op, attr, engine)
            pd._adopt(n.lib.zendnn_primitive_desc_iterator_fetch(iterator))
            found.setdefault(pd._identity, pd)
            status = n.lib.zendnn_primitive_desc_iterator_next(iterator)
            if status == _ITERATOR_ENDS:
                break
            check(status, "listing the implementations of {}", op)
        yield from (pd for pd in found.values() if everything or pd.problem is None)

    @property
    def implementation(self) -> str:
        """The implementation's name, such as "brgconv:avx512_core"."""
        if self._implementation is None:
            self._implementation = primitive_cache.implementation_name(self.handle)
        return self._implementation

    @property
    def known_problem(self) -> str | None:
        """Why this implementation gives wrong answers here, or None."""
        return (
            known_problem(self.op, self.attr.post_ops, self.implementation, self.src_desc, self.dst_desc, self.attr)
            if self.op
            else None
        )

    @property
    def problem(self) -> str | None:
        """Why this implementation must not be used here, or None: its known problem, else what `make verify-library`
        or a check before its first use found.
        """
        return self.known_problem or first_use.problem(self)

    def made_again(self) -> PrimitiveDesc | None:
        """Return the same implementation with the same layouts for the number of threads of now, None if there is none.

        The scratchpad may have another size. None, too, for what has no operation descriptor (concat, sum).
        """
        if self.op is not None and self.op.kind == "reorder":
            src, dst = self.op.descs["src"], self.op.descs["dst"]
            assert src is not None and dst is not None
            others: Iterator[PrimitiveDesc] = iter([PrimitiveDesc.reorder(src, dst, self.attr, self.engine)])
        elif self.op is not None and self.op.ptr is not None:
            others = self.implementations(everything=True)
        else:
            return None
        return next((other for other in others if other._identity == self._identity), None)

    @property
    def key(self) -> bytes:
        """Equal for descriptors of equal primitives."""
        if self._key is None:
            layouts = self.src_desc, self.weights_desc, self.bias_desc, self.dst_desc, self.scratchpad_desc
            engine = int(native().ffi.cast("intptr_t", self.engine_handle))
            others = (self.attr.key, self.implementation, engine, self.num_threads)
            self._key = primitive_cache.digest(self.op.content if self.op else b"", *layouts, others)
        return self._key

    @property
    def _identity(self) -> Hashable:
        return self.implementation, self.src_desc, self.weights_desc, self.bias_desc, self.dst_desc

    def create(self) -> Primitive:
        """Return an executable primitive, made for the number of threads of now."""
        return Primitive(self)

    def query_md(self, what: str, index: int = 0) -> MemoryDesc | None:
        """Return a layout: what is "src", "weights", "dst", "workspace", "scratchpad", or "exec_arg" with an argument
        id as index.
        """
        key = (what, index)
        if key not in self._descs:
            if what not in _QUERIES:
                raise ValueError(f"what must be one of {', '.join(_QUERIES)}, got {what!r}")
            if not isinstance(index, int) or not 0 <= index < 2**31:
                raise ValueError(f"index must be a small non-negative integer, got {index!r}")
            self._descs[key] = MemoryDesc._wrap(
                native().lib.zendnn_primitive_desc_query_md(self.handle, _QUERIES[what], index)
            )
        return self._descs[key]

    @property
    def src_desc(self) -> MemoryDesc | None:
        return self.query_md("src")

    @property
    def weights_desc(self) -> MemoryDesc | None:
        return self.query_md("weights")

    @property
    def bias_desc(self) -> MemoryDesc | None:
        return self.query_md("weights", 1)

    @property
    def dst_desc(self) -> MemoryDesc | None:
        return self.query_md("dst")

    @property
    def scratchpad_desc(self) -> MemoryDesc | None:
        """Layout of the user scratchpad, None where none is needed."""
        return self.query_md("scratchpad")

    @property
    def expected_args(self) -> dict[int, MemoryDesc]:
        """Argument ids with the descriptor each memory must have. Arguments of the attributes that have no fixed one
        are left out.
        """
        if self._expected is None:
            self._expected = self._find_expected()
        return self._expected

    def _find_expected(self) -> dict[int, MemoryDesc]:
        candidates = list(_PLAIN_ARGS)
        if self.op is not None and self.op.kind == "rnn":
            candidates += _RECURRENT_ARGS
        for i, entry in enumerate(self.attr.post_ops):
            if entry[0] == "binary":
                candidates.append(arg_post_op(i))
            elif entry[0] == "depthwise":
                candidates += [ARG_ATTR_POST_OP_DW | ARG_WEIGHTS, ARG_ATTR_POST_OP_DW | ARG_BIAS]
        found = {}
        for arg in candidates:
            desc = self.query_md("exec_arg", arg)
            if desc is None and arg >= attributes.ARG_ATTR_POST_OP_BASE:
                desc = self.attr.post_ops.entries[arg // attributes.ARG_ATTR_POST_OP_BASE - 1][2]
            if desc is not None:
                found[arg] = desc
        if self.op is not None and self.op.kind in ("batch_normalization", "layer_normalization"):
            for arg in _unused_norm_args(self.op):
                found.pop(arg, None)
        if self.attr.scratchpad == "library":
            found.pop(ARG_SCRATCHPAD, None)
        return found

    def __repr__(self) -> str:
        return f"PrimitiveDesc({self.op.kind if self.op else '?'}, {self.implementation})"


def _wants_avx512(op: OpDesc) -> str:
    """What to add to an error: that this CPU has none of the kernels for bfloat16 or Winograd convolutions."""
    is_bf16 = any(desc is not None and desc.dtype == torch.bfloat16 for desc in op.descs.values())
    is_winograd = op.params.get("algorithm") == "winograd"
    if not (is_bf16 or is_winograd) or load().runs("cpu_isa_avx512_core"):
        return ""
    what = "bfloat16" if is_bf16 else "Winograd convolutions"
    return f" (the library's kernels for {what} need AVX-512, which this CPU has not)"


def _check_kinds(op_desc: object, attr: object) -> None:
    if not isinstance(op_desc, OpDesc):
        raise TypeError(f"op_desc must be an OpDesc, got {type(op_desc).__name__}")
    if attr is not None and not isinstance(attr, Attr):
        raise TypeError(f"attr must be an Attr, got {type(attr).__name__}")
    if attr is not None and (attr.post_ops.entries or isinstance(attr.output_scales, tuple)):
        _check_sizes(attr, op_desc.descs.get("dst") or op_desc.descs.get("src"))


def _check_sizes(attr: Attr, dst: MemoryDesc | None) -> None:
    """Raise ValueError for operands of post-ops and scales that are too few: the library reads as many as dst has."""
    if dst is None or any(entry[0] == "depthwise" for entry in attr.post_ops):  # whose result is a smaller one
        return
    rank = len(dst.dims)
    for index, entry in enumerate(attr.post_ops):
        if entry[0] == "binary":
            dims = entry[2].dims
            if len(dims) != rank or any(n not in (1, size) for n, size in zip(dims, dst.dims, strict=True)):
                raise ValueError(
                    f"post-op {index}: binary reads {list(dims)}, which is not broadcast to {list(dst.dims)}"
                )
        elif entry[0] == "prelu" and entry[1] >> rank:
            raise ValueError(f"post-op {index}: prelu has the mask {entry[1]}, and the result {rank} dimensions")
    if isinstance(attr.output_scales, tuple) and attr.output_scales_mask:
        needed = math.prod(size for axis, size in enumerate(dst.dims) if attr.output_scales_mask >> axis & 1)
        if attr.output_scales_mask >> rank or len(attr.output_scales) != needed:
            raise ValueError(
                f"{len(attr.output_scales)} output scales with mask {attr.output_scales_mask}: {dst} has {needed}"
            )


def _unused_norm_args(op: OpDesc) -> list[int]:
    """Return arguments that the library describes for a normalization but neither reads nor writes with its flags."""
    flags = op.params["flags"]
    unused = [ARG_SCALE_SHIFT]
    if not flags & NORM_SCALE:
        unused.append(ARG_SCALE)
    if not flags & NORM_SHIFT:
        unused.append(ARG_SHIFT)
    return unused if flags & NORM_GLOBAL_STATS else [*unused, ARG_MEAN, ARG_VARIANCE]


class Primitive(NotCopyable):
    """An executable primitive: owns a ``zendnn_primitive_t``. Made for the thread count of its creation.

    Several threads may execute one primitive at once, each with its own memories.
    """

    __slots__ = ("_handle", "_names", "_optional", "_required", "_scratch_bytes", "_thread", "num_threads", "pd")

    def __init__(self, pd: PrimitiveDesc) -> None:
        if not isinstance(pd, PrimitiveDesc):
            raise TypeError(f"pd must be a PrimitiveDesc, got {type(pd).__name__}")
        self.pd = pd
        self.num_threads = torch.get_num_threads()
        self._thread = threading.get_ident()
        self._handle: Any = primitive_cache.create(pd)
        self._required: dict[int, MemoryDesc] | None = None
        self._optional: set[int] = set()
        self._scratch_bytes = 0

    @property
    def handle(self) -> Any:
        """The ``zendnn_primitive_t``. Raises ValueError once closed."""
        if self._handle is None:
            raise ValueError(f"the primitive of {self.pd} is closed: create a new one")
        return self._handle

    def close(self) -> None:
        """Give up the handle; an execution already running finishes. Closing twice is allowed."""
        self._handle = None

    def _prepare(self) -> dict[int, MemoryDesc]:
        required = dict(self.pd.expected_args)
        scratch = required.pop(ARG_SCRATCHPAD, None)
        self._scratch_bytes = scratch.size_bytes if scratch is not None else 0
        self._optional = set(self.pd.attr.runtime_args)
        for i, entry in enumerate(self.pd.attr.post_ops):
            if entry[0] == "prelu":
                self._optional.add(arg_post_op(i, ARG_WEIGHTS))
        self._required = required
        return required

    def execute(self, args: Mapping[int, Memory], stream: Stream | None = None) -> None:
        """Run with the memories given by argument id; returns when dst is written.

        A user scratchpad that is left out is supplied. Raises TypeError, ValueError before any C call for a missing,
        superfluous, unbound or closed memory, one whose descriptor is not the primitive's, a stream of another engine,
        or a thread count that is not the one of creation.
        """
        n = native()
        handle = self.handle
        if not isinstance(args, Mapping):
            raise TypeError(f"args must map argument ids to Memory objects, got {type(args).__name__}")
        if stream is not None and not isinstance(stream, Stream):
            raise TypeError(f"stream must be a Stream, or None for the thread's own, got {stream!r}")
        used = stream if stream is not None else default_stream()
        if used._engine_handle != self.pd.engine_handle:
            raise ValueError(
                f"{self.pd} is of another engine than the stream{'' if stream else ' of Engine.cpu()'}: give it a "
                f"Stream of the engine that its descriptor was made with"
            )
        required = self._required if self._required is not None else self._prepare()
        if torch.get_num_threads() != self.num_threads:
            raise ValueError(
                f"{self.pd} was created for {self.num_threads} threads and cannot run with {torch.get_num_threads()}: "
                f"create it again after torch.set_num_threads"
            )
        if self.pd.attr.scratchpad == "library" and threading.get_ident() != self._thread:
            raise ValueError(
                f"{self.pd} keeps its scratchpad in the thread that created it: use Attr(scratchpad='user') to share it"
            )
        memories = []
        for arg, memory in args.items():
            if not isinstance(arg, int):
                raise TypeError(f"{self.pd}: args must have argument ids such as ARG_SRC for keys, got {arg!r}")
            if not isinstance(memory, Memory):
                raise TypeError(f"{self.pd}: {arg_name(arg)} must be a Memory, got {type(memory).__name__}")
            memories.append(memory)
        pin(memories, 1)
        try:
            keep = [m._owner for m in memories]  # a close() in another thread must not free them under the call
            pairs = [(arg, self._checked(arg, memory, required)) for arg, memory in args.items()]
            missing = [arg for arg in (*required, *self._optional) if arg not in args]
            if missing:
                raise ValueError(f"{self.pd}: missing {', '.join(map(arg_name, missing))}")
            if self._scratch_bytes and ARG_SCRATCHPAD not in args:
                scratch = Memory(
                    self.pd.expected_args[ARG_SCRATCHPAD], allocation.empty((self._scratch_bytes,), torch.uint8)
                )
                keep.append(scratch)
                pairs.append((ARG_SCRATCHPAD, scratch.handle))
            c_args = n.ffi.new("zendnn_exec_arg_t[]", pairs)
            with self._event(args) if profiler._is_profiler_enabled else _no_event:
                status = n.lib.zendnn_primitive_execute(handle, used.handle, len(pairs), c_args)
            if status:
                check(status, "executing {}", self.pd)
            check(n.lib.zendnn_stream_wait(used.handle), "waiting for {}", self.pd)
        finally:
            pin(memories, -1)

    def _event(self, args: Mapping[int, Memory]) -> AbstractContextManager[Any]:
        return primitive_label(self.pd, {arg: memory.desc for arg, memory in args.items()}).event()

    def _checked(self, arg: int, memory: Memory, required: Mapping[int, MemoryDesc]) -> Any:
        """Return the memory's handle once it is known to fit."""
        expected = required.get(arg)
        if expected is None and arg == ARG_SCRATCHPAD:
            expected = self.pd.expected_args.get(arg)
        if expected is None and arg not in self._optional:
            raise ValueError(
                f"{self.pd} takes no {arg_name(arg)}: it takes "
                f"{', '.join(arg_name(a) for a in (*required, *self._optional))}"
            )
        desc = memory.desc
        if expected is None and arg in self._optional:
            self._check_attribute(arg, desc)
        if expected is not None and desc is not expected and desc != expected:
            raise ValueError(f"{self.pd}: {arg_name(arg)} is {desc}, the primitive needs {expected}: reorder it")
        handle = memory.handle
        if memory._address == 0 and desc.size_bytes:
            raise ValueError(f"{self.pd}: the memory of {arg_name(arg)} is not bound to a buffer: call rebind")
        if arg in _WRITTEN and memory.is_read_only:
            raise ValueError(f"{self.pd}: {arg_name(arg)} is a read-only array: pass one that may be written")
        if not memory.is_current():
            raise ValueError(
                f"{self.pd}: the tensor of {arg_name(arg)} was resized or moved after it was bound: call rebind"
            )
        return handle

    def _check_attribute(self, arg: int, desc: MemoryDesc) -> None:
        """Raise for scales, zero points or slopes that the library would read past their end, or as another type."""
        attr, dims = self.pd.attr, self._described_dims(arg)
        if arg in attr.runtime_args:
            mask, dtype = attr.runtime_args[arg][:2]
        else:
            mask, dtype = attr.post_ops.entries[arg // attributes.ARG_ATTR_POST_OP_BASE - 1][1], torch.float32
        needed = math.prod(n for axis, n in enumerate(dims) if mask >> axis & 1)
        if arg == ARG_ATTR_WOQ_SCALES:  # per group, too: how many depends on the implementation
            needed = 1
        if desc.dtype != dtype or not desc.is_plain or not desc.is_dense or math.prod(desc.dims) < needed:
            kind = str(dtype).removeprefix("torch.")
            raise ValueError(f"{self.pd}: {arg_name(arg)} is {desc}, the primitive needs {needed} dense {kind} numbers")

    def _described_dims(self, arg: int) -> tuple[int, ...]:
        """Dims of the operand that an attribute's argument belongs to; those of the result for post-ops."""
        inner = ARG_DST
        for operand in (ARG_SRC, ARG_WEIGHTS):
            if arg in (ARG_ATTR_SCALES | operand, ARG_ATTR_ZERO_POINTS | operand):
                inner = operand
        desc = self.pd.expected_args.get(inner)
        return desc.dims if desc is not None else ()

    def __repr__(self) -> str:
        return f"Primitive({self.pd!r}{', closed' if self._handle is None else ''})"
