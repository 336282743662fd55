"""Which calls a graph is right for, as JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fx_passes.saved.encoding import decode, encode
from fx_passes.saved.errors import FileError, NotSaved
from fx_passes.saved.graphs import dump_structure, load_structure
from fx_passes.trace.assumptions import Assumption, Bare, Present
from fx_passes.trace.call_kind import Kind
from fx_passes.trace.guards import Description, Guards
from fx_passes.trace.sizes import ALL, Free, FreeSizes
from fx_passes.trace.states import State
from fx_passes.trace.traced import Traced


def encode_arguments(traced: Traced) -> dict[str, Any]:
    try:
        fixed = {name: encode(value, lambda _: None) for name, value in traced.specialized.items()}
    except NotSaved as reason:
        raise NotSaved(f"it was traced for {reason}") from None
    rows: dict[str, Any] = {"specialized": fixed, "given": sorted(traced.given)}
    if calls := traced.calls:
        rows["calls"] = calls
    if traced.assumed:
        rows["assumed"] = [_encode_assumption(assumption) for assumption in traced.assumed]
    if traced.states:
        rows["states"] = [encode(tuple(state), lambda _: None) for state in traced.states]
    if traced.guards is None or traced.example is None:
        return rows
    args, kwargs = traced.example
    found = traced.guards.description()
    try:
        values = [encode(tuple(leaf) if tensor else leaf, lambda _: None) for tensor, leaf in found.leaves]
    except NotSaved as reason:
        raise NotSaved(f"it was exported with {reason}") from None
    tensors = [tensor for tensor, _ in found.leaves]
    guards: dict[str, Any] = {
        "structure": dump_structure(found.structure),
        "leaves": values,
        "tensors": tensors,
        "sizes": found.sizes,
        "conditions": found.conditions,
    }
    if found.without_gradients:
        guards["without_gradients"] = True
    if found.any_order:
        guards["any_order"] = True
    if traced.sizes != ALL:
        guards["free"] = [int(traced.sizes.free), traced.sizes.because]
    return {**rows, "guards": guards, "positional": len(args), "keywords": [*kwargs]}


_KINDS = {
    kind.__name__: kind
    for kind in (torch.Tensor, nn.Parameter, bool, int, float, complex, str, list, tuple, dict, Bare, Present)
}


def _encode_assumption(assumption: Assumption) -> list[Any]:
    name, path, kind = assumption
    if isinstance(kind, type) and kind not in _KINDS.values():
        raise NotSaved(f"it was traced for an argument of class {kind.__name__}")
    return [name, encode(path, lambda _: None), kind.__name__ if isinstance(kind, type) else kind]


def _decode_assumption(row: Any) -> Assumption:
    name, path, kind = row
    if kind is not None and type(kind) is not int:
        if kind not in _KINDS:
            raise FileError(f"no class of an argument is {str(kind)[:80]!r}")
        kind = _KINDS[kind]
    return Assumption(str(name), decode(path, lambda _: None), kind)


def _decode_state(row: Any) -> State:
    found = decode(row, lambda _: None)
    if not isinstance(found, tuple) or len(found) != 4 or not isinstance(found[2], tuple) or not State(*found).is_known:
        raise FileError(f"no flag of PyTorch's is {str(found)[:80]!r}")
    return State(*found)


def _decode_sizes(row: Any) -> FreeSizes:
    if row is None:
        return ALL
    if not isinstance(row, list) or len(row) != 2 or type(row[0]) is not int or not isinstance(row[1], str):
        raise FileError(f"no sizes are free by {str(row)[:80]!r}")
    try:
        return FreeSizes(Free(row[0]), row[1])
    except ValueError as error:
        raise FileError(f"no sizes are free by {row[0]}") from error


def decode_arguments(data: Mapping[str, Any]) -> dict[str, Any]:
    """Those of Traced."""
    fixed = {name: decode(value, lambda _: None) for name, value in data["specialized"].items()}
    assumed = tuple(_decode_assumption(row) for row in data.get("assumed", ()))
    states = tuple(_decode_state(row) for row in data.get("states", ()))
    found: dict[str, Any] = {"specialized": fixed, "given": frozenset(data["given"]), "assumed": assumed}
    found["states"] = states
    if "calls" in data:
        if not isinstance(data["calls"], str):
            raise FileError(f"no calls are described by {str(data['calls'])[:80]!r}")
        found["kind"] = Kind.described(data["calls"])
    if "guards" in data:
        row = data["guards"]
        leaves = [(tensor, decode(v, lambda _: None)) for tensor, v in zip(row["tensors"], row["leaves"], strict=True)]
        structure = load_structure(row["structure"])
        given = [len(part.children()) for part in structure.children()]
        if structure.num_leaves != len(leaves) or given != [data["positional"], len(data["keywords"])]:
            raise FileError(f"{len(leaves)} arguments are described, and there are {structure.num_leaves}")
        found["guards"] = Guards.described(
            Description(
                structure,
                leaves,
                sizes=row["sizes"],
                conditions=row.get("conditions"),
                without_gradients=row.get("without_gradients") is True,
                any_order=row.get("any_order") is True,
            )
        )
        found["sizes"] = _decode_sizes(row.get("free"))
        found["example"] = ((None,) * data["positional"], dict.fromkeys(data["keywords"]))
    return found
