"""reorder: copies between strides and data types."""

from __future__ import annotations

from typing import Any

import torch

from zendnn_cffi import checks
from zendnn_cffi.attributes import ARG_DST, ARG_SRC, Attr
from zendnn_cffi.functional._arrays import FLOATS, INT8, channels_last_strides
from zendnn_cffi.functional._call import Call
from zendnn_cffi.functional._kernel import Kernel
from zendnn_cffi.memory import MemoryDesc, dense_strides
from zendnn_cffi.primitive import PrimitiveDesc

_TYPES = (*FLOATS, torch.float16, torch.int32, *INT8)
_LAYOUTS = ("same", "contiguous", "channels_last")


def reorder(
    src: Any, *, dtype: torch.dtype | None = None, layout: str = "same", scale: float = 1.0, out: Any = None
) -> Any:
    """Return src in another layout or data type, multiplied by scale; integer results are rounded to even and
    saturated.

    src      any shape, float32, bfloat16, float16, int32, int8 or uint8, any strides
    dtype    one of these (default: src's, or out's)
    layout   "same" (dense, in src's order of dimensions), "contiguous" or "channels_last"
    out      a tensor of src's shape, whose strides and dtype say where to write
    Returns  shape of src
    Raises   TypeError, ValueError for arguments that do not fit; UnsupportedError for a pair of types the library
             cannot copy
    """
    call = Call()
    x = call.take(src, "src", _TYPES)
    if layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(_LAYOUTS)}, got {layout!r}")
    if layout == "channels_last" and not 3 <= x.dim() <= 5:
        raise ValueError(
            f"channels_last needs src [N, C, *spatial] with 1 to 3 spatial dimensions, got shape {list(x.shape)}"
        )
    wanted = (
        dtype if dtype is not None else getattr(out, "dtype", x.dtype) if isinstance(out, torch.Tensor) else x.dtype
    )
    if wanted not in _TYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, _TYPES))}, got {wanted!r}")
    factor = checks.as_float(scale, "scale")
    call.add(ARG_SRC, x, "src")
    strides = {"contiguous": dense_strides, "channels_last": channels_last_strides}.get(layout)
    result = call.output(
        out, x.shape, wanted, strides=strides(x.shape) if strides else None, like=None if strides else x
    )
    if result.numel() == 0:
        return call.result()

    def build(layouts: dict[int, MemoryDesc], attr: Attr) -> Kernel:
        scaled = attr if factor == 1.0 else Attr(output_scales=factor)
        return Kernel(PrimitiveDesc.reorder(layouts[ARG_SRC], layouts[ARG_DST], scaled), layouts)

    return call.run(("reorder", factor), build)
