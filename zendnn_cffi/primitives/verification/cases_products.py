"""Cases of matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_WEIGHTS, Attr
from zendnn_cffi.primitives.descriptors import OpDesc
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.verification.cases import (
    BF16,
    F32,
    FLOATS,
    NOTHING,
    S8,
    S32,
    U8,
    Case,
    Chain,
    case,
    chains,
    few_chains,
    gapped,
    name_of,
)

SIZES = ((3, 17, 33), (1, 16, 32), (33, 64, 48), (64, 1, 16), (5, 3, 1), (1, 33, 1), (1, 1, 1), (128, 96, 80))
CHAIN_SIZES = ((17, 33, 48), (1, 32, 64), (6, 16, 19))
_Pair = tuple[torch.dtype, torch.dtype]
PAIRS: tuple[_Pair, ...] = ((F32, F32), (BF16, BF16), (BF16, F32))


def _matrix(dims: tuple[int, ...], dtype: torch.dtype, layout: str) -> MemoryDesc:
    return gapped(dims, dtype) if layout == "gaps" else MemoryDesc(dims, dtype, layout)


def _inner_product(
    sizes: tuple[int, int, int], types: _Pair, layouts: tuple[str, str, str], bias: torch.dtype | None, chain: Chain
) -> Case:
    m, k, n = sizes
    src, dst = types
    return Case(
        f"inner_product {sizes} {name_of(src)} {name_of(dst)} {layouts} bias {bias} [{chain.name}]",
        lambda: (
            descriptors.inner_product(
                _matrix((m, k), src, layouts[0]),
                _matrix((n, k), src, layouts[1]),
                MemoryDesc((n,), bias) if bias else None,
                _matrix((m, n), dst, layouts[2]),
            ),
            Attr(chain.make((m, n), dst)),
        ),
    )


def inner_products(types: _Pair) -> Iterator[Case]:
    plain = product(("ab", "ba", "gaps"), ("ab", "ba", "any", "gaps"), ("ab", "gaps"))
    for layouts, bias, sizes in product(plain, (None, F32, BF16), SIZES):
        if bias in (None, F32, types[0]):
            yield _inner_product(sizes, types, layouts, bias, NOTHING)
    for weights, chain, sizes in product(("ab", "any"), chains(), CHAIN_SIZES):
        for bias in (None, F32) if sizes is CHAIN_SIZES[0] else (None,):
            yield _inner_product(sizes, types, ("ab", weights, "ab"), bias, chain)


def inner_products_of_images(dtype: torch.dtype) -> Iterator[Case]:
    for tag, weights, (n, c, s, o) in product(
        ("abcd", "acdb"), ("abcd", "acdb", "any"), ((3, 16, 3, 17), (1, 5, 2, 32), (2, 32, 1, 1))
    ):
        yield case(
            f"inner_product of images {name_of(dtype)} {tag} {weights} {n, c, s, o}",
            partial(_image_product, (n, c, s, s), (o, c, s, s), dtype, tag, weights),
        )


def _image_product(src: tuple[int, ...], weights: tuple[int, ...], dtype: torch.dtype, tag: str, other: str) -> OpDesc:
    return descriptors.inner_product(
        MemoryDesc(src, dtype, tag), MemoryDesc(weights, dtype, other), None, MemoryDesc((src[0], weights[0]), dtype)
    )


_BIASES: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "row": lambda m, n: (1, n),
    "column": lambda m, n: (m, 1),
    "one": lambda m, n: (1, 1),
    "full": lambda m, n: (m, n),
}


def _matmul(
    sizes: tuple[int, int, int],
    types: _Pair,
    layouts: tuple[str, str, str],
    bias: str,
    chain: Chain,
    bias_dtype: torch.dtype = F32,
) -> Case:
    m, k, n = sizes
    src, dst = types
    return Case(
        f"matmul {sizes} {name_of(src)} {name_of(dst)} {layouts} bias {bias} {name_of(bias_dtype)} [{chain.name}]",
        lambda: (
            descriptors.matmul(
                _matrix((m, k), src, layouts[0]),
                _matrix((k, n), src, layouts[1]),
                MemoryDesc(_BIASES[bias](m, n), bias_dtype) if bias else None,
                _matrix((m, n), dst, layouts[2]),
            ),
            Attr(chain.make((m, n), dst)),
        ),
    )


def matmuls(types: _Pair) -> Iterator[Case]:
    plain = product(("ab", "ba", "gaps"), ("ab", "ba", "any", "gaps"), ("ab", "gaps"))
    for layouts, bias, sizes in product(plain, ("", "row"), SIZES):
        yield _matmul(sizes, types, layouts, bias, NOTHING)
    for weights, bias, sizes in product(("ab", "ba", "any"), ("column", "one", "full", "row"), SIZES):
        if bias != "row":
            yield _matmul(sizes, types, ("ab", weights, "ab"), bias, NOTHING)
        if types[0] == BF16:
            yield _matmul(sizes, types, ("ab", weights, "ab"), bias, NOTHING, BF16)
    for weights, chain, sizes in product(("ab", "ba", "any"), chains(), CHAIN_SIZES):
        for bias in ("", "row") if sizes is CHAIN_SIZES[0] else ("",):
            yield _matmul(sizes, types, ("ab", weights, "ab"), bias, chain)


_BATCHES = (((2,), (2,)), ((3,), (1,)), ((1,), (3,)), ((2, 3), (2, 3)), ((2, 1), (1, 3)), ((1, 4), (1, 4)))


def batched_matmuls(types: _Pair) -> Iterator[Case]:
    sizes = ((5, 17, 33), (16, 32, 48), (1, 16, 9), (7, 1, 16), (4, 8, 1))
    for (left, right), (m, k, n), swapped, chain in product(_BATCHES, sizes, (False, True), (NOTHING, *few_chains())):
        if chain is not NOTHING and m * n == n:
            continue
        yield _batched(left, right, (m, k, n), types, swapped, chain)


def _batched(
    left: tuple[int, ...],
    right: tuple[int, ...],
    sizes: tuple[int, int, int],
    types: _Pair,
    swapped: bool,
    chain: Chain,
) -> Case:
    m, k, n = sizes
    src, dst = types
    batch = tuple(map(max, left, right))
    rank = len(batch) + 2
    tag = "".join(chr(ord("a") + i) for i in range(rank - 2)) + "".join(chr(ord("a") + i) for i in (rank - 1, rank - 2))
    return Case(
        f"matmul {left} {right} {sizes} {name_of(src)} {name_of(dst)} {'ba' if swapped else 'ab'} [{chain.name}]",
        lambda: (
            descriptors.matmul(
                MemoryDesc((*left, m, k), src),
                MemoryDesc((*right, k, n), src, tag if swapped else None),
                None,
                MemoryDesc((*batch, m, n), dst),
            ),
            Attr(chain.make((*batch, m, n), dst)),
        ),
    )


def int8_products() -> Iterator[Case]:
    sizes = ((17, 32, 48), (3, 17, 33), (1, 64, 16), (5, 3, 1))
    for src, dst, (m, k, n), weights in product((U8, S8), (F32, S32, S8, U8, BF16), sizes, ("ab", "ba", "any")):
        for name, attr in _INT8_ATTRIBUTES.items():
            if dst == S32 and name != "plain":
                continue
            yield case(
                f"matmul int8 {name_of(src)} {name_of(dst)} {m, k, n} {weights} {name}",
                partial(_int8_matmul, (m, k, n), src, dst, weights),
                partial(attr, n),
            )
        yield case(
            f"inner_product int8 {name_of(src)} {name_of(dst)} {m, k, n} {weights}",
            partial(_int8_inner_product, (m, k, n), src, dst, weights),
            partial(Attr, None, "user", None if dst == S32 else 0.05),
        )


_INT8_ATTRIBUTES: dict[str, Callable[[int], Attr]] = {
    "plain": lambda n: Attr(),
    "one scale": lambda n: Attr(output_scales=0.05),
    "scales": lambda n: Attr(
        output_scales=[0.01 * (1 + i % 5) for i in range(n)], output_scales_mask=2 if n > 1 else 0
    ),
    "runtime scale": lambda n: Attr(output_scales="runtime"),
    "zero point of src": lambda n: Attr(output_scales=0.05, zero_points={ARG_SRC: 0}),
    "zero point of dst": lambda n: Attr(output_scales=0.05, zero_points={ARG_DST: 0}),
    "scales of operands": lambda n: Attr(scales={ARG_SRC: (0, F32), ARG_WEIGHTS: (2, F32)}),
}


def _int8_matmul(sizes: tuple[int, int, int], src: torch.dtype, dst: torch.dtype, weights: str) -> OpDesc:
    m, k, n = sizes
    return descriptors.matmul(MemoryDesc((m, k), src), MemoryDesc((k, n), S8, weights), None, MemoryDesc((m, n), dst))


def _int8_inner_product(sizes: tuple[int, int, int], src: torch.dtype, dst: torch.dtype, weights: str) -> OpDesc:
    m, k, n = sizes
    return descriptors.inner_product(
        MemoryDesc((m, k), src), MemoryDesc((n, k), S8, weights), None, MemoryDesc((m, n), dst)
    )


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    **{f"inner_product {name_of(s)} {name_of(d)}": partial(inner_products, (s, d)) for s, d in PAIRS},
    **{f"inner_product of images {name_of(t)}": partial(inner_products_of_images, t) for t in FLOATS},
    **{f"matmul {name_of(s)} {name_of(d)}": partial(matmuls, (s, d)) for s, d in PAIRS},
    **{f"batched matmul {name_of(s)} {name_of(d)}": partial(batched_matmuls, (s, d)) for s, d in PAIRS},
    "int8 products": int8_products,
}
