"""Matrix products: inner_product (a torch Linear), and matmul with batches and broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zendnn_cffi.functional._arrays import FLOATS, dense_layout
from zendnn_cffi.functional._call import Call, first_fast
from zendnn_cffi.functional._kernel import Kernel
from zendnn_cffi.functional._operation import operation
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_BIAS, ARG_DST, ARG_SRC, ARG_WEIGHTS, Attr
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc


@operation
def inner_product(
    src: Any, weights: Any, bias: Any = None, *, post_ops: Sequence[tuple[Any, ...]] = (), out: Any = None
) -> Any:
    """Return post_ops(src @ weights.T + bias), as torch.nn.functional.linear.

    src      [..., K] float32 or bfloat16, any strides
    weights  [O, K], dtype of src
    bias     [O] float32 or dtype of src, or None
    post_ops all but ("prelu", weight), which no implementation executes
    Returns  [..., O], dtype of src; tensors in post_ops broadcast to [rows, O], the result with leading dimensions
             joined
    Raises   TypeError, ValueError for arguments that do not fit; UnsupportedError where no implementation takes them
    """
    call = Call()
    x = call.take(src, "src", FLOATS)
    w = call.take(weights, "weights", (x.dtype,))
    if x.dim() < 1 or w.dim() != 2:
        raise ValueError(f"src must be [..., K] and weights [O, K], got shapes {list(x.shape)} and {list(w.shape)}")
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"src has K = {x.shape[-1]} (last dim), weights {w.shape[1]} (dim 1)")
    leading = tuple(x.shape[:-1])
    rows = x.numel() // x.shape[-1] if x.shape[-1] else _product(leading)
    flat = x.reshape(rows, x.shape[-1])
    call.add(ARG_SRC, flat)
    call.add(ARG_WEIGHTS, w)
    if bias is not None:
        b = call.take_dense(bias, "bias", (torch.float32, x.dtype))
        if tuple(b.shape) != (w.shape[0],):
            raise ValueError(f"bias must have shape [{w.shape[0]}], one value per output, got {list(b.shape)}")
        call.add(ARG_BIAS, b)
    call.add_post_ops(post_ops, (rows, w.shape[0]), without_prelu="inner_product")
    call.adopt_post_tensors()
    result = call.output(out, (*leading, w.shape[0]), x.dtype)
    if result.numel() == 0:
        return call.result()
    if x.numel() == 0:
        raise ValueError(f"src is empty in K, shape {list(x.shape)}: there is nothing to multiply")
    flat_out = result.view(rows, w.shape[0]) if result.is_contiguous() or len(leading) == 1 else None
    if flat_out is None:
        raise ValueError(
            f"out must be contiguous when src has {x.dim()} dimensions, got strides {list(result.stride())}"
        )
    call.operands[ARG_DST] = flat_out

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        dense_out = MemoryDesc((rows, w.shape[0]), x.dtype)

        def plain(src_md: MemoryDesc, weights_md: MemoryDesc) -> Kernel:
            op = descriptors.inner_product(src_md, weights_md, layouts.get(ARG_BIAS), dense_out)
            return Kernel(PrimitiveDesc(op, attr), layouts, reads_dst=call.reads_dst)

        dense = MemoryDesc(flat.shape, x.dtype)
        return first_fast(
            [lambda: plain(dense, dense_layout(w)), lambda: plain(dense, MemoryDesc(w.shape, x.dtype, "any"))]
        )

    return call.run(("inner_product",), build)


@operation
def matmul(a: Any, b: Any, bias: Any = None, *, post_ops: Sequence[tuple[Any, ...]] = (), out: Any = None) -> Any:
    """Return post_ops(a @ b + bias), as torch.matmul: batches broadcast, a vector is a row (a) or a column (b).

    a        [*B, M, K] or [K], float32 or bfloat16, any strides (a transposed matrix is taken as it lies)
    b        [*B, K, N] or [K], dtype of a
    bias     broadcastable to the result, float32 or dtype of a, or None
    post_ops all but ("prelu", weight), which no implementation executes
    Returns  [*B, M, N], dtype of a
    Raises   TypeError, ValueError for arguments that do not fit; UnsupportedError where no implementation takes them
    """
    call = Call()
    x = call.take(a, "a", FLOATS)
    y = call.take(b, "b", (x.dtype,))
    if x.dim() == 0 or y.dim() == 0:
        raise ValueError(f"a and b must have at least one dimension, got shapes {list(x.shape)} and {list(y.shape)}")
    row, column = x.dim() == 1, y.dim() == 1
    x, y = (x.unsqueeze(0) if row else x), (y.unsqueeze(1) if column else y)
    if x.shape[-1] != y.shape[-2]:
        raise ValueError(f"a has K = {x.shape[-1]} (last dim), b {y.shape[-2]} (last but one)")
    rank = max(x.dim(), y.dim())
    x, y = (t.reshape((1,) * (rank - t.dim()) + tuple(t.shape)) for t in (x, y))
    batch = tuple(_broadcast_dim(i, p, q) for i, (p, q) in enumerate(zip(x.shape[:-2], y.shape[:-2], strict=False)))
    full = (*batch, x.shape[-2], y.shape[-1])
    shown = tuple(d for i, d in enumerate(full) if not (row and i == rank - 2 or column and i == rank - 1))
    call.add(ARG_SRC, x)
    call.add(ARG_WEIGHTS, y)
    if bias is not None:
        call.add(ARG_BIAS, _matmul_bias(call, bias, x.dtype, shown, full, row, column))
    call.add_post_ops(post_ops, full, without_prelu="matmul")
    call.adopt_post_tensors()
    result = call.output(out, shown, x.dtype)
    if result.numel() == 0:
        return call.result()
    if x.shape[-1] == 0:
        raise ValueError(
            f"a and b have K = 0, shapes {list(x.shape)} and {list(y.shape)}: there is nothing to multiply"
        )
    wide = result
    if row:
        wide = wide.unsqueeze(-1 if column else -2)
    if column:
        wide = wide.unsqueeze(-1)
    call.operands[ARG_DST] = wide

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        def plain(src_md: MemoryDesc, weights_md: MemoryDesc, dst_md: MemoryDesc) -> Kernel:
            op = descriptors.matmul(src_md, weights_md, layouts.get(ARG_BIAS), dst_md)
            return Kernel(PrimitiveDesc(op, attr), layouts, reads_dst=call.reads_dst)

        dense_out = MemoryDesc(full, x.dtype)
        return first_fast(
            [
                lambda: plain(layouts[ARG_SRC], layouts[ARG_WEIGHTS], layouts[ARG_DST]),
                lambda: plain(dense_layout(x), dense_layout(y), dense_out),
                lambda: plain(MemoryDesc(x.shape, x.dtype), MemoryDesc(y.shape, x.dtype), dense_out),
            ]
        )

    return call.run(("matmul",), build)


def _matmul_bias(
    call: Call, bias: Any, dtype: torch.dtype, shown: tuple[int, ...], full: tuple[int, ...], row: bool, column: bool
) -> torch.Tensor:
    tensor = call.take_dense(bias, "bias", (torch.float32, dtype))
    if tensor.dim() > len(shown) or any(
        d not in (1, s) for d, s in zip(reversed(tensor.shape), reversed(shown), strict=False)
    ):
        raise ValueError(f"bias has shape {list(tensor.shape)}, which does not broadcast to the result's {list(shown)}")
    if column:
        tensor = tensor.unsqueeze(-1)
    if row and tensor.dim() >= 1 + column:
        tensor = tensor.unsqueeze(-2)
    return tensor.reshape((1,) * (len(full) - tensor.dim()) + tuple(tensor.shape))


def _broadcast_dim(index: int, a: int, b: int) -> int:
    if a != b and 1 not in (a, b):
        raise ValueError(f"batch dim {index} of a is {a} and of b {b}: they must be equal, or one of them 1")
    return b if a == 1 else a


def _product(values: Sequence[int]) -> int:
    total = 1
    for value in values:
        total *= value
    return total
