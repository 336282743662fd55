"""What `make verify-library` runs: descriptors and attributes, in groups that each get a process of their own.

A case names itself; its descriptors are made only when it runs. Sizes are small and odd, whole blocks, and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import Attr, PostOps
from zendnn_cffi.primitives.descriptors import OpDesc
from zendnn_cffi.primitives.memory import MemoryDesc

F32, BF16, S8, U8, S32 = torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int32
FLOATS = (F32, BF16)


@dataclass(frozen=True)
class Case:
    """One use of a primitive. make returns its descriptor (for a reorder, one without a C struct) and attributes."""

    name: str
    make: Callable[[], tuple[OpDesc, Attr]]


def name_of(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.").replace("float", "f")


def gapped(dims: tuple[int, ...], dtype: torch.dtype, order: str | None = None) -> MemoryDesc:
    """Return a layout in which elements of the innermost dimension are followed by three that belong to others.

    order  dimensions from outermost to innermost, "acdb" for channels last
    """
    axes = [ord(c) - ord("a") for c in order] if order else list(range(len(dims)))
    strides, step = [0] * len(dims), 1
    for position, axis in enumerate(reversed(axes)):
        strides[axis] = step
        step *= dims[axis] + (3 if position == 0 else 0)
    return MemoryDesc(dims, dtype, strides=strides)


@dataclass(frozen=True)
class Chain:
    """Post-ops for a result of given dims: name, and what makes them."""

    name: str
    make: Callable[[tuple[int, ...], torch.dtype], PostOps]


NUMBERS = {
    "relu": (0.1, 0.0), "pow": (0.5, 2.0), "elu": (0.7, 0.0), "linear": (2.0, -0.5), "bounded_relu": (0.8, 0.0),
    "swish": (1.7, 0.0), "clip": (-0.5, 0.7), "clip_v2": (-0.5, 0.7),
}  # fmt: skip
ELTWISE_KINDS = (
    "relu", "pow", "tanh", "gelu_erf", "elu", "round", "square", "logsigmoid", "abs", "mish", "sqrt", "hardswish",
    "linear", "bounded_relu", "soft_relu", "logistic", "exp", "gelu_tanh", "swish", "log", "clip", "clip_v2",
)  # fmt: skip
BINARY_KINDS = ("add", "mul", "max", "min", "div", "sub", "ge", "gt", "le", "lt", "eq", "ne")
SHAPES = {
    "full": lambda dims: dims,
    "channels": lambda dims: (1, dims[1], *(1 for _ in dims[2:])),
    "samples": lambda dims: (dims[0], *(1 for _ in dims[1:])),
    "one": lambda dims: tuple(1 for _ in dims),
    "last": lambda dims: (*(1 for _ in dims[:-1]), dims[-1]),
    "but last": lambda dims: (*dims[:-1], 1),
}


def eltwise(kind: str, *numbers: float) -> Chain:
    given = numbers or NUMBERS.get(kind, (0.0, 0.0))
    return Chain(" ".join(map(str, (kind, *given))), lambda dims, dtype: PostOps().eltwise(kind, *given))


def binary(kind: str, shape: str, dtype: torch.dtype | None = None) -> Chain:
    """A binary post-op; its operand lies as the result does (row-major or channels last), dtype of dst unless given."""
    return Chain(
        f"{kind} {shape} {name_of(dtype) if dtype else ''}".strip(),
        lambda dims, dst: PostOps().binary(kind, MemoryDesc(SHAPES[shape](dims), dtype or dst)),
    )


def sums(*scales: float) -> Chain:
    def make(dims: tuple[int, ...], dtype: torch.dtype) -> PostOps:
        chain = PostOps()
        for scale in scales:
            chain = chain.sum(scale)
        return chain

    return Chain("sum " + " ".join(map(str, scales)), make)


def joined(*chains: Chain) -> Chain:
    return Chain(
        " + ".join(c.name for c in chains),
        lambda dims, dtype: PostOps([entry for c in chains for entry in c.make(dims, dtype)]),
    )


NOTHING = Chain("", lambda dims, dtype: PostOps())
PRELU = [Chain(f"prelu {mask}", lambda dims, dtype, mask=mask: PostOps().prelu(mask)) for mask in (0, 2)]  # type: ignore[misc]


def chains() -> Iterator[Chain]:
    """Every kind of post-op with every broadcast, by itself; and pairs and triples that networks have."""
    yield from map(eltwise, ELTWISE_KINDS)
    yield from (eltwise("relu", 0.0, 0.0), eltwise("swish", 1.0, 0.0), eltwise("linear", 2.0, 0.0))
    yield from (eltwise(kind, *NUMBERS.get(kind, (0.0, 0.0)), 0.5) for kind in ("relu", "gelu_erf", "tanh"))
    yield from (binary(kind, shape) for kind in BINARY_KINDS for shape in ("full", "channels", "one"))
    yield from (binary(kind, shape) for kind in ("add", "mul") for shape in ("samples", "last", "but last"))
    yield from (binary("add", shape, dtype) for shape in ("full", "channels") for dtype in FLOATS)
    yield from (sums(1.0), sums(0.5), sums(1.0, 1.0), sums(2.0, 0.5))
    relu, add, gate = eltwise("relu", 0.0, 0.0), binary("add", "full"), binary("mul", "channels")
    yield from (joined(relu, add), joined(add, relu), joined(sums(1.0), relu), joined(relu, sums(1.0)))
    yield from (
        joined(gate, binary("add", "channels")),
        joined(gate, add, relu),
        joined(eltwise("swish", 1.0, 0.0), add),
    )
    yield from (joined(eltwise("linear"), eltwise("clip")), joined(relu, eltwise("relu", 0.1, 0.0)), joined(add, add))


def few_chains() -> Iterator[Chain]:
    """One of each sort, for primitives with many layouts."""
    yield from (eltwise("relu", 0.0, 0.0), eltwise("tanh"), eltwise("linear"), sums(1.0), sums(0.5))
    yield from (binary("add", shape) for shape in ("full", "channels", "one"))
    yield binary("mul", "full")
    yield joined(sums(1.0), eltwise("relu", 0.0, 0.0))


def case(name: str, make: Callable[[], OpDesc], attr: Callable[[], Attr] = Attr) -> Case:
    return Case(name, lambda: (make(), attr()))


__all__ = ["Case", "Chain", "case", "chains", "descriptors", "few_chains", "gapped"]
