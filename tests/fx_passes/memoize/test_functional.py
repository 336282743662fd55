"""Calls as TorchDynamo spells them: which only compute, and that their results are remembered in compiled models."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fx_passes.memoize.functional import is_functional
from fx_passes.memoize.memoised import Memoised
from zendnn_cffi import backend

X = torch.randn(3, 4)

PURE: dict[str, tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = {
    "a method": ("call_method", "new_ones", ((2,),), {}),
    "a view": ("call_method", "expand", (2, 3, 4), {}),
    "a cast": ("call_method", "to", (torch.bool,), {}),
    "a cast by name": ("call_method", "long", (), {}),
    "an operator": ("call_function", operator.and_, (X > 0,), {}),
    "an index": ("call_function", operator.getitem, ((None, 0),), {}),
    "a function": ("call_function", torch.where, (X, X), {}),
    "a reduction": ("call_method", "cumsum", (0,), {}),
    "the smaller": ("call_function", torch.min, (X,), {}),
}
OTHERS: dict[str, tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = {
    "writes": ("call_method", "add_", (1,), {}),
    "augmented": ("call_function", operator.iadd, (1,), {}),
    "where it is told": ("call_function", torch.add, (X,), {"out": X.clone()}),
    "random": ("call_method", "bernoulli", (), {}),
    "drops": ("call_function", torch.dropout, (0.5, True), {}),
    "statistics": ("call_function", torch.batch_norm, (None, None, None, None, True, 0.1, 1e-5, False), {}),
    "not known": ("call_function", lambda x: x + 1, (), {}),
    "of another module": ("call_function", F.pad, ((1, 1),), {}),
    "assigns": ("call_function", operator.setitem, (0, 1.0), {}),
    "resizes": ("call_method", "resize_", (2,), {}),
}


def node_of(op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], example: Any = X) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = example
    return graph.create_node(op, target, (x, *args), kwargs)


@pytest.mark.parametrize("case", PURE)
def test_what_only_computes(case: str) -> None:
    op, target, args, kwargs = PURE[case]
    assert is_functional(node_of(op, target, args, kwargs))
    x = (X > 0) if target is operator.and_ else X.clone()
    x = x if target is not torch.where else X > 0
    before = x.clone()
    call = getattr(x, target) if op == "call_method" else target
    call(*(args if op == "call_method" else (x, *args)), **kwargs)
    assert torch.equal(x, before)


@pytest.mark.parametrize("case", OTHERS)
def test_what_does_more(case: str) -> None:
    assert not is_functional(node_of(*OTHERS[case]))


def test_methods_of_others_are_not_known() -> None:
    assert not is_functional(node_of("call_method", "index", (3,), {}, example=[1, 2, 3]))


class Attending(nn.Module):
    def __init__(self, mask_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.mask_of, self.tokens, self.linear = mask_of, nn.Embedding(50, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.linear(self.tokens(ids))[:, None]
        result: Tensor = F.scaled_dot_product_attention(x, x, x, self.mask_of(ids, mask))[:, 0]
        return self.linear(result)


def _by_indices(ids: Tensor, mask: Tensor) -> Tensor:
    """As transformers spells padding for all queries."""
    n, length = ids.shape
    rows, places = torch.arange(n), torch.arange(length)
    live = mask.to(torch.bool)
    queries, keys = places[None, None, :, None], places[None, None, None, :]
    seen = queries.new_ones((), dtype=torch.bool) & (queries >= 0)
    return (seen & live[rows[:, None, None, None], keys]).expand(n, -1, length, length)


def _causal(ids: Tensor, mask: Tensor) -> Tensor:
    length = ids.shape[1]
    places = torch.arange(length)
    later = places[:, None] >= places
    return torch.where(later, mask.bool()[:, None, None, :], later.new_zeros(()))


@pytest.fixture
def bindings() -> Iterator[list[backend.Binding]]:
    made: list[backend.Binding] = []
    init = backend.Binding.__init__

    def noted(self: backend.Binding, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backend.Binding, "__init__", noted)
        torch._dynamo.reset()
        yield made
    torch._dynamo.reset()


@pytest.mark.parametrize("mask_of", [_by_indices, _causal])
def test_masks_of_compiled_models_are_remembered(
    mask_of: Callable[[Tensor, Tensor], Tensor], bindings: list[backend.Binding], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Methods and Python's operators were not known to only compute: thirteen ran in each call of a BERT."""
    torch.manual_seed(0)
    model = Attending(mask_of).eval()
    compiled = torch.compile(model, backend="zendnn", options={"tune": "off"})
    computed: list[int] = []
    compute = Memoised._compute

    def noted(self: Memoised, given: tuple[Any, ...]) -> tuple[Tensor, ...]:
        computed.append(self.masks)
        return compute(self, given)

    monkeypatch.setattr(Memoised, "_compute", noted)
    ids, mask = torch.randint(0, 50, (2, 7)), torch.ones(2, 7, dtype=torch.long)
    with torch.no_grad():
        for end, times in ((5, 1), (5, 1), (3, 2), (7, 3), (7, 3)):
            mask[1] = torch.arange(7) < end  # the same tensor, written to
            torch.testing.assert_close(compiled(ids, mask), model(ids, mask))
            assert computed.count(1) == times
    (binding,) = bindings
    left = [node.name for node in binding.module.graph.nodes if node.op == "call_method" or node.target in _LEFT]
    assert not left
    assert len(binding.module.regions()) == 1


_LEFT = (operator.and_, operator.ge, torch.where)
