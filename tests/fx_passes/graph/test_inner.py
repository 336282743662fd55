"""Tensors that are made of others, and where a name of a graph leads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from fx_passes.graph.inner import find, is_plain, parts, plain_tensors, value_of
from tests.support.int8_tensors import block


class Marked(torch.Tensor):
    """A subclass that says nothing of parts."""


def test_plain_tensors_have_no_parts() -> None:
    for plain in (torch.ones(2), nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(2))):
        assert is_plain(plain) and parts(plain) == {} and plain_tensors(plain) == [plain]
    marked = torch.ones(2).as_subclass(Marked)
    assert not is_plain(marked) and parts(marked) == {} and plain_tensors(marked)[0] is marked


def test_parts_of_parts() -> None:
    a, b, c = (torch.full((2,), float(n)) for n in range(3))
    nested = TwoTensor(TwoTensor(a, b), c)
    found = parts(nested)
    assert list(found) == ["a.a", "a.b", "b"]
    assert all(each is part for each, part in zip(plain_tensors(nested), (a, b, c), strict=True))


def test_where_a_name_leads() -> None:
    root = nn.Sequential(block(), nn.ReLU())
    weight: Any = root[0].up.weight
    assert find(root, "0.up.weight.qdata") == (root[0].up, "weight", "qdata")
    assert find(root, "0.up.bias") == (root[0].up, "bias", "")
    assert value_of(*find(root, "0.up.weight.qdata")) is weight.qdata
    assert value_of(*find(root, "0.up.bias")) is root[0].up.bias
    for missing in ("2.bias", "0.up.weight.nothing", "0.up.nothing.qdata"):
        with pytest.raises(AttributeError):
            value_of(*find(root, missing))
