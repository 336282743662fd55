"""Run zendnn_cffi on oneDNN 2.6, from which ZenDNN 5.1 descends, to compare the two libraries on the same graph.

    use()    before anything else of zendnn_cffi is imported, in a process of its own

Everything else is ours: passes, measuring, layouts, arena, the flat program. What differs is what the code asks of the
library by name: functions, types and enumerators are spelled dnnl_, two functions take two arguments less, and some
argument ids and layout numbers are others. The declarations are zendnn_cffi's own for oneDNN (zendnn_cffi.engines).
"""

from __future__ import annotations

import sys
from typing import Any

_FEWER_ARGUMENTS = ("memory_desc_init_by_tag", "memory_desc_init_by_strides")  # not: is constant, is in place
_ARGUMENT_IDS = {
    "ARG_ATTR_OUTPUT_SCALES": "ARG_ATTR_OUTPUT_SCALES",
    "ARG_ATTR_ZERO_POINTS": "ARG_ATTR_ZERO_POINTS",
    "ARG_ATTR_POST_OP_DW": "ARG_ATTR_POST_OP_DW",
    "ARG_ATTR_POST_OP_BASE": "ARG_ATTR_MULTIPLE_POST_OP_BASE",
}


class _Ffi:
    """oneDNN's ffi for code that spells its types zendnn_."""

    def __init__(self, ffi: Any) -> None:
        self._ffi = ffi

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ffi, name)
        setattr(self, name, value)
        return value

    def new(self, ctype: Any, *init: Any) -> Any:
        return self._ffi.new(_spelled(ctype), *init)

    def typeof(self, ctype: Any) -> Any:
        return self._ffi.typeof(_spelled(ctype))

    def integer_const(self, name: str) -> Any:
        return self._ffi.integer_const(_spelled(name))


class _Lib:
    """oneDNN's functions under ZenDNN's names; each is found once, then called without a detour."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._lib, _spelled(name))
        if name.removeprefix("zendnn_") in _FEWER_ARGUMENTS:
            longer = function

            def function(*arguments: Any) -> Any:
                return longer(*arguments[:-2])

        setattr(self, name, function)
        return function


def _spelled(name: Any) -> Any:
    return name.replace("zendnn_", "dnnl_") if isinstance(name, str) else name


def use() -> str:
    """Make this process's zendnn_cffi call oneDNN; return its version.

    Raises   RuntimeError where zendnn_cffi has begun already, LibraryError where onednn-cpu-gomp is not installed.
    """
    if "zendnn_cffi.primitives.attributes" in sys.modules:
        raise RuntimeError("zendnn_cffi is in use already: call use() first, in a process of its own")
    from zendnn_cffi import engines
    from zendnn_cffi.engine import library

    engine = engines.load_engine("onednn")
    version = f"{engine.version} (oneDNN)"
    library._loaded = library.Library(
        _Ffi(engine.ffi), _Lib(engine.lib), "zendnn_", engine.path, version, provider="onednn", openmp=engine.openmp
    )
    from zendnn_cffi.primitives import attributes, memory_desc

    for ours, theirs in _ARGUMENT_IDS.items():
        setattr(attributes, ours, engine.const(theirs))
    attributes.ELTWISE.update({kind: engine.const(f"eltwise_{kind}") for kind in attributes.ELTWISE})
    tags = engine.ffi.typeof("dnnl_format_tag_t").relements
    memory_desc._tags.update({name.removeprefix("dnnl_"): value for name, value in tags.items()})
    memory_desc._tags["any"] = tags["dnnl_format_tag_any"]
    return version
