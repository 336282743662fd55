"""Questions about sizes, dtypes and devices that a forward asks while it is traced: the example answers them.

    if x.shape[-1] % 7:       the branch that the example takes is in the graph
    for i in range(n):        as many rounds as there are for the example
    int(math.sqrt(n))         a number of the graph

The graph is right for calls that have the same answers (fx_passes/trace/refusals.py). What depends on tensors' numbers
has no answer, nor has what rests on strides or gradients: such are not the same on meta tensors.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace as fx_tracing
from torch.utils import _pytree as pytree

from fx_passes.trace.on_meta import OnMeta, Values, on_meta
from zendnn_cffi.errors import is_of_signal_handler

DECIDED = "decided"  # in the meta of nodes: question -> answer
SIZES = "sizes"  # a question that has Tied sizes in its answer


class Tied(NamedTuple):
    """In place of a number: the size of an argument."""

    name: str
    dim: int


class Undecided(Exception):
    """The example does not tell."""


def _value(value: Any) -> Any:
    if isinstance(value, Tensor):
        raise Undecided
    return value


def _items(value: Any) -> int:
    """Of how many items something is that code goes through."""
    if not isinstance(value, Tensor | tuple | list):
        raise Undecided
    return len(value)


QUESTIONS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "bool": lambda value: bool(_value(value)),
        "int": lambda value: int(_value(value)),
        "float": lambda value: float(_value(value)),
        "str": lambda value: str(_value(value)),
        "value": _value,
        "items": _items,
        "rank": lambda value: value.ndim,
        "dtype": lambda value: value.dtype,
        "class": lambda value: Tensor if isinstance(value, Tensor) else type(value),
    }
)
_ATTRIBUTES = frozenset(("shape", "dtype", "device", "ndim"))
_METHODS = frozenset(("size", "dim", "ndimension", "numel", "nelement", "is_floating_point", "is_complex"))
_FUNCTIONS = (torch.numel, torch.is_floating_point, torch.is_complex, len, isinstance)
_OF_PYTHON = (operator.__name__, "_operator", math.__name__, "builtins")
_NAMED = (Tensor, torch.Size, torch.dtype, torch.device, bool, int, float, complex, str, tuple, list, type(None))
# After these a tensor has other sizes than before.
RESHAPING = frozenset(("resize_", "resize_as_", "set_", "as_strided_", "unsqueeze_", "squeeze_", "transpose_", "t_",
                       "swapaxes_", "swapdims_"))  # fmt: skip


class ByExample:
    """Answers of an example, while the graph is traced.

    values  arguments of the example, by name
    """

    def __init__(self, root: nn.Module, values: Mapping[str, Any]) -> None:
        self._on_meta, self._values = OnMeta(root), values
        self._found: Values = {}
        self._seen: set[fx.Node] = set()

    def answer(self, node: fx.Node, question: str) -> Any:
        """What the example answers; calls of the graph are to have the same answer. Raises Undecided."""
        value = self._of(node)
        if type(value) not in _NAMED:
            raise Undecided
        try:
            answer = QUESTIONS[question](value)
        except Exception as error:  # whatever code raises that asks an integer for what it has not
            if is_of_signal_handler(error):
                raise
            raise Undecided from error
        node.meta.setdefault(DECIDED, {})[question] = answer
        return answer

    def _of(self, node: fx.Node) -> Any:
        if node not in self._seen:
            self._follow(node)
        if node not in self._found:
            raise Undecided
        return self._found[node]

    def _follow(self, wanted: fx.Node) -> None:
        with _modules_as_usual(), on_meta():
            for node in _unseen_up_to(wanted, self._seen):
                self._seen.add(node)
                self._on_meta.step(node, self._found, self._values)
                if node in self._found and not tells(node, self._found):
                    del self._found[node]


def _unseen_up_to(wanted: fx.Node, seen: set[fx.Node]) -> list[fx.Node]:
    """What wanted depends on, and was not seen, in an order in which operands come first."""
    found: dict[fx.Node, None] = {}
    waiting = [wanted]
    while waiting:
        node = waiting[-1]
        sources = [source for source in node.all_input_nodes if source not in seen and source not in found]
        if sources:
            waiting += sources
        else:
            found[waiting.pop()] = None
    return list(found)


def tells(node: fx.Node, found: Values) -> bool:
    """Whether what was computed on meta is what it would be of the tensors themselves."""
    if node.op in ("placeholder", "get_attr") or _has_tensors_alone(found[node]):
        return True
    if not any(_has_tensors(found[source]) for source in node.all_input_nodes):
        return node.op == "call_method" or getattr(node.target, "__module__", None) in _OF_PYTHON
    if node.op == "call_method":
        return node.target in _METHODS
    if node.target is getattr:
        return node.args[1] in _ATTRIBUTES
    return node.target is operator.getitem or node.target in _FUNCTIONS


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


def _has_tensors_alone(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves)


@contextlib.contextmanager
def _modules_as_usual() -> Iterator[None]:
    """Let modules be called, and have attributes, as where torch.fx does not trace."""
    cls: Any = nn.Module
    traced = cls.__call__, cls.__getattr__
    cls.__call__, cls.__getattr__ = fx_tracing._orig_module_call, fx_tracing._orig_module_getattr
    try:
        yield
    finally:
        cls.__call__, cls.__getattr__ = traced


def decided(graph: fx.Graph) -> list[fx.Node]:
    """Nodes of which a graph takes something for granted."""
    return [node for node in graph.nodes if DECIDED in node.meta]


def sets_sizes_in_place(graph: fx.Graph) -> bool:
    """Whether answers may be wrong: a tensor's sizes change without a new tensor."""
    return any(node.op == "call_method" and node.target in RESHAPING for node in graph.nodes)


def other_answer(node: fx.Node, value: Any, inputs: Mapping[str, Any]) -> str | None:
    """What of a node is another than the graph takes for granted; None where nothing is.

    inputs  arguments of the call by name
    """
    for question, expected in node.meta[DECIDED].items():
        try:
            if question == SIZES:
                answer, expected = value, _sizes(expected, inputs)
            else:
                answer = QUESTIONS[question](value)
        except Exception as error:  # as while it was traced
            return f"{question} of {node.name}: {error}"
        if type(answer) is not type(expected) or answer != expected:
            return f"{question} of {node.name} is {answer}, not {expected}"
    return None


def _sizes(tied: Any, inputs: Mapping[str, Any]) -> Any:
    if isinstance(tied, Tied):
        return inputs[tied.name].shape[tied.dim]
    return torch.Size(_sizes(each, inputs) for each in tied) if type(tied) is tuple else tied
