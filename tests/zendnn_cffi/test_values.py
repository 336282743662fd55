"""Classes of values are those that the standard library's decorator makes, in all that we use of it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import field
from typing import Any

import pytest

from zendnn_cffi import values

DECORATORS = {"ours": values.dataclass, "standard": dataclasses.dataclass}


@pytest.fixture(params=DECORATORS)
def dataclass(request: pytest.FixtureRequest) -> Any:
    return DECORATORS[request.param]


def test_equal_fields_make_equal_objects(dataclass: Any) -> None:
    @dataclass(frozen=True)
    class Point:
        x: int
        y: Any = field(default=None)
        note: str = field(default="", compare=False)

    @dataclass(frozen=True)
    class Other(Point):
        """Fields and values of Point, and another class."""

    assert Point(1, (2,)) == Point(1, (2,), "seen") != Point(1, (3,))
    assert hash(Point(1)) == hash(Point(1, note="seen")) != hash(Point(2))
    assert Point(1) != Other(1) and {Point(1): "here"}[Point(1)] == "here"
    assert Point(1).__eq__("text") is NotImplemented
    nan = float("nan")
    assert Point(nan) == Point(nan), "tuples look at identity first"


@pytest.mark.parametrize("count", [0, 1])
def test_few_fields(dataclass: Any, count: int) -> None:
    Small = dataclass(frozen=True)(type("Small", (), {"__annotations__": {"x": "float"} if count else {}}))
    values = [float("nan")] * count
    assert Small(*values) == Small(*values) and hash(Small(*values)) == hash(Small(*values))


def test_what_is_not_frozen_has_no_hash(dataclass: Any) -> None:
    @dataclass
    class Changing:
        x: int

    assert Changing(1) == Changing(1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Changing(1))


def test_without_eq_each_object_is_its_own(dataclass: Any) -> None:
    @dataclass(eq=False)
    class Owner:
        x: int

    assert Owner(1) != Owner(1) and len({Owner(1), Owner(1)}) == 2


def test_text_names_the_fields(dataclass: Any) -> None:
    @dataclass
    class Inner:
        x: Any
        hidden: int = field(default=0, repr=False)

    inner = Inner("a")
    prefix = test_text_names_the_fields.__qualname__ + ".<locals>."
    assert repr(inner) == f"{prefix}Inner(x='a')"
    inner.x = [inner]
    assert repr(inner) == f"{prefix}Inner(x=[...])"


def test_methods_written_out_stay(dataclass: Any) -> None:
    @dataclass(frozen=True)
    class Own:
        x: int

        def __repr__(self) -> str:
            return "mine"

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 7

    assert repr(Own(1)) == "mine" and Own(1) == Own(2) and hash(Own(1)) == 7


@values.dataclass(frozen=True, kw_only=True)
class Kept:
    x: int
    y: list[int] = field(default_factory=list)
    z: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "z", self.x + 1)


def test_the_librarys_functions_know_them() -> None:
    kept = Kept(x=1)
    assert dataclasses.is_dataclass(kept) and [f.name for f in dataclasses.fields(kept)] == ["x", "y", "z"]
    assert dataclasses.replace(kept, x=2).z == 3 and dataclasses.asdict(kept) == {"x": 1, "y": [], "z": 2}
    assert copy.deepcopy(kept) == pickle.loads(pickle.dumps(kept)) == kept
    with pytest.raises(TypeError, match="positional"):
        Kept(1)  # type: ignore[misc]
