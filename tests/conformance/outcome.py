"""What a call gives and leaves behind, and whether that is what eager PyTorch's call does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.tolerance import tolerance

SEED = 15
_BEYOND_EAGER = 2.0  # times eager's own error against float64: both round, in another order
_LONGEST_SUM = 256  # products in the samples' longest sums, for the tolerance of their rounding
_RELATIVE = {torch.float32: 1.3e-6, torch.bfloat16: 1.6e-2, torch.float16: 1e-3, torch.complex64: 1.3e-6}
_ABSOLUTE = 1e-5  # these are torch.testing.assert_close's own


@dataclass
class Outcome:
    """Results and everything that a call may have written to, or the error that it raised."""

    value: Any = None
    args: Any = None
    state: dict[str, Any] | None = None
    shared: list[tuple[int, ...]] | None = None  # for each result the numbers of the arguments whose memory it is
    error: Exception | None = None


def outcome(call: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outcome:
    """Call with these arguments and PyTorch's generator at a fixed state, without gradients.

    model  whose parameters and buffers the call reads and may write
    """
    torch.manual_seed(SEED)
    try:
        with torch.no_grad():
            value = call(*args, **kwargs)
    except Exception as error:  # whatever the operator raises is an outcome
        return Outcome(error=error)
    return Outcome(value, (args, kwargs), model.state_dict(), _shared(value, (args, kwargs)))


def _shared(value: Any, args: Any) -> list[tuple[int, ...]]:
    memory = [_address(argument) for argument in pytree.tree_leaves(args)]
    results = [_address(result) for result in pytree.tree_leaves(value)]
    return [tuple(i for i, address in enumerate(memory) if address and address == result) for result in results]


def _address(value: Any) -> int:
    """Where a tensor's memory begins; 0 for what has none."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.numel():
        return 0
    return value.untyped_storage().data_ptr()


@dataclass(frozen=True)
class Rules:
    """What has to be equal beside shapes, dtypes and the like.

    values   numbers (those of empty() mean nothing)
    strides  strides, and which number is not finite: of a result that is the operator's own. Layers behind it may write
             in another layout, and make NaN of some infinities and not of the same ones.
    """

    values: bool = True
    strides: bool = True


def difference(ours: Outcome, eager: Outcome, exact: Callable[[], Outcome], rules: Rules) -> str:
    """Return how our outcome differs from eager's, "" where it does not.

    exact  computes the same in float64: the arbiter where numbers differ
    """
    if (ours.error is None) != (eager.error is None):
        return f"raised {brief(ours.error)}" if ours.error is not None else f"eager raised {brief(eager.error)}"
    if eager.error is not None:
        return ""
    wide: list[Outcome] = []
    for what in ("value", "args", "state"):
        mine, theirs = getattr(ours, what), getattr(eager, what)
        found = _differs(mine, theirs, lambda w=what: _exact(wide, exact, w), rules)  # type: ignore[misc]
        if found:
            return f"{what}: {found}"
    if ours.shared != eager.shared:
        return f"results share memory with arguments {ours.shared}, eager's with {eager.shared}"
    return ""


def brief(error: BaseException | None, most: int = 200) -> str:
    """Type and first line of an error, so many characters of that."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:most] if lines else ''}"


def _exact(wide: list[Outcome], exact: Callable[[], Outcome], what: str) -> Any:
    """The leaves of the float64 outcome, computed once; None where float64 is not supported."""
    if not wide:
        wide.append(exact())
    return None if wide[0].error is not None else pytree.tree_leaves(getattr(wide[0], what))


def _differs(ours: Any, eager: Any, exact: Callable[[], Any], rules: Rules) -> str:
    mine, structure = pytree.tree_flatten(ours)
    theirs, expected = pytree.tree_flatten(eager)
    if len(mine) != len(theirs) or (structure != expected and not _alike(structure, expected)):
        return f"structure {structure}, eager's {expected}"
    for i, (a, e) in enumerate(zip(mine, theirs, strict=True)):
        found = _leaf(a, e, lambda i=i: _entry(exact(), i), rules)  # type: ignore[misc]
        if found:
            return f"{i}: {found}" if len(mine) > 1 else found
    return ""


def _alike(structure: Any, expected: Any) -> bool:
    """Whether they differ in a tuple in place of a torch.Size alone: those are equal."""
    return str(structure) == str(expected).replace("TreeSpec(Size,", "TreeSpec(tuple,")


def _entry(leaves: Any, i: int) -> Any:
    return leaves[i] if leaves is not None and i < len(leaves) else None


def _leaf(a: Any, e: Any, exact: Callable[[], Any], rules: Rules) -> str:
    if not isinstance(e, Tensor):
        if type(a) is not type(e):
            return f"{type(a).__name__}, eager's {type(e).__name__}"
        same = a == e or (isinstance(e, float) and (math.isclose(a, e, rel_tol=1e-5) or (a != a and e != e)))
        return "" if same else f"{a!r}, eager's {e!r}"
    if not isinstance(a, Tensor):
        return f"{type(a).__name__}, eager's a tensor"
    for name in ("shape", "dtype", "layout", "device", "requires_grad"):
        if getattr(a, name) != getattr(e, name):
            return f"{name} {getattr(a, name)}, eager's {getattr(e, name)}"
    if rules.strides and e.layout is torch.strided and e.numel() > 1 and a.stride() != e.stride():
        return f"strides {a.stride()}, eager's {e.stride()}"
    if not rules.values or not e.numel():
        return ""
    return _numbers(_plain(a), _plain(e), exact, rules)


def _plain(t: Tensor) -> Tensor:
    """Numbers without layout."""
    if t.is_quantized:
        t = t.dequantize()
    t = t.detach() if t.layout is torch.strided else t.detach().to_dense()
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def _numbers(a: Tensor, e: Tensor, exact: Callable[[], Any], rules: Rules) -> str:
    if torch.equal(a, e):
        return ""
    if not e.is_floating_point():
        return f"{int((a != e).sum())} of {e.numel()} integers differ"
    dtype = e.dtype
    a64, e64 = a.double(), e.double()
    if not rules.strides:
        a64 = torch.where(e64.isfinite() | a64.isfinite(), a64, e64)
    if bool(torch.isclose(a64, e64, _RELATIVE.get(dtype, 1e-7), _ABSOLUTE, equal_nan=True).all()):
        return ""
    x = exact()
    if not isinstance(x, Tensor) or x.shape != e.shape and not x.is_complex():
        return _beyond(a64, e64, e64, dtype)
    return _beyond(a64, e64, _plain(x).double(), dtype)


def _beyond(a: Tensor, e: Tensor, x: Tensor, dtype: torch.dtype) -> str:
    """Whether ours is further from x than eager is, and than rounding explains."""
    odd = ~torch.isfinite(e)
    same = (a == e) | (a.isnan() & e.isnan())
    if not bool(same[odd].all()):
        return f"{a[odd & ~same][0].item()} where eager has {e[odd & ~same][0].item()}"
    usable = ~odd & x.isfinite()
    if not bool(a[~odd].isfinite().all()):
        return f"{a[~odd & ~a.isfinite()][0].item()} where eager has {e[~odd & ~a.isfinite()][0].item()}"
    if not bool(usable.any()):
        return ""
    scale = x[usable].abs().max().item()
    mine, theirs = ((t - x)[usable].abs().max().item() for t in (a, e))
    near = torch.isclose(a, x, _RELATIVE.get(dtype, 1e-7), _ABSOLUTE)[usable]
    allowed = max(_BEYOND_EAGER * theirs, tolerance(dtype, _LONGEST_SUM) * scale)
    if mine <= allowed or bool(near.all()):
        return ""
    return f"error {mine:.2g} of {scale:.3g}, eager's own {theirs:.2g}, allowed {allowed:.2g}"
