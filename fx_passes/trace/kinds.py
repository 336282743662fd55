"""Of which class a traced value is: from the schemas of PyTorch's operators, annotations, and operands' classes.

Nothing is told of what users' own functions and modules return. The model's arguments are tensors, or what the example
inputs are; whatever relies on that is written down, and each call is compared with it.
"""

from __future__ import annotations

import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fx_passes.graph.graph import AUGMENTED
from fx_passes.graph.hooks import has_hooks, has_own_forward
from fx_passes.trace.assumptions import EVERY, Assumption, Bare, Path, Present, follow, own_attributes

_MISSING = object()
_ATTRIBUTES: Mapping[type, Mapping[str, type]] = MappingProxyType(
    {
        Tensor: {
            "shape": torch.Size, "dtype": torch.dtype, "device": torch.device, "layout": torch.layout,
            **dict.fromkeys(("T", "mT", "H", "mH", "data", "real", "imag"), Tensor),
            **dict.fromkeys(("ndim", "itemsize", "nbytes"), int),
            **dict.fromkeys(("requires_grad", "is_cuda", "is_cpu", "is_leaf", "is_sparse", "is_quantized", "is_nested",
                             "is_meta", "is_mkldnn", "is_mps", "is_xpu", "is_sparse_csr"), bool),
        },
        torch.device: {"type": str},
        torch.dtype: {"is_floating_point": bool, "is_complex": bool, "is_signed": bool, "itemsize": int},
    }
)  # fmt: skip
# What schemas say of another function of that name, or not at all.
_METHODS: Mapping[str, type] = MappingProxyType(
    {
        **dict.fromkeys(("dim", "ndimension", "numel", "nelement", "element_size", "storage_offset"), int),
        **dict.fromkeys(("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_pinned"), bool),
        **dict.fromkeys(("float", "double", "half", "bfloat16", "long", "int", "short", "bool", "char", "byte", "cpu",
                         "cuda", "to", "type_as", "contiguous", "clone", "detach", "new", "requires_grad_"), Tensor),
    }
)  # fmt: skip
_UNKNOWN_METHODS = ("item", "tolist", "type", "numpy", "stride", "backward", "data_ptr", "storage", "apply_", "map_")
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod", "truediv", "neg", "pos")
_OPERATORS = frozenset(getattr(operator, name) for name in (*_ARITHMETIC, "pow", "matmul", "and_", "or_", "xor",
                                                            "invert", "lshift", "rshift", "abs"))  # fmt: skip
_NUMERIC = frozenset(getattr(operator, name) for name in _ARITHMETIC)
_COMPARISONS = frozenset(getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_POOLS = tuple(getattr(F, f"{kind}max_pool{n}d") for kind in ("", "adaptive_") for n in (1, 2, 3))


class Kinds:
    """The classes of a graph's values, found when asked for.

    values   arguments of the example, by name; None without an example
    assumed  what was taken for granted
    """

    def __init__(self, root: nn.Module, values: Mapping[str, Any] | None) -> None:
        self.root = root
        self.values = values
        self.assumed: dict[tuple[str, Path, type | None], Assumption] = {}
        self._known: dict[fx.Node, type | None] = {}

    def of(self, node: Any) -> type | None:
        """The class of what node, or a constant in its place, is; None where that is unknown."""
        if not isinstance(node, fx.Node):
            return type(node)
        if node not in self._known:
            self._known[node] = None  # while it is looked for
            self._known[node] = self._find(node)
        return self._known[node]

    def of_attribute(self, node: fx.Node, name: str) -> type | None:
        """The class of an attribute of what node is."""
        inside = self._path(node)
        if inside is not None and (self._is_no_tensor(*inside) or not hasattr(Tensor, name)):
            return self._assume(inside[0], (*inside[1], ("attr", name)))
        owner = self.of(node)
        return _ATTRIBUTES.get(Tensor if owner is nn.Parameter else owner, {}).get(name)  # type: ignore[arg-type]

    def is_never_none(self, node: fx.Node) -> bool:
        """Whether node is known not to be None; where that is so of an argument of the example, it is assumed."""
        inside = self._path(node)
        if inside is None:
            return self.of(node) is not None
        name, path = inside
        if self.values is not None and self._example(name, path) is None:
            return False
        self._note(name, path, None)
        return True

    def assume_given(self, names: Iterable[str]) -> None:
        """These arguments are not None: code may compare them with it."""
        for name in names:
            self._note(name, (), None)

    def assume_bare(self, node: fx.Node, name: str) -> bool:
        """Whether node, a tensor, lacks an attribute of that name; of calls it is assumed that it has none at all.

        A result may be the very operand: x.float() is x. So of results it is assumed of all arguments.
        """
        if node.op == "get_attr":
            return name not in own_attributes(_held(self.root, str(node.target)))
        argument, path = self._path(node) or (EVERY, ())
        known = self.values or {}
        example = self._example(argument, path) if argument != EVERY else known
        if name in own_attributes(example) or (argument == EVERY and self._is_held(name)):
            return False
        self._note(argument, path, Bare)
        return True

    def assume_present(self, node: fx.Node, name: str) -> None:
        """An attribute of an argument is there: code may catch the exception where it is not."""
        if (inside := self._path(node)) is not None:
            self._note(inside[0], (*inside[1], ("attr", name)), Present)

    def _is_held(self, name: str) -> bool:
        return any(name in vars(held) for held in (*self.root.parameters(), *self.root.buffers()))

    def _note(self, name: str, path: Path, kind: type | None) -> None:
        self.assumed[name, path, kind] = Assumption(name, path, kind)

    def is_guess(self, node: fx.Node) -> bool:
        """Whether node is an argument, or in one, of which no example tells what it is."""
        return self.values is None and self._path(node) is not None

    def is_given(self, node: fx.Node) -> bool:
        """Whether node is an argument or in one, by position or name of its own or not."""
        while node.op != "placeholder":
            taken_out = node.target in (operator.getitem, getattr) or (
                node.op == "call_method" and node.target == "get"
            )
            if not taken_out or not isinstance(node.args[0], fx.Node):
                return False
            node = node.args[0]
        return True

    def _find(self, node: fx.Node) -> type | None:
        if node.op == "placeholder":
            name = str(node.target)
            if name.startswith("*"):
                return dict if name.startswith("**") else tuple
            return self._assume(name, ())
        if node.op == "get_attr":
            return type(_held(self.root, str(node.target)))
        if node.op == "call_module":
            return self._of_module(self.root.get_submodule(str(node.target)), node)
        if node.op == "call_method":
            return self._of_method(node)
        return self._of_function(node) if node.op == "call_function" else None

    def _of_module(self, module: nn.Module, node: fx.Node) -> type | None:
        """Of torch.nn's modules alone: their annotations are true."""
        if not type(module).__module__.startswith("torch.nn.modules") or has_hooks(module) or has_own_forward(module):
            return None
        if isinstance(module, nn.Identity | nn.Dropout):
            return self.of(node.args[0]) if node.args else None
        if "MaxPool" in type(module).__name__:
            return None if getattr(module, "return_indices", False) else Tensor
        return Tensor if _returns_tensor(type(module).forward) else None

    def _of_states(self, source: fx.Node, key: Any) -> type | None:
        """Of one result of a module of torch.nn's that has several."""
        module = self.root.get_submodule(str(source.target))
        if has_hooks(module) or has_own_forward(module) or type(key) is not int:
            return None
        if type(module) is nn.LSTM:
            return tuple if key == 1 else Tensor
        if type(module) in (nn.GRU, nn.RNN, nn.LSTMCell, nn.MultiheadAttention):
            return Tensor
        return Tensor if self.of(source) is Tensor else None

    def _of_method(self, node: fx.Node) -> type | None:
        name, owner = str(node.target), self.of(node.args[0])
        if name == "get" and (inside := self._path(node)) is not None:
            return self._assume(*inside)
        if owner is None or not issubclass(owner, Tensor):
            return None
        if name == "size":
            return torch.Size if len(node.args) == 1 and not node.kwargs else int
        if name in _UNKNOWN_METHODS:
            return None
        return _METHODS.get(name) or self._by_schema(name, node)

    def _of_function(self, node: fx.Node) -> type | None:
        target: Any = AUGMENTED.get(node.target, node.target)
        if target is operator.getitem:
            return self._of_item(node)
        if target is getattr and len(node.args) == 2:
            return self.of_attribute(node.args[0], node.args[1])
        if target in (math.floor, math.ceil):
            return int
        kinds: list[type | None] = [self.of(arg) for arg in node.args] if not node.kwargs else [None]
        if target in (max, min):
            return int if kinds and all(kind is int for kind in kinds) else None
        if target in _OPERATORS or target in _COMPARISONS:
            return _of_operator(target, kinds)
        if target in _POOLS:
            with_indices = node.kwargs.get("return_indices", any(isinstance(arg, bool) for arg in node.args[1:]))
            return None if with_indices else Tensor
        if not str(getattr(target, "__module__", None) or "torch").startswith("torch"):
            return None
        if inspect.isfunction(target) and _returns_tensor(target):
            return Tensor
        name = getattr(target, "__name__", "")
        is_torch_s = any(getattr(space, name, None) is target for space in (torch, torch._C._nn, F, torch._C._special))
        return self._by_schema(name, node) if is_torch_s else None

    def _of_item(self, node: fx.Node) -> type | None:
        source, key = node.args
        inside = self._path(node)
        if inside is not None and (self.values is None or self._is_no_tensor(*self._path(source))):  # type: ignore[misc]
            return self._assume(*inside)
        if isinstance(source, fx.Node) and source.op == "call_module":
            return self._of_states(source, key)
        if isinstance(source, fx.Node) and source.target is operator.getitem and self.of(source) is tuple:
            return Tensor  # one of an LSTM's two states
        owner = self.of(source)
        if owner is None or (isinstance(source, fx.Node) and source.op == "placeholder" and owner is tuple):
            return None  # of *args nothing is known
        if issubclass(owner, Tensor):
            return Tensor
        if owner is torch.Size:
            return torch.Size if isinstance(key, slice) else int
        is_of_tensors = isinstance(source, fx.Node) and _makes_tensors(source, owner)
        return Tensor if is_of_tensors and isinstance(key, int) else None

    def _by_schema(self, name: str, node: fx.Node) -> type | None:
        """What all overloads return that may take these arguments."""
        packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, f"special_{name}", None)
        if packet is None:
            return None
        found = set()
        for overload in packet.overloads():
            schema = getattr(packet, overload)._schema
            if overload.endswith("out") or not self._may_take(schema, node):
                continue
            returned = [str(result.type) for result in schema.returns]
            found.add(_RETURNED.get(returned[0]) if len(returned) == 1 else getattr(torch.return_types, name, tuple))
        return found.pop() if len(found) == 1 else None

    def _may_take(self, schema: Any, node: fx.Node) -> bool:
        given: dict[str, Any] = dict(node.kwargs)
        rows = list(schema.arguments)
        for row, value in zip(rows, node.args, strict=False):
            given[row.name] = value
        by_position = [row for row in rows if not row.kwarg_only]
        takes_list = by_position and str(by_position[-1].type) in ("List[int]", "Optional[List[int]]", "List[SymInt]")
        if len(node.args) > len(by_position) and not takes_list:
            return False
        names = {row.name for row in rows}
        aliases = {"keepdims": "keepdim", "axis": "dim", "input": "self", "x1": "self"}
        given = {aliases.get(name, name) if name not in names else name: value for name, value in given.items()}
        if not given.keys() <= names:
            return False
        for row in rows:
            if row.name not in given:
                if not row.has_default_value():
                    return False
            elif not self._fits(given[row.name], str(row.type)):
                return False
        return True

    def _fits(self, value: Any, kind: str) -> bool:
        """Whether a value may be an argument of this type of a schema."""
        if kind.startswith("Optional["):
            return value is None or self._fits(value, kind[9:-1])
        found = self.of(value)
        if kind == "Tensor":
            return found is None or issubclass(found, Tensor)
        if kind in ("int", "SymInt", "bool", "float"):
            return found is None or (issubclass(found, numbers.Number) and not issubclass(found, Tensor))
        if kind == "str":
            return found in (None, str)
        return not (kind.startswith("List[Tensor") and found is not None and issubclass(found, Tensor | int))

    # ---- arguments

    def _path(self, node: Any) -> tuple[str, Path] | None:
        """The argument that node is taken out of, and how."""
        if not isinstance(node, fx.Node):
            return None
        if node.op == "placeholder":
            return None if str(node.target).startswith("*") else (str(node.target), ())
        step: tuple[str, Any]
        if node.op == "call_function" and node.target in (operator.getitem, getattr) and len(node.args) == 2:
            step = ("item" if node.target is operator.getitem else "attr", node.args[1])
        elif node.op == "call_method" and node.target == "get" and not node.kwargs:
            step = ("get", node.args[1:])
        else:
            return None
        if not isinstance(step[1], str | int | bool | tuple) or fx.node.map_arg(step[1], lambda n: _MISSING) != step[1]:
            return None
        inside = self._path(node.args[0])
        if inside is None or (step[0] == "attr" and hasattr(Tensor, str(step[1])) and not self._is_no_tensor(*inside)):
            return None
        return inside[0], (*inside[1], step)

    def _is_no_tensor(self, name: str, path: Path) -> bool:
        """Whether an argument is a container, as far as the example tells."""
        return self.values is not None and not isinstance(self._example(name, path), Tensor | numbers.Number)

    def _example(self, name: str, path: Path) -> Any:
        try:
            return follow((self.values or {})[name], path)
        except Exception:  # whatever a container of the user's raises
            return None

    def _assume(self, name: str, path: Path) -> type | None:
        """The class that an argument has in the example; without one, or without that argument, it is a tensor."""
        kind: type = Tensor
        if self.values is not None:
            value = self._example(name, path)
            if value is None or not (isinstance(value, Tensor) or type(value).__module__ == "builtins"):
                return None
            kind = type(value)
        self._note(name, path, kind)
        return kind


_RETURNED: Mapping[str, type] = MappingProxyType(
    {"Tensor": Tensor, "List[Tensor]": tuple, "bool": bool, "int": int, "float": float}
)


def _held(root: nn.Module, path: str) -> Any:
    """A parameter, buffer or other attribute; torch.fx answers getattr() with proxies while it traces."""
    *owners, name = path.split(".")
    for owner in owners:
        root = root._modules[owner]
    return next(held[name] for held in (root._parameters, root._buffers, root.__dict__) if name in held)


def _returns_tensor(function: Callable[..., Any]) -> bool:
    return getattr(function, "__annotations__", {}).get("return") in (Tensor, "Tensor")


def _makes_tensors(source: fx.Node, owner: type) -> bool:
    """Whether what torch's own function returns as a tuple is one of tensors."""
    return owner is tuple or getattr(torch.return_types, owner.__name__, None) is owner


def _of_operator(target: Any, kinds: list[type | None]) -> type | None:
    if any(kind is None for kind in kinds):
        return None
    if any(issubclass(kind, Tensor) for kind in kinds):  # type: ignore[arg-type]
        return Tensor
    if not all(kind in (int, float, bool) for kind in kinds):
        return bool if target in (operator.eq, operator.ne) else None
    if target in _COMPARISONS:
        return bool
    if target not in _NUMERIC:
        return None
    if target is operator.truediv or float in kinds:
        return float
    return int
