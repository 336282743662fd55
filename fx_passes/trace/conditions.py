"""The check of an exported graph's sizes as data, so that a file can hold it without code.

torch.export makes a function that asserts conditions on sizes. It is called with terms in place of sizes, and each
truth value that it asks for is written down, as it is for the sizes of a call that passed:

    assert (1 + args[1].size()[2]) == (1 + args[3].size()[2])
    [["eq", ["add", 1, ["size", 1, 2]], ["add", 1, ["size", 3, 2]]], True]

Sizes for which all of these are as written take the same way through the function, so they pass, too.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

Row = Any  # an integer, ["size", input, dimension] or [operator, row, row]
Asked = list[tuple[Row, bool]]
Sizes = Sequence[Sequence[int] | None]  # of each input that is a tensor

_OPERATORS: Mapping[str, Callable[[int, int], int]] = MappingProxyType(
    {
        name: getattr(operator, name)
        for name in ("add", "sub", "mul", "floordiv", "mod", "eq", "ne", "lt", "le", "gt", "ge")
    }
)
_DEEPEST, _LARGEST = 40, 1 << 62


class Conditions:
    """A check of sizes that is data: one of the alternatives has to hold, all of it.

    Raises  ValueError for rows that say nothing of so many inputs
    """

    def __init__(self, alternatives: Sequence[Any], inputs: int) -> None:
        self.rows = [[(row, answer) for row, answer in asked] for asked in alternatives]
        for asked in self.rows:
            for row, answer in asked:
                _look_at(row, inputs, _DEEPEST)
                if type(answer) is not bool:
                    raise ValueError(f"no truth value is written as {answer!r}")

    def __call__(self, *flat: Any) -> None:
        """Raise AssertionError for sizes that the graph may not be right for."""
        sizes = [tuple(value.shape) if isinstance(value, torch.Tensor) else None for value in flat]
        assert any(_hold(asked, sizes) for asked in self.rows), "sizes that the graph was not exported for"


def conditions_of(check: Callable[..., Any], leaves: Sequence[Any], passed: Sequence[Sizes]) -> Conditions | None:
    """Return the check as data; None where it asks for more than sizes, or nothing is known to pass.

    leaves  what the check is called with: anything in place of tensors, other inputs as they are
    passed  sizes that it let through
    """
    found: list[Asked] = []
    for sizes in passed:
        asked: Asked = []
        stand_ins = [
            leaf if own is None else _Input(i, own, asked)
            for i, (leaf, own) in enumerate(zip(leaves, sizes, strict=True))
        ]
        try:
            check(*stand_ins)
            Conditions([asked], len(leaves))
        except Exception:  # whatever else the code does with what is no size
            return None
        if asked not in found:
            found.append(asked)
    return Conditions(found, len(leaves)) if found else None


class _Input:
    """Stands for a tensor, of which the check may ask sizes alone."""

    def __init__(self, number: int, sizes: Sequence[int], asked: Asked) -> None:
        self.shape = [_Term(["size", number, dim], size, asked) for dim, size in enumerate(sizes)]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


class _Term:
    """An integer, or a truth value, and how it comes from sizes."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, row: Row, value: Any, asked: Asked) -> None:
        self.row, self.value, self.asked = row, value, asked

    def __bool__(self) -> bool:
        self.asked.append((self.row, bool(self.value)))
        return bool(self.value)


def _method(name: str, swapped: bool) -> Callable[[_Term, Any], Any]:
    function = _OPERATORS[name]

    def method(self: _Term, other: Any) -> Any:
        if not isinstance(other, _Term):
            if type(other) not in (int, bool):
                raise TypeError(f"a size and {other!r}")
            other = _Term(int(other), int(other), self.asked)
        left, right = (other, self) if swapped else (self, other)
        return _Term([name, left.row, right.row], function(left.value, right.value), self.asked)

    return method


for _name in _OPERATORS:
    setattr(_Term, f"__{_name}__", _method(_name, False))
    if _name in ("add", "sub", "mul", "floordiv", "mod"):
        setattr(_Term, f"__r{_name}__", _method(_name, True))


def _look_at(row: Row, inputs: int, deepest: int) -> None:
    """Raise ValueError unless row is one."""
    if type(row) is int and abs(row) < _LARGEST:
        return None
    if isinstance(row, list | tuple) and len(row) == 3 and deepest > 0:
        kind, left, right = row
        if kind == "size" and type(left) is int and type(right) is int and 0 <= left < inputs and 0 <= right < 64:
            return None
        if isinstance(kind, str) and kind in _OPERATORS:
            _look_at(left, inputs, deepest - 1)
            return _look_at(right, inputs, deepest - 1)
    raise ValueError(f"no condition is written as {reprlib.repr(row)}")


def _hold(asked: Asked, sizes: Sizes) -> bool:
    try:
        return all(bool(_value(row, sizes)) == answer for row, answer in asked)
    except (IndexError, TypeError, ZeroDivisionError):  # fewer dimensions, no tensor
        return False


def _value(row: Row, sizes: Sizes) -> int:
    if isinstance(row, int):
        return row
    kind, left, right = row
    if kind == "size":
        return sizes[left][right]
    return _OPERATORS[kind](_value(left, sizes), _value(right, sizes))
