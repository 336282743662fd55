"""Primitives as candidates: which implementations are worth trying, what they run on, and which of them stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import get_num_threads

from fx_passes.candidates.candidates import (
    Argument,
    Arguments,
    Candidate,
    Operand,
    Operation,
    PackedWeights,
    PrimitiveTemplate,
    Result,
    Weights,
    primitive_template,
)
from fx_passes.candidates.layouts import Layout
from fx_passes.lower.context import NotLowered, SplitPostOps
from fx_passes.lower.post_ops import Chain
from zendnn_cffi.errors import ZenDNNError
from zendnn_cffi.primitives.attributes import ARG_BIAS, ARG_DST, ARG_SRC, ARG_WEIGHTS, Attr, PostOps
from zendnn_cffi.primitives.descriptors.common import OpDesc
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc
from zendnn_cffi.primitives.primitive_cache import exact
from zendnn_cffi.primitives.verification.unchecked import is_unchecked
from zendnn_cffi.recent import Recent

# Implementations never used where another one exists. "zendnn" ignores parameters of some post-ops and aborts on some
# convolutions; "ref" is a plain loop nest, for checking. "bnorm_ref" takes 100 times bnorm_jit's time.
_NEVER = ("zendnn",)
_LAST_RESORT = ("ref",)
_SLOW = (*_LAST_RESORT, "bnorm_ref")
_NO_POST_OPS = PostOps()


def implementations(
    describe: Callable[..., Any],
    *args: Any,
    post_ops: PostOps = _NO_POST_OPS,
    attr: Attr | None = None,
    **parameters: Any,
) -> list[PrimitiveDesc]:
    """The implementations worth trying of what describe(*args, **parameters) describes, in the library's order.

    describe  one of zendnn_cffi.primitives.descriptors
    attr      all attributes, where there are others than post_ops
    Reference implementations only when alone; none at all where the library refuses.
    """
    if attr is not None or not _remembers.get():
        return _offered(lambda: describe(*args, **parameters), attr or Attr(post_ops))
    key = describe, exact(args), exact(parameters.items()), exact(post_ops), get_num_threads(), is_unchecked()
    known = _recent.get(key)
    if known is None:
        known = _recent.keep(key, _offered(lambda: describe(*args, **parameters), Attr(post_ops)))
    return list(known)


def _offered(described: Callable[[], OpDesc], attr: Attr) -> list[PrimitiveDesc]:
    try:
        offered = PrimitiveDesc.every(described(), attr)
        found = [pd for pd in offered if not pd.implementation.startswith(_NEVER)]
    except ZenDNNError:
        return []
    return [pd for pd in found if not pd.implementation.startswith(_SLOW)] or found[:1]


# What the library offered most recently: models repeat their layers, in one region and in hundreds of equal ones.
_recent: Recent[list[PrimitiveDesc]] = Recent(most=256)
_remembers: ContextVar[bool] = ContextVar("remembers implementations", default=False)


@contextmanager
def remembering() -> Iterator[None]:
    """Let implementations() ask the library once for layers of equal shapes, those of other regions included."""
    token = _remembers.set(True)
    try:
        yield
    finally:
        _remembers.reset(token)


def optimized_implementations(describe: Callable[..., Any], *args: Any, **parameters: Any) -> list[PrimitiveDesc]:
    """As implementations(), but no reference implementation, not even alone."""
    found = implementations(describe, *args, **parameters)
    return [pd for pd in found if not pd.implementation.startswith(_SLOW)]


def first_optimized(
    args: Arguments,
    kind: str,
    describe: Callable[..., Any],
    *operands: Any,
    flops: int | None = None,
    **parameters: Any,
) -> PrimitiveTemplate | None:
    """One execution on args by the first optimized implementation; None where there is none."""
    for pd in optimized_implementations(describe, *operands, **parameters):
        return primitive_template(pd, args, kind, flops)
    return None


def weighted_arguments(
    weights: PackedWeights,
    bias: Weights | None,
    chain: Chain,
    src: MemoryDesc | None = None,
    dst: MemoryDesc | None = None,
) -> dict[int, Argument | PackedWeights]:
    """What a convolution or product runs on: operand 0, constants, what post-ops read; seen through src and dst."""
    args = {ARG_SRC: Operand(0, src), ARG_WEIGHTS: weights, ARG_DST: Result(dst), **chain.args}
    return args if bias is None else {**args, ARG_BIAS: bias}


def candidates(
    found: Iterable[PrimitiveDesc],
    args: Arguments,
    kind: str,
    srcs: tuple[Layout, ...],
    dst: Layout,
    flops: int | None = None,
    **traits: Any,
) -> list[Candidate]:
    """A candidate for each implementation: one primitive on args.

    kind    of the primitive, for profiles
    flops   None: those of the operation
    traits  further fields of Candidate
    """
    return [
        Candidate(pd.implementation, srcs, dst, (primitive_template(pd, args, kind, flops),), **traits) for pd in found
    ]


def optimized(found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that are no reference implementation."""
    return [c for c in found if not c.implementation.startswith(_LAST_RESORT)]


def keep_optimized(operation: Operation, otherwise: str, *, post_ops: int = 0, or_reference: bool = False) -> Operation:
    """The operation without reference implementations.

    otherwise     why it is not lowered where nothing is left
    post_ops      how many it absorbs: the last one then becomes an operation of its own first
    or_reference  whether a reference implementation is better than none
    Raises        NotLowered, SplitPostOps
    """
    fast = optimized(operation.candidates)
    if not fast and post_ops:
        raise SplitPostOps(post_ops - 1)
    operation.candidates = fast or (operation.candidates[:1] if or_reference else [])
    if not operation.candidates:
        raise NotLowered(otherwise)
    return operation
