"""Nodes of a graph computed on meta tensors, which have sizes, strides and dtypes, and no numbers.

Unknown functions and modules of the user's are left out, and so is what depends on them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes.aliasing.effects import is_known_function
from fx_passes.graph.graph import get_attribute
from fx_passes.graph.hooks import has_hooks
from fx_passes.graph.interpreter import call_node
from zendnn_cffi.errors import is_of_signal_handler

_META, _CPU = torch.device("meta"), torch.device("cpu")

Values = dict[fx.Node, Any]
Compute = Callable[[fx.Node, tuple[Any, ...], dict[str, Any], Any], Any]  # the last: the module of a call_module node


def compute(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], module: Any) -> Any:
    """What node's operation gives."""
    return call_node(node, args, kwargs) if module is None else module(*args, **kwargs)


class OnMeta:
    """Computes nodes of graphs over root. Within on_meta()."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._held: dict[fx.Node, Any] = {}  # what get_attr and call_module nodes stand for; None: it is left out

    def forget(self) -> None:
        """What root holds may have another shape or dtype."""
        self._held.clear()

    def step(
        self, node: fx.Node, found: Values, inputs: Mapping[str, Any], compute: Compute = compute
    ) -> Exception | None:
        """Put into found what node is, if that can be told; return what its operation raised.

        found   what the nodes before it are
        inputs  arguments by the names of placeholders
        """
        if node.op == "placeholder":
            if str(node.target) in inputs or node.args:
                found[node] = on_meta_device(inputs.get(str(node.target), *node.args))
            return None
        held = self._of(node)
        if node.op == "get_attr":
            found[node] = held
        if node.op not in ("call_function", "call_method", "call_module") or not _is_computed(node, found, held):
            return None
        args, kwargs = fx.node.map_aggregate(
            (node.args, node.kwargs), lambda a: found[a] if isinstance(a, fx.Node) else a
        )
        if node.op == "call_method" or str(getattr(node.target, "__module__", None) or "torch").startswith("torch"):
            args = tuple(_META if type(arg) is torch.device else arg for arg in args)
        if kwargs.get("device") is not None:  # which PyTorch puts above the mode: it would draw numbers
            kwargs = {**kwargs, "device": "meta"}
        try:
            result = compute(node, args, kwargs, held)
        except Exception as error:  # whatever PyTorch raises: for numbers that are asked for, too
            if is_of_signal_handler(error):
                raise
            return error
        found[node] = _CPU if type(result) is torch.device else on_meta_device(result)
        return None

    def _of(self, node: fx.Node) -> Any:
        if node.op not in ("get_attr", "call_module"):
            return None
        if node not in self._held:
            target = str(node.target)
            is_module = node.op == "call_module"
            self._held[node] = (
                _module_on_meta(self._root, target) if is_module else on_meta_device(get_attribute(self._root, target))
            )
        return self._held[node]


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Where nodes are computed: what they make is on meta as well."""
    with torch.no_grad(), _META:
        yield


def up_to(wanted: Collection[fx.Node], graph: fx.Graph) -> list[fx.Node]:
    """The nodes that these depend on, and they themselves, in order."""
    found, waiting = set(wanted), list(wanted)
    while waiting:
        waiting += (sources := set(waiting.pop().all_input_nodes) - found)
        found |= sources
    return [node for node in graph.nodes if node in found]


def on_meta_device(value: Any) -> Any:
    """The same with meta tensors in place of tensors."""
    if isinstance(value, torch.Tensor):
        return (
            value
            if value.is_meta
            else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        )
    # a torch.Size would be a tuple after it
    return value if isinstance(value, torch.Size) else pytree.tree_map_only(torch.Tensor, on_meta_device, value)


def _is_computed(node: fx.Node, found: Values, held: Any) -> bool:
    if node.op == "call_module":
        is_known = held is not None
    else:
        is_known = node.op != "call_function" or is_known_function(node.target)
    return is_known and all(source in found for source in node.all_input_nodes)


def _module_on_meta(root: nn.Module, path: str) -> nn.Module | None:
    """A copy of one of PyTorch's modules over meta tensors; None of others, which may do anything."""
    module = root.get_submodule(path)
    for part in module.modules():
        if not type(part).__module__.startswith("torch.nn.modules.") or "forward" in part.__dict__ or has_hooks(part):
            return None
    try:
        return copy.deepcopy(module, {id(t): on_meta_device(t) for t in (*module.parameters(), *module.buffers())})
    except Exception:  # whatever a module's state raises
        return None
