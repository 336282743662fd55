"""Kinds of calls: what makes two calls of one kind."""

from __future__ import annotations

import numpy as np
import torch

from fx_passes.trace.call_kind import form_of, kind_of

X = torch.randn(3, 16)


def test_which_calls_are_of_a_kind() -> None:
    names = ("x", "flag")
    by_name = {"flag": 1, "x": X}
    assert kind_of(names, (X,), {"flag": 1}) == kind_of(names, (X[:2], 1), {}) == kind_of(names, (), by_name)
    numbers = (None, True, 1, 2, 1.0, -0.0, 0.0)
    kinds = [(X,), (X[:1],), (X.double(),), (X[0],), ([X],), *((X, number) for number in numbers)]
    assert len({kind_of(names, args, {}) for args in kinds}) == len(kinds)
    one, two, true = (kind_of(names, (X, value), {}) for value in (1, 2, True))
    assert one.differs_by_number(two) and not one.differs_by_number(true) and not one.differs_by_number(one)
    alone = kind_of(names, (X[:1], 1), {})
    assert alone.differs_by_sizes(one) and not alone.differs_by_number(two) and not two.differs_by_sizes(one)
    assert kind_of(names, (X, float("nan")), {}) == kind_of(names, (X, float("nan")), {})


def test_nested_tensors_have_a_kind() -> None:
    rows = [X, X[:2]]
    nested = torch.nested.nested_tensor(rows)
    assert kind_of(("x",), (nested,), {}) == kind_of(("x",), (torch.nested.nested_tensor(rows[::-1]),), {})
    kind_of(("x",), (torch.nested.nested_tensor(rows, layout=torch.jagged),), {})


def test_which_calls_are_of_a_form() -> None:
    """Whatever decides on a kind, its sizes or whether it is an example makes another form."""
    assert form_of((X, 1), {"mask": None}) == form_of((X + 1, 1), {"mask": None}) is not None
    gradients = X.clone().requires_grad_()
    values = (X, X[:2], X[0], X.double(), gradients, X.to("meta"), None, True, 1, 2, False, 0, "text")
    forms = [*(form_of((value,), {}) for value in values), *(form_of((), {name: X}) for name in ("x", "y"))]
    assert None not in forms and len(set(forms)) == len(forms)
    nested, parameter = torch.nested.nested_tensor([X, X[:2]]), torch.nn.Parameter(X)
    for value in ([X], 1.0, np.float64(1), parameter, nested, X.to_sparse(), object()):
        assert form_of((X, value), {}) is None
