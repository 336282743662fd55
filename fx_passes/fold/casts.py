"""Drop conversions that convert nothing, copies of constants, empty pieces of concatenations, and checks that
torch.export found to hold.

Before: y = x.to(torch.float32)            with x float32: eager returns x itself
After:  y = x
Needs:  dtypes that are known: of meta["val"], or of the weights of layers
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.fold.identities import only_values_count
from fx_passes.graph.graph import example, finish, is_call, replace
from fx_passes.graph.inference import dtype

aten = torch.ops.aten
_ALIAS = "alias.default"
_NAMED = {"float": torch.float32, "double": torch.float64, "bfloat16": torch.bfloat16, "half": torch.float16}
_METHODS = frozenset({"to", "type_as", *_NAMED})
_TO_COPY = "_to_copy.default"
_OVERLOADS = frozenset({"to.dtype", "to.device", "to.dtype_layout", "to.other", "type_as.default", _TO_COPY})
_OVERLOADS |= {_ALIAS}
_COPY = "lift_fresh_copy.default"  # torch.tensor(...) in a forward: a copy of a constant
_CHECKS = frozenset({"_assert_tensor_metadata.default"})


def fold_casts(gm: fx.GraphModule) -> fx.GraphModule:
    """Remove what changes neither dtype nor device, and legacy empty tensors among the pieces of a concatenation."""
    aliasing = Aliasing(gm)
    for node in list(gm.graph.nodes):
        if _overload(node) == _COPY and not aliasing.is_written(node) and only_values_count(node):
            replace(node, node.args[0])
        elif _overload(node) in _CHECKS and not node.users:
            gm.graph.erase_node(node)
        elif is_cast(node) and _changes_nothing(node, gm) and (not _copies(node) or _may_be_source(node, aliasing)):
            replace(node, node.args[0])
        elif is_call(node, ops.concat):
            _drop_empty(node)
    return finish(gm)


def is_cast(node: Any) -> bool:
    """Whether node is one of the conversions of dtype or device."""
    if not isinstance(node, fx.Node) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return (node.op == "call_method" and node.target in _METHODS) or _overload(node) in _OVERLOADS


def dtype_of(node: Any) -> torch.dtype | None:
    """The dtype of a node's example; None where it has none."""
    value = example(node)
    return None if value is None else value.dtype


def _overload(node: fx.Node) -> str:
    """The name of an aten overload without its namespace; empty for anything else."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return str(node.target).removeprefix("aten.") if node.target.namespace == "aten" else ""


def _changes_nothing(node: fx.Node, gm: fx.GraphModule) -> bool:
    have, want = example(node.args[0]), example(node)
    if have is None or want is None:
        asked = _asked_dtype(node, gm)
        return asked is not None and asked == dtype(node.args[0], gm)
    asks_copy = node.kwargs.get("copy") or node.kwargs.get("memory_format") is not None or node.args[3:]
    if _overload(node) == _ALIAS and any(user.op == "output" for user in node.users):
        return False  # it is another tensor, in the same memory
    return have.dtype == want.dtype and have.device == want.device and have.layout == want.layout and not asks_copy


def _asked_dtype(node: fx.Node, gm: fx.GraphModule) -> torch.dtype | None:
    """The dtype that a method converts to, and nothing else; None where it is not known."""
    if node.op != "call_method":
        return None
    given: list[Any] = [*node.args[1:], *node.kwargs.values()]
    if node.target in _NAMED:
        return None if given else _NAMED[node.target]
    if len(given) != 1 or not node.kwargs.keys() <= {"dtype", "other"}:
        return None
    if node.target == "type_as":
        return dtype(given[0], gm)
    if is_call(given[0], getattr) and given[0].args[1] == "dtype":
        return dtype(given[0].args[0], gm)
    return given[0] if isinstance(given[0], torch.dtype) else None


def _copies(node: fx.Node) -> bool:
    """Whether node makes a new tensor of an equal dtype as well."""
    return _overload(node) == _TO_COPY


def _may_be_source(node: fx.Node, aliasing: Aliasing) -> bool:
    """Whether nobody can tell a copy from what it is a copy of: neither is written to, and the copy is not seen."""
    return only_values_count(node) and not aliasing.is_written(node) and not aliasing.is_written(node.args[0])


def _drop_empty(node: fx.Node) -> None:
    """torch.cat ignores pieces of shape [0], whatever the rank of the others, but for their dtype; one piece stays."""
    pieces, dim = node.args
    full = tuple(p for p in pieces if not _is_legacy_empty(p))
    if full and len(full) < len(pieces) and _promoted(full) == _promoted(pieces) is not None:
        node.args = (full, dim)


def _promoted(pieces: Sequence[fx.Node]) -> torch.dtype | None:
    """The dtype of a concatenation; None where that of a piece is not known."""
    dtypes = [dtype_of(piece) for piece in pieces]
    return None if None in dtypes else reduce(torch.promote_types, [dtype for dtype in dtypes if dtype is not None])


def _is_legacy_empty(node: Any) -> bool:
    value = example(node)
    if value is None or value.ndim != 1:
        return False
    size = value.shape[0]
    return type(size) is int and size == 0  # what only the call tells may not be asked
