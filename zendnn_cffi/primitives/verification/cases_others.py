"""Cases of what keeps shapes, reduces, looks up or copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, Attr, PostOps
from zendnn_cffi.primitives.descriptors import OpDesc
from zendnn_cffi.primitives.memory import MemoryDesc, dense_strides
from zendnn_cffi.primitives.verification.cases import (
    BF16,
    BINARY_KINDS,
    ELTWISE_KINDS,
    F32,
    FLOATS,
    NUMBERS,
    S8,
    S32,
    SHAPES,
    U8,
    Case,
    case,
    few_chains,
    gapped,
    name_of,
)

# every rank, whole blocks and not, ones in every place
TENSORS: tuple[tuple[int, ...], ...] = (
    (7,), (1,), (64,), (3, 17), (1, 32), (5, 1), (16, 48), (1, 1), (2, 5, 33), (1, 3, 16), (4, 1, 8), (2, 16, 4, 5),
    (1, 17, 3, 3), (2, 1, 3, 19), (3, 5, 1, 1), (2, 16, 3, 4, 5), (1, 3, 2, 1, 2, 3),
)  # fmt: skip
_OTHER_NUMBERS = (
    ("relu", (0.0, 0.0)), ("swish", (1.0, 0.0)), ("linear", (1.0, 0.0)), ("linear", (2.0, 0.0)), ("clip", (0.0, 1.0)),
    ("elu", (1.0, 0.0)), ("pow", (1.0, 0.5)), ("bounded_relu", (1.0, 0.0)),
)  # fmt: skip
ORDERS = {3: ("abc", "acb", "cba"), 4: ("abcd", "acdb", "dcba", "aBcd16b"), 5: ("abcde", "acdeb", "aBcde16b")}


def layouts(dims: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], MemoryDesc]]]:
    """Yield name and descriptor of each layout: orders of dimensions, blocks, gaps."""
    rank = len(dims)
    for order in ORDERS.get(rank, ("abcdefgh"[:rank], "abcdefgh"[:rank][::-1])[: 1 + (rank > 1)]):
        yield order, partial(_ordered, dims, dtype, order)
    yield "gaps", partial(gapped, dims, dtype)
    if rank == 4:
        yield "acdb gaps", partial(gapped, dims, dtype, "acdb")


def _ordered(dims: tuple[int, ...], dtype: torch.dtype, order: str) -> MemoryDesc:
    """Return a dense layout: dimensions from outermost to innermost, or a blocked tag."""
    if "B" in order:
        return MemoryDesc(dims, dtype, order)
    return MemoryDesc(dims, dtype, strides=dense_strides(dims, [ord(c) - ord("a") for c in order]))


def eltwises(dtype: torch.dtype) -> Iterator[Case]:
    numbers = [(kind, NUMBERS.get(kind, (0.0, 0.0))) for kind in ELTWISE_KINDS]
    numbers += _OTHER_NUMBERS
    for (kind, (alpha, beta)), dims in product(numbers, TENSORS):
        for name, desc in layouts(dims, dtype):
            yield case(
                f"eltwise {kind} {alpha} {beta} {name_of(dtype)} {dims} {name}",
                partial(_eltwise, kind, desc, alpha, beta),
            )
    for dims, chain in product(((2, 16, 4, 5), (3, 17)), few_chains()):
        name = f"eltwise {name_of(dtype)} {dims} [{chain.name}]"
        yield Case(
            name,
            partial(
                lambda dims, chain: (
                    descriptors.eltwise("linear", MemoryDesc(dims, dtype), 2.0, 0.5),
                    Attr(chain.make(dims, dtype)),
                ),
                dims,
                chain,
            ),
        )


def _eltwise(kind: str, desc: Callable[[], MemoryDesc], alpha: float, beta: float) -> OpDesc:
    return descriptors.eltwise(kind, desc(), alpha, beta)


def binaries(dtype: torch.dtype) -> Iterator[Case]:
    for kind, dims, shape in product(BINARY_KINDS, TENSORS, SHAPES):
        if len(dims) < 2 and shape not in ("full", "one"):
            continue
        other = SHAPES[shape](dims)
        for name, desc in layouts(dims, dtype):
            yield case(
                f"binary {kind} {name_of(dtype)} {dims} {shape} {name}",
                partial(_binary, kind, desc, other, dtype, shape == "full"),
            )
    mixed = BF16 if dtype == F32 else F32
    for dims, shape, kind in product(((2, 16, 4, 5), (3, 17)), ("full", "channels", "one"), ("add", "mul")):
        yield case(
            f"binary {kind} {name_of(dtype)} {name_of(mixed)} {dims} {shape}",
            partial(_binary, kind, partial(MemoryDesc, dims, dtype), SHAPES[shape](dims), mixed, False),
        )
    for dims, chain in product(((2, 16, 4, 5), (3, 17)), few_chains()):
        yield Case(
            f"binary {name_of(dtype)} {dims} [{chain.name}]",
            partial(
                lambda dims, chain: (
                    _binary("add", partial(MemoryDesc, dims, dtype), dims, dtype, True),
                    Attr(chain.make(dims, dtype)),
                ),
                dims,
                chain,
            ),
        )


def _binary(
    kind: str, desc: Callable[[], MemoryDesc], other: tuple[int, ...], dtype: torch.dtype, alike: bool
) -> OpDesc:
    a = desc()
    return descriptors.binary(kind, a, a if alike else MemoryDesc(other, dtype), a)


def rows(dtype: torch.dtype) -> Iterator[Case]:
    """Softmax along every axis, layer normalization, shuffles."""
    for dims in TENSORS:
        for name, desc in layouts(dims, dtype):
            label = f"{name_of(dtype)} {dims} {name}"
            for axis, log in product(range(len(dims)), (False, True)):
                yield case(f"softmax {axis} {log} {label}", partial(_softmax, desc, axis, log))
            if len(dims) > 1:
                for scale, shift, given in product((True, False), (True, False), (False, True)):
                    yield case(
                        f"layer_normalization {label} {scale, shift, given}",
                        partial(_layer_norm, desc, scale, shift, given),
                    )
            for axis, groups in product(range(len(dims)), (1, 2, 3, 4, 17)):
                if dims[axis] % groups == 0 and (groups > 1 or axis == 1):
                    yield case(f"shuffle {axis} {groups} {label}", partial(_shuffle, desc, axis, groups))
    other = BF16 if dtype == F32 else F32
    for dims, axis, log in product(((3, 17), (1, 32), (2, 5, 33)), (0, 1), (False, True)):
        yield case(
            f"softmax_v2 {name_of(dtype)} {name_of(other)} {dims} {axis} {log}",
            partial(_softmax_into, dims, dtype, other, axis, log),
        )


def _softmax(desc: Callable[[], MemoryDesc], axis: int, log: bool) -> OpDesc:
    return descriptors.softmax(desc(), axis, log)


def _softmax_into(dims: tuple[int, ...], src: torch.dtype, dst: torch.dtype, axis: int, log: bool) -> OpDesc:
    return descriptors.softmax(MemoryDesc(dims, src), axis, log, MemoryDesc(dims, dst))


def _layer_norm(desc: Callable[[], MemoryDesc], scale: bool, shift: bool, given: bool) -> OpDesc:
    return descriptors.layer_normalization(desc(), 1e-5, scale=scale, shift=shift, given_statistics=given)


def _shuffle(desc: Callable[[], MemoryDesc], axis: int, groups: int) -> OpDesc:
    return descriptors.shuffle(desc(), axis, groups)


def reductions(dtype: torch.dtype) -> Iterator[Case]:
    for dims, kind in product(TENSORS, descriptors.REDUCTION):
        rank = len(dims)
        for axes in _subsets(rank) if rank <= 4 and kind in ("sum", "max", "mean") else _usual_axes(rank):
            kept = tuple(1 if i in axes else n for i, n in enumerate(dims))
            if kept == dims:
                continue
            norms = ((1.0, 0.0), (2.0, 0.0), (3.0, 0.5)) if kind.startswith("norm") else ((2.0, 0.0),)
            for (p, eps), (name, desc) in product(norms, layouts(dims, dtype)):
                yield case(
                    f"reduction {kind} {p} {eps} {name_of(dtype)} {dims} {axes} {name}",
                    partial(_reduction, kind, desc, kept, dtype, p, eps),
                )


def _subsets(rank: int) -> Iterator[tuple[int, ...]]:
    for bits in range(1, 1 << rank):
        yield tuple(i for i in range(rank) if bits >> i & 1)


def _usual_axes(rank: int) -> set[tuple[int, ...]]:
    return {(rank - 1,), (min(1, rank - 1),), tuple(range(min(2, rank - 1), rank)), tuple(range(rank))}


def _reduction(
    kind: str, desc: Callable[[], MemoryDesc], kept: tuple[int, ...], dtype: torch.dtype, p: float, eps: float
) -> OpDesc:
    return descriptors.reduction(kind, desc(), MemoryDesc(kept, dtype), p=p, eps=eps)


def prelus(dtype: torch.dtype) -> Iterator[Case]:
    for dims, shape in product(TENSORS, SHAPES):
        if len(dims) < 2 and shape not in ("full", "one"):
            continue
        for name, desc in layouts(dims, dtype):
            yield case(
                f"prelu {name_of(dtype)} {dims} {shape} {name}", partial(_prelu, desc, SHAPES[shape](dims), dtype)
            )


def _prelu(desc: Callable[[], MemoryDesc], weights: tuple[int, ...], dtype: torch.dtype) -> OpDesc:
    return descriptors.prelu(desc(), MemoryDesc(weights, dtype, "any"))


def embedding_bags() -> Iterator[Case]:
    widths = (1, 3, 16, 17, 32, 48, 64, 128, 200, 256, 512)
    counts = ((30, 7), (7, 7), (1, 1), (40, 1))
    for kind, (table, dst), width, (length, bags), weighted, padding in product(
        descriptors.EMBEDDING_BAG, ((F32, F32), (BF16, BF16), (BF16, F32)), widths, counts, (False, True), (-1, 3)
    ):
        if weighted and kind != "sum":
            continue
        yield case(
            f"embedding_bag {kind} {name_of(table)} {name_of(dst)} {width} {length, bags} {weighted} {padding}",
            partial(_embedding_bag, kind, table, dst, width, length, bags, weighted, padding),
        )


def _embedding_bag(
    kind: str, table: torch.dtype, dst: torch.dtype, width: int, length: int, bags: int, weighted: bool, padding: int
) -> OpDesc:
    return descriptors.embedding_bag(
        kind,
        MemoryDesc((50, width), table),
        MemoryDesc((length,), S32),
        MemoryDesc((bags,), S32),
        MemoryDesc((length,), F32) if weighted else None,
        MemoryDesc((bags, width), dst),
        padding_idx=padding,
    )


_REORDERED = (
    (7,),
    (3, 17),
    (33, 16),
    (2, 5, 33),
    (2, 16, 4, 5),
    (1, 17, 3, 3),
    (2, 16, 3, 4, 5),
    (1, 1),
    (1, 16, 1, 1),
)
_WEIGHTS = ("Acdb16a", "ABcd16b16a", "AcdB16a2b", "ABcd4b16a4b")


def reorders() -> Iterator[Case]:
    for dims, src, dst in product(_REORDERED, (F32, BF16, S8, U8, S32), (F32, BF16, S8, U8, S32)):
        for (a, first), (b, second) in product(layouts(dims, src), layouts(dims, dst)):
            label = f"reorder {name_of(src)} {a} to {name_of(dst)} {b} {dims}"
            for name, attr in _reorder_attributes(src, dst, a == b):
                yield Case(f"{label} {name}", partial(_reorder, first, second, attr))
    for dims, (src, dst), tag in product(
        ((17, 33, 3, 3), (32, 16, 1, 1)), ((F32, F32), (BF16, BF16), (F32, BF16)), _WEIGHTS
    ):
        yield Case(
            f"reorder {name_of(src)} to {name_of(dst)} {tag} {dims}",
            partial(_reorder, partial(MemoryDesc, dims, src), partial(MemoryDesc, dims, dst, tag), Attr),
        )


def _reorder_attributes(src: torch.dtype, dst: torch.dtype, plain: bool) -> Iterator[tuple[str, Callable[[], Attr]]]:
    yield "", Attr
    if plain and src == F32:
        yield "sum", lambda: Attr(PostOps().sum(1.0))
        yield "scale", lambda: Attr(output_scales=2.0)
        yield "runtime scale", lambda: Attr(output_scales="runtime")
        if dst in (S8, U8):
            yield "zero point", lambda: Attr(output_scales=2.0, zero_points={ARG_DST: 0})
    if plain and src in (S8, U8) and dst == F32:
        yield "zero point", lambda: Attr(output_scales=0.5, zero_points={ARG_SRC: 0})


def _reorder(first: Any, second: Any, attr: Callable[[], Attr]) -> tuple[OpDesc, Attr]:
    return OpDesc("reorder", None, {"src": first(), "dst": second()}), attr()


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    **{f"eltwise {name_of(t)}": partial(eltwises, t) for t in FLOATS},
    **{f"binary {name_of(t)}": partial(binaries, t) for t in FLOATS},
    **{f"rows {name_of(t)}": partial(rows, t) for t in FLOATS},
    **{f"reduction {name_of(t)}": partial(reductions, t) for t in FLOATS},
    **{f"prelu {name_of(t)}": partial(prelus, t) for t in FLOATS},
    "embedding_bag": embedding_bags,
    "reorder": reorders,
}
