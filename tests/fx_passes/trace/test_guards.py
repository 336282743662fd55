"""Guards let calls of the example's structure through, and no others; sizes and dtypes are tested where graphs are."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from fx_passes.trace.guards import Guards

VALUES = st.sampled_from([None, True, 1, 1.5, "text", torch.ones(2), torch.ones(3)])
ARGUMENTS = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    ),
    max_leaves=4,
)
CALLS = st.tuples(
    st.lists(ARGUMENTS, max_size=2).map(tuple), st.dictionaries(st.sampled_from("xyz"), ARGUMENTS, max_size=2)
)


def is_like(one: Any, other: Any) -> bool:
    leaves, spec = pytree.tree_flatten(one)
    others, other_spec = pytree.tree_flatten(other)
    if spec != other_spec:
        return False
    for a, b in zip(leaves, others, strict=True):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            continue  # without a check of sizes
        if type(a) is not type(b) or a != b:
            return False
    return True


@given(example=CALLS, call=CALLS)
@settings(deadline=None, max_examples=400)
def test_calls_like_the_example_alone(example: Any, call: Any) -> None:
    guards = Guards(None, example)
    assert guards.hold(*example) and guards.resemble(*example)
    assert guards.hold(*call) == is_like(example, call)


@given(example=CALLS, data=st.data())
@settings(deadline=None, max_examples=200)
def test_one_argument_more_or_another_container(example: Any, data: Any) -> None:
    args, kwargs = example
    guards = Guards(None, example)
    for call in (((*args, 1), kwargs), (args, {**kwargs, "w": None}), ((args,), kwargs), (args[:-1], kwargs)):
        assert guards.hold(*call) == is_like(example, call)
    changed = [[*value] if type(value) is tuple else value for value in args]
    call = tuple(changed), dict(reversed(kwargs.items())) if data.draw(st.booleans()) else kwargs
    assert guards.hold(*call) == is_like(example, call)
