"""Sizes in the middle of a graph, told by the sizes of its arguments, where an example decided which way forward goes.

So are the rank and dtype of each tensor.

    getitem(getattr(y, "shape"), 0)   ->  size(x, 0)    the same number for all calls that the graph is for, as far as
    getitem(getattr(y, "shape"), 1)   ->  64            variants of the example tell
    cat(split(y, 8))                  ->  cat([getitem(split, 0), getitem(split, 1)])

What is made of them need not wait for y then. That it is so is compared for each set of sizes, as other answers of the
example are (fx_passes/trace/decisions.py): a wrong guess means a graph for fewer calls.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fx_passes.graph.graph import DTYPE, RANK, read_instead
from fx_passes.trace.decisions import DECIDED, SIZES, Tied, other_answer, tells
from fx_passes.trace.on_meta import OnMeta, Values, on_meta, on_meta_device

_CONSTANT = (torch.dtype, torch.device)


class _Run(NamedTuple):
    """A call on meta: its arguments by name, and what nodes are."""

    inputs: Mapping[str, Any]
    found: Values


def settle(graph: fx.Graph, root: nn.Module, example: Mapping[str, Any]) -> None:
    """Replace sizes, dtypes and devices that a graph reads in its midst, and note the rank and dtype of tensors.

    example  its arguments by name
    """
    inputs = {name: on_meta_device(value) for name, value in example.items()}
    if any(isinstance(leaf, Tensor) for value in inputs.values() for leaf in _inside(value)):
        return  # of such no variants are made
    computed = OnMeta(root)
    if (own := _run(graph, computed, inputs, {})) is None:
        return
    varied = (_run(graph, computed, each, own.found) for each in _variants(inputs))
    runs = [own, *(run for run in varied if run is not None)]
    placeholders = {str(node.target): node for node in graph.find_nodes(op="placeholder")}
    settled = {node: tied for node in _in_the_midst(graph) if (tied := _tied(node, runs)) is not None}
    for node, tied in settled.items():
        if readers := [user for user in node.users if user not in settled and DECIDED not in user.meta]:
            node.meta.setdefault(DECIDED, {})[SIZES] = tied
            read_instead(readers, node, _told(tied, node, placeholders))
    _note_ranks(graph, runs)
    for node in list(graph.nodes):
        if count := _pieces(node, runs):
            node.meta.setdefault(DECIDED, {})["items"] = count
            _take_apart(node, count)


def _inside(value: Any) -> Sequence[Any]:
    return () if isinstance(value, Tensor) else pytree.tree_leaves(value)


def _run(graph: fx.Graph, computed: OnMeta, inputs: Mapping[str, Any], first: Values) -> _Run | None:
    """What nodes are for these arguments; None where the graph is not for them. first  what they are for the example"""
    found: Values = {}
    with on_meta():
        for node in graph.nodes:
            if node.op == "output":
                continue
            error = computed.step(node, found, inputs)
            is_other = DECIDED in node.meta and other_answer(node, found.get(node), inputs) is not None
            if is_other or (error is not None and node in first):
                return None
    return _Run(inputs, found)


def _variants(inputs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The arguments with one of their sizes another one: in all tensors that have it, first dimensions apart."""
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    firsts = dict.fromkeys(value.shape[0] for value in tensors if value.ndim)
    others = dict.fromkeys(size for value in tensors for size in value.shape[1:])
    for size in firsts:
        yield _varied(inputs, size, size + 2, slice(0, 1))
    for size in others:
        yield _varied(inputs, size, 2 * size if size > 1 else 3, slice(1, None))


def _varied(inputs: Mapping[str, Any], size: int, other: int, dims: slice) -> Mapping[str, Any]:
    def of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        shape = list(value.shape)
        shape[dims] = [other if each == size else each for each in shape[dims]]
        return value.new_empty(shape)

    return {name: of(value) for name, value in inputs.items()}


def _in_the_midst(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes that depend on more than the arguments' own sizes."""
    given: set[fx.Node] = set()  # arguments, and numbers made of their sizes
    for node in graph.nodes:
        is_number = node.op == "call_method" or getattr(node.target, "__module__", "") in ("_operator", "builtins")
        if node.op == "placeholder" or (is_number and given.issuperset(node.all_input_nodes)):
            given.add(node)
        elif node.op in ("call_function", "call_method"):
            yield node


def _tied(node: fx.Node, runs: Sequence[_Run]) -> Any:
    """What tells a node of sizes, or a dtype or device; None where nothing does."""
    if not all(node in run.found for run in runs) or not tells(node, runs[0].found):
        return None
    values = [run.found[node] for run in runs]
    if isinstance(values[0], _CONSTANT):
        return values[0] if all(value == values[0] for value in values) else None
    if all(type(value) is int for value in values):
        return _tied_size(values, runs)
    if not all(isinstance(value, torch.Size) and len(value) == len(values[0]) for value in values):
        return None
    sizes = tuple(_tied_size(each, runs) for each in zip(*values, strict=True))
    return None if None in sizes else sizes


def _tied_size(values: Sequence[int], runs: Sequence[_Run]) -> Any:
    """The number, or the argument and dimension whose size it is."""
    if all(value == values[0] for value in values):
        return values[0]
    for name, value in runs[0].inputs.items():
        for dim in range(value.ndim if isinstance(value, Tensor) else 0):
            if all(run.inputs[name].shape[dim] == each for run, each in zip(runs, values, strict=True)):
                return Tied(name, dim)
    return None


def _note_ranks(graph: fx.Graph, runs: Sequence[_Run]) -> None:
    """Write down what each tensor is; of arguments, calls are to have the same."""
    for node in graph.nodes:
        value = runs[0].found.get(node)
        if not isinstance(value, Tensor) or node.op == "get_attr":
            continue
        node.meta.update({RANK: value.ndim, DTYPE: value.dtype})
        if node.op == "placeholder":
            node.meta.setdefault(DECIDED, {}).update(rank=value.ndim, dtype=value.dtype)


def _pieces(node: fx.Node, runs: Sequence[_Run]) -> int:
    """How many tensors an operator makes that others read as a whole; 0 where that is not what they do."""
    counts = {len(value) if _is_tensors(value := run.found.get(node)) else 0 for run in runs}
    is_read = any(user.target is not operator.getitem and user.op != "output" for user in node.users)
    return counts.pop() if len(counts) == 1 and is_read and node.op in ("call_function", "call_method") else 0


def _is_tensors(value: Any) -> TypeGuard[Sequence[Tensor]]:
    return type(value) in (tuple, list) and all(isinstance(each, Tensor) for each in value)


def _take_apart(node: fx.Node, count: int) -> None:
    readers = [user for user in node.users if user.target is not operator.getitem and user.op != "output"]
    with node.graph.inserting_after(node):
        pieces = [node.graph.call_function(operator.getitem, (node, i)) for i in reversed(range(count))][::-1]
    read_instead(readers, node, pieces)


def _told(tied: Any, node: fx.Node, placeholders: Mapping[str, fx.Node]) -> Any:
    """What tells sizes that node tells, for whoever reads it: before it, as users are in no order."""
    if type(tied) is tuple:
        return tuple(_told(each, node, placeholders) for each in tied)
    if not isinstance(tied, Tied):
        return tied
    with node.graph.inserting_before(node):
        return node.graph.call_method("size", (placeholders[tied.name], tied.dim))
