"""What masks say."""

from __future__ import annotations

import pytest
import torch

from fx_passes.memoize.masks import CAUSAL, FULL, KEYS, LIVE, OTHER, additive, describe, kind_of, remember

MASKS = {
    FULL: torch.ones(2, 1, 4, 4, dtype=torch.bool),
    CAUSAL: torch.ones(4, 4, dtype=torch.bool).tril(),
    KEYS: torch.tensor([True, True, False]).expand(2, 1, 3, 3),
    LIVE: torch.tensor([[True, False], [True, True]]).flip(0).view(1, 1, 2, 2),
    OTHER: torch.zeros(1, 1, 2, 2, dtype=torch.bool),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_mask_that_stays_is_looked_at_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = MASKS[kind].clone()
    assert kind_of(mask) == describe(mask) == kind
    expected = additive(mask, False) if mask.ndim == 4 else None
    remember(mask)
    for _ in range(2):
        assert kind_of(mask) == kind and kind_of(mask, keys=False) == (LIVE if kind == KEYS else kind)
        if expected is not None:
            assert torch.equal(additive(mask, False), expected)
        monkeypatch.setattr("fx_passes.memoize.masks.describe", None)
        monkeypatch.setattr("fx_passes.ops.additive_mask", None)
