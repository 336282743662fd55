"""torch.export makes the graph, torchao's PT2E observes it and writes quantize and dequantize operators into it."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from fx_passes.aliasing.aliasing import Aliasing
from fx_passes.candidates.layouts import has_vnni
from fx_passes.graph.graph import example
from fx_passes.search.progress import ProgressBar
from fx_passes.trace.export import is_exported, written_out
from fx_passes.trace.one_thread import following
from fx_passes.trace.quiet import kept_quiet
from fx_passes.trace.recurrent_sizes import lengths_free
from fx_passes.trace.sizes import Free, TimeLeft, attempts
from fx_passes.trace.time_limit import TooLong
from fx_passes.trace.written_out import modules_written_out, read_weights
from zendnn_cffi.api.quantization.attention import OBSERVED
from zendnn_cffi.api.quantization.called_alike import call_alike
from zendnn_cffi.api.quantization.constants import LAYERS, drop_unread, fold_constants, of_constants
from zendnn_cffi.api.quantization.inputs import FIRST, check_cache, check_call, copied, why_not_exported
from zendnn_cffi.api.quantization.layers import (
    ANNOTATION,
    SUMS,
    Call,
    calibrating_with,
    has_constant_weight,
    kind,
    sharing_weights,
)
from zendnn_cffi.api.quantization.norms import fold_norms, hidden_norms, show_norms, shown_norms
from zendnn_cffi.api.quantization.padding import write_out_padding
from zendnn_cffi.api.quantization.places import note_weights
from zendnn_cffi.api.quantization.products import name_products
from zendnn_cffi.api.quantization.row_scales import one_sided_values, scale_rows
from zendnn_cffi.api.quantization.sources import name_sources
from zendnn_cffi.api.quantization.states import buffers_restored
from zendnn_cffi.errors import interrupts

log = logging.getLogger("zendnn_cffi.quantize")

# Limits of following free sizes. optimize() has less patience, as plain PyTorch computes other sizes there; here they
# raise. Symbols and operations, on average: GoogLeNet 35, DenseNet-201 31 or more, Swin 85 after 30 s
_SECONDS, _LONGEST = 30.0, 50.0
_WEIGHTS_WITHIN = 63  # of 7 bits, as far on both sides
# torchao's is 2^-12: weights below 0.03, and activations below 0.06, would have fewer than 8 bits. With smaller ones
# than this, squared errors of HistogramObserver are no numbers of float32 any longer.
_LEAST_SCALE = 2.0**-40


class Pt2e:
    """torchao's functions, with its quantizer for x86."""

    def __init__(self) -> None:
        from torchao.quantization.pt2e import quantize_pt2e, quantizer
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer

        self._functions, self._quantizers, self._x86 = quantize_pt2e, quantizer, x86_inductor_quantizer

    def prepare(self, exported: fx.GraphModule, dynamic: bool) -> fx.GraphModule:
        """Insert observers: those of torchao's quantizer for x86, and those of products that it does not see.

        dynamic: of linear layers alone. Their rows are int8, of which no kernel is exact without VNNI.
        """
        config = self._x86.get_default_x86_inductor_quantization_config(is_dynamic=dynamic)
        activation, weight = map(_of_small_numbers, (config.input_activation, config.weight))
        config = dataclasses.replace(config, input_activation=activation, output_activation=activation, weight=weight)
        if not (dynamic or has_vnni()):
            weight = dataclasses.replace(config.weight, quant_min=-_WEIGHTS_WITHIN, quant_max=_WEIGHTS_WITHIN)
            config = dataclasses.replace(config, weight=weight)
        quantizer = self._x86.X86InductorQuantizer().set_global(config)
        annotate, positions = quantizer.annotate, quantizer._get_input_idx_for_binary_node
        annotate_products = quantizer._annotate_mul_tensor

        def positions_of(product: fx.Node, binary: fx.Node) -> tuple[int | None, int | None]:
            """As torchao's, which fails where a number is added: that is no sum that a product takes in."""
            both = len(binary.args) > 1 and all(isinstance(arg, fx.Node) for arg in binary.args[:2])
            found: tuple[int | None, int | None] = positions(product, binary) if both else (None, None)
            return found

        def annotate_products_of(model: fx.GraphModule, config: Any, wanted: Callable[..., bool]) -> None:
            """As torchao's, which compares sizes, and fails where these depend on numbers."""
            annotate_products(model, config, lambda nodes: all(map(_has_known_sizes, nodes)) and wanted(nodes))

        quantizer._get_input_idx_for_binary_node = positions_of
        quantizer._annotate_mul_tensor = annotate_products_of

        def annotate_all(model: fx.GraphModule) -> fx.GraphModule:
            model = annotate(model)
            with shown_norms(model):  # what they write to is known of them alone
                self._annotate_others(model, config, dynamic)
            return model

        quantizer.annotate = annotate_all
        with following(), hidden_norms(exported):
            prepared: fx.GraphModule = self._functions.prepare_pt2e(exported, quantizer)
        show_norms(prepared)
        return prepared

    def _annotate_others(self, model: fx.GraphModule, config: Any, dynamic: bool) -> None:
        """Annotate products that the quantizer does not see; drop annotations that are wrong or gain nothing."""
        aliasing, constants = Aliasing(model), of_constants(model)
        for node in model.graph.nodes:
            if dynamic and kind(node) != "linear":
                node.meta.pop(ANNOTATION, None)  # no kernel of other operations takes scales of the call
            once = constants.issuperset(node.all_input_nodes)
            if kind(node) in LAYERS and (once or not has_constant_weight(model, node)):
                node.meta.pop(ANNOTATION, None)  # nor weights that each call computes, or of nothing
                continue  # and there is nothing to gain where layers read no input: they are computed once
            specs = _other_product(node, config.input_activation, config.weight, dynamic)
            if specs and not getattr(node.meta.get(ANNOTATION), "_annotated", False):
                found = self._quantizers.QuantizationAnnotation(input_qspec_map=specs, _annotated=True)
                node.meta[ANNOTATION] = found
            if _reads_what_is_written(node, aliasing) or _of_whole_numbers(node) or _is_sum_of_floats(node):
                node.meta.pop(ANNOTATION, None)

    def convert(self, prepared: fx.GraphModule) -> fx.GraphModule:
        """Write quantize and dequantize operators; scales that calls choose become those of rows."""
        one_sided = one_sided_values(prepared)
        with following(), hidden_norms(prepared):
            converted = self._functions.convert_pt2e(prepared)
        show_norms(converted)
        found = scale_rows(converted, one_sided)
        drop_unread(found)
        return found


def _of_small_numbers(spec: Any) -> Any:
    """The same with scales as small as numbers are: each value has all bits, however small its range."""
    made = spec.observer_or_fake_quant_ctr.p  # a functools.partial: torchao asks its function for a name
    observer = made.func.with_args(**{**made.keywords, "eps": _LEAST_SCALE})
    return dataclasses.replace(spec, observer_or_fake_quant_ctr=observer)


def weight_bits(converted: fx.GraphModule) -> int:
    """How many bits the weights of a converted graph use: 7 where none may be beyond -63 and 63."""
    dequantize = torch.ops.quantized_decomposed.dequantize_per_channel.default
    kept = [node.args for node in converted.graph.find_nodes(op="call_function", target=dequantize)]
    return 7 if kept and all(args[5] <= _WEIGHTS_WITHIN for args in kept) else 8


def _has_known_sizes(node: fx.Node) -> bool:
    """Whether no size of an operand is known but by the numbers of a tensor."""
    return not any(free_unbacked_symbols(value) for value in map(example, node.all_input_nodes) if value is not None)


def _reads_what_is_written(node: fx.Node, aliasing: Aliasing) -> bool:
    """Whether a value to be quantized for node is written to before node reads it: it is quantized where it is made."""
    values = getattr(node.meta.get(ANNOTATION), "input_qspec_map", {})
    return any(aliasing.is_written_between((value,), value, node) for value in values)


def _of_whole_numbers(node: fx.Node) -> bool:
    """Whether a value to be quantized for node has no floats, as a product of masks: torchao looks at shapes alone."""
    values = map(example, getattr(node.meta.get(ANNOTATION), "input_qspec_map", {}))
    return any(value is not None and not value.is_floating_point() for value in values)


def _is_sum_of_floats(node: fx.Node) -> bool:
    """Whether a sum rounds what is added to a layer, though that stays float."""
    values = getattr(node.meta.get(ANNOTATION), "input_qspec_map", {})
    others = [operand for operand in node.all_input_nodes if operand not in values]
    return kind(node) in SUMS and not any(kind(other) in LAYERS and ANNOTATION in other.meta for other in others)


def _other_product(node: fx.Node, activation: Any, weight: Any, dynamic: bool) -> dict[fx.Node, Any]:
    """How a product keeps its operands that the quantizer does not see: it looks for linear layers by their module.

    Those of nn.MultiheadAttention are functions in another module. Of convolutions it knows those of images, and those
    of sequences before a relu. Keys are counted from 0 (attention.py).
    """
    if node.meta.get(OBSERVED):
        keys = dataclasses.replace(
            activation, dtype=torch.int8, quant_min=-128, quant_max=127, qscheme=torch.per_tensor_symmetric
        )
        return {node.args[0]: activation, node.args[1]: keys}
    kinds = ("linear",) if dynamic else ("linear", "conv1d", "conv3d")
    if node.op == "call_function" and kind(node) in kinds and node.args[1].op == "get_attr":
        return {node.args[0]: activation, node.args[1]: weight}
    return {}


class NotExported(ValueError):
    """torch.export cannot follow a model."""


def torchao() -> Pt2e:
    try:
        with warnings.catch_warnings(), kept_quiet():  # of its libraries for GPUs that do not load
            warnings.simplefilter("ignore")
            return Pt2e()
    except ImportError as error:
        raise ImportError("quantize() needs torchao: pip install torchao, or zendnn_cffi[quant]") from error


def exported_graph(model: nn.Module, example: Call, name: str = FIRST) -> fx.GraphModule:
    """The model's graph, with as many sizes free as can be; errors call the example by that name.

    What was exported before keeps the sizes of that export. A graph that refuses one sample, where the example has
    several, is the last choice: where torch.export leaves 0 and 1 free, it may ask for sizes other than 1.
    Raises ValueError for an example that is no call of the model, NotExported for a model that cannot be followed.
    """
    if is_exported(model):
        assert isinstance(model, fx.GraphModule)
        return _as_quantizable(sharing_weights(model))
    with buffers_restored(model):
        check_cache(model, example)
    found, refused = _first_export(model, example, strict=True)
    if found is None and isinstance(refused, torch._dynamo.exc.Unsupported):  # torch.export may follow calls alone
        found, _ = _first_export(model, example, strict=False)
    if found is not None:
        call_alike(found, model, example)
        return _as_quantizable(found)
    check_call(model, example, name)
    raise NotExported(why_not_exported(model, refused)) from refused


def _first_export(model: nn.Module, example: Call, strict: bool) -> tuple[fx.GraphModule | None, Exception | None]:
    """The graph of the first way to export that goes, or of the last that has one; and what the last was refused for.

    strict  whether torch.export reads Python's code; else it runs that, which takes what Python decides for decided.
            So the graph has to do what the model does.
    """
    refused: Exception | None = None
    found: fx.GraphModule | None = None
    left, most = TimeLeft(_SECONDS, _LONGEST), Free.ALL
    for attempt in attempts():
        if attempt.free > most or (found is not None and attempt.free is not Free.ALL):
            continue
        try:
            shapes = attempt.shapes(model, example)
            limit, quietly = left.limit(attempt.free, strict), warnings.catch_warnings()
            with torch.no_grad(), attempt.mode, written_out(), lengths_free(), quietly, kept_quiet():
                warnings.simplefilter("ignore")
                with limit:
                    exported = _exported(model, example, shapes, strict)
                    if literal := read_weights(exported.graph):
                        exported = _exported(model, example, shapes, strict, literal)
                with buffers_restored(model):
                    if not (strict or all(_does_as(exported, model, example) for _ in range(2))):
                        continue  # it counts its calls, for one
                    takes_one = _takes_one_sample(exported, model, example)
            if takes_one or found is None:
                found = exported
            if takes_one:
                break
        except TooLong:
            most = Free(attempt.free - 1)
            log.info("torch.export with %s free takes too long", attempt.what)
        except Exception as error:  # whatever the model's own code or torch.export raises
            if interrupts(error):
                raise
            refused = error
    return found, refused


def _exported(
    model: nn.Module, example: Call, shapes: Any, strict: bool, literal: Collection[str] = ()
) -> fx.GraphModule:
    """literal: paths of attention modules that are exported as PyTorch writes them."""
    with following(), modules_written_out(model, literal):
        program = torch.export.export(model, *example, dynamic_shapes=shapes, strict=strict)
    exported: fx.GraphModule = program.module()
    exported.graph.eliminate_dead_code()
    return exported


def _takes_one_sample(exported: fx.GraphModule, model: nn.Module, example: Call) -> bool:
    """Whether it does for the first sample of the example what the model does; True where the model takes none."""
    one: Call = pytree.tree_map(lambda x: x[:1] if isinstance(x, torch.Tensor) and x.ndim else x, example)
    if all(x.shape == y.shape for x, y in zip(_tensors(one), _tensors(example), strict=True)):
        return True
    return _does_as(exported, model, one)


def _does_as(exported: fx.GraphModule, model: nn.Module, call: Call) -> bool:
    """Whether it does for this call what the model does; True where the model takes no such call."""
    try:
        args, kwargs = copied(call)  # it may write to them
        expected = model(*args, **kwargs)
    except Exception as error:
        if interrupts(error):
            raise
        return True  # what is no batch, or not of one size
    try:
        args, kwargs = copied(call)
        found = exported(*args, **kwargs)
    except Exception as error:
        if interrupts(error):
            raise
        return False
    pairs = zip(_tensors(found), _tensors(expected), strict=True)
    return all(x.shape == y.shape and torch.allclose(x, y, 1e-3, 1e-3, equal_nan=True) for x, y in pairs)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _as_quantizable(exported: fx.GraphModule) -> fx.GraphModule:
    """In the form that torchao's quantizer takes, in place."""
    exported.graph.eliminate_dead_code()  # it fails on layers that nobody reads
    note_weights(exported)
    name_products(exported)
    fold_constants(exported)
    fold_norms(exported)
    write_out_padding(exported)
    name_sources(exported)
    return exported


def calibrate(prepared: nn.Module, calls: Iterable[Call]) -> None:
    """Run all inputs through the observers."""
    with ProgressBar("zendnn_cffi: calibrating") as show:
        for number, (args, kwargs) in enumerate(calls, 1):
            with calibrating_with(number):
                prepared(*args, **kwargs)
            show(number, number)
