"""The library's own cache of compiled primitives: its size, and getting from it what was asked for.

The cache looks primitives up by the operation and the implementation's number in the library's list. Algorithm "auto"
becomes "direct" in the operation, but its list is longer: the numbers mean other implementations. What comes back then
has another layout and another scratchpad, and writes to memory that is not its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zendnn_cffi.errors import check
from zendnn_cffi.locks import new_lock
from zendnn_cffi.primitives.handles import native

if TYPE_CHECKING:
    from zendnn_cffi.primitives.primitive import PrimitiveDesc

_IMPL_INFO = 8
_lock = new_lock()


def capacity() -> int:
    """Return how many primitives the library keeps."""
    n = native()
    value = n.ffi.new("int *")
    check(n.lib.zendnn_get_primitive_cache_capacity(value), "asking for the size of the primitive cache")
    return int(value[0])


def clear() -> None:
    """Let the library forget its primitives; those in use stay."""
    _without_cache(lambda: None)


def create(pd: PrimitiveDesc) -> Any:
    """Return a new ``zendnn_primitive_t`` of pd's own implementation."""
    handle = _create(pd)
    if _implementation(handle) == pd.implementation:
        return handle
    return _without_cache(lambda: _create(pd))


def _create(pd: PrimitiveDesc) -> Any:
    n = native()
    slot = n.ffi.new("zendnn_primitive_t *")
    status = n.lib.zendnn_primitive_create(slot, pd.handle)
    if status:
        check(status, f"creating the primitive of {pd}")
    return n.ffi.gc(slot[0], n.lib.zendnn_primitive_destroy)


def _without_cache(do: Callable[[], Any]) -> Any:
    """Do something while the library keeps no primitives, which makes it forget those it has."""
    lib = native().lib
    with _lock:
        before = capacity()
        check(lib.zendnn_set_primitive_cache_capacity(0), "emptying the primitive cache")
        try:
            return do()
        finally:
            check(lib.zendnn_set_primitive_cache_capacity(before), "setting the size of the primitive cache")


def implementation_name(handle: Any) -> str:
    """Return the implementation's name of a ``zendnn_primitive_desc_t``."""
    n = native()
    result = n.ffi.new("char **")
    status = n.lib.zendnn_primitive_desc_query(handle, _IMPL_INFO, 0, result)
    if status:
        check(status, "asking for the implementation's name")
    return n.ffi.string(result[0]).decode() if result[0] != n.null else "?"


def _implementation(primitive: Any) -> str:
    n = native()
    slot = n.ffi.new("const_zendnn_primitive_desc_t *")
    check(n.lib.zendnn_primitive_get_primitive_desc(primitive, slot), "asking a primitive for its descriptor")
    return implementation_name(slot[0])
