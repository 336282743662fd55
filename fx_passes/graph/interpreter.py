"""The one loop that computes a graph node by node, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fx_passes.graph.graph import get_attribute


def call_node(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function, method or submodule that node names."""
    target: Any = node.target
    if node.op == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    if node.op == "call_module":
        target = node.graph.owning_module.get_submodule(target)
    return target(*args, **kwargs)


class Interpreter:
    """Computes a graph. A value lives until its last reader is done.

    known  values that are there already: those of all get_attr nodes, and perhaps of what follows from them
    """

    def __init__(self, graph: fx.Graph, known: Mapping[fx.Node, Any]) -> None:
        self.graph, self.known = graph, known
        self._last_reads: dict[fx.Node, list[fx.Node]] = {}
        seen: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            self._last_reads[node] = [operand for operand in node.all_input_nodes if operand not in seen]
            seen.update(node.all_input_nodes)

    def __call__(self, inputs: Iterable[Any], call: Callable[..., Any] = call_node) -> Any:
        """Return what the output node reads; inputs at the end that have a default may be missing."""
        values, remaining = dict(self.known), iter(inputs)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(remaining, *node.args)
            elif node.op == "output":
                return _mutable(fx.node.map_arg(node.args[0], values.__getitem__))
            elif node not in values:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = call(node, args, kwargs)
                del args, kwargs
            for dead in self._last_reads[node]:
                values.pop(dead, None)  # of what is known beforehand, not all is there
        raise AssertionError("a graph without an output")


def _mutable(results: Any) -> Any:
    """Results in lists and dictionaries of their own, as generated code returns them: those of nodes cannot change."""
    if type(results) is tuple:
        return tuple(map(_mutable, results))
    if type(results) is immutable_list:
        return list(map(_mutable, results))
    if type(results) is immutable_dict:
        return {name: _mutable(value) for name, value in results.items()}
    return results


def run(
    graph: fx.Graph,
    constants: Mapping[str, Any] | nn.Module,
    inputs: Iterable[Any],
    call: Callable[..., Any] = call_node,
) -> Any:
    """Compute a graph; constants are what its get_attr nodes stand for, by target, or the module that has them."""
    named = partial(get_attribute, constants) if isinstance(constants, nn.Module) else constants.__getitem__
    known = {node: named(str(node.target)) for node in graph.find_nodes(op="get_attr")}
    return Interpreter(graph, known)(inputs, call)
