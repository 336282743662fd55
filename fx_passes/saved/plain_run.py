"""A loaded module as plain PyTorch: its graph, with regions as what they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes.graph.interpreter import call_node, run
from fx_passes.trace.traced import Traced


class PlainRun:
    """The model as plain PyTorch: its graph, with regions as what they compute."""

    def __init__(self, traced: Traced, graph: fx.Graph, parts: Mapping[str, nn.Module]) -> None:
        self._traced, self._graph, self._parts = traced, graph, parts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arranged = self._traced.arrange(args, kwargs)
        if arranged is None:
            raise ValueError(
                "this module was saved for other arguments: call the original with these once, before it is saved, or"
                " optimize the original for them"
            )
        args, kwargs = arranged
        info = getattr(self._graph._codegen, "pytree_info", None)
        if info is not None:
            flat, _ = pytree.tree_flatten((args, kwargs))
            return pytree.tree_unflatten(self._run(flat), info.out_spec)
        placeholders = self._graph.find_nodes(op="placeholder")
        given = dict(zip((str(node.target) for node in placeholders), args, strict=False)) | kwargs
        defaults = {str(node.target): node.args[0] for node in placeholders if node.args}
        return self._run([(defaults | given)[str(node.target)] for node in placeholders])

    def _run(self, flat: Sequence[Any]) -> Any:
        return run(self._graph, self._traced.root, flat, self._call)

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if node.op != "call_module":
            return call_node(node, args, kwargs)
        part: Any = self._parts[str(node.target)]
        return run(part.graph, part.constants, args)  # by the parameters as they are: parts keep what was made of them
