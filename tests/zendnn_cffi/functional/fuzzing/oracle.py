"""Compare random calls that must succeed with plain PyTorch in float64, under random ambient modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.zendnn_cffi.functional.fuzzing.cases import ROWS, Case
from tests.zendnn_cffi.functional.fuzzing.cases_norms import NORMS
from tests.zendnn_cffi.functional.fuzzing.gemms import gemm
from tests.zendnn_cffi.functional.fuzzing.holding import Holder, as_tensor, overwritten
from tests.zendnn_cffi.functional.fuzzing.post_ops import allowed
from zendnn_cffi import UnsupportedError

# The oracle finds wrong elements, not lost digits: generated kernels approximate exp to some 1e-5.
RELATIVE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.int32: 1e-6, torch.int8: 1e-6, torch.uint8: 1e-6}
HUGE = 1e15


@contextlib.contextmanager
def _threads(count: int) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


AMBIENT: tuple[Callable[[], Any], ...] = (
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.device("meta"),
    _float64,
    _deterministic,
    lambda: _threads(2),
    lambda: _threads(3),
    contextlib.nullcontext,
)


def make(seed: int) -> tuple[Holder, Case]:
    """Return the case of a seed."""
    h = Holder(seed)
    while (case := h.r.choice((*ROWS, *NORMS, gemm))(h)) is None:
        h.made.clear()
    case.dtype = case.dtype or h.dtype
    if case.chain.tuples:
        case.kwargs["post_ops"] = case.chain.tuples
    return h, case


def wrong(h: Holder, case: Case) -> str | None:
    """Make the call; return what is wrong about its answer, or None. Raises what the call raises."""
    out, before = _out(h, case)
    expected, error = _expectation(case, before)
    held = [as_tensor(kept).clone() for kept, _ in h.made]
    with torch.no_grad(), h.r.choice(AMBIENT)() if h.chance(0.3) else contextlib.nullcontext():
        try:
            result = case.function(*case.args, **case.kwargs, **({} if out is None else {"out": out}))
        except UnsupportedError:
            return None
    if out is not None and result is not out:
        return "the result is not out"
    for (kept, _), value in zip(h.made, held, strict=True):
        if kept is not out and not torch.equal(as_tensor(kept).nan_to_num(), value.nan_to_num()):
            return "an operand has changed"
    if out is not None and out is not case.in_place and (count := overwritten(as_tensor(out))):
        return f"{count} bytes around out were written"
    got = as_tensor(result)
    if isinstance(result, np.ndarray) and not h.numpy:
        return "an array for tensors"
    if got.dtype != case.dtype:
        return f"dtype {got.dtype}, expected {case.dtype}"
    return _compare(got.double().reshape(expected.shape), expected, error)


def _out(h: Holder, case: Case) -> tuple[Any, torch.Tensor | None]:
    """Return out, perhaps None, and what it holds."""
    if not case.out and not case.chain.reads_out:
        return None, None
    if (
        isinstance(case.in_place, (torch.Tensor, np.ndarray))
        and not case.chain.tuples
        and h.chance(0.15)
        and _may_be_out(case)
    ):
        return case.in_place, None
    if not case.chain.reads_out and not h.chance(0.2):
        return None, None
    shape = _shape(case)
    out = h.result(shape, case.dtype)
    if not case.out:
        out = out.contiguous() if out.is_contiguous() else torch.zeros(shape, dtype=case.dtype)
        return out, out.double().clone().reshape(case.base.shape)
    return out, out.double().clone().reshape(case.base.shape)


def _may_be_out(case: Case) -> bool:
    if not isinstance(case.in_place, (torch.Tensor, np.ndarray)):
        return False
    tensor = as_tensor(case.in_place)
    own = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    fits = tuple(tensor.shape) == tuple(case.base.shape) and tensor.dtype == case.dtype
    return own and fits and tensor.is_contiguous()


def _shape(case: Case) -> tuple[int, ...]:
    """The result's shape as the caller sees it."""
    name = case.function.__name__
    if name == "inner_product":
        return (*as_tensor(case.args[0]).shape[:-1], case.base.shape[-1])
    if name == "matmul":
        return tuple((as_tensor(case.args[0]).double() @ as_tensor(case.args[1]).double()).shape)
    return tuple(case.base.shape)


def _expectation(case: Case, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    relative = RELATIVE[case.dtype] if not case.exact else {torch.bfloat16: 4e-3}.get(case.dtype, 1e-6)
    if any(as_tensor(a).dtype == torch.bfloat16 for a in case.args if isinstance(a, torch.Tensor)) and not case.exact:
        relative = max(relative, RELATIVE[torch.bfloat16])
    finite = case.base[case.base.isfinite()].abs()
    scale = case.scale if case.scale is not None else float(finite.max()) if finite.numel() else 1.0
    expected, error = allowed(case.chain, case.base, before, relative * case.tolerant, scale)
    if not case.dtype.is_floating_point:
        limits = torch.iinfo(case.dtype)
        expected, error = expected.round().clamp(limits.min, limits.max), error + 1.001
        error = torch.where(error > 2, error, torch.full_like(error, 0.5 if case.exact else 1.001))
    return expected, error


def _compare(got: torch.Tensor, expected: torch.Tensor, error: torch.Tensor) -> str | None:
    usual = expected.isfinite() & error.isfinite() & (expected.abs() < HUGE)
    bad = usual & ~((got - expected).abs() <= error)
    if not bad.any():
        return None
    place = tuple(int(i) for i in bad.nonzero()[0])
    return (
        f"{int(bad.sum())} of {expected.numel()} wrong, at {place}: {got[place].item():.6g}, expected "
        f"{expected[place].item():.6g} within {error[place].item():.3g}"
    )
