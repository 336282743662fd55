"""Random calls of gemm with their results in float64."""

from __future__ import annotations

from typing import Any

import torch

from tests.zendnn_cffi.functional.fuzzing.cases import Case, d
from tests.zendnn_cffi.functional.fuzzing.holding import Holder, as_tensor
from tests.zendnn_cffi.functional.fuzzing.post_ops import BINARY, ELTWISE, Chain
from zendnn_cffi import functional as zf
from zendnn_cffi.engine.library import load

_KINDS = ("relu", "gelu_erf", "gelu_tanh", "tanh", "logistic", "swish")
_RESULTS = {
    torch.float32: (torch.float32,),
    torch.bfloat16: (torch.bfloat16, torch.float32),
    torch.uint8: (torch.int32, torch.float32, torch.bfloat16, torch.int8, torch.uint8),
    torch.int8: (torch.int32, torch.float32, torch.bfloat16, torch.int8, torch.uint8),
}


def gemm(h: Holder) -> Case:
    m, k, n = h.size(), h.r.choice([1, 2, 3, 8, 17, 64, 200]), h.r.choice([1, 2, 3, 16, 33, 64, 70])
    has_integers = load().runs("cpu_isa_avx512_core_vnni")
    src = h.r.choice([dtype for dtype in _RESULTS if has_integers or dtype.is_floating_point])
    integer = not src.is_floating_point
    result = h.r.choice(_RESULTS[src])
    if integer:
        a = h.hold(torch.randint(-8 if src == torch.int8 else 0, 9, (m, k), generator=h.generator).to(src))
        b = h.hold(torch.randint(-8, 9, (k, n), generator=h.generator).to(torch.int8))
    else:
        a, b = h.operand([m, k], src), h.operand([k, n], src)
    alpha = h.r.choice([1, 1, 2]) if integer else h.r.choice([1, 1, 0.5, -2.0])
    base = d(a) @ d(b) * alpha
    bias = None
    if h.chance(0.4):
        bias = h.operand([n], torch.float32) if not integer else _whole(h, [n])
        base = base + d(bias)
    if h.chance(0.4):
        b = zf.PackedWeights(b, src_dtype=src)
    made = _chain(h, m, n, src, result)
    kwargs = {"alpha": alpha, "out_dtype": result, "post_ops": made.tuples}
    scale = 3.0 * (k**0.5) + 3 if not integer else None
    return Case(zf.gemm, [a, b, bias], kwargs, base, made, dtype=result, scale=scale)


def _whole(h: Holder, shape: list[int]) -> Any:
    return h.hold(torch.randint(-20, 20, shape, generator=h.generator).to(torch.int32))


def _chain(h: Holder, m: int, n: int, src: torch.dtype, result: torch.dtype) -> Chain:
    made = Chain()
    whole = not result.is_floating_point
    for _ in range(h.r.choice([0, 0, 1, 1, 2, 3])):
        which = h.r.choice(["eltwise", "eltwise", "binary", "bias", "scale"])
        if which == "eltwise":
            kind = h.r.choice([*_KINDS, *([] if whole else ["clip"])])
            alpha, beta = {"swish": (1.0, 0.0), "clip": (-0.5, 1.0)}.get(kind, (0.0, 0.0))
            if kind == "relu" and not whole and h.chance(0.4):
                alpha = 0.1
            f = ELTWISE[kind]
            made.append(("eltwise", kind, alpha, beta), lambda x, out, f=f, a=alpha, b=beta: f(x, a, b))
        elif which == "binary":
            kind = h.r.choice(["add", "mul"])
            other = h.operand([m, n], torch.float32)
            value = d(other).clone()
            made.append(("binary", kind, other), lambda x, out, f=BINARY[kind], v=value: f(x, v))
        elif which == "bias":
            other = h.operand([n], torch.float32) if src.is_floating_point else _whole(h, [n])
            value = d(other).clone()
            made.append(("bias", other), lambda x, out, v=value: x + v)
        elif result != torch.int32:
            scale: Any = h.operand([n], torch.float32) if h.chance(0.5) else 0.5
            zero: Any = h.r.choice([0, 3]) if h.chance(0.7) or not whole else _points(h, n, result)
            s = d(scale).clone() if not isinstance(scale, float) else scale
            z = as_tensor(zero).double().clone() if not isinstance(zero, int) else zero
            made.append(("scale", scale, zero), lambda x, out, s=s, z=z: x * s + z)
    return made


def _points(h: Holder, n: int, result: torch.dtype) -> Any:
    return h.hold(torch.randint(0, 5, (n,), generator=h.generator).to(result))
