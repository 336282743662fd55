"""A loaded library: its functions, constants and types by their names without prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from zendnn_cffi.values import dataclass


def exports(ffi: Any, lib: Any, name: str) -> bool:
    """Return whether an opened library has this declared function: cffi raises ffi.error where the symbol is absent."""
    try:
        getattr(lib, name)
    except (AttributeError, ffi.error):
        return False
    return True


@dataclass(eq=False)
class Library:
    """A loaded, accepted library. Names are given without prefix, so that code serves ZenDNN and oneDNN alike.

    fn("memory_create")  const("f32")  const("ARG_SRC")  new("memory_desc_t *")  ctype("dims_t")
    """

    ffi: Any
    lib: Any
    prefix: str
    path: str
    version: str
    provider: str = "unknown"
    config: Mapping[str, Any] = field(default_factory=dict)
    openmp: str = ""
    blis_lib: Any = None
    blis_ffi: Any = None

    def __post_init__(self) -> None:
        self._constants: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<Library {self.prefix.rstrip('_')} {self.version} from {self.path}>"

    @property
    def desc_flags(self) -> tuple[bool, ...]:
        """The arguments memory_desc_init_* takes beyond oneDNN's: not constant, not in place."""
        return (False, False) if self.prefix == "zendnn_" else ()

    def fn(self, name: str) -> Any:
        """Return the C function prefix + name; AttributeError if this library declares none."""
        return getattr(self.lib, self.prefix + name)

    def has(self, name: str) -> bool:
        """Return whether this library declares and exports prefix + name."""
        return exports(self.ffi, self.lib, self.prefix + name)

    def runs(self, instructions: str) -> bool:
        """Return whether its kernels may use an instruction set (`cpu_isa_avx512_core`): the CPU's, as limited."""
        needed = self.const(instructions)
        return bool(self.fn("get_effective_cpu_isa")() & needed == needed)

    def const(self, name: str) -> int:
        """Return an enumerator (`f32`, `nhwc`) or macro (`ARG_SRC`); AttributeError if this library has none."""
        value = self._constants.get(name)
        if value is None:
            value = self._constants[name] = _constant(self.ffi, self.prefix, name)
        return value

    def ctype(self, name: str) -> Any:
        """Return the cffi type prefix + name; `name` may end in " *", "[]" or "[3]"."""
        return self.ffi.typeof(self.prefix + name)

    def new(self, name: str, init: Any = None) -> Any:
        """Return zeroed, owned memory of the pointer or array type prefix + name."""
        return self.ffi.new(self.prefix + name, init)


def _constant(ffi: Any, prefix: str, name: str) -> int:
    for spelled in (prefix + name, prefix.upper() + name):
        try:
            return int(ffi.integer_const(spelled))
        except (AttributeError, ffi.error):
            continue
    raise AttributeError(f"no constant {prefix}{name} or {prefix.upper()}{name}")
