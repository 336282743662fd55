"""What the schemas of aten say of an operator by its name, as functions of torch and methods of tensors have it."""

from __future__ import annotations

import functools
from typing import Any

import torch

# Written in terms of others, or of lists of numbers, too: that their results are new tensors, no schema says.
_NEW = {"argsort", "max", "min", "one_hot", "sort", "where", "inner", "outer", "tensordot", "kron", "cross", "cdist",
        "cosine_similarity", "pairwise_distance", "isclose", "isfinite", "isinf", "isnan", "det", "logdet",
        "inverse"}  # fmt: skip
_STATISTICS = ("batch_norm", "instance_norm")  # which they may update, and their schemas do not say so


@functools.cache
def makes_new(name: str) -> bool:
    """Whether the schemas of an aten operator say that its results are new tensors: topk, cumsum and the like.

    Operators that are written in terms of others do not say so: atleast_1d, meshgrid and einsum may return views.
    """
    if name in _NEW:
        return True
    found = [each for each in _overloads(name) if not each._overloadname.startswith("dimname")]
    return bool(found) and not name.startswith(("_", "unsafe_", "resize", "to_")) and all(map(_says_new, found))


@functools.cache
def only_computes(name: str) -> bool:
    """Whether an aten operator writes to nothing, draws no random numbers, and returns something."""
    found = _overloads(name)
    return bool(found) and not name.endswith(_STATISTICS) and all(map(_is_functional, found))


def _overloads(name: str) -> list[Any]:
    """Those of an aten operator that are not told where to write; none where there is no such operator."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return []
    found = [getattr(packet, each) for each in packet.overloads()]
    return [each for each in found if not any(row.is_out for row in each._schema.arguments)]


def _says_new(overload: Any) -> bool:
    schema, name = overload._schema, overload.name()
    annotated = any(row.alias_info is not None for row in (*schema.returns, *schema.arguments))
    if annotated or not schema.returns or not torch._C._dispatch_has_kernel(name):
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")


def _is_functional(overload: Any) -> bool:
    schema, is_random = overload._schema, torch.Tag.nondeterministic_seeded in overload.tags
    return bool(schema.returns) and not schema.is_mutable and not is_random
