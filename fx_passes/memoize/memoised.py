"""The module that remembers results of plain operations, and how operations are moved into one."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fx_passes import ops
from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.graph.graph import (
    constant_nodes,
    finish,
    is_call,
    is_constant,
    is_pure,
    is_shape,
    is_vocabulary,
    replace,
    sort,
)
from fx_passes.graph.interpreter import run
from fx_passes.memoize.combinations import Combinations
from fx_passes.memoize.functional import gives_tensor, is_functional
from fx_passes.memoize.watched import is_watched
from fx_passes.partition.partition import Constants, Ordering, add_module, copy_nodes, ordering

log = logging.getLogger("zendnn_cffi.passes")

WORTHWHILE = 2  # operations
_MAX_MASK_ELEMENTS = 1 << 16  # of larger ones comparing costs about as much as computing


class Memoised(nn.Module):
    """Computes graph from masks, the first of its arguments, from sizes, and from tensors that depend on sizes alone.

    Results are remembered for each combination of sizes and shapes, with a copy of the masks, and given again for equal
    ones. Readers must not write to them: whoever makes a module sees to that.
    """

    reads_numbers = True  # for fx_passes.aliasing.effects: it neither writes to, nor hands on, what it is given

    def __init__(self, graph: fx.Graph, constants: Mapping[str, Tensor], masks: int = 0) -> None:
        super().__init__()
        self.graph = graph
        self.constants = constants
        self.masks = masks
        self.combinations = Combinations(8, most_bytes=8 << 20) if masks else Combinations(16)

    def forward(self, *given: Any) -> tuple[Tensor, ...]:
        """Return the tensors that others read, in graph order."""
        masks, state = given[: self.masks], self.combinations.state
        if is_watched() or not all(map(_is_plain, masks)) or torch.is_autocast_enabled("cpu") or self._trains():
            return self._compute(given)
        key = given
        if masks:
            shapes = [(mask.shape, mask.dtype) for mask in masks]
            key = (*shapes, *(id(x) if isinstance(x, Tensor) else x for x in given[self.masks :]))
        known = self.combinations.get(key)  # it holds the tensors whose addresses are in the key
        if known is not None and all(map(torch.equal, known.held, masks)):
            return known.results
        if sum(mask.numel() for mask in masks) > _MAX_MASK_ELEMENTS:
            return self._compute(given)
        with torch.inference_mode(False), torch.no_grad():
            held = (*(mask.clone() for mask in masks), *given[self.masks :])
            results = self._compute(held)
        self.combinations.keep(key, held, results, state)
        return results

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.constants.values())

    def _compute(self, given: tuple[Any, ...]) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = run(self.graph, self.constants, given)
        return results

    @property
    def kept(self) -> int:
        """How many results are kept."""
        return len(self.combinations)

    def forget(self) -> None:
        """What the graph reads may have changed."""
        self.combinations.clear()

    def extra_repr(self) -> str:
        operations = sum(node.op == "call_function" for node in self.graph.nodes)
        return f"{operations} operations on sizes and {self.masks} masks, known for {self.kept} combinations"


def is_kept(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether node is one of the results of a Memoised."""
    call = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(call, fx.Node) or call.op != "call_module":
        return False
    return isinstance(gm.get_submodule(str(call.target)), Memoised)


def _is_plain(mask: Any) -> bool:
    return type(mask) is Tensor and mask.is_cpu and mask.layout is torch.strided


def find_members(
    gm: fx.GraphModule, is_known: Callable[[fx.Node], bool] | None = None, masks: Collection[fx.Node] | None = None
) -> list[fx.Node]:
    """Plain operations on sizes, what is_known and each other, whose memory nobody writes to, and no caller sees.

    is_known  None: constants
    masks     where given, only operations that depend on one of them

    A size of what was computed from one of them is known after the module that computes them all, so it is no argument.
    """
    aliasing: Aliasing | None = None
    before: Ordering = {}
    found: dict[fx.Node, None] = {}
    after: set[fx.Node] = set()  # outside, computed from what is inside, or read or written behind that
    constants = constant_nodes(gm.graph)  # these belong to regions
    is_known = is_known or constants.__contains__
    for node in gm.graph.nodes:
        sources = node.all_input_nodes
        if node not in constants and _is_plain_operation(node) and after.isdisjoint(sources):
            known = all(s in found or s in (masks or ()) or is_shape(s) or _is_fact(s) or is_known(s) for s in sources)
            if known and (masks is None or any(s in found or s in masks for s in sources)):
                if aliasing is None:
                    aliasing = Aliasing(gm)
                    before = ordering(gm, aliasing)
                if not _is_shared(node, aliasing):
                    found[node] = None
                    continue
        if any(s in found or s in after for s in (*sources, *before.get(node, ()))):
            after.add(node)
    return list(found)


def _is_plain_operation(node: fx.Node) -> bool:
    """Whether node computes a tensor, and writes to nothing."""
    if is_shape(node) or is_call(node, ops.dequantize):  # regions read what integers stand for as integers
        return False
    if not (is_pure(node) or is_vocabulary(node) or is_functional(node)):
        return False
    return gives_tensor(node)


def _is_fact(node: fx.Node) -> bool:
    """Whether node is something about a tensor that is no number, and no numbers of it."""
    return is_call(node, getattr) and node.args[1] in ("device", "dtype") and len(node.args) == 2


def _is_shared(node: fx.Node, aliasing: Aliasing) -> bool:
    """Whether the caller gets to see node's memory, or somebody writes to it."""
    escapes = any(user.op == "output" for member in aliasing.members(node) for user in member.users)
    return escapes or aliasing.is_written(node)


def _merge_equal(members: Sequence[fx.Node]) -> list[fx.Node]:
    """Let one node stand for all that compute the same (each layer shapes the tables of angles for itself)."""
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in members:
        key = node.target, repr(node.args), repr(node.kwargs)
        if (other := first.setdefault(key, node)) is not node:
            replace(node, other)
    return list(first.values())


def move_into_module(
    gm: fx.GraphModule, members: Sequence[fx.Node], name: str, root: nn.Module, masks: Sequence[fx.Node] = ()
) -> fx.GraphModule:
    """Replace members, if they are more than an operation, by one call of a Memoised with their results.

    members  read masks, constants of root, each other, and what becomes further arguments
    """
    if len(members) < WORTHWHILE:
        return gm
    before = ordering(gm)
    members = _merge_equal(members)
    inside = set(members)
    sources = dict.fromkeys(source for node in members for source in node.all_input_nodes if source not in inside)
    masks = [mask for mask in masks if mask in sources]
    arguments = [*masks, *(source for source in sources if source not in masks and not is_constant(source))]
    inner, copies = copy_nodes(members, arguments)
    read = [node for node in members if any(user not in inside for user in node.users)]
    inner.output(tuple(copies[node] for node in read))
    name = add_module(gm, name, inner, lambda names, _: Memoised(inner, Constants(root, names), len(masks)))
    with gm.graph.inserting_after(members[-1]):
        call = gm.graph.call_module(name, tuple(arguments))
    for number, node in enumerate(read):
        with gm.graph.inserting_after(call):
            result = gm.graph.call_function(operator.getitem, (call, number))
        result.meta.update({k: v for k, v in node.meta.items() if k == "val"})
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
    for node in reversed(members):
        gm.graph.erase_node(node)
    sort(gm.graph, before)
    log.debug("%s: %d operations, %d arguments, %d results", name, len(members), len(arguments), len(read))
    return finish(gm)
