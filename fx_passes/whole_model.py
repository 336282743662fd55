"""The graph of a model that could not be traced: one call of its own forward."""

from __future__ import annotations

import enum
from typing import Any

from torch import fx, nn

from fx_passes.submodule import plain_forward
from fx_passes.trace.traced import forward_signature


class WholeModel:
    """Callable node target: the forward of a model that could not be traced, given every parameter of its signature."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.parameters = tuple(forward_signature(root).parameters.values())
        self.__name__ = self.__qualname__ = "whole_model"

    def __call__(self, *values: Any) -> Any:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        given = [*zip(self.parameters, values, strict=True)]
        takes_rest = any(p.kind is p.VAR_POSITIONAL and value for p, value in given)
        for p, value in given:
            is_left_out = value is _LeftOut.DEFAULT or value is p.default
            by_name = p.kind is p.KEYWORD_ONLY or (p.kind is p.POSITIONAL_OR_KEYWORD and p.default is not p.empty)
            if p.kind is p.VAR_POSITIONAL:
                args.extend(value)
            elif p.kind is p.VAR_KEYWORD:
                kwargs.update(value)
            elif not by_name or (takes_rest and p.kind is not p.KEYWORD_ONLY):
                args.append(p.default if is_left_out else value)
            elif not is_left_out:  # decorators around forward tell what was given from what was not
                kwargs[p.name] = value
        return plain_forward(self.root)(*args, **kwargs)


class _LeftOut(enum.Enum):
    """Stands for an argument that was not given, whose default generated code cannot write."""

    DEFAULT = enum.auto()


def _is_written(default: Any) -> bool:
    return default is None or type(default) in (bool, int, float, str)


def whole_model_graph(root: nn.Module) -> fx.Graph:
    """One call of root.forward, with its own signature."""
    graph = fx.Graph()
    call = WholeModel(root)
    values = []
    for p in call.parameters:
        stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        default = () if p.default is p.empty else (p.default if _is_written(p.default) else _LeftOut.DEFAULT,)
        values.append(graph.create_node("placeholder", stars + p.name, default, name=p.name))
    graph.output(graph.call_function(call, tuple(values)))
    return graph


def is_whole_model_graph(graph: fx.Graph) -> bool:
    """Whether the graph is still that one call alone."""
    inner = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    return len(inner) == 1 and isinstance(inner[0].target, WholeModel) and graph.output_node().args == (inner[0],)
