"""A loaded module as plain PyTorch: its graphs, with regions as what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes.graph.interpreter import call_node, run
from fx_passes.trace.guards import Call
from fx_passes.trace.traced import Traced, forward_signature


class PlainRun:
    """Computes each call by the graph that is right for it.

    graphs  by their place in the file
    """

    def __init__(self) -> None:
        self.graphs: dict[int, PlainGraph] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graphs = list(self.graphs.values())
        for graph in graphs:
            if (arranged := graph.traced.arrange(args, kwargs, may_ask=True)) is not None:
                return graph(arranged)
        forward_signature(graphs[0].traced.root).bind(*args, **kwargs)  # TypeError, as the model's own forward has it
        if torch.is_autocast_enabled("cpu"):
            raise ValueError(
                "this module, from a file, was traced without autocast, under which its forward may compute something"
                " else: optimize the original with dtype=torch.bfloat16, or call it under autocast"
            )
        known = "; ".join(dict.fromkeys(f"({graph.traced.calls})" for graph in graphs))
        sizes = next((found for graph in graphs if (found := graph.traced.sizes_for(args, kwargs))), ())
        if sizes:
            known += f", of sizes such as {', '.join(str([*each]) for each in sizes)}"
        raise ValueError(
            "this module was saved for other arguments: call the original with these, before it is saved, or optimize"
            f" the original for them. The file has graphs for {known}"
        )


class PlainGraph:
    """One graph as plain PyTorch.

    parts  the modules that it calls
    """

    def __init__(self, traced: Traced, graph: fx.Graph, parts: Mapping[str, nn.Module]) -> None:
        self.traced, self._graph, self._parts = traced, graph, parts

    def __call__(self, call: Call) -> Any:
        """Compute a call, whose arguments are as the graph takes them."""
        args, kwargs = call
        info = getattr(self._graph._codegen, "pytree_info", None)
        if info is not None:
            flat, _ = pytree.tree_flatten((args, kwargs))
            return pytree.tree_unflatten(self._run(flat), info.out_spec)
        placeholders = self._graph.find_nodes(op="placeholder")
        given = dict(zip((str(node.target) for node in placeholders), args, strict=False)) | kwargs
        defaults = {str(node.target): node.args[0] for node in placeholders if node.args}
        return self._run([(defaults | given)[str(node.target)] for node in placeholders])

    def _run(self, flat: Sequence[Any]) -> Any:
        return run(self._graph, self.traced.root, flat, self._call)

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if node.op != "call_module":
            return call_node(node, args, kwargs)
        part: Any = self._parts.get(str(node.target))
        if part is None:  # a layer of PyTorch's
            return self.traced.root.get_submodule(str(node.target))(*args, **kwargs)
        return run(part.graph, part.constants, args)  # by the parameters as they are: parts keep what was made of them
