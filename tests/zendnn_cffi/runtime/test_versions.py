"""Version counters read where they lie."""

import gc

import pytest
import torch
from torch import nn

from zendnn_cffi.runtime import versions
from zendnn_cffi.runtime.versions import Versions, find_place


def write(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(2)


def tensors() -> list[torch.Tensor]:
    base = torch.randn(4, 4)
    return [nn.Parameter(torch.randn(3)), base, base[1:], nn.Parameter(torch.randn(2), requires_grad=False),
            torch.randn(0), torch.ones(2, dtype=torch.long), torch.zeros(2, 2).to_sparse()]  # fmt: skip


def test_place_is_found() -> None:
    assert versions.PLACE is not None
    assert find_place() == versions.PLACE


@pytest.mark.parametrize("certain", [True, False], ids=["gathered", "asked"])
@pytest.mark.parametrize("number", range(len(tensors())))
def test_every_write_is_seen(number: int, certain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not certain:
        monkeypatch.setattr(versions, "PLACE", None)
    watched = tensors()
    found = Versions(watched)
    assert len(found._asked) == (0 if certain else len(watched))
    assert found.unchanged() and found.unchanged()
    write(watched[number])
    assert not found.unchanged()
    assert Versions(watched).unchanged()


def test_writes_through_aliases_are_seen_and_through_data_are_not() -> None:
    tensor = torch.randn(3)
    found = Versions([tensor])
    write(tensor.data)
    assert found.unchanged()
    write(tensor.detach()[1:])
    assert not found.unchanged()


def test_counters_outlive_their_tensors() -> None:
    watched = [torch.randn(3) for _ in range(300)]
    found = Versions(watched)
    del watched
    gc.collect()
    assert [torch.randn(3).add_(1) for _ in range(300)]
    assert found.unchanged()


def test_inside_inference_mode() -> None:
    tensor = torch.randn(3)
    with torch.inference_mode():
        found = Versions([tensor])
        assert not found._asked
        write(tensor)
    assert not found.unchanged()


def test_subclasses_are_asked() -> None:
    class Other(torch.Tensor):
        pass

    tensor = torch.randn(3).as_subclass(Other)
    found = Versions([tensor])
    assert found._asked
    assert found.unchanged()
    write(tensor)
    assert not found.unchanged()


def test_nothing_to_watch() -> None:
    assert Versions([]).unchanged()
