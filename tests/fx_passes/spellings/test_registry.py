"""A row enters every spelling of an operator; more special rows win, in whatever order they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fx_passes import ops
from fx_passes.spellings import normalization, registry
from fx_passes.spellings.registry import Alias, Built, Call, overload_builder, row, spelled

TABLES = ("NAMED", "FUNCTIONS", "METHODS", "OVERLOADS", "FIRST_RESULT", "MODULES", "INPLACE", "QUALIFIED")
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def empty_tables() -> Iterator[None]:
    """The tables without rows; what they held is put back in place, as others hold the same objects."""
    held = {name: dict(getattr(registry, name)) for name in TABLES}
    for name in TABLES:
        getattr(registry, name).clear()
    yield
    for name in TABLES:
        getattr(registry, name).clear()
        getattr(registry, name).update(held[name])


def builder(input: Any, *rest: Any) -> Built:
    return Call(ops.eltwise, (input, *rest))


def other(input: Any) -> Built:
    return Alias(input)


def test_a_name_stands_for_the_function_the_method_the_overloads_and_writing_in_place() -> None:
    assert row(builder, "relu") is builder
    for function in (torch.relu, F.relu):
        assert registry.FUNCTIONS[function] is builder
    assert registry.METHODS["relu"] is builder
    assert overload_builder(aten.relu.default) is overload_builder(aten.relu_.default) is builder
    assert dict(registry.INPLACE) == {torch.relu_: torch.relu, F.relu_: F.relu}


def test_a_name_that_a_namespace_lacks_is_no_spelling_there() -> None:
    row(builder, "hardswish")
    assert dict(registry.FUNCTIONS) == {F.hardswish: builder}
    assert not registry.METHODS
    assert not registry.INPLACE


@pytest.mark.parametrize("first", [True, False])
def test_what_a_row_names_by_itself_is_that_rows(first: bool) -> None:
    def special() -> None:
        row(other, functions=[F.softmax], methods=["log_softmax"], overloads=[aten.softmax.int])

    if first:
        special()
    row(builder, "softmax", "log_softmax")
    if not first:
        special()
    assert registry.FUNCTIONS[F.softmax] is registry.METHODS["log_softmax"] is other
    assert registry.FUNCTIONS[torch.softmax] is registry.METHODS["softmax"] is builder
    assert overload_builder(aten.softmax.int) is other
    assert overload_builder(aten.log_softmax.int) is builder


def test_only_overloads_of_aten_have_builders() -> None:
    row(builder, "relu")
    assert overload_builder(torch.relu) is None
    assert overload_builder(torch.ops.prims.convert_element_type.default) is None


def test_a_module_gives_its_attributes_and_its_parameters_as_nodes() -> None:
    module = nn.GroupNorm(2, 4, eps=0.5, affine=True)
    spelled(modules={nn.GroupNorm: ("num_groups", "weight", "eps")})(builder)
    built = registry.MODULES[nn.GroupNorm](module, lambda name: f"node of {name}", ("x",))
    assert built == Call(ops.eltwise, ("x", 2, "node of weight", 0.5))


def test_a_parameter_that_a_module_could_have_is_asked_for_as_a_parameter() -> None:
    spelled(modules={nn.LayerNorm: ("weight",)})(builder)
    module = nn.LayerNorm(4, elementwise_affine=False)
    assert registry.MODULES[nn.LayerNorm](module, lambda name: None, ("x",)) == Call(ops.eltwise, ("x", None))


def test_a_module_may_have_a_builder_of_its_own() -> None:
    spelled(modules={nn.Identity: lambda m, p, args: Alias(args[0])})(builder)
    assert registry.MODULES[nn.Identity](nn.Identity(), lambda name: None, ("x",)) == Alias("x")


def test_other_libraries_functions_go_by_qualified_names() -> None:
    spelled(qualified=["torchvision.ops.stochastic_depth.stochastic_depth"])(other)
    assert dict(registry.QUALIFIED) == {"torchvision.ops.stochastic_depth.stochastic_depth": other}


def test_a_decorator_leaves_the_builder_as_it_is() -> None:
    assert callable(normalization.group_norm)
    assert spelled("relu")(builder) is builder
