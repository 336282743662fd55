"""What a graph may contain after each stage. Run by the tests, and by the pipeline when ZENDNN_CFFI_LOG=DEBUG."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fx_passes import ops
from fx_passes.graph.graph import get_attribute, is_call, is_constant, is_shape, is_vocabulary, lint


class VerificationError(AssertionError):
    """A pass left a graph that breaks a rule; the message says which node and which rule."""


def verify(gm: fx.GraphModule) -> None:
    """Check what holds between any two passes, and inside the regions; raises VerificationError."""
    verify_graph(gm.graph, gm)
    for name, module in gm.named_children():
        graph = getattr(module, "graph", None)
        if name.startswith("zen_region") and isinstance(graph, fx.Graph):
            verify_region(graph, gm)


def verify_graph(graph: fx.Graph, root: nn.Module) -> None:
    """Well-formed: lint, every vocabulary call binds, its post-ops are of the three forms, attributes exist."""
    try:
        lint(graph, root)
    except RuntimeError as error:
        raise VerificationError(str(error)) from error
    for node in graph.nodes:
        if node.op == "get_attr":
            _resolve(node, root)
        elif is_vocabulary(node):
            _bind(node)
            if node.target in ops.WITH_POST_OPS:
                for entry in node.kwargs["post_ops"]:
                    _check_post_op(node, entry)
    _check_examples(graph, root)


def verify_region(graph: fx.Graph, root: nn.Module) -> None:
    """A region: tensors in and out, vocabulary and sizes in between, at least one computation."""
    verify_graph(graph, root)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        piece = is_call(node, operator.getitem) and is_call(node.args[0], *ops.SEVERAL)
        if not (is_vocabulary(node) or is_shape(node) or is_constant(node) or piece):
            raise VerificationError(f"{node.name}: {node.target} is not in the vocabulary, yet in a region")
    if not any(is_call(node, *ops.COMPUTE) for node in graph.nodes):
        raise VerificationError("a region that computes nothing")
    for result in next(iter(graph.find_nodes(op="output"))).all_input_nodes:
        if is_shape(result) or result.op == "get_attr":
            raise VerificationError(f"{result.name}: a region returns tensors it computed")


def _resolve(node: fx.Node, root: nn.Module) -> None:
    try:
        get_attribute(root, node.target)
    except AttributeError as error:
        raise VerificationError(f"{node.name}: nothing is called {node.target}") from error


def _bind(node: fx.Node) -> None:
    try:
        inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except TypeError as error:
        raise VerificationError(f"{node.name}: {node.target.__name__}: {error}") from error


def _check_post_op(node: fx.Node, entry: Any) -> None:
    """("eltwise", kind, alpha, beta), ("binary", kind, other) or ("prelu", weight)."""
    name, *rest = entry
    good = (
        (name == "eltwise" and len(rest) == 3 and rest[0] in ops.ELTWISE)
        or (name == "binary" and (len(rest) == 2 or rest[2:] == [True]) and rest[0] in ops.BINARY)
        or (name == "prelu" and len(rest) == 1 and isinstance(rest[0], fx.Node))
    )
    if not good:
        raise VerificationError(f"{node.name}: {entry} is no post-op")


def _check_examples(graph: fx.Graph, root: nn.Module) -> None:
    """What passes believe of a value, meta["val"], has the shape and dtype that its operands' examples lead to."""
    mode = FakeTensorMode()
    examples: dict[fx.Node, Any] = {}

    def example(node: fx.Node) -> Any:
        if node not in examples:
            examples[node] = _example(node, root, mode)
            if examples[node] is None and is_shape(node):
                examples[node] = _computed(node, example)
        return examples[node]

    for node in graph.nodes:
        if not is_vocabulary(node) or not isinstance(stated := example(node), torch.Tensor):
            continue
        with mode, torch.no_grad():
            found = _computed(node, example)
        if isinstance(found, torch.Tensor) and (found.shape, found.dtype) != (stated.shape, stated.dtype):
            raise VerificationError(
                f"{node.name}: meta['val'] says {stated.dtype} {tuple(stated.shape)},"
                f" its operands' lead to {found.dtype} {tuple(found.shape)}"
            )


def _example(node: fx.Node, root: nn.Module, mode: FakeTensorMode) -> Any:
    """The example of node with numbers for free sizes; None where it has none, or one of its sizes is unknown."""
    value = get_attribute(root, node.target) if node.op == "get_attr" else node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value if isinstance(value, int) else None
    sizes = [size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape]
    if None in sizes:
        return None
    with mode:
        return torch.empty(sizes, dtype=value.dtype, device=value.device)


def _computed(node: fx.Node, example: Callable[[fx.Node], Any]) -> Any:
    """What node makes of its operands' examples; None where one has none."""
    if any(example(source) is None for source in node.all_input_nodes):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), example)
    return node.target(*args, **kwargs)
