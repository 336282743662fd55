"""Embeddings of a call's own indices become vocabulary: rows go straight into the region that reads them.

    ids -> embedding(table) -> region                plain PyTorch, the table looked up in the module tree
becomes
    ids -> region: ids -> ops.embedding(table)

Others stay outside: what depends on sizes or masks is computed once for each (per_size, per_mask), and in a region it
would be computed anew.
"""

from __future__ import annotations

from torch import fx

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.fuse.embedding_bags import read_lookup, table_node
from fx_passes.graph.graph import finish, get_attribute


def move_lookups_in(gm: fx.GraphModule) -> fx.GraphModule:
    """Respell every embedding whose indices are an input and whose rows an operation of a region may read."""
    aliasing = Aliasing(gm)
    tables = {str(node.target) for node in gm.graph.find_nodes(op="get_attr") if aliasing.is_written(node)}
    for node in list(gm.graph.nodes):
        found = read_lookup(gm, node)
        if found is None or found[1].op != "placeholder" or not any(user.target in ops.COMPUTE for user in node.users):
            continue
        table, indices = found
        if aliasing.is_written(indices) or table in tables or not get_attribute(gm, table).is_floating_point():
            continue
        source = node.meta.get("source", str(node.target))
        with gm.graph.inserting_before(node):
            weight = table_node(gm.graph, table)
        node.op, node.target, node.args, node.kwargs = "call_function", ops.embedding, (weight, indices), {}
        node.meta["source"] = source
    return finish(gm)
