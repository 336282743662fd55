"""What a node may do to memory that it was given: write to it, or hand it on as (part of) its result.

Unknown functions and modules may do both. Known ones are in the tables of spellings, or carry their schema.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from fx_passes import ops
from fx_passes.aliasing.schemas import makes_new
from fx_passes.graph.graph import argument, get_attribute, is_shape, nodes_in
from fx_passes.graph.hooks import has_hooks
from fx_passes.spellings.registry import FUNCTIONS, INPLACE, METHODS, QUALIFIED

_VIEWS = {"reshape", "view", "flatten", "unflatten", "permute", "transpose", "swapaxes", "swapdims", "chunk", "split",
          "tensor_split", "unsqueeze", "squeeze", "expand", "contiguous", "getitem", "reshape_as",
          "view_as", "movedim", "moveaxis"}  # fmt: skip
_AS_ANOTHER = {"expand_as", "reshape_as", "view_as"}  # of the second operand the shape is read
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}
NUMBERS = {"item", "numel", "stride", "is_contiguous", "tolist", "dim", "size", "ndimension"}
_INPLACE_AT = {"relu": 1, "relu6": 1, "silu": 1, "hardswish": 1, "hardsigmoid": 1, "mish": 1, "selu": 1,
               "leaky_relu": 2, "elu": 2, "celu": 2, "hardtanh": 3, "_threshold": 3, "rrelu": 4,
               "dropout": 3, "dropout1d": 3, "dropout2d": 3, "dropout3d": 3, "alpha_dropout": 3,
               "feature_alpha_dropout": 3}  # fmt: skip
_RESIZING = {"resize_", "resize_as_", "set_", "as_strided_", "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_",
             "unsqueeze_"}  # fmt: skip
GUARDS = "_guards_fn"  # the submodule of an exported module that compares its inputs' sizes, from PyTorch 2.9 on
_FRESH_MODULES: tuple[Any, ...] = (
    nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.Embedding,
    nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd, nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd, nn.ReLU, nn.Hardtanh, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid,
    nn.Tanh, nn.Hardswish, nn.Hardsigmoid, nn.Mish, nn.SELU, nn.Softsign, nn.Softplus, nn.PReLU,
    nn.Softmax, nn.LogSoftmax, nn.MultiheadAttention,
)  # fmt: skip


def may_write_to_held(graph: fx.Graph, root: nn.Module) -> bool:
    """Whether something in graph is written to, and it might be a tensor that root holds: some are read by name."""
    if next(iter(graph.find_nodes(op="get_attr")), None) is None:
        return False
    return any(writes(node, root, unknown=False) for node in graph.nodes)


def writes(node: fx.Node, root: nn.Module, unknown: bool = True) -> list[fx.Node]:
    """Return the arguments whose memory node may write to.

    unknown  whether functions and modules that nobody knows count as writing to all they are given
    """
    if node.target in ops.WRITING:
        return list(node.args[:1])
    if node.op not in ("call_function", "call_method", "call_module") or node.target in ops.VOCABULARY:
        return []
    inputs = node.all_input_nodes
    if not inputs or node.meta.get("constant"):
        return []
    if node.op == "call_module":
        return [] if node.target == GUARDS else _module_writes(node, root, unknown)
    if node.op == "call_method":
        return inputs[:1] if _has_inplace_name(node.target) or node.target == "__setitem__" else []
    if updated := _updated_statistics(node) or _renormalized_table(node):
        return updated
    if isinstance(node.target, torch._ops.OpOverload):
        return _schema_writes(node)
    if is_shape(node):
        return []  # n += 1 of a number
    if node.target in INPLACE or node.target is operator.setitem or is_inplace_call(node):
        return inputs[:1]
    if not is_known_function(node.target) and unknown:
        return _memory(inputs)
    if out := _given_out(node):
        return out
    if is_known_function(node.target) and node.target not in _OPERATORS and _has_inplace_name(node.target.__name__):
        return nodes_in(node.args[:1]) or inputs[:1]  # of a list, all that are in it
    return []


# They return something new, and write to nothing, though the names of some end like those of what does.
_OPERATORS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, operator.floordiv,
              operator.mod, operator.and_, operator.or_, operator.xor, operator.invert, operator.not_,
              operator.is_)  # fmt: skip
_TABLES = (F.embedding, F.embedding_bag)  # their results are new, too: no view of a table
_NORMS = {"batch_norm": "training", "instance_norm": "use_input_stats"}


def _updated_statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a normalization updates; PyTorch's schemas do not mark them."""
    name = getattr(node.target, "__name__", "").partition(".")[0]
    if name not in _NORMS or not (isinstance(node.target, torch._ops.OpOverload) or _is_ours_or_torch(node.target)):
        return []
    first = 1 if node.target in (F.batch_norm, F.instance_norm) else 3
    statistics = [argument(node, first, "running_mean"), argument(node, first + 1, "running_var")]
    updates = argument(node, 5, _NORMS[name], name == "instance_norm")
    return [each for each in statistics if isinstance(each, fx.Node)] if updates is not False else []


def _renormalized_table(node: fx.Node) -> list[fx.Node]:
    """The table of an embedding with max_norm, which scales the rows that it reads where they lie."""
    if node.target not in _TABLES or argument(node, 3, "max_norm") is None:
        return []
    return nodes_in(argument(node, 1, "weight"))


def aliases(node: fx.Node, root: nn.Module) -> list[fx.Node]:
    """Return the arguments whose memory the result of node may be."""
    inputs = [source for source in node.all_input_nodes if not is_shape(source)]
    if not inputs or node.op == "output":
        return []
    if node.op == "call_method":
        if _has_inplace_name(node.target) and node.target != "set_":
            return inputs[:1]
        fresh = node.target in NUMBERS or (node.target in METHODS and node.target not in _VIEWS)
        may_be = inputs[:1] if node.target in _AS_ANOTHER else inputs
        return [] if fresh or makes_new(node.target) else may_be
    if node.op == "call_module":
        module = root.get_submodule(node.target)
        if getattr(module, "reads_numbers", False):
            return []
        if isinstance(module, _FRESH_MODULES) and type(module).__module__.startswith("torch.nn"):
            return inputs[:1] if is_inplace_module(module) and not node.meta.get("out_of_place") else []
        return inputs
    if node.target in ops.COMPUTE or node.target in ops.SHAPE:
        return inputs[:1] if node.target in ops.WRITING else []
    if (out := _given_out(node)) and is_known_function(node.target):
        return out
    if node.target in INPLACE or node.target is operator.setitem:
        return inputs[:1]
    if isinstance(node.target, torch._ops.OpOverload) and node.target._opname not in _DROPOUTS | {"contiguous"}:
        return _schema_aliases(node)
    name = getattr(node.target, "__name__", "")
    if node.target in _OPERATORS or node.target in _TABLES:
        return []
    if node.target is operator.getitem:
        if _is_new_piece(node, root):  # another tensor than the other pieces; taken out twice it is the same one
            same = [user for user in node.args[0].users if user.args[1] == node.args[1]]
            return [] if same[0] is node else same[:1]
        return nodes_in(node.args[0])  # of what is looked up, not of its place
    if node.target is torch.einsum and len(node.args) == 2 and len(nodes_in(node.args)) == 1:
        return inputs  # of one operand it may be a view
    if node.target in FUNCTIONS and name not in _VIEWS | _DROPOUTS:
        return inputs[:1] if is_inplace_call(node) else []
    if getattr(torch, name, None) is node.target and makes_new(name):
        return []
    return inputs


def may_be_held(node: fx.Node, root: nn.Module) -> bool:
    """Whether somebody outside of the graph may keep what node returns, or kept it before.

    A module or function that nobody knows may return a buffer of its own, and a hook keep each result.
    """
    if node.op == "call_module":
        modules = root.get_submodule(str(node.target)).modules()
        return any(has_hooks(each) or not type(each).__module__.startswith("torch.nn") for each in modules)
    return node.op == "call_function" and not is_known_function(node.target)


def _given_out(node: fx.Node) -> list[fx.Node]:
    """The tensors that a function is to write its results to: out=values, or out=(values, indices)."""
    return nodes_in(node.kwargs.get("out"))


def _is_new_piece(node: fx.Node, root: nn.Module) -> bool:
    """Whether node is one of several new tensors that an operator returns, and nobody sees them together."""
    several = node.args[0]
    if not isinstance(several, fx.Node) or not isinstance(several.meta.get("val"), list | tuple):
        return False
    if several.op not in ("call_function", "call_method") or several.target in ops.VOCABULARY or aliases(several, root):
        return False
    return all(user.target is operator.getitem and type(user.args[1]) is int for user in several.users)


def may_change_sizes(writer: fx.Node) -> bool:
    """Whether what writes to a tensor may give it other sizes: numbers that are written to it do not."""
    is_named = writer.op == "call_method" or isinstance(writer.target, torch._ops.OpOverload)
    return not is_named or resizes(writer)


def resizes(writer: fx.Node) -> bool:
    """Whether a method or operator gives the tensor that it writes to other sizes, or another order of these."""
    return str(writer.target).removeprefix("aten.").partition(".")[0] in _RESIZING


def written_inputs(graph: fx.Graph) -> tuple[int, ...]:
    """The numbers of the inputs that operations of the vocabulary write to."""
    written = {node.args[0] for node in graph.nodes if node.target in ops.WRITING}
    return tuple(i for i, node in enumerate(graph.find_nodes(op="placeholder")) if node in written)


def is_inplace_call(node: fx.Node) -> bool:
    """F.relu(x, inplace=True) and the like, also by position."""
    if node.op != "call_function":
        return False
    at = _INPLACE_AT.get(getattr(node.target, "__name__", ""))
    by_position = at is not None and node.args[at : at + 1] == (True,)
    return (node.kwargs.get("inplace") is True or by_position) and not _idle_dropout(node)


def is_inplace_module(module: nn.Module) -> bool:
    """nn.ReLU(inplace=True) and the like; an in-place dropout writes nothing in evaluation mode."""
    if isinstance(module, nn.modules.dropout._DropoutNd) and not module.training:
        return False
    return getattr(module, "inplace", False) is True


def qualified_name(target: Any) -> str:
    """module.name of a function."""
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _idle_dropout(node: fx.Node) -> bool:
    training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
    return getattr(node.target, "__name__", "") in _DROPOUTS and training is False


def _has_inplace_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _module_writes(node: fx.Node, root: nn.Module, unknown: bool) -> list[fx.Node]:
    module = root.get_submodule(str(node.target))
    written = getattr(module, "writes_to", None)  # numbers of inputs, of a region
    if written is not None:
        return [node.args[number] for number in written]
    if node.meta.get("out_of_place") or getattr(module, "reads_numbers", False):
        return []
    if is_inplace_module(module):
        return node.all_input_nodes[:1]
    if not unknown or type(module).__module__.startswith("torch.nn"):
        return []
    return [*_memory(node.all_input_nodes), *_buffers_of(node, root)]


def _memory(inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Those that may be tensors: nobody writes to a number."""
    return [each for each in inputs if not is_shape(each)]


def _buffers_of(node: fx.Node, root: nn.Module) -> list[fx.Node]:
    """What the graph itself reads of the buffers of a module that it calls: forward may count in one."""
    read = [each for each in node.graph.find_nodes(op="get_attr") if str(each.target).startswith(f"{node.target}.")]
    return [each for each in read if not isinstance(get_attribute(root, str(each.target)), nn.Parameter)]


def _schema_writes(node: fx.Node) -> list[fx.Node]:
    """Arguments that an operator's schema marks as written."""
    return [value for value, alias in _annotated(node) if alias.is_write]


# Operators whose schemas do not say that the result may be an argument, or a view of it. Most are written in terms of
# others; a tensor that set_ was called on lies in the memory of the other one.
_MAY_BE_VIEWS = frozenset(
    ("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "cartesian_prod", "conj_physical", "einsum",
     "feature_dropout", "meshgrid", "set_", "type_as", "unsafe_chunk", "unsafe_split")
)  # fmt: skip


def _schema_aliases(node: fx.Node) -> list[fx.Node]:
    """Arguments that an operator's schema marks as what the result is, or is part of."""
    if node.target._opname in _MAY_BE_VIEWS:
        return node.all_input_nodes
    results = [r.alias_info for r in node.target._schema.returns if r.alias_info is not None]
    shared = set().union(*(alias.before_set | alias.after_set for alias in results))
    found = [value for value, alias in _annotated(node) if (alias.before_set | alias.after_set) & shared]
    return found if found or not results else node.all_input_nodes


def _annotated(node: fx.Node) -> Iterator[tuple[fx.Node, Any]]:
    """Each argument about whose memory an operator's schema says something, and what it says."""
    for i, row in enumerate(node.target._schema.arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(row.name)
        if row.alias_info is not None:
            yield from ((each, row.alias_info) for each in nodes_in(value))  # of a list of tensors, all


def is_known_function(target: Any) -> bool:
    """Whether it is known of a function what it computes or writes to: of torch, of ours, or one that passes spell."""
    return _is_ours_or_torch(target) or qualified_name(target) in QUALIFIED


def _is_ours_or_torch(target: Any) -> bool:
    """Whether a function comes from torch or Python, and so writes only where its name says."""
    module = getattr(target, "__module__", None) or ""
    if module.startswith("torch._dynamo"):  # functions on numpy's arrays, wrapped
        return False
    return module.partition(".")[0] in ("torch", "_operator", "operator", "builtins", "math", "fx_passes")
