"""One line of text for all uses of an implementation that one check speaks for.

    inner_product zendnn | src f32 ab, weights f32 ab, dst f32 ab | binary add f32 -1 ab

It names the primitive, the implementation, every operand's dtype, layout and dimensions of size 1, what the parameters
switch (a dilation, padding, groups, the axis), and every attribute: a post-op's kind, whether its numbers are 0, 1 or
others, and how its operand is broadcast. Other sizes than 1 do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zendnn_cffi.primitives.attributes import ARG_BIAS, ARG_DST, ARG_SRC, ARG_SRC_1, ARG_SRC_3, ARG_WEIGHTS, Attr
from zendnn_cffi.primitives.memory import MemoryDesc

if TYPE_CHECKING:
    from zendnn_cffi.primitives.descriptors import OpDesc
    from zendnn_cffi.primitives.primitive import PrimitiveDesc

_OPERANDS = {
    ARG_SRC: "src",
    ARG_SRC_1: "src_1",
    ARG_SRC_3: "src_3",
    ARG_WEIGHTS: "weights",
    ARG_BIAS: "bias",
    ARG_DST: "dst",
}
_BLOCK = 16  # channels that kernels compute at once: a rest takes other code


def kind_of(pd: PrimitiveDesc) -> str:
    """Return the line for a primitive descriptor."""
    assert pd.op is not None
    descs = {name: pd.expected_args[arg] for arg, name in _OPERANDS.items() if arg in pd.expected_args}
    parts = [
        f"{pd.op.kind} {pd.implementation}",
        ", ".join(f"{name} {_layout(desc)}" for name, desc in descs.items()),
        " ".join(_parameters(pd.op, descs)),
        ", ".join(_attributes(pd.attr, descs["dst"])),
    ]
    return " | ".join(part for part in parts if part)


def sizes_of(pd: PrimitiveDesc) -> str:
    """Return which sizes are whole blocks ("b"), which are not ("-") and which are 1, of source and result."""
    descs = (pd.expected_args[arg] for arg in (ARG_SRC, ARG_DST))
    return " ".join("".join("1" if n == 1 else "-b"[n % _BLOCK == 0] for n in desc.dims) for desc in descs)


def _layout(desc: MemoryDesc) -> str:
    """Return dtype, format, "gaps" where elements lie apart, and which dimensions are 1: "f32 nhwc gaps 1---"."""
    dtype = str(desc.dtype).removeprefix("torch.").replace("float", "f")
    parts = [dtype, "packed" if desc.ptr.extra.flags else desc.format]
    if not desc.is_dense:
        parts.append("gaps")
    if 1 in desc.dims:
        parts.append("".join("1" if n == 1 else "-" for n in desc.dims))
    return " ".join(parts)


def _broadcast(desc: MemoryDesc, to: MemoryDesc) -> str:
    """Return which dimensions are broadcast: "1-" for [1, N] to [M, N]; "" for none."""
    if desc.dims == to.dims:
        return ""
    return "".join("1" if n == 1 != t else "-" for n, t in zip(desc.dims, to.dims, strict=True))


def _number(value: float) -> str:
    return str(int(value)) if value in (0, 1) else "x"


def _switch(name: str, values: Sequence[int], usual: int) -> list[str]:
    return [] if all(v == usual for v in values) else [name]


def _window(op: OpDesc, descs: dict[str, MemoryDesc]) -> list[str]:
    p = op.params
    padding = (*p["padding_l"], *p["padding_r"])
    parts = [str(p["kind"])] if "kind" in p else []
    parts += (
        _switch("strides", p["strides"], 1) + _switch("dilation", p["dilation"], 1) + _switch("padding", padding, 0)
    )
    if any(v < 0 for v in padding):
        parts.append("cut")
    if "weights" in descs:
        src, weights = descs["src"], descs["weights"]
        kernel = weights.dims[2 - src.ndim :]
        parts.insert(0, "1x1" if all(k == 1 for k in kernel) else "kernel")
        if weights.ndim > src.ndim:
            parts.append("depthwise" if weights.dims[1] == weights.dims[2] == 1 else "groups")
    if p.get("algorithm", "direct") != "direct":
        parts.append(p["algorithm"])
    return parts + _bits(op, descs)


def _bits(op: OpDesc, descs: dict[str, MemoryDesc]) -> list[str]:
    return ["7 bits"] if 7 in (op.params.get("src_bits"), op.params.get("weights_bits")) else []


def _eltwise(op: OpDesc, descs: dict[str, MemoryDesc]) -> list[str]:
    return [op.params["kind"], _number(op.params["alpha"]), _number(op.params["beta"])]


def _binary(op: OpDesc, descs: dict[str, MemoryDesc]) -> list[str]:
    return [op.params["kind"], _broadcast(descs["src_1"], descs["dst"])]


def _reduction(op: OpDesc, descs: dict[str, MemoryDesc]) -> list[str]:
    p = op.params
    parts = [p["kind"], _broadcast(descs["dst"], descs["src"])]
    return [*parts, f"p {_number(p['p'])}", f"eps {_number(p['eps'])}"] if p["kind"].startswith("norm") else parts


def _axis(op: OpDesc, descs: dict[str, MemoryDesc]) -> list[str]:
    return [f"axis {op.params['axis']}", *(["log"] if op.params.get("log") else [])]


def _norm(op: OpDesc, descs: dict[str, MemoryDesc]) -> list[str]:
    return [f"flags {op.params['flags']}"]


def _kind(op: OpDesc, descs: dict[str, MemoryDesc]) -> list[str]:
    return [op.params["kind"], *(["padding_idx"] if op.params.get("padding_idx", -1) >= 0 else [])]


def _prelu(op: OpDesc, descs: dict[str, MemoryDesc]) -> list[str]:
    return [_broadcast(descs["weights"], descs["src"])]


def _recurrent(op: OpDesc, descs: dict[str, MemoryDesc]) -> list[str]:
    given = [name for name in ("projection", "src_iter", "dst_iter") if op.descs[name] is not None]
    return [op.params["kind"], *(["reverse"] if op.params["reverse"] else []), *given]


_PARAMETERS: dict[str, Callable[[Any, dict[str, MemoryDesc]], list[str]]] = {
    "convolution": _window,
    "deconvolution": _window,
    "inner_product": _bits,
    "matmul": _bits,
    "pooling": _window,
    "pooling_v2": _window,
    "eltwise": _eltwise,
    "binary": _binary,
    "reduction": _reduction,
    "softmax": _axis,
    "logsoftmax": _axis,
    "softmax_v2": _axis,
    "shuffle": _axis,
    "batch_normalization": _norm,
    "layer_normalization": _norm,
    "lrn": _kind,
    "resampling": _kind,
    "embedding_bag": _kind,
    "prelu": _prelu,
    "rnn": _recurrent,
}


def _parameters(op: OpDesc, descs: dict[str, MemoryDesc]) -> list[str]:
    function = _PARAMETERS.get(op.kind)
    return [] if function is None else [part for part in function(op, descs) if part]


def _attributes(attr: Attr, dst: MemoryDesc) -> list[str]:
    parts = [" ".join(part for part in _post_op(entry, dst) if part) for entry in attr.post_ops]
    if attr.output_scales is not None:
        given = "runtime" if isinstance(attr.output_scales, str) else "fixed"
        parts.append(f"output_scales {attr.output_scales_mask} {given}")
    for arg, (mask, dtype, *groups) in sorted(attr.runtime_args.items()):
        parts.append(" ".join(["runtime", str(arg), str(mask), _short(dtype), *map(str, groups)]))
    return parts


def _post_op(entry: tuple[Any, ...], dst: MemoryDesc) -> list[str]:
    match entry:
        case ("eltwise", kind, alpha, beta, scale):
            scaled = [] if scale == 1.0 else ["scaled"]
            return ["eltwise", kind, _number(alpha), _number(beta), *scaled]
        case ("sum", scale, dtype):
            return ["sum", _number(scale), "" if dtype is None else _short(dtype)]
        case ("binary", kind, desc):
            return ["binary", kind, _layout(desc), _broadcast(desc, dst)]
        case ("prelu", mask):
            return ["prelu", str(mask)]
        case ("depthwise", *types, kernel, stride, padding):
            return ["depthwise", *map(_short, types), f"{kernel}x{kernel}", f"stride {stride}", f"padding {padding}"]
    return [repr(entry)]


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.").replace("float", "f")
