"""dataclass, as that of the standard library, for classes that every process makes: making one takes a quarter.

Python 3.12 and older compile a method at a time: six of a frozen class, 0.33 ms, and a process makes seventy of such
before its first answer. Here __init__ alone is compiled, and the others are closures over the fields' names. Nothing
but a type checker keeps a frozen object from being written to, and for that making it takes a quarter, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:
    import dataclasses
    from operator import attrgetter
    from reprlib import recursive_repr

    def dataclass(cls: type | None = None, /, *, frozen: bool = False, eq: bool = True, **options: Any) -> Any:
        """Turn a class into one of values, as dataclasses.dataclass does.

        frozen   whether it may be hashed where eq is true; type checkers also refuse writes to its fields
        eq       whether two are equal whose fields are
        options  kw_only, init: as there
        """
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen, eq=eq, **options)
        written_out = set(vars(cls))
        made = dataclasses.dataclass(cls, eq=False, repr=False, **options)
        methods = {"__repr__": _repr}
        if eq:
            values_of = _getter([field.name for field in dataclasses.fields(made) if field.compare])
            methods |= {"__eq__": _eq_of(values_of), "__hash__": _hash_of(values_of) if frozen else None}
        for name in methods.keys() - written_out:
            setattr(made, name, methods[name])
        return made

    @recursive_repr()
    def _repr(self: Any) -> str:
        values = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
        return f"{type(self).__qualname__}({', '.join(values)})"

    def _getter(names: list[str]) -> Any:
        """A function of an object that returns a tuple of these attributes."""
        if len(names) > 1:
            return attrgetter(*names)
        return lambda value: tuple(getattr(value, name) for name in names)

    def _eq_of(values_of: Any) -> Any:
        def __eq__(self: Any, other: Any) -> Any:
            return values_of(self) == values_of(other) if other.__class__ is self.__class__ else NotImplemented

        return __eq__

    def _hash_of(values_of: Any) -> Any:
        return lambda self: hash(values_of(self))


__all__ = ["dataclass"]
