"""Embeddings of quantized tables dequantize the rows that are read, not the table in each call.

    embedding(torchao's IntxUnpackedToInt8Tensor or Float8Tensor), or embedding(dequantize(table, scale, zero_point))
becomes
    ops.quantized_embedding(indices, table, scale, zero_point)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.fuse.embedding_bags import lookup_of, table_node
from fx_passes.graph.graph import finish, get_attribute, is_call, is_constant, tensor_of
from fx_passes.graph.inner import parts
from fx_passes.graph.int8_tensor import table_blocks


def read_quantized_tables(gm: fx.GraphModule) -> fx.GraphModule:
    """Respell every embedding of such a table."""
    lookups = [(node, lookup) for node in gm.graph.nodes if (lookup := lookup_of(gm, node)) is not None]
    if not lookups:
        return gm
    aliasing = Aliasing(gm)
    written = {str(node.target) for node in gm.graph.find_nodes(op="get_attr") if aliasing.is_written(node)}
    for node, (table, indices) in lookups:
        found = _table(gm, table, written)
        if found is None:
            continue
        source = node.meta.get("source", str(node.target))
        with gm.graph.inserting_before(node):
            held = [table_node(gm.graph, each) if isinstance(each, str) else each for each in found[:3]]
        node.op, node.target, node.kwargs = "call_function", ops.quantized_embedding, {}
        node.args = (indices, *held, *found[3:])
        node.meta["source"] = source
    return finish(gm)


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
