"""What quantize() refuses before it does any work: a model that cannot be right, and arguments that are none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from fx_passes.module import OptimizedModule
from fx_passes.trace.export import is_exported
from zendnn_cffi.api.exported import as_module, is_program
from zendnn_cffi.api.optimize import DTYPES, TUNE_MODES
from zendnn_cffi.api.quantization.choose import as_accuracy
from zendnn_cffi.api.quantization.fake_quantized import FakeQuantized
from zendnn_cffi.api.quantization.layers import kind
from zendnn_cffi.api.replace_forward import ReplacedForward
from zendnn_cffi.primitives import checks

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_OTHER_DTYPES = (torch.float16, torch.bfloat16, torch.float64)


def as_model(given: Any) -> nn.Module:
    """The module to quantize. Raises TypeError, ValueError for what is none, or what integers cannot stand in for."""
    model = as_module(given)[0] if is_program(given) else given
    if not isinstance(model, nn.Module):
        kinds = "a torch.nn.Module or a torch.export.ExportedProgram"
        raise TypeError(f"model must be {kinds}, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"model is TorchScript ({type(model).__name__}): give quantize() the model that it was made of")
    _check_is_original(model)
    _check_mode(model)
    _check_dtype(model)
    for name, tensor in _own_tensors(model):
        if tensor.device.type != "cpu":
            what = "load its weights" if tensor.device.type == "meta" else "call model.cpu()"
            raise ValueError(f"quantize() is for models on the CPU, and {name} is on {tensor.device}: {what} first")
    _check_numbers(model)
    return model


def check_options(dtype: Any, tune: Any, **flags: Any) -> None:
    """Raise ValueError for what optimize() would refuse, TypeError for flags that are neither True nor False."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be torch.float32, torch.bfloat16 or None, got {dtype!r}")
    if tune not in TUNE_MODES:
        raise ValueError(f"tune must be one of {', '.join(map(repr, TUNE_MODES))}, got {tune!r}")
    for name, value in flags.items():
        checks.as_bool(value, name)


def as_limit(value: Any, name: str) -> float | None:
    """A budget or drop as a float. Raises TypeError, ValueError for what is no real number."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number or None, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError as error:
        raise ValueError(f"{name} is too large for a float") from error


def check_limits(budget: float | None, accuracy: Any, max_drop: float | None) -> None:
    """Raise TypeError or ValueError for limits that cannot be kept to."""
    if budget is not None and math.isnan(budget):
        raise ValueError("budget is not a number: give the least signal to noise ratio in dB, such as 30")
    if accuracy is not None and not callable(accuracy):
        raise TypeError(f"accuracy must be a function of a module, got {type(accuracy).__name__}")
    if (accuracy is None) != (max_drop is None):
        raise ValueError("accuracy and max_drop go together: how the model is judged, and how far it may fall")
    if max_drop is not None and not max_drop >= 0:
        raise ValueError(f"max_drop must be at least 0, got {max_drop}")


def check_outputs(exported: fx.GraphModule, budget: Any) -> None:
    """Raise ValueError where a budget is of noise in floating point outputs, and the graph returns none."""
    results = [node.meta.get("val") for node in exported.graph.output_node().all_input_nodes]
    if budget is None or any(not isinstance(x, Tensor) or x.is_floating_point() for x in results):
        return
    raise ValueError(
        "budget is the noise in floating point outputs, and the model returns none: give accuracy and max_drop instead,"
        " or a module that returns what those were computed of, such as scores in place of labels"
    )


def check_signal(fake: FakeQuantized, budget: Any) -> None:
    """Raise ValueError where a budget is of noise against zeros."""
    if budget is not None and not fake.has_signal():
        raise ValueError(
            "budget is the noise against floating point outputs, and the model returns zeros for all calibration"
            " inputs: give inputs like those to come, or accuracy and max_drop instead"
        )


def accuracy_of(model: nn.Module, accuracy: Callable[[Any], float] | None) -> float:
    """What the float model reaches, NaN where nobody asks. Raises TypeError, ValueError for what is no number."""
    if accuracy is None:
        return math.nan
    number = as_accuracy(accuracy(model))
    if not math.isfinite(number):
        raise ValueError(f"accuracy of the float model must be a finite number, got {number}")
    return number


def _check_is_original(model: nn.Module) -> None:
    for path, module in model.named_modules():
        name = f"its submodule {path}" if path else "model"
        if isinstance(module, OptimizedModule):
            raise ValueError(f"{name} is what optimize() or quantize() returned: give quantize() the original model")
        if isinstance(module.__dict__.get("forward"), ReplacedForward):
            raise ValueError(f"the forward of {name} was replaced by replace_forward(): call its undo() first")


def _check_mode(model: nn.Module) -> None:
    if is_exported(model):  # its mode is that of the export, whatever its flag says
        _check_exported(model)
        return
    if model.training:
        raise ValueError("model is in training mode: quantize() is for inference, call model.eval() first")
    for path, module in model.named_modules():
        if module.training and _computes_otherwise(module):
            layer = f"{path} ({type(module).__name__})"
            raise ValueError(f"{layer} is in training mode, though the model is not: call model.eval() first")


def _check_exported(model: Any) -> None:
    for node in model.graph.nodes:
        what = kind(node)
        if what.startswith(("quantize_per_", "quantize_affine")):
            raise ValueError(f"model is quantized already ({node.name} does it): give it to optimize()")
        if (what == "batch_norm" and node.args[3] is not None and node.args[5]) or (
            what in ("dropout", "dropout_") and node.args[1] and node.args[2]
        ):
            raise ValueError(
                f"model was exported in training mode ({node.name} computes so): call eval() before torch.export.export"
            )


def _computes_otherwise(module: nn.Module) -> bool:
    """Whether module does something else in training mode."""
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return bool(module.dropout)
    return isinstance(module, _BatchNorm) or (isinstance(module, _DropoutNd) and module.p > 0)


def _check_dtype(model: nn.Module) -> None:
    for path, module in model.named_modules():
        dtype = module.weight.dtype if isinstance(module, _LAYERS) else torch.float32
        if dtype in _OTHER_DTYPES:
            name = f"{path}.weight".lstrip(".")
            raise ValueError(f"quantize() is for models of float32, and {name} is {dtype}: call model.float() first")


def _check_numbers(model: nn.Module) -> None:
    weights = {id(module.weight) for module in model.modules() if isinstance(module, _LAYERS)}
    for name, tensor in _own_tensors(model):
        if not tensor.is_floating_point() or tensor.layout is not torch.strided or tensor.sum().isfinite():
            continue
        if tensor.isnan().any():
            raise ValueError(f"{name} holds NaN: a model that computes NaN cannot be quantized, load its weights again")
        if id(tensor) in weights and tensor.isinf().any():
            raise ValueError(f"{name} holds infinity, which no integer stands for: load the model's weights again")


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and statistics of batch normalizations, under their names; tensors of other classes left out."""
    buffers = [(name, x) for name, x in model.named_buffers() if name.rpartition(".")[2].startswith("running_")]
    for name, tensor in (*model.named_parameters(), *buffers):
        if type(tensor) in (Tensor, nn.Parameter) and not is_lazy(tensor):
            yield name, tensor
