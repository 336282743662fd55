"""Every operation declares what the stages ask of it, and every stage has an answer for it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

from fx_passes import ops
from fx_passes.lower.rules import RULES
from fx_passes.ops import registry

# public functions of the families that are no operations
HELPERS = {
    "apply_post_ops",
    "borders",
    "blocked",
    "in_long_runs",
    "is_plain",
    "misfit",
    "plain_axis",
    "row_zero_points",
    "state_offset",
    "state_widths",
    "with_state_behind",
    "count_of_chosen",
    "euclidean_norm",
    "output_and_cell",
}


def test_every_public_function_of_the_families_is_an_operation() -> None:
    families = [importlib.import_module(f"{ops.__name__}.{m.name}") for m in pkgutil.iter_modules(ops.__path__)]
    public = {
        name: function
        for family in families
        if family is not registry
        for name, function in inspect.getmembers(family, inspect.isfunction)
        if not name.startswith("_") and function.__module__ == family.__name__ and name not in HELPERS
    }
    assert set(public.values()) == ops.VOCABULARY
    assert all(getattr(ops, name) is function for name, function in public.items())


@pytest.mark.parametrize("operation", sorted(ops.COMPUTE | ops.MOVEMENT, key=lambda o: o.__name__))
def test_an_operation_is_lowered_or_says_why_not(operation: registry.Operator) -> None:
    assert (operation in RULES) != bool(ops.TRAITS[operation].no_rule)


def test_no_other_operation_has_a_rule() -> None:
    assert {target for target in RULES if target in ops.VOCABULARY} <= ops.COMPUTE | ops.MOVEMENT


@pytest.mark.parametrize("operation", sorted(ops.WITH_POST_OPS, key=lambda o: o.__name__))
def test_who_takes_post_ops_has_the_parameter(operation: registry.Operator) -> None:
    assert inspect.signature(operation).parameters["post_ops"].default == ()


def test_who_has_the_parameter_takes_post_ops() -> None:
    assert {o for o in ops.VOCABULARY if "post_ops" in inspect.signature(o).parameters} == ops.WITH_POST_OPS


@pytest.mark.parametrize("operation", sorted(ops.having(weighted=True), key=lambda o: o.__name__))
def test_a_weighted_operation_takes_its_weight_second(operation: registry.Operator) -> None:
    assert list(inspect.signature(operation).parameters)[:2] == ["src", "weight"]


@pytest.mark.parametrize("operation", sorted(ops.having(torch_candidate=True), key=lambda o: o.__name__))
def test_torch_candidates_stand_beside_a_rule(operation: registry.Operator) -> None:
    assert operation in RULES


def test_kinds_part_the_vocabulary() -> None:
    assert sum(map(len, (ops.COMPUTE, ops.MOVEMENT, ops.SHAPE, ops.CONSTANT))) == len(ops.VOCABULARY)


@pytest.mark.parametrize("traits", [{"kind": "other"}, {"kind": registry.COMPUTE, "shape": "smaller"}])
def test_unknown_traits_are_refused(traits: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        registry.op(**traits)(lambda src: src)


def test_the_vocabulary_is_documented() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "passes.md").read_text()
    rows = {name: page.partition(f"| {name} |")[2].partition("\n")[0] for name in ("COMPUTE", "MOVEMENT", "SHAPE")}
    for name, row in rows.items():
        listed = set(re.findall(r"`(\w+)`", row.partition(";")[0]))
        assert listed == {operation.__name__ for operation in getattr(ops, name)}, name
