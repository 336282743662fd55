"""Constants in the layouts that implementations want."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.candidates.candidates import Weights
from fx_passes.candidates.layouts import row_major
from fx_passes.plan.prepack import WeightStore, Workspace, prepack
from fx_passes.region.region import ZenRegion


@pytest.mark.needs("avx512")
@torch.no_grad()
def test_channels_last_weights_are_transformed_for_winograd() -> None:
    """The library reorders to Winograd's layout from row-major weights alone; the region ran as plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()).eval().to(memory_format=torch.channels_last)
    images = torch.randn(1, 64, 56, 56).to(memory_format=torch.channels_last)
    fast = zendnn_cffi.optimize(model, tune="off")
    difference = (fast(images) - model(images)).abs().max()
    assert float(difference) < 1e-4
    (convolution,) = [node for node in zendnn_cffi.explain(fast).nodes if node.became == "convolution"]
    assert "wino" in convolution.implementation


def test_layouts_that_no_program_uses_any_longer_are_forgotten() -> None:
    """Each length has constants of its own: what describes them goes with them."""
    store = WeightStore()
    kept = store.get(_ones(7))
    for length in range(8, 400):
        store.get(_ones(length))
    (packed,) = store.by_name()["ones"]
    assert packed.data is kept and packed.desc == _ones(7).desc
    assert len(store._descs) < 64
    again = [store.get(_ones(length)) for length in range(8, 200)]
    assert sorted(p.desc.dims for p in store.by_name()["ones"]) == [(1, n) for n in range(7, 200)]
    del again


def test_stores_that_look_at_each_other_pack_at_the_same_time() -> None:
    """Graphs for several kinds of calls do, in several threads."""
    stores = [WeightStore(), WeightStore()]
    for store in stores:
        store.share_with(stores)

    def pack(store: WeightStore) -> list[torch.Tensor]:
        return [store.get(_ones(length)) for length in range(1, 400)]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            packed = list(threads.map(pack, stores))
    finally:
        sys.setswitchinterval(interval)
    assert [len(each) for each in packed] == [399, 399]


def _ones(length: int) -> Weights:
    return Weights("ones", torch.ones(1, length), row_major((1, length), torch.float32))


@torch.no_grad()
def test_weights_folded_in_shared_memory_do_not_change_with_the_next() -> None:
    """Those that lie as wanted once they are folded are copied: their memory is the next one's."""
    store, workspace = WeightStore(), Workspace()
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(rows, 24, generator=generator) for rows in (40, 8, 64)]
    factor = [torch.rand(len(weight), generator=generator) for weight in plain]
    packed = [
        store.get(_late(str(number), weight, by), workspace=workspace)
        for number, (weight, by) in enumerate(zip(plain, factor, strict=True))
    ]
    for found, weight, by in zip(packed, plain, factor, strict=True):
        expected = (weight.double() * by.double().unsqueeze(1)).float()
        assert torch.equal(found.view(torch.float32).view(weight.shape), expected)


@pytest.mark.needs("avx512")
@pytest.mark.parametrize(("by_library", "share"), [(False, 4), (True, 2)])
def test_transforms_find_their_scratch_memory_in_the_workspace(
    by_library: bool, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's takes one as large as its result, ours a quarter; the second time no memory is added."""
    if by_library:
        monkeypatch.setattr("zendnn_cffi.primitives.winograd.layout_of", lambda desc: None)
    weight = torch.randn(64, 64, 3, 3, generator=torch.Generator().manual_seed(0))
    fast = zendnn_cffi.optimize(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()).eval(), tune="off")
    with torch.no_grad():
        fast(torch.ones(1, 64, 56, 56))
    (region,) = [module for module in fast.modules() if isinstance(module, ZenRegion)]
    (packed,) = [p for row in region.weights.by_name().values() for p in row if p.desc.size_bytes > weight.nbytes]
    workspace = Workspace()
    wanted = Weights("w", weight, packed.desc)
    first, own = prepack(wanted, workspace=workspace), workspace.scratchpad.take(1).data_ptr()
    second = prepack(wanted, workspace=workspace)
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    assert workspace.scratchpad.take(packed.desc.size_bytes // share).data_ptr() == own


def _late(name: str, weight: torch.Tensor, factor: torch.Tensor) -> Weights:
    desc = row_major(tuple(weight.shape), torch.float32)
    return Weights(name, weight.to("meta"), desc, late=lambda: ops.scale_channels(weight, factor))
