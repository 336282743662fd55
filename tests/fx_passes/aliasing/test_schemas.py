"""What names of aten's operators say: held against what the methods of that name do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fx_passes.aliasing.schemas import makes_new, only_computes

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "topk": (2,), "cumsum": (0,), "where": (torch.zeros(3, 4) > 0, torch.ones(3, 4)), "max": (0,), "new_ones": ((2,),),
    "masked_fill": (torch.zeros(3, 4) > 0, 1.0), "tril": (), "sort": (), "clamp": (0,), "expand": (2, 3, 4),
    "view": (4, 3), "reshape": (4, 3), "unsqueeze": (0,), "to": (torch.float32,), "contiguous": (),
    "type_as": (torch.zeros(1),), "squeeze": (), "permute": (1, 0),
    "ravel": (), "add_": (1,), "zero_": (), "bernoulli": (), "repeat": (2, 1),
    "argsort": (), "unbind": (), "split": (2,), "conj": (), "index_select": (0, torch.tensor([0, 2])),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_said_holds(name: str) -> None:
    x = torch.rand(3, 4)
    before, random = x.clone(), torch.get_rng_state()
    result = torch.where(ARGUMENTS[name][0], x, 1.0) if name == "where" else getattr(x, name)(*ARGUMENTS[name])
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    assert leaves
    shares = any(leaf.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for leaf in leaves)
    assert not (shares and makes_new(name))
    does_more = not torch.equal(x, before) or not torch.equal(torch.get_rng_state(), random)
    assert not (does_more and only_computes(name))


# Those written in terms of others, on operands for which they might have nothing to compute.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "inner": (torch.ones(()),), "outer": (torch.ones(1),), "tensordot": (torch.ones(()), 0), "kron": (torch.ones(()),),
    "cross": (torch.eye(3), 1), "cdist": (torch.ones(3, 3),), "cosine_similarity": (torch.ones(3),),
    "pairwise_distance": (torch.ones(3),), "isclose": (torch.ones(3),), "isfinite": (), "isinf": (), "isnan": (),
    "det": (), "logdet": (), "inverse": (),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPUTED)
def test_those_written_in_terms_of_others_make_new_tensors(name: str) -> None:
    x = torch.ones(3) if name == "outer" else torch.eye(3)
    other = tuple(each for each in COMPUTED[name] if isinstance(each, torch.Tensor))
    result = getattr(torch, name)(x, *COMPUTED[name])
    places = {each.untyped_storage().data_ptr() for each in (x, *other)}
    assert makes_new(name) and result.untyped_storage().data_ptr() not in places


@pytest.mark.parametrize("name", ["topk", "cumsum", "where", "max", "new_ones", "masked_fill", "tril", "sort"])
def test_new_tensors_are_known(name: str) -> None:
    assert makes_new(name)


@pytest.mark.parametrize("name", ["topk", "where", "max", "new_ones", "expand", "to", "index", "__and__"])
def test_what_only_computes_is_known(name: str) -> None:
    assert only_computes(name)


@pytest.mark.parametrize("name", ["expand", "to", "type_as", "meshgrid", "atleast_1d", "einsum", "no_such_operator"])
def test_what_may_be_a_view_is_not_called_new(name: str) -> None:
    assert not makes_new(name)


@pytest.mark.parametrize("name", ["batch_norm", "native_batch_norm", "dropout", "rand", "set_", "no_such_operator"])
def test_what_does_more_is_not_called_functional(name: str) -> None:
    assert not only_computes(name)
