"""Post-ops as primitives of their own, behind implementations that take none, or are slow with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fx_passes.candidates.candidates import Argument, Candidate, Operand, PrimitiveTemplate, Weights
from fx_passes.lower.post_ops import Chain, EltwisePostOp, PostOp
from fx_passes.lower.primitives import first_optimized
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_SRC_1, arg_post_op
from zendnn_cffi.primitives.memory import MemoryDesc


def in_place(
    at: Argument, desc: MemoryDesc, post_ops: Sequence[PostOp], chain_of: Callable[[Sequence[PostOp]], Chain]
) -> tuple[PrimitiveTemplate, ...]:
    """Primitives that do all post-ops where their input lies: one where the first takes the others, else one by one.

    desc      how it lies there
    chain_of  returns the chain of the last of these post-ops
    Returns   () where the library has none that are fast
    """
    first, *others = post_ops
    own = chain_of(post_ops)
    whole = _of_one(at, desc, first, own, chain_of(others))
    if whole is not None or not others:
        return () if whole is None else (whole,)
    alone = _of_one(at, desc, first, own, chain_of(()))
    rest = in_place(at, desc, others, chain_of)
    return () if alone is None or not rest else (alone, *rest)


def _of_one(at: Argument, desc: MemoryDesc, first: PostOp, own: Chain, behind: Chain) -> PrimitiveTemplate | None:
    """A primitive for the first post-op of the chain `own`, with what is behind it as its post-ops."""
    args: dict[int, Argument] = {ARG_SRC: at, ARG_DST: at, **behind.args}
    if isinstance(first, EltwisePostOp):
        function = (descriptors.eltwise, first.kind, desc, first.alpha, first.beta)
        return first_optimized(args, "eltwise", *function, flops=0, post_ops=behind.post_ops)
    other = own.args[arg_post_op(0)]
    assert isinstance(other, Operand | Weights) and other.desc is not None
    args[ARG_SRC_1] = other
    function_of_two = (descriptors.binary, first.kind, desc, other.desc, desc)
    return first_optimized(args, "binary", *function_of_two, flops=0, post_ops=behind.post_ops)


def followed_by(candidate: Candidate, more: Sequence[PrimitiveTemplate]) -> Candidate:
    """The candidate with more primitives at its end."""
    names = dict.fromkeys([candidate.implementation, *(call.pd.implementation for call in more)])
    return replace(candidate, implementation=" + ".join(names), calls=(*candidate.calls, *more))
