"""Compiled primitives, kept for who asks for the same again: layers of one shape, a shape that returns.

The library has a cache for this, which is turned off. It finds primitives by their implementation's number in a list,
and lists of algorithm "auto" and "direct" differ: what comes back may have another layout, and write to memory that is
not its own. And it lends the descriptors of what it keeps, which point to post-ops of the descriptor that was compiled
first. Where that is gone and the primitive was forgotten, the next one is compiled with whatever lies there: a kernel
with other post-ops, or the end of the process. Here a primitive holds the descriptor that it was compiled from.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from zendnn_cffi.errors import check
from zendnn_cffi.locks import new_lock
from zendnn_cffi.primitives.handles import native
from zendnn_cffi.primitives.memory_desc import MemoryDesc
from zendnn_cffi.recent import Recent

if TYPE_CHECKING:
    from zendnn_cffi.primitives.primitive import PrimitiveDesc

_IMPL_INFO = 8
_lock = new_lock()


def capacity() -> int:
    """Return how many primitives are kept: ZENDNN_PRIMITIVE_CACHE_CAPACITY, 1024 unless set."""
    return _kept().most


def clear() -> None:
    """Forget all primitives; those in use stay."""
    _kept().clear()


def create(pd: PrimitiveDesc) -> Any:
    """Return a ``zendnn_primitive_t`` of pd's own implementation for the number of threads of now: perhaps one that
    others have, too, unless it keeps a scratchpad of its own.
    """
    kept = _kept()
    if pd.attr.scratchpad == "library":
        return _compiled(pd)
    key = pd.key, torch.get_num_threads()
    handle = kept.get(key)
    return kept.keep(key, _compiled(pd)) if handle is None else handle


def exact(value: Any) -> Hashable:
    """A key that is equal for what is the same to the last stride; descriptors are equal where such do not matter."""
    if isinstance(value, MemoryDesc):
        return value.key
    return value if isinstance(value, str | bytes) or not isinstance(value, Iterable) else tuple(map(exact, value))


def digest(*values: Any) -> bytes:
    """A key of few bytes, equal for what is the same to the last stride."""
    found = hashlib.blake2b(digest_size=16)
    for value in map(exact, values):
        found.update(value if isinstance(value, bytes) else repr(value).encode())
        found.update(b"|")
    return found.digest()


def _kept() -> Recent[Any]:
    with _lock:  # two threads would ask for the library's number, which is 0 for the second
        return _made()


@functools.cache
def _made() -> Recent[Any]:
    """The cache, as large as the library's own, which is off from now on."""
    n = native()
    size = n.ffi.new("int *")
    check(n.lib.zendnn_get_primitive_cache_capacity(size), "asking for the size of the library's primitive cache")
    check(n.lib.zendnn_set_primitive_cache_capacity(0), "turning off the library's primitive cache")
    return Recent(int(size[0]))


def _compiled(pd: PrimitiveDesc) -> Any:
    n = native()
    slot, destroy = n.ffi.new("zendnn_primitive_t *"), n.lib.zendnn_primitive_destroy
    status = n.lib.zendnn_primitive_create(slot, pd.handle)
    if status:
        check(status, f"creating the primitive of {pd}")
    return n.ffi.gc(slot[0], functools.partial(_destroy, destroy, pd.handle, pd.engine_handle))


def _destroy(destroy: Callable[[Any], None], _pd: Any, _engine: Any, handle: Any) -> None:
    """Destroy a primitive, which until then holds what it was compiled from."""
    destroy(handle)


def implementation_name(handle: Any) -> str:
    """Return the implementation's name of a ``zendnn_primitive_desc_t``."""
    n = native()
    result = n.ffi.new("char **")
    status = n.lib.zendnn_primitive_desc_query(handle, _IMPL_INFO, 0, result)
    if status:
        check(status, "asking for the implementation's name")
    return n.ffi.string(result[0]).decode() if result[0] != n.null else "?"
