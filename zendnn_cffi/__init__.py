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
import sys
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what the table below fetches, for type checkers and editors
    from . import backend, functional
    from .attributes import Attr, PostOps
    from .cache import cache_clear, cache_info
    from .config import show_config
    from .errors import LibraryError, UnsupportedError, ZenDNNError
    from .explain import explain
    from .library import blis, is_available, lib, unavailable_reason
    from .memory import Memory, MemoryDesc
    from .optimize import optimize
    from .primitive import Primitive, PrimitiveDesc
    from .profile import profile
    from .stream import Engine, Stream

    ffi: Any
    __config__: Mapping[str, Any]
    __version__: str

# public name -> module that defines it; None: the module of that name itself
_EXPORTS: dict[str, str | None] = {
    "ffi": "library",
    "lib": "library",
    "blis": "library",
    "is_available": "library",
    "unavailable_reason": "library",
    "optimize": "optimize",
    "explain": "explain",
    "profile": "profile",
    "cache_info": "cache",
    "cache_clear": "cache",
    "show_config": "config",
    "__config__": "config",
    "__version__": "config",
    "ZenDNNError": "errors",
    "UnsupportedError": "errors",
    "LibraryError": "errors",
    "Engine": "stream",
    "Stream": "stream",
    "MemoryDesc": "memory",
    "Memory": "memory",
    "PrimitiveDesc": "primitive",
    "Primitive": "primitive",
    "Attr": "attributes",
    "PostOps": "attributes",
    "backend": None,
    "functional": None,
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
    "explain",
    "ffi",
    "functional",
    "is_available",
    "lib",
    "optimize",
    "profile",
    "show_config",
    "unavailable_reason",
]


class _Package(types.ModuleType):
    """Keeps `zendnn_cffi.optimize` the function: importing a submodule would rebind the name to the module."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, types.ModuleType) and _EXPORTS.get(name) is not None:
            return
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _EXPORTS[name]
    if home is None:
        return importlib.import_module(f".{name}", __name__)
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_EXPORTS))


sys.modules[__name__].__class__ = _Package

if "ZENDNN_CFFI_LOG" in os.environ:
    from . import log as _log  # noqa: F401  (its import adds the handler)
