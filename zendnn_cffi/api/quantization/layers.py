"""Layers of a graph that PT2E prepared, and the observers that each needs to compute in integers.

    Before: x -> observer -> conv <- observer <- weight     all layers quantized
    After:  x -> conv <- weight                             mixed(prepared, layers without conv): it stays float

An observer feeds several readers, so the unit is an edge: (observer, reader). One calibration serves every choice of
layers, as observers keep their ranges.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from fx_passes.graph.graph import get_attribute
from fx_passes.graph.interpreter import call_node, run
from fx_passes.trace.quiet import structures_copied
from zendnn_cffi.api.quantization.called_alike import flat_arguments
from zendnn_cffi.errors import interrupts

_PRODUCTS = frozenset(
    ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
    + ("linear", "matmul", "bmm")
)
ATTENTION = "scaled_dot_product_attention"  # one more where its operands are rounded
SUMS = frozenset(("add", "add_"))
_NORMS = frozenset(("batch_norm", "_native_batch_norm_legit_no_training"))
_RELUS = frozenset(("relu", "relu_"))
# How TorchDynamo came to a layer whose forward stands for another one (fx_passes.trace.written_out)
_REPLACED_FORWARD = re.compile(r"\.?forward\.__closure__\[\d+\]\.cell_contents(\.__self__)?")
_NOT_FINITE = ("is not finite", "should be less than max")  # what observers say of NaN and infinity
ANNOTATION = "quantization_annotation"  # PT2E's key in node.meta
Edge = tuple[fx.Node, fx.Node]  # an observer and one of its readers
Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


def watch(gm: fx.GraphModule, calls: Iterable[Call], see: Callable[..., None]) -> None:
    """Compute gm for each call, and let `see` have each node's own: node, arguments and result."""

    def computed(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        see(node, args, kwargs, result := call_node(node, args, kwargs))
        return result

    with torch.no_grad():
        for number, (args, kwargs) in enumerate(calls, 1):
            with calibrating_with(number):
                run(gm.graph, gm, flat_arguments(gm, args, kwargs), computed)


@contextmanager
def calibrating_with(number: int) -> Iterator[None]:
    """Tell which input it is that the graph fails on."""
    try:
        yield
    except Exception as error:  # whatever the graph, its guards or observers raise
        if interrupts(error):
            raise
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        if any(words in reason for words in _NOT_FINITE):
            reason = f"the model computes NaN or infinity of it ({reason})"
        message = f"calibration input {number} fails in the graph that the first one gave: {reason}"
        raise ValueError(message) from error


def kind(node: fx.Node) -> str:
    """The operator's name, such as "conv2d"."""
    return str(getattr(node.target, "_opname", getattr(node.target, "__name__", "")))


def is_product(node: fx.Node) -> bool:
    """Whether it is a convolution or matrix product, or an attention of which queries and keys may be rounded."""
    if node.op != "call_function":
        return False
    return kind(node) in _PRODUCTS or (kind(node) == ATTENTION and _is_rounded(node.args[0]))


def _is_rounded(node: Any) -> bool:
    """Whether node is an observer, what stands in its place, or dequantizes."""
    return isinstance(node, fx.Node) and (node.op == "call_module" or kind(node).startswith("dequantize_"))


def module_path(node: fx.Node) -> str:
    """The submodule that a node comes from, "" where the graph does not say."""
    stack = node.meta.get("nn_module_stack")
    path: str = list(stack.values())[-1][0] if stack else ""
    return _REPLACED_FORWARD.sub("", path.removeprefix("L['self'].")).strip(".")


def observer_of(gm: fx.GraphModule, node: Any) -> Any:
    """The observer that a node calls, None for other nodes and arguments."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    module = gm.get_submodule(str(node.target))
    return module if hasattr(module, "calculate_qparams") else None


def quantized_layers(prepared: fx.GraphModule) -> list[fx.Node]:
    """Convolutions and linear layers whose source and weights are both observed, in execution order."""
    layers = []
    for node in prepared.graph.nodes:
        if is_product(node) and all(observer_of(prepared, arg) is not None for arg in node.args[:2]):
            layers.append(node)
    return layers


def edges(prepared: fx.GraphModule, layers: Collection[str]) -> set[Edge]:
    """The edges of observers that stay where just these layers (names of nodes) compute in integers.

    Those are the layers' own, the other operand of a sum that a layer absorbs, and those of operations on the way
    (pooling, concatenation, a normalization that no layer takes in) to an observer that stays.
    """
    stay: set[Edge] = set()
    for observer in reversed(_observers(prepared)):  # readers of a value come behind it
        stay |= {(observer, reader) for reader in observer.users if _needs_integers(reader, layers, stay)}
    return stay


def mixed(prepared: fx.GraphModule, layers: Collection[str], biases: Mapping[str, Tensor]) -> fx.GraphModule:
    """Return a copy with observers for just these layers (names of nodes), and what `biases` adds to theirs.

    The copy shares parameters. prepared stays as it is.
    """
    stay = {(observer.name, reader.name) for observer, reader in edges(prepared, layers)}
    result = _copied(prepared)
    for observer in _observers(result):
        source = observer.args[0]
        assert isinstance(source, fx.Node)
        for reader in list(observer.users):
            if (observer.name, reader.name) not in stay:
                reader.replace_input_with(observer, source)
        if not observer.users:
            result.graph.erase_node(observer)
    _drop_annotations(result)
    add_to_biases(result, {name: shift for name, shift in biases.items() if name in layers})
    return result


def add_to_biases(prepared: fx.GraphModule, shifts: Mapping[str, Tensor]) -> None:
    """Add [channels] to the bias of each of these layers, in place; it becomes another parameter."""
    for node in [node for node in prepared.graph.nodes if node.name in shifts]:
        _add_to_bias(prepared, node, shifts[node.name])
    prepared.graph.eliminate_dead_code()
    prepared.recompile()


def _observers(prepared: fx.GraphModule) -> list[fx.Node]:
    return [node for node in prepared.graph.nodes if observer_of(prepared, node) is not None]


def _needs_integers(reader: fx.Node, layers: Collection[str], stay: Collection[Edge]) -> bool:
    if is_product(reader):
        return reader.name in layers
    if kind(reader) in SUMS and any(is_product(operand) for operand in reader.all_input_nodes):
        return any(operand.name in layers for operand in reader.all_input_nodes)
    results = set(reader.users)
    if kind(reader) in _NORMS:  # with a relu behind it it is one primitive, which reads and writes integers
        results |= {value for relu in reader.users if kind(relu) in _RELUS for value in relu.users}
    return any((value, user) in stay for value in results for user in value.users)


def sharing_weights(prepared: fx.GraphModule) -> fx.GraphModule:
    """A copy whose parameters are the original's."""
    with structures_copied():
        return copy.deepcopy(prepared, {id(parameter): parameter for parameter in prepared.parameters()})


def _copied(prepared: fx.GraphModule) -> fx.GraphModule:
    result = sharing_weights(prepared)
    by_name = {node.name: node for node in result.graph.nodes}
    for node in result.graph.nodes:
        if ANNOTATION in node.meta:  # a copied graph's annotations name nodes of the original
            found = node.meta[ANNOTATION]
            inputs = {by_name[source.name]: spec for source, spec in found.input_qspec_map.items()}
            node.meta[ANNOTATION] = dataclasses.replace(found, input_qspec_map=inputs)
    return result


def _drop_annotations(gm: fx.GraphModule) -> None:
    """Of values without an observer: convert_pt2e takes annotations for quantized values."""
    for node in gm.graph.nodes:
        found = node.meta.get(ANNOTATION)
        if found is None:
            continue
        observed = {arg.args[0] for arg in node.all_input_nodes if observer_of(gm, arg) is not None}
        inputs = {source: spec for source, spec in found.input_qspec_map.items() if source in observed}
        output = found.output_qspec if any(observer_of(gm, user) is not None for user in node.users) else None
        node.meta[ANNOTATION] = dataclasses.replace(found, input_qspec_map=inputs, output_qspec=output)


def _add_to_bias(gm: fx.GraphModule, layer: fx.Node, shift: Tensor) -> None:
    before = layer.args[2] if len(layer.args) > 2 else None
    if isinstance(before, fx.Node):
        shift = constant_of(gm, before) + shift
    replace_constant(gm, layer, 2, shift)


def has_constant_weight(gm: fx.GraphModule, layer: fx.Node) -> bool:
    """Whether the layer's weight is a constant, of at least one number."""
    weight = layer.args[1]
    return isinstance(weight, fx.Node) and weight.op == "get_attr" and constant_of(gm, weight).numel() > 0


def constant_of(gm: fx.GraphModule, node: Any) -> Tensor:
    """The parameter or buffer that a node reads."""
    value = get_attribute(gm, str(node.target))
    assert isinstance(value, Tensor)
    return value.detach()


def replace_constant(gm: fx.GraphModule, node: fx.Node, position: int, value: Tensor, what: str = "corrected") -> None:
    """Make argument `position` of a node a new parameter of the module; what was there may have other readers.

    A parameter, as it was: who asks a module for its device or dtype looks at the first one.

    what  part of its name. A "folded" one stands where the one before did, if nobody else reads that: shipped times are
          found by names, which depend on the order of nodes and on how many of a kind there are.
    """
    before = node.args[position] if len(node.args) > position else None
    stays = what == "folded" and isinstance(before, fx.Node) and before.op == "get_attr" and len(before.users) == 1
    number = 0
    while hasattr(gm, name := f"_{what}_{number}"):
        number += 1
    gm.register_parameter(name, nn.Parameter(value.detach().contiguous(), requires_grad=False))
    with gm.graph.inserting_before(before if stays else node):
        constant = gm.graph.get_attr(name)
    fakes = [
        other.meta["val"].fake_mode for other in node.all_input_nodes if hasattr(other.meta.get("val"), "fake_mode")
    ]
    if fakes:
        constant.meta["val"] = fakes[0].from_tensor(value, static_shapes=True)
    node.args = (*node.args[:position], constant, *node.args[position + 1 :])
