"""Cut the graph into maximal convex regions of vocabulary operations; everything else stays plain PyTorch.

Each node gets a stage: how often the longest path to it changes from plain to vocabulary. Vocabulary nodes of one stage
form a region. Every path between two of them stays among them (one that leaves comes back at a later stage), so a
region can run as one step; and stages only grow along edges, so regions never wait for each other in a circle.

    x -> conv -> relu -> plain -> conv -> out        stages 1 1 1(plain) 2; regions {conv, relu}, {conv}
          \\------------------------^
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Container, Iterator, Mapping

import torch
from torch import fx, nn

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.aliasing.effects import may_change_sizes
from fx_passes.graph.free_sizes import growing_nodes
from fx_passes.graph.graph import (
    constant_nodes,
    finish,
    get_attribute,
    is_call,
    is_shape,
    is_vocabulary,
    nodes_in,
    sort,
    unique_name,
)
from fx_passes.partition.views import is_read_outside, keep_views_outside

log = logging.getLogger("zendnn_cffi.passes")

Ordering = dict[fx.Node, list[fx.Node]]  # node -> nodes that it has to follow though it does not read them
Operands = Mapping[fx.Node, Mapping[fx.Node, None]]  # node -> the tensors computed at run time that it needs
MakeRegion = Callable[[fx.Graph, "Constants", str], nn.Module]


class Constants(Mapping[str, torch.Tensor]):
    """Parameters and buffers by qualified name, looked up in the module tree each time they are asked for.

    A name whose tensor is gone, as its layer was replaced, raises KeyError; it stays among the names.
    """

    def __init__(self, root: nn.Module, names: tuple[str, ...]) -> None:
        self._root = root
        self._names = names

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        try:
            value = get_attribute(self._root, name)
        except AttributeError as error:
            raise KeyError(name) from error
        if not isinstance(value, torch.Tensor):
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def partition(
    gm: fx.GraphModule,
    make_region: MakeRegion,
    root: nn.Module | None = None,
    supported: Callable[[fx.Node], bool] = is_vocabulary,
) -> fx.GraphModule:
    """Replace each region by a call of make_region(graph, constants, name), a new submodule of gm.

    root       where constants are looked up (default gm)
    supported  which vocabulary nodes may be in a region
    """
    before, constants = ordering(gm), constant_nodes(gm.graph)
    for found in find_regions(gm, supported, before, constants):
        members = keep_views_outside(gm, found)
        read_in_place(members, before)
        call = extract(gm, members, make_region, root if root is not None else gm, constants)
        inherit_ordering(before, set(members), call)
    sort(gm.graph, before)  # once: a graph may have a hundred regions
    return finish(gm)


def supported_in(dtype: torch.dtype | None) -> Callable[[fx.Node], bool]:
    """Which vocabulary nodes regions that compute in a dtype (None: each value's own) may have: no sine in bf16."""
    if dtype != torch.bfloat16:
        return is_vocabulary
    return lambda node: is_vocabulary(node) and not (is_call(node, ops.eltwise) and node.args[1] in ops.PERIODIC)


def is_member(node: fx.Node, supported: Callable[[fx.Node], bool]) -> bool:
    """Whether node, which is no constant, may be in a region at all. Sizes belong to whoever reads them."""
    if node.op != "call_function" or is_shape(node):
        return False
    if node.target is operator.getitem:
        return type(node.args[1]) is int and is_call(node.args[0], *ops.SEVERAL) and is_member(node.args[0], supported)
    if not is_vocabulary(node) or not supported(node):
        return False
    if node.target in ops.SEVERAL:
        return all(is_call(user, operator.getitem) and type(user.args[1]) is int for user in node.users)
    sizes_at = ops.TRAITS[node.target].sizes_at
    return sizes_at is None or all(map(is_shape, nodes_in(node.args[sizes_at:])))


def operands(node: fx.Node, constants: Container[fx.Node]) -> dict[fx.Node, None]:
    """The tensors computed at run time that node needs, directly or for their sizes."""
    found: dict[fx.Node, None] = {}
    for source in node.all_input_nodes:
        if is_shape(source):
            found.update(operands(source, constants))
        elif source not in constants:
            found[source] = None
    return found


def find_regions(
    gm: fx.GraphModule, supported: Callable[[fx.Node], bool], before: Ordering, constants: Container[fx.Node]
) -> list[list[fx.Node]]:
    """Return the regions worth making, each a list of nodes in graph order."""
    growing = growing_nodes(gm)
    needs = {node: operands(node, constants) for node in gm.graph.nodes}
    able = [n for n in needs if not (n in growing or n in constants) and is_member(n, supported) and is_real(n)]
    # before there are stages: positions, and what is moved on the way in, would put all later by one
    members = set(trim(worth_keeping(able, needs), needs))
    stages: dict[fx.Node, int] = {}
    for node in needs:
        inside = node in members
        sources = [*needs[node], *before.get(node, ())]
        stages[node] = max((stages[s] + (inside and s not in members) for s in sources), default=int(inside))
    regions: dict[int, list[fx.Node]] = {}
    for node, stage in stages.items():
        if node in members:
            regions.setdefault(stage, []).append(node)
    trimmed = [trim(worth_keeping(nodes, needs), needs) for nodes in regions.values()]
    return [nodes for nodes in trimmed if any(n.target in _WORTH_A_REGION for n in nodes)]


_HEAVY = ops.COMPUTE & ops.having(light=False)
_WORTH_A_REGION = ops.COMPUTE & ops.having(opens_region=True)


def is_real(node: fx.Node) -> bool:
    """Whether node computes what primitives compute in, as far as is known: masks and positions stay outside."""
    if node.target in (ops.embedding_bag, ops.offset_bags, ops.quantized_embedding):
        return False  # PyTorch's own, outside, where it reads its indices in place
    if node.target in (ops.quantize, ops.quantize_by, ops.quantize_rows_by):
        return True
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point()


def worth_keeping(nodes: list[fx.Node], needs: Operands) -> list[fx.Node]:
    """Nodes without the connected parts that are element-wise alone, where their values are known to be small change.

    That is where shapes are known: models compute positions and masks in such parts, some of which are truncated to
    integers afterwards and must be what PyTorch computes to the last bit.
    """
    part: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        groups = list({id(part[s]): part[s] for s in needs[node] if s in part}.values())
        joined = max(groups, key=len, default=[])  # the largest one grows: a long chain would be copied for each node
        for added in ([node], *(group for group in groups if group is not joined)):
            joined.extend(added)
            part.update(dict.fromkeys(added, joined))
    worth = {
        id(group): any(n.target in _HEAVY or "val" not in n.meta for n in group)
        for group in {id(group): group for group in part.values()}.values()
    }
    return [node for node in nodes if worth[id(part[node])]]


def trim(nodes: list[fx.Node], needs: Operands) -> list[fx.Node]:
    """Leave out what only moves data on the way in: outside it is a view, which costs nothing and stays one."""
    inside: dict[fx.Node, None] = dict.fromkeys(nodes)
    for node in nodes:
        moves = node.target in ops.MOVEMENT or node.target is operator.getitem
        if moves and not any(source in inside for source in needs[node]):
            del inside[node]
    return list(inside)


def ordering(gm: fx.GraphModule, aliasing: Aliasing | None = None) -> Ordering:
    """Nodes that must stay behind others though no value flows: readers and writers of the same memory."""
    aliasing = aliasing or Aliasing(gm)
    before: Ordering = {}
    for writer, written in aliasing.writers.items():
        for reader in (reader for node in written for reader in aliasing.readers(node) if reader is not writer):
            if reader.target in ops.SHAPE and not may_change_sizes(writer):
                continue
            first, then = sorted((reader, writer), key=aliasing.order.__getitem__)
            before.setdefault(then, []).append(first)
    return before


def read_in_place(members: list[fx.Node], before: Ordering) -> None:
    """Let the outside read what a region writes to, behind it: the written input is no result of the region."""
    inside = set(members)
    for writer in (node for node in members if node.target in ops.WRITING):
        for user in [user for user in writer.users if is_read_outside(user, inside)]:
            user.replace_input_with(writer, writer.args[0])
            before.setdefault(user, []).append(writer)


def inherit_ordering(before: Ordering, members: set[fx.Node], call: fx.Node) -> None:
    """The call of a region has to follow what its members had to, and comes before what they did."""
    inherited = [first for member in members for first in before.pop(member, ()) if first not in members]
    for then, firsts in before.items():
        before[then] = [call if first in members else first for first in firsts]
    before[call] = inherited


def extract(
    gm: fx.GraphModule, nodes: list[fx.Node], make_region: MakeRegion, root: nn.Module, constants: Container[fx.Node]
) -> fx.Node:
    """Move nodes into a graph of their own; return the call of it, which stands where the last of them stood."""
    inside = set(nodes)
    inputs = list(dict.fromkeys(s for n in nodes for s in operands(n, constants) if s not in inside))
    inner, copies = copy_nodes(nodes, inputs)
    outputs = [n for n in nodes if any(is_read_outside(user, inside) for user in n.users)]
    inner.output(copies[outputs[0]] if len(outputs) == 1 else tuple(copies[n] for n in outputs))
    name = add_module(gm, "zen_region", inner, lambda names, name: make_region(inner, Constants(root, names), name))
    log.debug("partition: %s: %d nodes, %d inputs, %d outputs", name, len(nodes), len(inputs), len(outputs))
    return replace_by_call(gm.graph, nodes, name, inputs, outputs)


def add_module(
    gm: fx.GraphModule, prefix: str, inner: fx.Graph, make: Callable[[tuple[str, ...], str], nn.Module]
) -> str:
    """Give gm the submodule that make makes of inner; return its name.

    make  takes the names of the constants that inner reads, and the submodule's own
    """
    inner.lint()
    name = unique_name(gm, prefix)
    gm.add_submodule(name, make(tuple(dict.fromkeys(str(n.target) for n in inner.find_nodes(op="get_attr"))), name))
    return name


def copy_nodes(nodes: list[fx.Node], inputs: list[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return a graph of nodes in which inputs are placeholders, without an output yet, and what each node is there.

    Constants and sizes that are not among them come along when they are first read.
    """
    inner = fx.Graph()
    copies = {source: inner.placeholder(source.name) for source in inputs}

    def copy_of(source: fx.Node) -> fx.Node:
        if source not in copies:
            copies[source] = inner.node_copy(source, copy_of)
        return copies[source]

    for node in nodes:
        copy_of(node)
    return inner, copies


def replace_by_call(
    graph: fx.Graph, nodes: list[fx.Node], name: str, inputs: list[fx.Node], outputs: list[fx.Node]
) -> fx.Node:
    """Put one call in place of nodes, and return it."""
    with graph.inserting_after(nodes[-1]):
        call = graph.call_module(name, tuple(inputs))
    results = [call]
    if len(outputs) != 1:
        results = []
        for i in reversed(range(len(outputs))):
            with graph.inserting_after(call):
                results.insert(0, graph.call_function(operator.getitem, (call, i)))
    inside = set(nodes)
    for old, new in zip(outputs, results, strict=True):
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
        new.meta.update({k: v for k, v in old.meta.items() if k == "val"})
    for node in reversed(nodes):
        erase_with_sizes(node)
    return call


def erase_with_sizes(node: fx.Node) -> None:
    """Erase node and the sizes that only the inside has read."""
    while node.users:  # each goes once, whatever else reads it
        erase_with_sizes(next(iter(node.users)))
    node.graph.erase_node(node)
