"""Implementations of the library that answer wrongly with status success, found by comparing every one with PyTorch.

A PrimitiveDesc passes over them. Each row names the primitive, when it is wrong and what happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zendnn_cffi.engine.library import load
from zendnn_cffi.engine.openmp import has_parents_team
from zendnn_cffi.primitives.attributes import ARG_ATTR_SCALES
from zendnn_cffi.primitives.memory import MemoryDesc, dense_strides

if TYPE_CHECKING:
    from zendnn_cffi.primitives.attributes import Attr, PostOps
    from zendnn_cffi.primitives.descriptors import OpDesc

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
_PRODUCTS = ("convolution", "deconvolution", "inner_product", "matmul")
# Row lengths for which embedding_bag's max starts from minus infinity everywhere
MAX_WIDTHS = (16, 32, 64, 128, 256, 512)


def known_problem(
    op: OpDesc,
    post_ops: PostOps,
    implementation: str,
    src: MemoryDesc | None,
    dst: MemoryDesc | None,
    attr: Attr | None = None,
) -> str | None:
    """Return why this implementation must not be used for this operation, or None where nothing is known against it.

    attr  what else than post_ops changes numbers
    """
    if implementation == "zendnn" and has_parents_team():
        return "computes with as many threads as OMP_NUM_THREADS says, of which a forked child has one: it would hang"
    if (problem := _problem_of_integers(op, post_ops, implementation, attr)) is not None:
        return problem
    if (problem := _problem_of_post_ops(op, post_ops, implementation, dst)) is not None:
        return problem
    if op.kind == "eltwise" and len(post_ops) and src is not None and not 2 <= len(src.dims) <= 5:
        return "writes nothing with post-ops in one dimension, and ends the process in more than five"
    if op.kind == "rnn" and op.descs["projection"] is not None and src is not None and src.dtype == torch.bfloat16:
        return "multiplies by bfloat16 projections as if their rows were interleaved in pairs"
    if op.kind == "prelu" and implementation.startswith("jit") and _is_unusual_order(op):
        return "reads the weights of other channels where memory is neither row-major nor channels-last"
    if op.kind in ("convolution", "pooling", "pooling_v2"):
        return _problem_of_images(op, implementation, src, dst)
    if op.kind == "shuffle" and implementation.startswith("jit") and src is not None and src.inner_blocks:
        return "writes beyond a blocked bfloat16 result" if src.dtype == torch.bfloat16 else None
    if op.kind == "embedding_bag" and op.params["kind"] == "max":
        table = op.descs["src"]
        if op.params["padding_idx"] >= 0 or table is None or table.dims[1] not in MAX_WIDTHS:
            return f"gives wrong maxima with a padding index, or rows not {', '.join(map(str, MAX_WIDTHS))} long"
    if implementation == "zendnn" and op.kind in ("matmul", "inner_product"):
        return _problem_of_zendnn_products(op, post_ops, dst)
    return None


def _problem_of_integers(op: OpDesc, post_ops: PostOps, implementation: str, attr: Attr | None) -> str | None:
    src = op.descs.get("src")
    if op.kind not in _PRODUCTS or src is None or src.dtype not in (torch.uint8, torch.int8):
        return None
    if op.kind == "convolution" and "gemm" in implementation and _has_binary(post_ops):
        return "computes binary post-ops of 8-bit convolutions wrongly"
    is_narrow = 7 in (op.params.get("src_bits"), op.params.get("weights_bits"))  # two products fit into 16 bits
    if not is_narrow and not implementation.startswith("ref") and not _adds_at_32_bits(implementation):
        return "saturates sums of two products at 16 bits: this CPU, or its setting, has no VNNI"
    if attr is None:
        return None
    if implementation != "zendnn" and any(arg & ARG_ATTR_SCALES for arg in attr.runtime_args):
        return "ignores scales that are given at execution for one operand"
    if implementation == "zendnn" and attr.output_scales is not None and op.descs.get("bias") is not None:
        return "adds the bias after the output scales, all others before"
    return None


def _adds_at_32_bits(implementation: str) -> bool:
    """Whether products of 8-bit integers are added without loss: not where two of them pass through 16 bits."""
    if not load().runs("cpu_isa_avx512_core_vnni"):
        return False
    if implementation == "zendnn" or ("gemm" in implementation and "brgemm" not in implementation):
        return True  # its name does not say which instructions it has
    return "vnni" in implementation or "amx" in implementation


def _problem_of_post_ops(op: OpDesc, post_ops: PostOps, implementation: str, dst: MemoryDesc | None) -> str | None:
    if op.kind in ("matmul", "inner_product", "binary") and any(entry[0] == "prelu" for entry in post_ops):
        return "cannot be executed with a prelu post-op"
    if implementation.startswith("ref"):
        return None
    if (kind := _repeated_eltwise(post_ops)) is not None:
        return f"gives both {kind} post-ops the parameters of one"
    if _unequal_sums(post_ops):
        return "gives all sum post-ops the scale of one"
    if op.kind == "binary" and implementation.startswith("jit") and _is_per_channel_of_points(post_ops, dst):
        return "reads the operand of a binary post-op per channel as if per sample, where there is one pixel"
    if op.kind == "matmul" and "gemm:jit" in implementation and _has_binary(post_ops) and not _lies_in_order(dst):
        return "ends the process with a binary post-op where the result's dimensions lie in another order"
    if op.kind == "convolution" and len(post_ops) and _has_windows_of_padding(op):
        return "computes post-ops wrongly, or ends the process, where a window lies wholly in padding"
    if op.kind == "convolution" and "gemm:jit" in implementation and any(_lies_otherwise(e, dst) for e in post_ops):
        return "reads the whole operand of a binary post-op as if it lay as the result does"
    return None


def _has_binary(post_ops: PostOps) -> bool:
    return any(entry[0] == "binary" for entry in post_ops)


def _lies_in_order(desc: MemoryDesc | None) -> bool:
    """Whether no dimension, of size 1 neither, has a longer stride than one before it."""
    strides = () if desc is None else desc.strides or ()
    return all(first >= second for first, second in zip(strides, strides[1:], strict=False))


def _has_windows_of_padding(op: OpDesc) -> bool:
    """Whether some window of a convolution may touch nothing but padding: in one dimension is enough."""
    src, weights, p = op.descs["src"], op.descs["weights"], op.params
    assert src is not None and weights is not None
    sizes = zip(
        src.dims[2:], weights.dims[-(len(src.dims) - 2) :], p["dilation"], p["padding_l"], p["padding_r"], strict=True
    )
    return any(max(left, right) > (kernel - 1) * step or 0 < size < step for size, kernel, step, left, right in sizes)


def _is_unusual_order(op: OpDesc) -> bool:
    """Whether prelu's source with weights per channel lies neither row-major nor with channels innermost."""
    src, weights = op.descs["src"], op.descs["weights"]
    assert src is not None and weights is not None
    if src.strides is None or all(n == 1 for n in weights.dims):
        return False
    present = [axis for axis, n in enumerate(src.dims) if n > 1]
    order = sorted(present, key=lambda axis: -src.strides[axis])  # type: ignore[index]
    return order not in (present, [*(axis for axis in present if axis != 1), 1])


def _lies_otherwise(entry: tuple[Any, ...], dst: MemoryDesc | None) -> bool:
    """Whether a binary post-op's operand has the result's shape and another layout."""
    if entry[0] != "binary" or dst is None:
        return False
    other: MemoryDesc = entry[2]
    return other.dims == dst.dims and (other.strides != dst.strides or not dst.is_plain)


def _problem_of_images(op: OpDesc, implementation: str, src: MemoryDesc | None, dst: MemoryDesc | None) -> str | None:
    strided = dst is not None and dst.is_plain and not dst.is_dense
    if strided and not implementation.startswith("ref") and not _is_slice_of_channels(dst):
        return "writes densely into a strided destination, over its neighbours"
    if op.kind != "convolution":
        return None
    if implementation == "zendnn":
        return "aborts the process on layouts other than nhwc"
    if "gemm:jit" in implementation and src is not None and src.format not in _CHANNELS_FIRST:
        return "gives wrong numbers on channels-last sources"
    return None


def _problem_of_zendnn_products(op: OpDesc, post_ops: PostOps, dst: MemoryDesc | None) -> str | None:
    if op.kind == "matmul" and _chosen_by_library(op.descs.get("weights")):
        return "keeps weights by their address, and computes with the old ones after a change"
    if op.kind == "inner_product" and any(_misread(entry, dst) for entry in post_ops):
        return "reads the operand of a binary post-op as [M, N] float32, beyond its end"
    return next((p for entry in post_ops if (p := _zendnn_post_op_problem(entry)) is not None), None)


def _is_slice_of_channels(desc: MemoryDesc | None) -> bool:
    """Whether each sample lies in one piece, row-major."""
    if desc is None or desc.format not in _CHANNELS_FIRST:
        return False
    strides, dense = desc.strides or (), dense_strides(desc.dims)
    return all(s == d for s, d, size in zip(strides[1:], dense[1:], desc.dims[1:], strict=True) if size > 1)


def _chosen_by_library(weights: MemoryDesc | None) -> bool:
    """Whether the layout is or was left open: the library then marks the weights as constant."""
    return weights is not None and (weights.is_any or bool(weights.ptr.is_memory_const))


def _misread(entry: tuple[Any, ...], dst: MemoryDesc | None) -> bool:
    """Whether a binary post-op's operand is [1, N] or [1, 1], which is wrong on Zen 5, or bfloat16, which is wrong
    everywhere: [M, N] and [M, 1] float32 are right.
    """
    if entry[0] != "binary" or dst is None:
        return False
    dims = tuple(entry[2].dims)
    return entry[2].dtype != torch.float32 or dims != dst.dims and (dims[0] == 1 or dims[0] != dst.dims[0])


def _is_per_channel_of_points(post_ops: PostOps, dst: MemoryDesc | None) -> bool:
    """Whether a binary post-op's operand is [1, C, 1, ...] on several samples [N, C, 1, ...] of one pixel each."""
    if dst is None or len(dst.dims) < 3 or dst.dims[0] == 1 or dst.dims[1] == 1 or any(n != 1 for n in dst.dims[2:]):
        return False
    wanted = (1, *dst.dims[1:])
    return any(entry[0] == "binary" and tuple(entry[2].dims) == wanted for entry in post_ops)


def _unequal_sums(post_ops: PostOps) -> bool:
    return len({entry[1:] for entry in post_ops if entry[0] == "sum"}) > 1


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
    return None
