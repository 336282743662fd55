"""ZenDNN and AOCL-BLIS for PyTorch inference, through cffi.

    gm = zendnn_cffi.optimize(model)        rewrite an inference nn.Module onto ZenDNN
    torch.compile(model, backend="zendnn")  the same through TorchDynamo (zendnn_cffi.backend)
    zendnn_cffi.functional                  single operations on torch tensors and numpy arrays
    zendnn_cffi.lib, .ffi, .blis            the C functions themselves

Importing the package imports neither torch nor the engine library: each name below is fetched on first use.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zendnn_cffi.collector import collector_paused

if TYPE_CHECKING:  # what the table below fetches, for type checkers and editors
    from fx_passes.region.patience import warm_up
    from fx_passes.report.explain import explain
    from fx_passes.report.profile import profile
    from fx_passes.saved.files import load, save
    from zendnn_cffi import backend, functional
    from zendnn_cffi.api.cache import cache_clear, cache_info
    from zendnn_cffi.api.config import show_config
    from zendnn_cffi.api.optimize import optimize
    from zendnn_cffi.api.quantize import quantize
    from zendnn_cffi.api.replace_forward import replace_forward
    from zendnn_cffi.engine import engines
    from zendnn_cffi.engine.library import blis, is_available, lib, unavailable_reason
    from zendnn_cffi.errors import LibraryError, UnsupportedError, ZenDNNError
    from zendnn_cffi.primitives import descriptors
    from zendnn_cffi.primitives.attributes import Attr, PostOps
    from zendnn_cffi.primitives.memory import Memory, MemoryDesc
    from zendnn_cffi.primitives.primitive import Primitive, PrimitiveDesc
    from zendnn_cffi.primitives.stream import Engine, Stream
    from zendnn_cffi.serving.instances import instances

    ffi: Any
    __config__: Mapping[str, Any]
    __version__: str

# public name -> module that defines it
_EXPORTS = {
    "ffi": "zendnn_cffi.engine.library",
    "lib": "zendnn_cffi.engine.library",
    "blis": "zendnn_cffi.engine.library",
    "is_available": "zendnn_cffi.engine.library",
    "unavailable_reason": "zendnn_cffi.engine.library",
    "optimize": "zendnn_cffi.api.optimize",
    "quantize": "zendnn_cffi.api.quantize",
    "replace_forward": "zendnn_cffi.api.replace_forward",
    "warm_up": "fx_passes.region.patience",
    "instances": "zendnn_cffi.serving.instances",
    "save": "fx_passes.saved.files",
    "load": "fx_passes.saved.files",
    "explain": "fx_passes.report.explain",
    "profile": "fx_passes.report.profile",
    "cache_info": "zendnn_cffi.api.cache",
    "cache_clear": "zendnn_cffi.api.cache",
    "show_config": "zendnn_cffi.api.config",
    "__config__": "zendnn_cffi.api.config",
    "__version__": "zendnn_cffi.api.config",
    "ZenDNNError": "zendnn_cffi.errors",
    "UnsupportedError": "zendnn_cffi.errors",
    "LibraryError": "zendnn_cffi.errors",
    "Engine": "zendnn_cffi.primitives.stream",
    "Stream": "zendnn_cffi.primitives.stream",
    "MemoryDesc": "zendnn_cffi.primitives.memory",
    "Memory": "zendnn_cffi.primitives.memory",
    "PrimitiveDesc": "zendnn_cffi.primitives.primitive",
    "Primitive": "zendnn_cffi.primitives.primitive",
    "Attr": "zendnn_cffi.primitives.attributes",
    "PostOps": "zendnn_cffi.primitives.attributes",
}
# public name -> the module that it is
_MODULES = {
    "backend": "zendnn_cffi.backend",
    "descriptors": "zendnn_cffi.primitives.descriptors",
    "engines": "zendnn_cffi.engine.engines",
    "functional": "zendnn_cffi.functional",
}
__all__ = [
    "Attr",
    "Engine",
    "LibraryError",
    "Memory",
    "MemoryDesc",
    "PostOps",
    "Primitive",
    "PrimitiveDesc",
    "Stream",
    "UnsupportedError",
    "ZenDNNError",
    "backend",
    "blis",
    "cache_clear",
    "cache_info",
    "descriptors",
    "engines",
    "explain",
    "ffi",
    "functional",
    "instances",
    "is_available",
    "lib",
    "load",
    "optimize",
    "profile",
    "quantize",
    "replace_forward",
    "save",
    "show_config",
    "unavailable_reason",
    "warm_up",
]


if not TYPE_CHECKING:  # else every name that is not there would be one of type Any

    def __getattr__(name: str) -> Any:
        if name not in _MODULES and name not in _EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with collector_paused():
            if name in _MODULES:
                return importlib.import_module(_MODULES[name])
            value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*_EXPORTS, *_MODULES, "__doc__", "__file__", "__name__"])


if "ZENDNN_CFFI_LOG" in os.environ:
    from zendnn_cffi import log as _log  # noqa: F401  (its import adds the handler)
