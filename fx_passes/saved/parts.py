"""The modules that stand for parts of a graph, as JSON, and back: regions, and what else it calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import fx, nn

from fx_passes.bags.offset_bags import JoinedOffsetBags
from fx_passes.memoize.memoised import Memoised
from fx_passes.partition.partition import Constants
from fx_passes.region.kept import Kept
from fx_passes.region.options import RegionOptions
from fx_passes.region.region import ZenRegion
from fx_passes.saved.encoding import decode, encode
from fx_passes.saved.errors import FileError, NotSaved
from fx_passes.saved.graphs import decode_graph, encode_graph
from fx_passes.saved.layouts import Layouts
from fx_passes.saved.references import check_part
from fx_passes.saved.released import decode_kept, encode_kept


def encode_part(name: str, part: Any, layouts: Layouts, packed: dict[str, torch.Tensor]) -> dict[str, Any]:
    row = {"graph": encode_graph(part.graph), "constants": [*part.constants]}
    if isinstance(part, ZenRegion):
        options = part.options
        values = {field.name: encode(getattr(options, field.name), lambda _: None) for field in fields(options)}
        if isinstance(part.constants, Kept):
            row["kept"] = encode_kept(part.constants, layouts, packed)
            row["still"] = list(part.constants.still)
        return {**row, "kind": "region", "options": values}
    if isinstance(part, Memoised):
        return {**row, "kind": "memoised", "masks": part.masks}
    if isinstance(part, JoinedOffsetBags):
        return {**row, "kind": "bags", "tune": part.tune}
    raise NotSaved(f"its submodule {name} ({type(part).__name__}) is none that a file holds")


def decode_part(
    name: str, row: Mapping[str, Any], root: nn.Module, layouts: Layouts, tensors: Mapping[str, torch.Tensor]
) -> nn.Module:
    graph = decode_graph(row["graph"])
    constants: Any = Constants(root, tuple(row["constants"]))
    if "kept" in row:
        constants = decode_kept(row["kept"], layouts, tensors, row.get("still", ()))
    part = _made(name, row, graph, constants)
    check_part(name, part, root)
    return part


def _made(name: str, row: Mapping[str, Any], graph: fx.Graph, constants: Any) -> nn.Module:
    match row["kind"]:
        case "region":
            values = {key: decode(value, lambda _: None) for key, value in row["options"].items()}
            return ZenRegion(graph, constants, name, RegionOptions(**values))
        case "memoised":
            return Memoised(graph, constants, row["masks"])
        case "bags":
            return JoinedOffsetBags(graph, constants, row["tune"])
    raise FileError(f"no part of a module is {str(row['kind'])[:80]!r}")
