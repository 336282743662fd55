"""Ways to run a model, for `bench`: ours, eager PyTorch, and the peers that are installed."""

from __future__ import annotations

import importlib.util
import io
import math
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from zendnn_cffi.cli.models import Found

Run = Callable[[], Any]
_TINY = 1e-30  # in place of a largest number of 0


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the floating point tensors of a result, in float32."""
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    leaves = pytree.tree_leaves(value)
    made = [torch.as_tensor(leaf) for leaf in leaves if hasattr(leaf, "shape")]
    return [leaf.detach().float() for leaf in made if leaf.is_floating_point()]


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference relative to the largest expected number of its tensor.

    Not a number where a result is missing, or of another shape, or has such numbers. Further results are not compared:
    some contenders return caches as well.
    """
    if [each.shape for each in found[: len(expected)]] != [each.shape for each in expected]:
        return math.nan
    pairs = [pair for pair in zip(found, expected, strict=False) if pair[1].numel()]
    errors = [float((ours - right).abs().max() / right.abs().max().clamp(min=_TINY)) for ours, right in pairs]
    return float(np.max(errors, initial=0.0))  # NaN stays


def _cast(found: Found, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    model = found.model if dtype == torch.float32 else found.model.to(dtype)
    args, kwargs = pytree.tree_map(cast, (found.args, found.kwargs))
    return model, args, kwargs


def _ours(found: Found, dtype: torch.dtype) -> Run:
    from zendnn_cffi.api.optimize import optimize

    wanted = None if dtype == torch.float32 else dtype
    fast = optimize(found.optimizable, found.example_inputs, dtype=wanted)
    return lambda: fast(*found.args, **found.kwargs)


def _eager(found: Found, dtype: torch.dtype) -> Run:
    model, args, kwargs = _cast(found, dtype)
    return lambda: model(*args, **kwargs)


def _channels_last(found: Found, dtype: torch.dtype) -> Run:
    model, args, kwargs = _cast(found, dtype)
    model = model.to(memory_format=torch.channels_last)
    args = tuple(arg.contiguous(memory_format=torch.channels_last) for arg in args)
    return lambda: model(*args, **kwargs)


def _compiled(found: Found, dtype: torch.dtype, backend: str) -> Run:
    import torch._inductor.config as settings

    settings.freezing = True
    model, args, kwargs = _cast(found, dtype)
    call = torch.compile(model.requires_grad_(False), backend=backend)
    return lambda: call(*args, **kwargs)


def _inductor(found: Found, dtype: torch.dtype) -> Run:
    return _compiled(found, dtype, "inductor")


def _zentorch(found: Found, dtype: torch.dtype) -> Run:
    importlib.import_module("zentorch")
    return _compiled(found, dtype, "zentorch")


def _arrays(found: Found) -> list[Any]:
    return [leaf.numpy() for leaf in pytree.tree_leaves((found.args, found.kwargs))]


def _openvino(found: Found, dtype: torch.dtype) -> Run:
    openvino = importlib.import_module("openvino")
    program = torch.export.export(found.model, found.args, found.kwargs)
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32" if dtype == torch.float32 else "bf16",
    }
    request = openvino.compile_model(openvino.convert_model(program), "CPU", settings).create_infer_request()
    arrays = _arrays(found)
    return lambda: list(request.infer(arrays, share_inputs=True).values())


def _onnxruntime(found: Found, dtype: torch.dtype) -> Run:
    if dtype != torch.float32:
        raise ValueError("its CPU provider has no bfloat16")
    runtime, file = importlib.import_module("onnxruntime"), io.BytesIO()
    torch.onnx.export(found.model, found.args, file, kwargs=found.kwargs, dynamo=True, verbose=False)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    given = {each.name: array for each, array in zip(session.get_inputs(), _arrays(found), strict=True)}
    return lambda: session.run(None, given)


CONTENDERS: dict[str, Callable[[Found, torch.dtype], Run]] = {
    "zendnn_cffi": _ours,
    "eager": _eager,
    "channels_last": _channels_last,
    "inductor": _inductor,
    "zentorch": _zentorch,
    "openvino": _openvino,
    "onnxruntime": _onnxruntime,
}


def installed(found: Found) -> list[str]:
    """Return the contenders that can run a model here."""
    images = not found.kwargs and all(isinstance(arg, torch.Tensor) and arg.ndim == 4 for arg in found.args)
    usable = {
        "channels_last": images,
        "inductor": any(map(shutil.which, ("g++", "c++", "clang++"))),
        "zentorch": importlib.util.find_spec("zentorch") is not None,
        "openvino": importlib.util.find_spec("openvino") is not None,
        "onnxruntime": all(map(importlib.util.find_spec, ("onnxruntime", "onnx", "onnxscript"))),
    }
    return [name for name in CONTENDERS if usable.get(name, True)]
