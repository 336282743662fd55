"""What the stages need to know of an operation, declared once beside its body.

    @op(kind=COMPUTE, shape="same", torch_candidate=True)
    def softmax(src, dim, log=False): ...

The sets that stages ask for are derived by `having`: an operation that is added cannot be forgotten in one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from zendnn_cffi.values import dataclass

COMPUTE = "compute"  # numbers from numbers: what primitives are for
MOVEMENT = "movement"  # the same numbers elsewhere, or seen otherwise
SHAPE = "shape"  # numbers about tensors
CONSTANT = "constant"  # over parameters, evaluated once
KINDS = (COMPUTE, MOVEMENT, SHAPE, CONSTANT)
SHAPES = ("", "rank", "same")

Operator = Callable[..., Any]
_F = TypeVar("_F", bound=Operator)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """One operation.

    kind             one of KINDS
    shape            "same": the result has the shape of the first operand; "rank": as many dimensions; "": neither
    post_ops         takes a chain of post-ops
    weighted         the first operand and the second, the weight, have one dtype
    windows          the first operand is [N, C, *spatial], or [C, *spatial]
    per_sample       keeps the samples along dimension 0 apart, whatever its other arguments are
    light            small change: element-wise and the like alone make no region where their shapes are known
    opens_region     alone is worth a region
    torch_candidate  plain PyTorch is measured beside the primitives
    several          the result is a tuple of tensors, read by operator.getitem
    view             may be the operand's memory seen otherwise
    shares_memory    the result may lie in an operand's memory, or an operand in the result's; every view's does
    no_rule          why no rule lowers it; then it is plain PyTorch within a region, or read by who needs it
    writes           writes to its first operand, which is the result
    row_major        the result lies in row-major order, however the operands lie
    sizes_at         from this positional argument on there are sizes, which may be computed; None: nowhere
    """

    kind: str
    shape: str = ""
    post_ops: bool = False
    weighted: bool = False
    windows: bool = False
    per_sample: bool = False
    light: bool = False
    opens_region: bool = True
    torch_candidate: bool = False
    several: bool = False
    view: bool = False
    shares_memory: bool = False
    no_rule: str = ""
    writes: bool = False
    row_major: bool = False
    sizes_at: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.shape not in SHAPES:
            raise ValueError(
                f"kind must be one of {KINDS} and shape one of {SHAPES}, got {self.kind!r}, {self.shape!r}"
            )


TRAITS: dict[Operator, Traits] = {}


def op(**traits: Any) -> Callable[[_F], _F]:
    """Declare a function to be an operation of the vocabulary with these Traits."""

    def declare(function: _F) -> _F:
        TRAITS[function] = Traits(**traits)
        return function

    return declare


def having(**traits: Any) -> frozenset[Operator]:
    """Return the operations whose traits have these values."""
    return frozenset(o for o, t in TRAITS.items() if all(getattr(t, name) == value for name, value in traits.items()))
