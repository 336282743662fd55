"""What a graph itself tells about its values, whatever the inputs: number of dimensions, dtype, being a tensor at all.

Where nodes carry meta["val"] (a traced example), that is believed, and so are RANK and DTYPE.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable
from typing import Any, cast

import torch
from torch import fx, nn

from fx_passes import ops
from fx_passes.graph.graph import AUGMENTED, DTYPE, RANK, argument, get_attribute, is_call, is_stack, is_vocabulary

LAYER = "layer"  # in node.meta: the class of the module that it was
_SAME_RANK = ops.having(shape="same") | ops.having(shape="rank")
_FROM_WEIGHT = ops.having(weighted=True)
_SAYS_DTYPE = (ops.quantize, ops.dequantize, ops.quantize_by, ops.quantize_rows_by, ops.dequantize_rows_by,
               ops.quantized_embedding)  # fmt: skip
_MOVING = (
    "view",
    "reshape",
    "permute",
    "transpose",
    "flatten",
    "contiguous",
    "unsqueeze",
    "squeeze",
    "expand",
)  # methods

# Modules outside of the vocabulary that return one tensor.
_SAME_RANK_MODULES = {nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LocalResponseNorm, nn.PixelShuffle,
                      nn.PixelUnshuffle, nn.ChannelShuffle, nn.RMSNorm, nn.ReflectionPad2d, nn.ReplicationPad2d,
                      nn.CircularPad2d}  # fmt: skip
_ADDED_DIMENSIONS: dict[type | None, int] = {**dict.fromkeys(_SAME_RANK_MODULES, 0), nn.Embedding: 1}
_TENSOR_MODULES = _SAME_RANK_MODULES | {nn.Embedding, nn.EmbeddingBag, nn.Unfold, nn.Fold, nn.GRUCell, nn.RNNCell}


def is_tensor(node: Any) -> bool:
    """Whether node is a tensor for certain."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "get_attr" or isinstance(node.meta.get("val"), torch.Tensor) or DTYPE in node.meta:
        return True
    if node.op == "call_module":
        return _layer(node) in _TENSOR_MODULES
    if node.op == "placeholder":
        return node.type is torch.Tensor or any(_takes_tensor(user, node) for user in node.users)
    if node.op == "call_method":
        return node.target in _MOVING and is_tensor(node.args[0])
    if is_call(node, operator.getitem):
        return is_call(node.args[0], *ops.SEVERAL) or is_tensor(node.args[0])
    if is_call(node, ops.binary):
        return any(map(is_tensor, node.args))
    return is_vocabulary(node) and node.target not in ops.SHAPE | ops.SEVERAL


def _layer(node: fx.Node) -> type | None:
    """The class of the module that node calls."""
    owner = node.graph.owning_module
    return None if owner is None else type(owner.get_submodule(str(node.target)))


def _takes_tensor(user: fx.Node, node: fx.Node) -> bool:
    """Whether what node is for user can only be a tensor."""
    if user.op == "call_module":
        return user.args[:1] == (node,)
    return is_vocabulary(user) and user.target not in (ops.binary, ops.reshape, ops.expand) and user.args[0] is node


def rank(node: Any, known: dict[fx.Node, Any] | None = None) -> int | None:
    """Return how many dimensions node has, or None where that depends on the inputs.

    known  ranks that were found before and are so still: for a pass that asks of many nodes
    """
    return _find_out(node, _rank, known)


def rank_of(node: Any, dimensions: int) -> tuple[int | None, list[fx.Node]]:
    """Return node's rank if values of which nothing is known had so many dimensions, and these values."""
    unknown: dict[fx.Node, None] = {}

    def rule(source: Any) -> _Rule:
        found = yield from _rank(source)
        if found is None and isinstance(source, fx.Node) and not is_vocabulary(source):
            unknown[source] = None
            return dimensions
        return found

    return _find_out(node, rule), [*unknown]


def rank_source(node: fx.Node) -> fx.Node:
    """Return the earliest node that has as many dimensions as node, whatever the inputs."""
    return cast(fx.Node, _find_out(node, _rank_source))


def dtype(node: Any, root: nn.Module) -> torch.dtype | None:
    """Return the dtype of node's result, or None where that depends on the inputs.

    A convolution or linear takes input and weight of one dtype only, so its weight tells both.
    """
    return _find_out(node, lambda source: _dtype(source, root))


_Rule = Generator[Any, Any, Any]  # yields what else has to be known, is sent that, returns the fact


def _find_out(node: Any, rule: Callable[[Any], _Rule], known: dict[fx.Node, Any] | None = None) -> Any:
    """Return the fact that rule finds of node, each node on the way asked once.

    Not recursive: a residual network is deeper than Python's stack, and has exponentially many paths.
    """
    known = {} if known is None else known
    if isinstance(node, fx.Node) and node in known:
        return known[node]
    waiting = [(node, rule(node))]
    asking = {node} if isinstance(node, fx.Node) else set()  # a product of a value with itself asks in a circle
    answer = None
    while waiting:
        asked, steps = waiting[-1]
        try:
            source = steps.send(answer)
        except StopIteration as stop:
            waiting.pop()
            answer = stop.value
            if isinstance(asked, fx.Node):
                known[asked] = answer
                asking.discard(asked)
            continue
        answer = None
        if not isinstance(source, fx.Node):
            waiting.append((source, rule(source)))
        elif source in known:
            answer = known[source]
        elif source not in asking:
            asking.add(source)
            waiting.append((source, rule(source)))
    return answer


def _rank(node: Any) -> _Rule:
    if not isinstance(node, fx.Node):
        return 0 if isinstance(node, int | float) else None
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.ndim
    if RANK in node.meta:
        return node.meta[RANK]
    if node.op == "call_module" and node.args and (added := _ADDED_DIMENSIONS.get(_layer(node))) is not None:
        below = yield node.args[0]
        return None if below is None else below + added
    if node.op != "call_function":
        return None
    if node.target in (ops.reshape, ops.permute, ops.expand):
        return len(node.args[1])
    if node.target is ops.flatten and node.args[1] >= 0 and node.args[2] == -1:
        return node.args[1] + 1
    if node.target is ops.flatten and 0 <= node.args[1] <= node.args[2]:
        whole = yield node.args[0]
        return None if whole is None else whole - (node.args[2] - node.args[1])
    if node.target is ops.reshape_as:
        return (yield node.args[1])
    if node.target is ops.unflatten:
        whole = yield node.args[0]
        return None if whole is None else whole + len(node.args[2]) - 1
    if node.target is ops.unsqueeze:
        below = yield node.args[0]
        return None if below is None else below + 1
    if (node.target is ops.index or _takes_part(node)) and (items := view_places(node.args[1])) is not None:
        below = yield node.args[0]
        return None if below is None else below - sum(type(i) is int for i in items) + items.count(None)
    if node.target is ops.binary:
        a, b = (yield node.args[0]), (yield node.args[1])
        return None if a is None or b is None else max(a, b)
    if node.target is ops.matmul:  # of two vectors it is a number
        a, b = (yield node.args[0]), (yield node.args[1])
        return max(a, b) if a and b and min(a, b) > 1 else None
    if node.target is ops.embedding_bag or (node.target is ops.embedding_bags and node.args[2] != "row"):
        return 2
    if node.target is ops.quantized_embedding:
        places = yield node.args[0]
        return None if places is None else places + 1
    if node.target in (ops.offset_bags, ops.concat_bags):
        return 3 if node.target is ops.offset_bags else 2
    if node.target is ops.concat:
        for part in node.args[0]:
            if (found := (yield part)) is not None:
                return found
        return None
    if is_call(node, operator.getitem) and is_call(node.args[0], *ops.PIECES):
        return (yield node.args[0].args[0])
    return (yield node.args[0]) if _keeps_rank(node) else None


def _takes_part(node: fx.Node) -> bool:
    """Whether node is a part of a tensor: not one of several in a list."""
    return is_call(node, operator.getitem) and not is_call(node.args[0], *ops.SEVERAL) and is_tensor(node.args[0])


def view_places(item: Any) -> tuple[Any, ...] | None:
    """The entries of an index that makes a view; None of another."""
    items = item if isinstance(item, tuple) else (item,)
    views = all(i is None or i is Ellipsis or type(i) is int or isinstance(i, slice) for i in items)
    return items if views else None


def _agreed(sources: Iterable[Any]) -> _Rule:
    """The one fact that is found of all sources, or None."""
    found = set()
    for source in sources:
        found.add((yield source))
    return found.pop() if len(found) == 1 else None


def _keeps_rank(node: fx.Node) -> bool:
    """Whether the result has as many dimensions as the first operand."""
    return node.target in _SAME_RANK or (node.target is ops.reduce and node.args[3] is True)


def _rank_source(node: Any) -> _Rule:
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return node
    if _keeps_rank(node):
        return (yield node.args[0])
    if node.target is ops.binary:
        first, second = (yield node.args[0]), (yield node.args[1])
        return first if first is second or not isinstance(second, fx.Node) else node
    if node.target is ops.concat:
        # an empty piece may have another number of dimensions
        return (yield from _agreed(node.args[0])) or node
    return node


def _is_view(target: Any) -> bool:
    """Whether an aten operator is a view of one dtype, or writes, by its schema."""
    if not isinstance(target, torch._ops.OpOverload) or target._opname in ("real", "imag", "_conj"):
        return False
    first, *others = target._schema.arguments or (None,)
    views = first is not None and first.alias_info is not None and len(target._schema.returns) == 1
    return views and not target._opname.startswith("view_as_") and not any(row.name == "dtype" for row in others)


def _dtype(node: Any, root: nn.Module) -> _Rule:
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dtype
    if DTYPE in node.meta:
        return node.meta[DTYPE]
    if node.op == "get_attr":
        value = get_attribute(root, node.target)
        return value.dtype if isinstance(value, torch.Tensor) else None
    if node.op == "placeholder":
        readers = [u for u in node.users if u.op == "call_function" and u.target in _FROM_WEIGHT and u.args[0] is node]
        return (yield readers[0].args[1]) if readers else None
    if node.op == "call_module":
        module = root.get_submodule(node.target)
        if isinstance(module, nn.Embedding):
            return module.weight.dtype
        inplace = getattr(module, "inplace", False) is True
        return (yield node.args[0]) if inplace and node.args else None
    if node.op == "call_method":
        moves = (
            node.target in _MOVING and not any(isinstance(arg, torch.dtype) for arg in node.args) and not node.kwargs
        )
        return (yield node.args[0]) if moves or node.target.endswith("_") else None
    if node.target in _FROM_WEIGHT:
        return (yield node.args[1])
    if node.target in AUGMENTED or node.target is operator.getitem or _is_view(node.target):
        return (yield node.args[0])
    if node.target is ops.embedding_bag:
        return (yield node.args[1])
    if node.target in (ops.choose_scale, ops.choose_row_scales):
        return torch.float32
    if node.target in (ops.dynamic_linear, ops.row_scaled_linear):
        return node.kwargs.get("dtype") or (yield node.args[2])
    if node.target in _SAYS_DTYPE:
        return node.args[-1]
    if node.target is ops.binary:
        both = yield from _agreed([side for side in node.args[:2] if isinstance(side, fx.Node)])
        return both if both is not None and both.is_floating_point else None
    if node.target is ops.concat or is_stack(node):
        return (yield from _agreed(argument(node, 0, "tensors")))
    if node.target in (ops.eltwise, ops.reduce):  # of integers, roots are no integers, nor are sums as narrow
        found = yield node.args[0]
        return found if found is not None and found.is_floating_point else None
    if is_vocabulary(node) and node.target not in ops.SHAPE:
        return (yield node.args[0])
    return None
