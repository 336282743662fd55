"""Leave calls to plain PyTorch that a graph is not for, by their sizes.

Some it refuses, where the vocabulary's operation would take them:

    torch.bmm(x, w)   becomes ops.matmul, which takes vectors, and batches that broadcast
    x.view(-1)        becomes ops.reshape, which copies where strides are odd
    x.mul_(self.w)    becomes ops.mul, whose result may be larger than x

Such spellings are strict. Others take another way through forward than the example took (fx_passes/trace/decisions.py).
Before a graph that has either runs on new sizes, it is computed up to them on meta tensors
(fx_passes/trace/on_meta.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes.graph.graph import is_shape
from fx_passes.spellings.registry import FUNCTIONS, INPLACE, METHODS, STRICT, overload_builder
from fx_passes.trace.decisions import decided, other_answer
from fx_passes.trace.guards import Passed
from fx_passes.trace.on_meta import OnMeta, Values, compute, on_meta, up_to
from zendnn_cffi.primitives.ambient import is_watched

log = logging.getLogger("zendnn_cffi.passes")

# Of these even torch.export and TorchDynamo follow what eager PyTorch refuses.
CAPTURED = frozenset(("addmm", "einsum"))
IN_PLACE = "in place"
_OF_MODULES: Mapping[type[nn.Module], str] = MappingProxyType({nn.RMSNorm: "rms_norm"})
MOST_SIZES = 3  # but for first dimensions, that a graph with answers of an example is for before there is another one
_NUMBERS = frozenset((type(None), bool, int, float, complex, str))


class Refusals:
    """Tells which calls of a graph reach a strict spelling with what it refuses, or have other answers than it took."""

    def __init__(self, root: nn.Module, graph: fx.Graph, strict: Mapping[fx.Node, str]) -> None:
        self._decided = frozenset(decided(graph))
        self._on_meta, self._strict, self._nodes = OnMeta(root), strict, up_to({*strict, *self._decided}, graph)
        self._placeholders = [str(node.target) for node in graph.find_nodes(op="placeholder")]
        self._passed = Passed()
        self._passed_by_position = Passed()  # of calls with tensors alone
        self._others = Passed()  # that have other answers
        self._few: set[tuple[Any, ...]] | None = set() if self._decided else None  # sizes but the first, see allow()

    @classmethod
    def of(cls, root: nn.Module, graph: fx.Graph | None, names: Collection[str] | None = None) -> Refusals | None:
        """Those of a graph over root; None where it has no strict spelling, or none of these names, and no answers."""
        found = {node: strict_name(node, root) for node in graph.nodes} if graph is not None else {}
        strict = {node: name for node, name in found.items() if name and (names is None or name in names)}
        return cls(root, graph, strict) if graph is not None and (strict or decided(graph)) else None

    def allow_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Iterable[str]) -> bool:
        """Whether the graph may compute this call; names: of the model's arguments in order."""
        key = None if kwargs else _sizes_of(args)
        if key is not None and key in self._passed_by_position:
            return True
        if not self.allow({**dict(zip(names, args, strict=False)), **kwargs}):
            return False
        if key is not None and not is_watched():
            self._passed_by_position.remember(key)
        return True

    def allow(self, values: Mapping[str, Any]) -> bool:
        """Whether the graph may compute a call with these arguments, by the names of its placeholders.

        One with answers of an example is for few sizes, as each is followed for some 10 to 100 ms.
        """
        if is_watched():
            return not self._decided
        key = key_of(values)
        if key is not None and key in self._passed:
            return True
        if self._decided and (key in self._others or self._has_too_many_sizes(key)):
            return False
        if (refused := self._refused(values)) is not None:
            log.info("a call is none that the graph is for: %s", refused)
            if self._decided and key is not None:
                self._others.remember(key)
            return False
        if key is not None:
            self._passed.remember(key)
            if self._few is not None:
                self._few.add(_but_first(key))
        return True

    def serve_all_sizes(self) -> None:
        """There is no other graph that could be for more."""
        self._few = None

    def _has_too_many_sizes(self, key: tuple[Any, ...] | None) -> bool:
        """Whether it came with many sizes: following each anew takes longer than conditions of torch.export's."""
        is_limited = self._few is not None and key is not None and len(self._few) >= MOST_SIZES
        return is_limited and _but_first(key) not in self._few  # type: ignore[arg-type,operator]

    def allow_flat(self, values: Sequence[Any]) -> bool:
        """The same with the arguments in the order of the placeholders."""
        return self.allow(dict(zip(self._placeholders, values, strict=False)))

    def calls(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Arguments with the sizes, strides and dtypes of calls that were allowed, of tensors by position alone."""
        for key in list(self._passed_by_position):  # other threads add to it meanwhile
            yield tuple(
                torch.empty_strided(shape, strides, dtype=dtype, device="cpu").zero_() for shape, strides, dtype in key
            )

    def forget(self) -> None:
        """What root holds may have another shape or dtype."""
        self._on_meta.forget()
        self._passed.clear()
        self._passed_by_position.clear()
        self._others.clear()

    def _refused(self, values: Mapping[str, Any]) -> str | None:
        """What the first strict node that refuses its operands says, or what the first other answer is."""
        found: Values = {}
        with on_meta():
            for node in self._nodes:
                error = self._on_meta.step(node, found, values, self._computed)
                if error is not None and node in self._strict:
                    return f"{node.name}: {error}"
                if node in self._decided and (other := other_answer(node, found.get(node), values)) is not None:
                    return other
        return None

    def _computed(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], module: Any) -> Any:
        name = self._strict.get(node, "")
        if module is not None and name:
            _rms_norm(args[0], module.normalized_shape, module.weight)
        elif name == IN_PLACE:
            _check_fits(*args)
        elif name in _STRICTER:
            return _STRICTER[name](*args, **kwargs)
        return compute(node, args, kwargs, module)


def strict_name(node: fx.Node, root: nn.Module) -> str:
    """The name of an operation that refuses what the vocabulary's takes; "" for others."""
    target: Any = node.target
    if node.op == "call_module":
        name = _OF_MODULES.get(type(root.get_submodule(target)), "")
    elif node.op == "call_method":
        name = target
    elif node.op != "call_function":
        name = ""
    elif overload_builder(target) is not None:
        name = target._opname.rstrip("_")
    else:
        name = target.__name__ if target in FUNCTIONS else ""
    return name if name in STRICT else IN_PLACE if _may_outgrow(node) else ""


def _may_outgrow(node: fx.Node) -> bool:
    """Whether it writes what may be larger than where it writes it: layers' results are taken to fit each other."""
    is_method = node.op == "call_method" and str(node.target).endswith("_") and str(node.target)[:-1] in METHODS
    others = [source for source in node.all_input_nodes[1:] if not is_shape(source)]
    return (is_method or node.target in INPLACE) and any(other.op in ("get_attr", "placeholder") for other in others)


def _check_fits(written: Any, *others: Any) -> None:
    """Raise RuntimeError where eager PyTorch does: pow_ of meta tensors takes what would make them larger."""
    if not isinstance(written, torch.Tensor):
        return  # n //= m of numbers
    shape = torch.broadcast_shapes(written.shape, *(other.shape for other in others if isinstance(other, torch.Tensor)))
    if shape != written.shape:
        raise RuntimeError(f"{list(written.shape)} would be {list(shape)}")


def _addmm(input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, **factors: Any) -> torch.Tensor:
    """torch.addmm as eager PyTorch has it: on meta tensors it takes what does not broadcast, and other dtypes."""
    product = torch.mm(mat1, mat2)
    if input.dtype != product.dtype or not product.is_floating_point():  # integers stay integers there
        raise RuntimeError(f"{input.dtype} is added to {product.dtype}")
    input.expand(product.shape)
    return product


def _rms_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """F.rms_norm of dense rows of one floating-point dtype: else eager's result has the input's, and lies dense."""
    is_one = input.is_floating_point() and (weight is None or weight.dtype == input.dtype)
    if not (is_one and input.is_contiguous()):
        raise RuntimeError(f"rms_norm of {input.dtype}, the weight is {getattr(weight, 'dtype', None)}")
    return F.rms_norm(input, normalized_shape, weight, eps)


def _einsum(equation: str, *operands: Any) -> torch.Tensor:
    """torch.einsum of labels that have one size each: others broadcast, and the result lies otherwise then."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    sizes: dict[str, int] = {}
    for labels, tensor in zip(equation.replace(" ", "").partition("->")[0].split(","), tensors, strict=True):
        first, _, last = labels.partition("...")  # what the dots stand for broadcasts in every result
        named = [*zip(first, tensor.shape, strict="." not in labels)]
        for label, size in (*named, *zip(last[::-1], tensor.shape[::-1], strict=False)):
            if sizes.setdefault(label, size) != size:
                raise RuntimeError(f"{label} is {sizes[label]} and {size}")
    return torch.einsum(equation, *tensors)


_STRICTER: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {"addmm": _addmm, "rms_norm": _rms_norm, "einsum": _einsum}
)


def _sizes_of(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What of plain tensors decides: found in less time than `_key` takes; None where other values are among them."""
    key = []
    for value in args:
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return None
        key.append((value.shape, value.stride(), value.dtype))
    return tuple(key)


def _but_first(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sizes in a key of key_of's, without those of first dimensions."""
    return tuple(each[0][1:] for each in key if type(each) is tuple and each and type(each[0]) is torch.Size)


def key_of(values: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What of a call's arguments decides; None where that cannot be told."""
    key: list[Any] = [*values]
    for value in values.values():
        if isinstance(value, torch.Tensor) or type(value) in _NUMBERS:
            leaves: list[Any] = [value]
        else:
            leaves, structure = pytree.tree_flatten(value)
            key.append(structure)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                key.append((leaf.shape, leaf.stride(), leaf.dtype))
            elif type(leaf) in _NUMBERS:
                key.append((type(leaf), leaf))
            else:
                return None
    return tuple(key)
