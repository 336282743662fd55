"""Results that share memory in eager share it here, too: views of a result stay outside of its region.

    Before: y = conv(x); v = y.flatten(1); return y, v     both in the region, which would return two tensors
    After:  y in the region; v = y.flatten(1) behind it

Whoever writes to y afterwards finds it in v. A view that the region reads itself is there twice.
Of an input that the region writes to, all views that are read outside stay there.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator

import torch
from torch import fx

from fx_passes import ops
from fx_passes.graph.graph import is_shape

_SAME_SHAPE = ops.having(shape="same")
_SEVERAL = ops.having(several=True)


def keep_views_outside(gm: fx.GraphModule, nodes: list[fx.Node]) -> list[fx.Node]:
    """Return the nodes of a region, in order, without views that share memory with what is outside of it."""
    inside = dict.fromkeys(nodes)
    base = _bases(inside)
    returned = [node for node in nodes if _is_returned(node, inside)] if base else []
    sharing = Counter(base.get(node, node) for node in returned)
    twins: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node not in base or not any(is_read_outside(user, inside) for user in node.users):
            continue
        if base[node].target in ops.WRITING or (node in returned and sharing[base[node]] > 1):
            twin = _twin(gm.graph, node, inside, base, twins)
            made = {*twins.values()}
            node.replace_all_uses_with(
                twin, delete_user_cb=lambda user, made=made: user not in made and not _is_read_inside(user, inside)
            )
    for node in reversed(nodes):
        if node in base and not node.users:
            gm.graph.erase_node(node)
            del inside[node]
    return list(inside)


def _bases(inside: dict[fx.Node, None]) -> dict[fx.Node, fx.Node]:
    """What each view in a region is a view of: the first value that is none, by what its sizes can be told from."""
    base: dict[fx.Node, fx.Node] = {}
    for node in inside:
        source = node.args[0] if node.target in ops.MOVEMENT or node.target is operator.getitem else None
        if not isinstance(source, fx.Node) or source not in inside:
            continue
        if source in base or source.target not in _SEVERAL:  # several results are no views of each other
            first = base.get(source, source)
            if all(base.get(n, n) is first or n in _as_large_as(first) for n in _sized(node, inside)):
                base[node] = first
    return base


def _twin(
    graph: fx.Graph,
    node: fx.Node,
    inside: dict[fx.Node, None],
    base: dict[fx.Node, fx.Node],
    twins: dict[fx.Node, fx.Node],
) -> fx.Node:
    """The view again, outside of the region, of what leaves it; sizes are asked there, too."""
    if node not in base or node in twins:
        return twins.get(node, node)

    def outside(source: fx.Node) -> fx.Node:
        if source in inside:
            return _twin(graph, source, inside, base, twins) if source in base else base[node]
        if is_shape(source) and any(n in inside for n in _read_by_sizes(source)):
            return graph.node_copy(source, outside)
        return source

    with graph.inserting_after(node):
        twins[node] = graph.node_copy(node, outside)
    return twins[node]


def _sized(node: fx.Node, inside: dict[fx.Node, None]) -> list[fx.Node]:
    """Members of the region whose sizes node needs."""
    sizes = [source for source in node.all_input_nodes if is_shape(source)]
    return [source for size in sizes for source in _read_by_sizes(size) if source in inside]


def _read_by_sizes(size: fx.Node) -> list[fx.Node]:
    """The tensors whose sizes a number is made of."""
    found = []
    for source in size.all_input_nodes:
        found.extend(_read_by_sizes(source) if is_shape(source) else [source])
    return found


def _as_large_as(node: fx.Node) -> Iterator[fx.Node]:
    """The values of the same shape that node is computed from."""
    while node.target in _SAME_SHAPE:
        node = node.args[0]
        yield node


def is_read_outside(user: fx.Node, inside: dict[fx.Node, None] | set[fx.Node]) -> bool:
    """Whether the value user reads is needed outside: sizes that only the inside reads are copied there."""
    if is_shape(user):
        return any(is_read_outside(reader, inside) for reader in user.users)
    return user not in inside


def _is_read_inside(user: fx.Node, inside: dict[fx.Node, None]) -> bool:
    """Whether user is a member of the region, or a size that one of them needs."""
    return user in inside or (is_shape(user) and any(_is_read_inside(reader, inside) for reader in user.users))


def _is_returned(node: fx.Node, inside: dict[fx.Node, None]) -> bool:
    """Whether node, or what shares memory with it outside of the region, is a result of the graph."""
    seen, pending = {node}, [node]
    while pending:
        top = pending.pop()
        for user in top.users:
            if user.op == "output":
                return True
            if user not in inside and user not in seen and _is_view(user):
                seen.add(user)
                pending.append(user)
    return False


def _is_view(node: fx.Node) -> bool:
    """Whether the result of node is known to be memory of its argument."""
    if node.target in ops.MOVEMENT or node.target in (operator.getitem, getattr):
        return True
    name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
    packet = getattr(torch.ops.aten, str(name).partition(".")[0], None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    results = [part for overload in packet.overloads() for part in getattr(packet, overload)._schema.returns]
    return any(result.alias_info is not None and not result.alias_info.is_write for result in results)
