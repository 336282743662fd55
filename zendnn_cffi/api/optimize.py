"""optimize(): the one call that most users need."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from zendnn_cffi.api import exported
from zendnn_cffi.collector import collector_paused
from zendnn_cffi.engine.library import is_available, unavailable_reason
from zendnn_cffi.log import get_logger
from zendnn_cffi.primitives import checks

log = get_logger(__name__)
TUNE_MODES = ("auto", "off", "full")
DTYPES = (None, torch.float32, torch.bfloat16)
_warned = False


@collector_paused()  # imports, graphs and regions stay
def optimize(
    model: nn.Module | torch.export.ExportedProgram | str | os.PathLike[str],
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None = None,
    *,
    dynamic: bool = True,
    dtype: torch.dtype | None = None,
    allow_winograd: bool = True,
    tune: str = "auto",
    tune_seconds: float = 1.0,
    release_weights: bool = False,
) -> fx.GraphModule:
    """Return `model` rewritten for inference, with its convolutions, matrix products and what surrounds them in ZenDNN.

    model           in evaluation mode; not changed. Weights are shared with it until prepacked. An ExportedProgram,
                    what its module() returns, or the path of a file that torch.export.save wrote: what is exported is
                    optimized, and calls that the export is not made for raise as there. Exported modules cannot be
                    pickled, nor can the result: save() writes it.
    example_inputs  a tensor, the positional arguments of one call, or a mapping of its keyword arguments: what
                    torch.export is given where torch.fx cannot trace symbolically. A model that is no graph (a
                    detector) is called with them once or a few times: its submodules that are graphs are optimized.
                    None: where they are needed, the first call's arguments are taken, and that call takes longer.
                    Calls of another kind (another optional tensor, flag, dtype) get graphs of their own, 8 in all.
    dynamic         whether torch.export leaves free the sizes that the model does not depend on. False: all are those
                    of example_inputs, which takes a fraction of the time; calls with other sizes run as plain PyTorch.
                    Where symbolic tracing gives the graph, sizes are free either way, at no cost.
    dtype           torch.bfloat16: activations and weights in bf16 inside, inputs and outputs as they were. Sums of
                    residual connections that a normalization of rows reads stay float32, as does what lies around
                    Winograd convolutions that beat bf16's. None (default) and torch.float32: each value in its own
                    dtype. Models in float16 are float32 inside, or bf16 where that is asked for, as no AMD CPU has
                    fast kernels for float16. Without AVX-512 there are none for bf16: all of it is float32 inside, of
                    models in bf16, too.
    allow_winograd  whether 3x3 convolutions may use Winograd's algorithm (f32 error no larger than direct's)
    tune            how implementations are chosen. "auto": those that may win are measured on the first call with a new
                    input signature, and the results kept on disk (ZENDNN_CFFI_CACHE: the folder, empty for none).
                    "full": all are measured. "off": by estimate. In each mode an implementation runs only after its
                    numbers matched plain PyTorch's.
    tune_seconds    how long "auto" may measure for one input signature of a region: by default about a second, for
                    the first one ten calls where these are longer; all regions of a call twice that. Rest and what a
                    busy machine keeps from being measured is estimated, and measured by a thread of its own once no
                    call came for two seconds. 0: never in a call. One process of a machine measures at a time. Beyond
                    16 signatures a region's further ones run as plain PyTorch until programs pay (`warm_up`).
    release_weights after the first call, keep packed weights alone and let go of the parameters they were made from
                    (memory comes back once the original model is gone too). The module is copied, pickled and saved
                    with these. It has no state_dict then, and loading or converting it raises RuntimeError. Winograd's
                    algorithm, whose weights are large, is then used in early layers only. Where nothing can be
                    released (PyTorch runs the model's own forward, or nothing is in a region), a RuntimeWarning says
                    so, and explain().
    Returns         an fx.GraphModule with the model's signature and state_dict. It lowers its regions on the first call
                    with each input signature. Outputs carry no gradient, unless an input asks for one: then that call
                    runs in plain PyTorch.
    Changes         Weights written in place (also the original's: optimizer.step(), load_state_dict()), parameters and
                    layers replaced, hooks and parametrizations added, and attributes that forward reads set on the
                    result: the next call notices and runs plain PyTorch, later ones pack again. Call invalidate() on
                    the result after writes that PyTorch does not count (through .data or numpy, or to inference
                    tensors). Layers, parameters, hooks and attributes of the original that are replaced afterwards are
                    not seen: the result has a module tree of its own. A submodule whose forward changes its attributes,
                    a list or a global stays plain PyTorch, and its state is the result's own. Globals and attributes of
                    classes that your code names may change: calls run as plain PyTorch until they are as before.
                    What forward prints, logs or warns of is left out of calls that run the graph.
    Raises          TypeError, FileNotFoundError, ValueError (training mode, another dtype, a file without an exported
                    program). What is not supported is no error: it stays plain PyTorch, and explain() says why; without
                    a usable library all does, with one warning.
    """
    gm = made(model, example_inputs, dynamic, dtype, allow_winograd, tune, tune_seconds, release_weights)
    if isinstance(model, nn.Module):
        _warn_of_calls(model)
    return gm


def made(
    model: Any,
    example_inputs: Any = None,
    dynamic: bool = True,
    dtype: torch.dtype | None = None,
    allow_winograd: bool = True,
    tune: str = "auto",
    tune_seconds: float = 1.0,
    release_weights: bool = False,
) -> fx.GraphModule:
    """As optimize(), for callers whose module keeps its own way to be called."""
    model, exported_with = exported.as_module(model)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be torch.float32, torch.bfloat16 or None, got {dtype!r}")
    if tune not in TUNE_MODES:
        raise ValueError(f"tune must be one of {', '.join(map(repr, TUNE_MODES))}, got {tune!r}")
    tune_seconds = as_seconds(tune_seconds)
    allow_winograd = checks.as_bool(allow_winograd, "allow_winograd")
    release_weights = checks.as_bool(release_weights, "release_weights")
    dynamic = checks.as_bool(dynamic, "dynamic")
    from fx_passes.pipeline import build, build_plain
    from fx_passes.region.options import RegionOptions, computes_in
    from fx_passes.region.region import RegionFactory
    from fx_passes.trace.export import is_exported
    from fx_passes.trace.trace import trace

    if model.training and not is_exported(model):
        raise ValueError("model is in training mode: optimize() is for inference, call model.eval() first")

    inputs = _arguments(example_inputs) if example_inputs is not None else exported_with
    has_library = is_available()
    traced = trace(model, inputs, dynamic, awaits_call=has_library, has_one_graph=release_weights)
    if not has_library:
        _warn_once()
        return build_plain(traced)
    options = RegionOptions(computes_in(dtype), allow_winograd, tune, release_weights, tune_seconds)
    gm = build(traced, make_region=RegionFactory(options, kept_choices(tune)))
    if release_weights:
        from fx_passes.saved.released import release_weights as release

        gm.release_after_first_call(release)
    return gm


def kept_choices(tune: str) -> Any:
    """What makes a region ask for choices of processes before; None where all are by estimate, which keeps none."""
    if tune == "off":
        return None
    from fx_passes.saved.remembered import Remembered

    return Remembered


def as_seconds(value: Any) -> float:
    """Return tune_seconds as a float. Raises TypeError for what is no number, ValueError below 0 and for NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"tune_seconds must be a number of seconds, got {value!r}")
    if not value >= 0:
        raise ValueError(f"tune_seconds must be 0 or more, got {value!r}")
    return float(value)


def _arguments(
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor | None,
) -> tuple[Any, ...] | dict[str, Any] | None:
    """Positional arguments, or keyword arguments where they were given by name."""
    if example_inputs is None:
        return None
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,)
    if isinstance(example_inputs, Mapping):
        return dict(example_inputs)
    if not isinstance(example_inputs, Sequence) or isinstance(example_inputs, str):
        raise TypeError(
            "example_inputs must be a tensor, a sequence of the model's positional arguments or a mapping of its"
            f" keyword arguments, got {type(example_inputs).__name__}"
        )
    return tuple(example_inputs)


def _warn_of_calls(model: torch.nn.Module) -> None:
    """Say that what is called in place of forward is left out: the result is no instance of the model's class."""
    cls: type = next(cls for cls in type(model).__mro__ if "__call__" in vars(cls))
    if cls.__module__.partition(".")[0] != "torch":
        warnings.warn(
            f"zendnn_cffi: optimize() leaves {cls.__name__}.__call__() out, the result calls forward();"
            " replace_forward(model) keeps the model's own way to be called",
            UserWarning,
            stacklevel=4,  # optimize is decorated
        )


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"zendnn_cffi: optimize() returns a module that runs in plain PyTorch: {unavailable_reason()}",
            RuntimeWarning,
            stacklevel=5,  # optimize is decorated
        )
