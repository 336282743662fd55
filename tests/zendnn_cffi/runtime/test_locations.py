"""Addresses and views of tensors, read where they lie."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from zendnn_cffi.runtime import locations
from zendnn_cffi.runtime.locations import Locations, find_places


def tensors() -> list[torch.Tensor]:
    base = torch.randn(4, 4)
    return [nn.Parameter(torch.randn(4, 4), requires_grad=False), base, base[1:, 1:], torch.randn(3, 3, 2, 2, 2),
            torch.randn(4, 4).T, torch.ones(3, 3, dtype=torch.long),
            torch.randn(2, 2, dtype=torch.complex64)]  # fmt: skip


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda t: t.clone(),
    "transposed": lambda t: t.transpose(0, 1),
    "rows": lambda t: t[:2] if len(t) > 2 else t[:1],
    "later rows": lambda t: t[1:],
    "flat": lambda t: t.reshape(-1),
    "with a dimension": lambda t: t[:, None],
    "expanded": lambda t: t[:1].expand_as(t),
    "negated": torch._neg_view,
    "another dtype": lambda t: t.to(torch.float64),
    "bits": lambda t: t.view(torch.int32),
    "empty": lambda t: t[:0],
}


def test_places_are_found() -> None:
    assert locations.PLACES is not None
    assert find_places() == locations.PLACES


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@pytest.mark.parametrize("certain", [True, False], ids=["gathered", "asked"])
@pytest.mark.parametrize("number", range(len(tensors())))
@pytest.mark.parametrize("way", WAYS)
def test_every_assignment_to_data_is_seen(
    way: str, number: int, certain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not certain:
        monkeypatch.setattr(locations, "PLACES", None)
    watched = tensors()
    found = Locations(watched)
    assert len(found._asked) == (0 if certain else len(watched))
    assert found.unchanged() and found.unchanged() and not found.changed()
    watched[number].data = WAYS[way](watched[number].detach())
    assert not found.unchanged()
    assert [t is watched[number] for t in found.changed()] == [True]
    assert Locations(watched).unchanged()


def test_tensors_of_many_dimensions_are_asked() -> None:
    tensor = torch.randn(2, 2, 1, 1, 1, 2)
    found = Locations([tensor])
    assert found._asked and found.unchanged()
    tensor.data = tensor.data.transpose(0, 1)
    assert not found.unchanged()


def test_swapped_tensors_are_seen_and_what_was_freed_is_not_read() -> None:
    watched = [nn.Parameter(torch.randn(3, 3)) for _ in range(50)]
    found = Locations(watched)
    for tensor in watched:
        torch.utils.swap_tensors(tensor, nn.Parameter(torch.randn(3, 3)))
    gc.collect()
    assert not found.unchanged()
    assert len(found.changed()) == len(watched)


@pytest.mark.parametrize("size", [0, 4, 1_000_000])
def test_storages_that_are_resized_are_seen(size: int) -> None:
    tensor = torch.randn(100_000)
    found = Locations([tensor, tensor[1:]])
    tensor.untyped_storage().resize_(size)
    assert not found.unchanged()


def test_shared_memory_is_seen() -> None:
    tensor = torch.randn(10)
    found = Locations([tensor])
    tensor.share_memory_()
    assert not found.unchanged()


def test_what_programs_do_to_tensors_changes_nothing() -> None:
    watched = [nn.Parameter(torch.randn(4, 4)), *tensors()]
    found = Locations(watched)
    parameter = watched[0]
    (parameter * 2).sum().backward()
    torch.optim.SGD([parameter], 0.1, momentum=0.9).step()
    parameter.requires_grad_(False)
    held = [t.detach() for t in watched] + [t[1:] for t in watched]
    parameter.name_of_ours = "kept"  # type: ignore[attr-defined]
    assert found.unchanged() and held


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_have_an_address_and_sparse_ones_none() -> None:
    nested, sparse = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(3, 3)]), torch.eye(3).to_sparse()
    found = Locations([nested, sparse])
    assert found.unchanged() and not found.changed()
    nested.data = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(3, 3)])
    assert not found.unchanged()
    assert [t is nested for t in found.changed()] == [True]


def test_nothing_to_watch() -> None:
    assert Locations([]).unchanged()
