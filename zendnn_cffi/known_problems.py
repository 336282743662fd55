"""Implementations of the library that answer wrongly with status success, found by comparing every one with PyTorch.

A PrimitiveDesc passes over them. Each row names the primitive, when it is wrong and what happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zendnn_cffi.memory import MemoryDesc

if TYPE_CHECKING:
    from zendnn_cffi.attributes import PostOps
    from zendnn_cffi.descriptors import OpDesc

_CHANNELS_FIRST = {"ncw", "nchw", "ncdhw"}
# With these parameters implementation `zendnn` computes post-ops rightly: kind -> needed (alpha, scale), None where not
# read
_ZENDNN_ELTWISE: dict[str, float | None] = {
    "relu": 0.0,
    "gelu_erf": None,
    "gelu_tanh": None,
    "swish": 1.0,
    "logistic": None,
}
_ZENDNN_BINARY = {"add", "mul"}
# Row lengths for which embedding_bag's max starts from minus infinity everywhere
MAX_WIDTHS = (16, 32, 64, 128, 256, 512)


def known_problem(
    op: OpDesc, post_ops: PostOps, implementation: str, src: MemoryDesc | None, dst: MemoryDesc | None
) -> str | None:
    """Return why this implementation must not be used for this operation, or None where nothing is known against it."""
    if (
        op.kind in ("convolution", "pooling", "pooling_v2")
        and dst is not None
        and not implementation.startswith("ref")
        and dst.is_plain
        and not dst.is_dense
        and dst.format not in _CHANNELS_FIRST
    ):
        return "writes densely into a strided channels-last destination, over its neighbours"
    if not implementation.startswith("ref") and (kind := _repeated_eltwise(post_ops)) is not None:
        return f"gives both {kind} post-ops the parameters of one"
    if op.kind == "convolution":
        if implementation == "zendnn":
            return "aborts the process on layouts other than nhwc"
        if "gemm:jit" in implementation and src is not None and src.format not in _CHANNELS_FIRST:
            return "gives wrong numbers on channels-last sources"
    if op.kind == "embedding_bag" and op.params["kind"] == "max":
        table = op.descs["src"]
        if op.params["padding_idx"] >= 0 or table is None or table.dims[1] not in MAX_WIDTHS:
            return f"gives wrong maxima with a padding index, or rows not {', '.join(map(str, MAX_WIDTHS))} long"
    if implementation == "zendnn" and op.kind in ("matmul", "inner_product"):
        return next((p for entry in post_ops if (p := _zendnn_post_op_problem(entry)) is not None), None)
    return None


def _repeated_eltwise(post_ops: PostOps) -> str | None:
    """Return an eltwise kind that occurs twice with different parameters: the generated kernels keep one set per
    kind.
    """
    parameters: dict[str, tuple[Any, ...]] = {}
    for _, kind, *numbers in (entry for entry in post_ops if entry[0] == "eltwise"):
        if parameters.setdefault(kind, tuple(numbers)) != tuple(numbers):
            return str(kind)
    return None


def _zendnn_post_op_problem(entry: tuple[Any, ...]) -> str | None:
    match entry:
        case ("eltwise", kind, alpha, _, scale):
            if kind not in _ZENDNN_ELTWISE:
                return f"does not know the post-op {kind}"
            needed = _ZENDNN_ELTWISE[kind]
            if needed is not None and alpha != needed:
                return f"ignores the alpha of {kind}"
            return "ignores the scale of an eltwise post-op" if scale != 1.0 else None
        case ("binary", kind, _):
            return None if kind in _ZENDNN_BINARY else f"computes something else for the binary post-op {kind}"
        case ("sum", scale, _):
            return None if scale == 1.0 else "is untested with a scaled sum post-op"
        case ("prelu", _):
            return "does not know the prelu post-op"
    return None
