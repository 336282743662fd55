"""reorder: copies between strides and data types."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from zendnn_cffi.functional._arrays import FLOATS, FROM_NUMPY, INT8, channels_last_strides
from zendnn_cffi.functional._call import Call
from zendnn_cffi.functional._kernel import Kernel
from zendnn_cffi.functional._operation import operation
from zendnn_cffi.primitives import checks
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, Attr
from zendnn_cffi.primitives.memory import MemoryDesc, dense_strides
from zendnn_cffi.primitives.primitive import PrimitiveDesc

_TYPES = (*FLOATS, torch.float16, torch.int32, *INT8)
_LAYOUTS = ("same", "contiguous", "channels_last")


@operation
def reorder(
    src: Any, *, dtype: torch.dtype | None = None, layout: str = "same", scale: float = 1.0, out: Any = None
) -> Any:
    """Return src in another layout or data type, multiplied by scale; integer results are rounded to even and
    saturated.

    src      any shape, float32, bfloat16, float16, int32, int8 or uint8, any strides
    dtype    one of these (default: src's, or out's)
    layout   "same" (dense, in src's order of dimensions), "contiguous" or "channels_last"
    out      a tensor of src's shape, whose strides and dtype say where to write
    Returns  shape of src; bfloat16 is a tensor, as numpy has none
    Raises   TypeError, ValueError for arguments that do not fit; UnsupportedError for a pair of types the library
             cannot copy
    """
    call = Call()
    x = call.take(src, "src", _TYPES)
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(_LAYOUTS)}, got {layout!r}")
    if layout == "channels_last" and not 3 <= x.dim() <= 5:
        raise ValueError(
            f"channels_last needs src [N, C, *spatial] with 1 to 3 spatial dimensions, got shape {list(x.shape)}"
        )
    wanted = dtype if dtype is not None else _dtype_of(out) or x.dtype
    if not isinstance(wanted, torch.dtype) or wanted not in _TYPES:
        raise TypeError(f"dtype must be one of {', '.join(map(str, _TYPES))}, got {wanted!r}")
    factor = checks.as_float(scale, "scale")
    call.add(ARG_SRC, x)
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


def _dtype_of(out: Any) -> torch.dtype | None:
    """The data type of a tensor or array, None where it has none of the library's."""
    if isinstance(out, torch.Tensor):
        return out.dtype
    return FROM_NUMPY.get(out.dtype.name) if isinstance(out, np.ndarray) else None
