"""Embeddings of quantized tables dequantize the rows that are read, not the table in each call.

    embedding(torchao's IntxUnpackedToInt8Tensor or Float8Tensor), or embedding(dequantize(table, scale, zero_point))
becomes
    ops.quantized_embedding(indices, table, scale, zero_point)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.fuse.embedding_bags import refused_module, table_node
from fx_passes.graph.graph import argument, finish, get_attribute, is_call, is_constant, tensor_of
from fx_passes.graph.inner import parts
from fx_passes.graph.int8_tensor import table_blocks


def read_quantized_tables(gm: fx.GraphModule) -> fx.GraphModule:
    """Respell every embedding of such a table."""
    aliasing = Aliasing(gm)
    written = {str(node.target) for node in gm.graph.find_nodes(op="get_attr") if aliasing.is_written(node)}
    for node in list(gm.graph.nodes):
        lookup = _lookup(gm, node)
        found = None if lookup is None else _table(gm, lookup[0], written)
        if lookup is None or found is None:
            continue
        source = node.meta.get("source", str(node.target))
        with gm.graph.inserting_before(node):
            table, scale, zero_point = (table_node(gm.graph, e) if isinstance(e, str) else e for e in found[:3])
        node.op, node.target, node.kwargs = "call_function", ops.quantized_embedding, {}
        node.args = (lookup[1], table, scale, zero_point, *found[3:])
        node.meta["source"] = source
    return finish(gm)


def _lookup(gm: fx.GraphModule, node: fx.Node) -> tuple[Any, Any] | None:
    """(table, indices) of an embedding: the table as a node or a name; None for other nodes."""
    if node.op == "call_module":
        module = gm.get_submodule(str(node.target))
        known = type(module) is nn.Embedding and module.max_norm is None and refused_module(module) is None
        return (f"{node.target}.weight", node.args[0]) if known and len(node.args) == 1 else None
    if is_call(node, ops.embedding, torch.embedding, torch.ops.aten.embedding.default):
        return argument(node, 0, "weight"), argument(node, 1, "indices")
    if is_call(node, F.embedding) and argument(node, 3, "max_norm") is None:
        return argument(node, 1, "weight"), argument(node, 0, "input")
    return None


def _table(gm: fx.GraphModule, table: Any, written: set[str]) -> tuple[Any, ...] | None:
    """(table, scale, zero point, axis, dtype), the first three as nodes or names; None for other tables."""
    if is_call(table, ops.dequantize):
        return _dequantized(gm, table)
    name = str(table.target) if isinstance(table, fx.Node) and table.op == "get_attr" else table
    if not isinstance(name, str) or name in written:
        return None
    value = get_attribute(gm, name)
    blocks = table_blocks(value)
    if blocks is None:
        return None
    zero_point = f"{name}.zero_point" if "zero_point" in parts(value) else None
    return f"{name}.qdata", f"{name}.scale", zero_point, blocks, value.dtype


def _dequantized(gm: fx.GraphModule, real: fx.Node) -> tuple[Any, ...] | None:
    """The same of a table that the graph dequantizes."""
    kept, scale, zero_point, axis, _ = real.args
    held, scales, zeros = (tensor_of(gm, each) for each in (kept, scale, zero_point))
    if held is None or held.ndim != 2 or scales is None or not is_constant(real):
        return None
    if not (axis == 0 or (isinstance(axis, tuple) and len(axis) == 2 and axis[0] == 1)):
        return None
    if zero_point is not None and zeros is None:
        return None
    return real.args
