"""Convolution and transposed convolution over 1, 2 or 3 spatial dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zendnn_cffi.functional._arrays import FLOATS, channels_last_strides, image_strides, is_channels_last
from zendnn_cffi.functional._call import Call, first_fast
from zendnn_cffi.functional._kernel import Kernel
from zendnn_cffi.functional._operation import operation
from zendnn_cffi.primitives import checks, descriptors
from zendnn_cffi.primitives.attributes import ARG_BIAS, ARG_DST, ARG_SRC, ARG_WEIGHTS, Attr, kind_value
from zendnn_cffi.primitives.memory import MemoryDesc, plain_desc
from zendnn_cffi.primitives.primitive import PrimitiveDesc

Ints = int | Sequence[int]


@operation
def convolution(
    src: Any,
    weights: Any,
    bias: Any = None,
    *,
    stride: Ints = 1,
    padding: Ints = 0,
    padding_r: Ints | None = None,
    dilation: Ints = 1,
    groups: int = 1,
    algorithm: str = "direct",
    post_ops: Sequence[tuple[Any, ...]] = (),
    out: Any = None,
) -> Any:
    """Return post_ops(convolution of src with weights + bias), as torch.nn.functional.conv1d, conv2d and conv3d.

    src        [N, C, *spatial] float32 or bfloat16, any strides; channels_last is taken as it lies, other layouts are
               copied
    weights    [O, C/groups, *kernel], dtype of src
    bias       [O] float32 or dtype of src, or None
    stride, padding, dilation
               one int, or one per spatial dimension; padding_r (default: padding) is that of the far side
    algorithm  "direct", "winograd" (3x3, stride 1, float32) or "auto"
    Returns    [N, O, *out], dtype of src, channels_last where src is
    Raises     TypeError, ValueError for arguments that do not fit; UnsupportedError where no implementation takes them
    """
    call = Call()
    kind_value(descriptors.ALGORITHMS, algorithm, "algorithm")
    x, w, b, groups = _operands(call, src, weights, bias, groups)
    n = x.dim() - 2
    if w.shape[0] % groups or x.shape[1] != w.shape[1] * groups:
        raise ValueError(
            f"weights {list(w.shape)} with groups {groups} need src with {w.shape[1] * groups} channels and an "
            "output count "
            f"divisible by groups; src has {x.shape[1]} channels"
        )
    stride, dilation = (
        checks.as_dims(v, k, rank=n, minimum=1) for v, k in ((stride, "stride"), (dilation, "dilation"))
    )
    padding = checks.as_dims(padding, "padding", rank=n)
    right = padding if padding_r is None else checks.as_dims(padding_r, "padding_r", rank=n)
    reach = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilation, strict=False)]
    for i, (size, r) in enumerate(zip(x.shape[2:], reach, strict=False)):
        if size + padding[i] + right[i] < r:
            raise ValueError(
                f"the kernel reaches over {r} elements in spatial dim {i}, src with padding has "
                f"{size + padding[i] + right[i]}"
            )
    spatial = [
        (s + pl + pr - r) // st + 1
        for s, pl, pr, r, st in zip(x.shape[2:], padding, right, reach, stride, strict=False)
    ]
    shape = (x.shape[0], w.shape[0], *spatial)
    _grouped(call, w, groups)

    def describe(
        src_md: MemoryDesc, weights_md: MemoryDesc, bias_md: MemoryDesc | None, dst_md: MemoryDesc
    ) -> descriptors.OpDesc:
        return descriptors.convolution(
            src_md,
            weights_md,
            bias_md,
            dst_md,
            strides=stride,
            dilation=dilation,
            padding_l=padding,
            padding_r=right,
            algorithm=algorithm,
        )

    signature = ("convolution", stride, padding, right, dilation, groups, algorithm)
    return _run(call, signature, shape, post_ops, out, describe, open_layout=algorithm != "direct")


@operation
def deconvolution(
    src: Any,
    weights: Any,
    bias: Any = None,
    *,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    post_ops: Sequence[tuple[Any, ...]] = (),
    out: Any = None,
) -> Any:
    """Return post_ops(transposed convolution of src with weights + bias), as torch.nn.functional.conv_transpose1d, 2d
    and 3d.

    src      [N, C, *spatial] float32 or bfloat16, any strides
    weights  [C, O/groups, *kernel], dtype of src (torch's order)
    bias     [O] float32 or dtype of src, or None
    Returns  [N, O, *out], dtype of src, channels_last where src is
    Raises   TypeError, ValueError for arguments that do not fit; UnsupportedError where no implementation takes them
    """
    call = Call()
    x, w, b, groups = _operands(call, src, weights, bias, groups, outputs_dim=1)
    n = x.dim() - 2
    if w.shape[0] % groups or x.shape[1] != w.shape[0]:
        raise ValueError(
            f"weights {list(w.shape)} need src with {w.shape[0]} channels, divisible by groups {groups}; "
            f"src has {x.shape[1]} channels"
        )
    stride, dilation = (
        checks.as_dims(v, k, rank=n, minimum=1) for v, k in ((stride, "stride"), (dilation, "dilation"))
    )
    padding, extra = (
        checks.as_dims(v, k, rank=n) for v, k in ((padding, "padding"), (output_padding, "output_padding"))
    )
    if any(e >= max(s, d) for e, s, d in zip(extra, stride, dilation, strict=False)):
        raise ValueError(f"output_padding {extra} must be smaller than stride {stride} or dilation {dilation}")
    right = tuple(p - e for p, e in zip(padding, extra, strict=False))
    spatial = [
        (s - 1) * st + (k - 1) * d + 1 - pl - pr
        for s, st, k, d, pl, pr in zip(x.shape[2:], stride, w.shape[2:], dilation, padding, right, strict=False)
    ]
    if min(spatial) < 1:
        raise ValueError(f"the output would have spatial size {spatial}: padding {padding} is too large")
    shape = (x.shape[0], w.shape[1] * groups, *spatial)
    inputs, outputs = w.shape[0] // groups, w.shape[1]
    logical = w.transpose(0, 1) if groups == 1 else w.reshape(groups, inputs, outputs, *w.shape[2:]).transpose(1, 2)
    call.add(ARG_WEIGHTS, logical)

    def describe(
        src_md: MemoryDesc, weights_md: MemoryDesc, bias_md: MemoryDesc | None, dst_md: MemoryDesc
    ) -> descriptors.OpDesc:
        return descriptors.deconvolution(
            src_md, weights_md, bias_md, dst_md, strides=stride, dilation=dilation, padding_l=padding, padding_r=right
        )

    return _run(call, ("deconvolution", stride, padding, right, dilation, groups), shape, post_ops, out, describe)


def _operands(
    call: Call, src: Any, weights: Any, bias: Any, groups: Any, outputs_dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]:
    """Check ranks and dtypes, and make src, weights and bias operands."""
    x = call.take(src, "src", FLOATS)
    if not 3 <= x.dim() <= 5:
        raise ValueError(
            f"src must be [N, C, *spatial] with 1 to 3 spatial dimensions, got shape {list(x.shape)}"
            + (": add a batch dimension with unsqueeze(0)" if x.dim() == 2 else "")
        )
    w = call.take(weights, "weights", (x.dtype,))
    if w.dim() != x.dim():
        raise ValueError(f"weights must have {x.dim()} dimensions as src has, got shape {list(w.shape)}")
    groups = checks.as_int(groups, "groups", minimum=1)
    if w.numel() == 0:
        raise ValueError(f"weights are empty, shape {list(w.shape)}")
    b = None
    if bias is not None:
        outputs = w.shape[0] if outputs_dim == 0 else w.shape[1] * groups
        b = call.take_dense(bias, "bias", (torch.float32, x.dtype))
        if tuple(b.shape) != (outputs,):
            raise ValueError(f"bias must have shape [{outputs}], one value per output channel, got {list(b.shape)}")
        call.add(ARG_BIAS, b)
    if x.numel() == 0 and 0 in x.shape[1:]:
        raise ValueError(f"src has an empty dimension, {list(x.shape)}: only the batch may be empty")
    call.add(ARG_SRC, x)
    return x, w, b, groups


def _grouped(call: Call, w: torch.Tensor, groups: int) -> None:
    call.add(ARG_WEIGHTS, w if groups == 1 else w.reshape(groups, w.shape[0] // groups, *w.shape[1:]))


def _run(
    call: Call,
    signature: tuple[Any, ...],
    shape: tuple[int, ...],
    post_ops: Any,
    out: Any,
    describe: Callable[..., descriptors.OpDesc],
    open_layout: bool = False,
) -> Any:
    x = call.operands[ARG_SRC]
    call.add_post_ops(post_ops, shape, channels_last_strides(shape))
    call.adopt_post_tensors()
    result = call.output(out, shape, x.dtype, strides=image_strides(x, shape))
    if result.numel() == 0:
        return call.result()
    if is_channels_last(x):
        call.operands[ARG_SRC] = x.as_strided(x.shape, channels_last_strides(x.shape))
    if is_channels_last(result):
        call.operands[ARG_DST] = result.as_strided(shape, channels_last_strides(shape))

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        dtype = x.dtype

        def with_layout(inner: bool) -> Kernel:
            def data(dims: Sequence[int]) -> MemoryDesc:
                return (
                    plain_desc(dtype, tuple(dims), channels_last_strides(dims))
                    if inner
                    else MemoryDesc(dims, dtype, "any")
                )

            op = describe(
                data(x.shape), MemoryDesc(layouts[ARG_WEIGHTS].dims, dtype, "any"), layouts.get(ARG_BIAS), data(shape)
            )
            return Kernel(PrimitiveDesc(op, attr), layouts, reads_dst=call.reads_dst)

        return first_fast(
            [lambda: with_layout(False)] if open_layout else [lambda: with_layout(True), lambda: with_layout(False)]
        )

    return call.run(signature, build)
