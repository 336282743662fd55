"""What every owner of a C handle shares: the loaded library, and the refusal to be copied.

A handle is held as a cffi ``gc`` object, so it is destroyed exactly once, when the last reference goes. Closing an
owner only drops its own reference: a call that is running in another thread keeps the handle until it returns.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from zendnn_cffi.errors import check


class Native:
    """The library's ``ffi`` and ``lib``, plus the few things built from them once."""

    __slots__ = ("ffi", "lib", "null")

    def __init__(self, ffi: Any, lib: Any) -> None:
        self.ffi = ffi
        self.lib = lib
        self.null = ffi.NULL


@functools.cache
def native() -> Native:
    """Return the loaded library (loading it on the first call). Raises LibraryError where it cannot be loaded."""
    from zendnn_cffi.engine.library import load

    library = load()
    return Native(library.ffi, library.lib)


def new_handle(create: Any, destroy: Any, kind: str, doing: str, *arguments: Any) -> Any:
    """Call ``create(&handle, *arguments)``; return the handle, destroyed when its last reference goes."""
    ffi = native().ffi
    slot = ffi.new(kind + " *")
    check(create(slot, *arguments), doing)
    return ffi.gc(slot[0], destroy)


class Immutable:
    """Mixin for values that are keys of caches: attributes are set once, by ``_set`` while the object is made."""

    __slots__ = ()

    def _set(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: make a new one instead of setting {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: {name} cannot be deleted")


class NotCopyable:
    """Mixin for owners of C handles: a copy or a pickle would be a second owner of the same handle."""

    __slots__ = ()

    def _refuse(self, what: str) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} owns a C handle and cannot be {what}: create a new {name} where it is needed")

    def __copy__(self) -> NoReturn:
        self._refuse("copied")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickled")
