"""Who shares memory with whom, and who writes: what decides whether an in-place operation may become out-of-place.

    y = x.add_(1)  ->  y = x + 1, later readers of x read y

is right when x is neither an input of the graph nor a parameter, and no other name for the same memory is read later.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from fx_passes import ops
from fx_passes.normalize.spellings import FUNCTIONS, INPLACE, METHODS

_VIEW_BUILDERS = {"reshape", "view", "flatten", "permute", "transpose", "chunk", "split", "swapaxes", "swapdims"}
_FRESH_METHODS = set(METHODS) - _VIEW_BUILDERS
_NUMBER_METHODS = {"size", "dim", "item", "numel", "stride", "is_contiguous", "ndimension"}


class Aliasing:
    """Alias classes of the nodes of a graph, and which nodes write to memory they were given."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.parent: dict[fx.Node, fx.Node] = {}
        self.mutating: dict[fx.Node, list[fx.Node]] = {}
        self._analyse()

    def _analyse(self) -> None:
        self.parent.clear()
        self.mutating.clear()
        storages: dict[int, fx.Node] = {}
        for node in self.graph.nodes:
            for source in self._may_alias(node):
                self._join(node, source)
            if node.op == "get_attr":
                value = operator.attrgetter(node.target)(self.gm)
                if isinstance(value, torch.Tensor):
                    self._join(node, storages.setdefault(value.untyped_storage()._cdata, node))
            written = self._writes(node)
            if written:
                self.mutating[node] = written
        self._mutated_roots = {self._find(n) for written in self.mutating.values() for n in written}
        self._mutated_targets = {n.target for n in self.graph.nodes if n.op == "get_attr" and self.is_mutated(n)}

    def is_mutated(self, node: fx.Node) -> bool:
        """Whether some node writes to memory that node may share."""
        return self._find(node) in self._mutated_roots

    def is_constant(self, target: str) -> bool:
        """Whether no node writes to this parameter or buffer."""
        return target not in self._mutated_targets

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Every node that reads memory node may share."""
        root = self._find(node)
        return [n for n in self.graph.nodes if any(self._find(source) is root for source in n.all_input_nodes)]

    def make_out_of_place(self) -> None:
        """Turn every in-place node nobody can tell from its out-of-place form into that; note the others."""
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        changed = False
        for node in list(self.mutating):
            if self._convert(node, order):
                changed = True
        if changed:
            self._analyse()

    def _convert(self, node: fx.Node, order: dict[fx.Node, int]) -> bool:
        written = self.mutating[node]
        source = written[0]
        if len(written) != 1 or not self._convertible(node):
            return False
        now = order[node]
        for other in order:
            if self._find(other) is not self._find(source):
                continue
            if other.op in ("placeholder", "get_attr"):
                return False
            later = any(order[user] > now for user in other.users)
            if other not in (source, node) and later and not self._descends(other, node):
                return False
        for user in list(source.users):
            if order[user] > now:
                user.replace_input_with(source, node)
        self._out_of_place(node)
        return True

    def _descends(self, other: fx.Node, node: fx.Node) -> bool:
        """Whether other is an alias made from node, after it wrote: the out-of-place result serves it as well."""
        while True:
            sources = [s for s in self._may_alias(other) if self._find(s) is self._find(node)]
            if len(sources) != 1:
                return False
            if sources[0] is node:
                return True
            other = sources[0]

    def _convertible(self, node: fx.Node) -> bool:
        """Whether there is an out-of-place spelling of the same operation."""
        if node.op == "call_module":
            return hasattr(self.gm.get_submodule(node.target), "inplace")
        if node.op == "call_method":
            return node.target[:-1] in METHODS and node.target.endswith("_") and self._same_dtype(node)
        if node.target in INPLACE:
            return self._same_dtype(node)
        return "inplace" in node.kwargs or node.target in FUNCTIONS

    def _same_dtype(self, node: fx.Node) -> bool:
        """Out-of-place arithmetic promotes dtypes where in-place keeps the first operand's; numbers and one dtype agree."""
        return True

    def _out_of_place(self, node: fx.Node) -> None:
        """Respell node; a module keeps its target (only its function is looked up), marked as settled."""
        if node.op == "call_method":
            node.target = node.target[:-1]
        elif node.op == "call_function" and node.target in INPLACE:
            node.target = INPLACE[node.target]
        elif node.op == "call_function":
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
        else:
            node.meta["out_of_place"] = True

    def _writes(self, node: fx.Node) -> list[fx.Node]:
        """The arguments whose memory node may write to."""
        nodes = node.all_input_nodes
        if not nodes or node.op in ("output", "placeholder", "get_attr"):
            return []
        if node.op == "call_module":
            return self._module_writes(node, self.gm.get_submodule(node.target))
        if node.op == "call_method":
            name = node.target
            inplace = name.endswith("_") and not name.endswith("__") or name == "__setitem__"
            return nodes[:1] if inplace else []
        if node.target in INPLACE or node.target is operator.setitem:
            return nodes[:1]
        written = [n for n in [node.kwargs.get("out")] if isinstance(n, fx.Node)]
        if isinstance(node.target, torch._ops.OpOverload):
            return _schema_writes(node)
        if node.kwargs.get("inplace") is True or _positional_inplace(node):
            return nodes[:1]
        name = getattr(node.target, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            return nodes[:1]
        if not _is_known(node.target) and "stochastic_depth" not in name:
            written = list(nodes)  # somebody's own function
        return written

    def _module_writes(self, node: fx.Node, module: nn.Module) -> list[fx.Node]:
        if node.meta.get("out_of_place"):
            return []
        if getattr(module, "inplace", False) is True:
            # Dropout(inplace=True) in evaluation mode writes nothing.
            idle = isinstance(module, nn.modules.dropout._DropoutNd) and not module.training
            return [] if idle else node.all_input_nodes[:1]
        return [] if type(module).__module__.startswith("torch.") else node.all_input_nodes

    def _may_alias(self, node: fx.Node) -> list[fx.Node]:
        """The arguments whose memory the result of node may be."""
        if node.op in ("placeholder", "get_attr", "output"):
            return []
        if node.op == "call_method" and node.target in _FRESH_METHODS | _NUMBER_METHODS:
            return []
        if node.op == "call_function" and (
            node.target in ops.COMPUTE
            or node.target is ops.size
            or (node.target in FUNCTIONS and getattr(node.target, "__name__", "") not in _VIEW_BUILDERS | _DROPOUTS)
        ):
            return node.all_input_nodes[:1] if node.kwargs.get("inplace") or _positional_inplace(node) else []
        if node.op == "call_module":
            module = self.gm.get_submodule(node.target)
            if type(module).__module__.startswith("torch.nn") and not _returns_input(module):
                return node.all_input_nodes[:1] if getattr(module, "inplace", False) is True else []
        return node.all_input_nodes

    def _find(self, node: fx.Node) -> fx.Node:
        while node in self.parent:
            node = self.parent[node]
        return node

    def _join(self, a: fx.Node, c: fx.Node) -> None:
        a, c = self._find(a), self._find(c)
        if a is not c:
            self.parent[a] = c


_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}


def _returns_input(module: nn.Module) -> bool:
    """Whether a torch.nn module may return its input, or a view of it."""
    kinds = (nn.Identity, nn.modules.dropout._DropoutNd, nn.Flatten, nn.Unflatten, nn.AdaptiveAvgPool2d)
    return isinstance(module, kinds) or not isinstance(module, tuple(_LEAVES))


_LEAVES: tuple[Any, ...] = (
    nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.Embedding,
    nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.Hardtanh, nn.GELU, nn.SiLU,
    nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid, nn.Mish, nn.Softplus, nn.PReLU, nn.Softmax, nn.LogSoftmax,
    nn.MultiheadAttention,
)  # fmt: skip


def _positional_inplace(node: fx.Node) -> bool:
    """F.relu(x, True) and the like."""
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and name in _INPLACE_AT and node.args[_INPLACE_AT[name] :][:1] == (True,)


_INPLACE_AT = {
    "relu": 1, "relu6": 1, "silu": 1, "hardswish": 1, "hardsigmoid": 1, "mish": 1, "leaky_relu": 2, "elu": 2,
    "hardtanh": 3, "dropout": 3, "dropout2d": 3,
}  # fmt: skip


def _schema_writes(node: fx.Node) -> list[fx.Node]:
    """Arguments an operator's schema marks as written."""
    schema = node.target._schema  # type: ignore[union-attr]
    written = []
    for i, argument in enumerate(schema.arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
            written.append(value)
    return written


def _is_known(target: Any) -> bool:
    """Whether target comes from torch or Python, and so writes only where its name says."""
    module = getattr(target, "__module__", None) or ""
    return module.partition(".")[0] in ("torch", "_operator", "operator", "builtins", "math", "fx_passes")
