"""What depends on masks and sizes alone is computed again only where a mask says something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes import ops
from fx_passes.memoize.memoised import Memoised
from tests.support.exported import needs_export


class Encoder(nn.Module):
    """Attention with a padding mask, and a mean over the tokens that take part."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.linear = nn.Embedding(50, 16), nn.Linear(16, 16)

    def embed(self, ids: Tensor) -> Tensor:
        """Looking at a size makes it one for torch.export, which knows what is a tensor of integers."""
        assert needs_export(ids) and ids.shape[1] < 60
        x: Tensor = self.linear(self.tokens(ids))
        return x

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        x = self.embed(ids)
        takes_part = mask.bool()[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        y = torch.nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], takes_part)[:, 0]
        share = mask.unsqueeze(-1).to(torch.float32)
        return self.linear((y * share).sum(1) / share.sum(1).clamp(min=1e-9))


class Returned(Encoder):
    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        shares = mask.unsqueeze(-1).to(torch.float32) * 2
        return self.embed(ids) * shares, shares


class Written(Encoder):
    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        shares = mask.unsqueeze(-1).to(torch.float32) * 2
        x = self.embed(ids) * shares
        shares += x.sum()
        return x * shares.sum()


class AlsoIndices(Encoder):
    """The mask chooses rows of a table, too."""

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        return super().forward(ids, mask) + self.tokens(mask).sum(1)


class OfFloats(Encoder):
    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        return self.embed(ids) * (mask * 2.0).unsqueeze(-1).square()


def memo(gm: Any) -> list[Memoised]:
    return [module for module in gm.modules() if isinstance(module, Memoised)]


def example(n: int = 2, length: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and a mask that leaves out the end of each sentence but the first."""
    ids = torch.randint(0, 50, (n, length), generator=torch.Generator().manual_seed(seed))
    lengths = torch.arange(length, length - n, -1).clamp(min=1)
    return ids, (torch.arange(length) < lengths[:, None]).long()


def optimized(model: nn.Module, *inputs: Tensor) -> Any:
    return zendnn_cffi.optimize(model.eval(), inputs, tune="off")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of arguments of each computation."""
    seen: list[int] = []
    compute: Callable[..., Any] = Memoised._compute
    monkeypatch.setattr(Memoised, "_compute", lambda self, given: (seen.append(len(given)), compute(self, given))[1])
    return seen


@torch.no_grad()
def test_computed_once_for_equal_masks(computed: list[int]) -> None:
    model, (ids, mask) = Encoder(), example()
    gm = optimized(model, ids, mask)
    (module,) = memo(gm)
    assert module.masks == 1
    for seed in range(3):  # other ids, and a copy of the mask
        ids, same = example(seed=seed)
        torch.testing.assert_close(gm(ids, same), model(ids, same))
    assert len(computed) == 1


@torch.no_grad()
def test_masks_that_say_something_else(computed: list[int]) -> None:
    """Among them one that is written to between calls, as serving code does with its buffers."""
    model, (ids, mask) = Encoder(), example()
    gm = optimized(model, ids, mask)
    for change in (
        lambda m: m.fill_(1),
        lambda m: m[1, 3:].zero_(),
        lambda m: m[0, 0].zero_(),
        lambda m: m.numpy().fill(1),
    ):
        change(mask)
        torch.testing.assert_close(gm(ids, mask), model(ids, mask))
    assert len(computed) == 4


@torch.no_grad()
def test_shapes_do_not_drive_each_other_out(computed: list[int]) -> None:
    model = Encoder()
    gm = optimized(model, *example())
    for _ in range(3):
        for n, length in ((2, 7), (3, 7), (2, 9)):
            inputs = example(n, length)
            torch.testing.assert_close(gm(*inputs), model(*inputs))
    assert len(computed) == 3


@torch.no_grad()
def test_bounded() -> None:
    gm = optimized(Encoder(), *example())
    (module,) = memo(gm)
    for length in range(3, 25):
        gm(*example(2, length))
    assert module.kept == 8
    gm.invalidate()
    assert module.kept == 0


@pytest.mark.parametrize("dtype", (torch.bool, torch.uint8, torch.int32), ids=str)
@torch.no_grad()
def test_dtypes_of_masks(dtype: torch.dtype, computed: list[int]) -> None:
    model, (ids, mask) = Encoder(), example()
    gm = optimized(model, ids, mask.to(dtype))
    for _ in range(2):
        torch.testing.assert_close(gm(ids, mask.to(dtype)), model(ids, mask.to(dtype)))
    assert len(computed) == 1


@torch.no_grad()
def test_indices_of_a_table_are_no_mask() -> None:
    model, (ids, mask) = AlsoIndices(), example()
    gm = optimized(model, ids, mask)
    torch.testing.assert_close(gm(ids, mask), model(ids, mask))
    assert not memo(gm)


@pytest.mark.needs("avx512")
@pytest.mark.parametrize(("kind", "inside"), [(Returned, 2), (Written, 3)])
@torch.no_grad()
def test_what_the_caller_sees_is_made_anew(kind: type[Encoder], inside: int) -> None:
    """The multiplication, where it is returned; where it is written to, the sum is another tensor by now."""
    model, (ids, mask) = kind(), example()
    gm = optimized(model, ids, mask)
    for _ in range(3):
        ours, theirs = gm(ids, mask), model(ids, mask)
        torch.testing.assert_close(ours, theirs)
        for result in ours if isinstance(ours, tuple) else (ours,):
            result.fill_(7.0)
    (module,) = memo(gm)
    assert sum(node.op == "call_function" for node in module.graph.nodes) == inside


@torch.no_grad()
def test_numbers_are_no_mask() -> None:
    model, (ids, mask) = OfFloats(), example()
    gm = optimized(model, ids, mask.float())
    torch.testing.assert_close(gm(ids, mask.float()), model(ids, mask.float()))
    assert not memo(gm)


@torch.no_grad()
def test_what_somebody_keeps_is_never_given_out() -> None:
    """A result of the model that is written to afterwards changes nothing."""
    model, (ids, mask) = Encoder(), example()
    gm = optimized(model, ids, mask)
    first = gm(ids, mask).clone()
    gm(ids, mask).fill_(9.0)
    assert torch.equal(gm(ids, mask), first)


def test_inference_mode_first() -> None:
    """What was remembered there is used with gradients later."""
    model, (ids, mask) = Encoder(), example()
    gm = optimized(model, ids, mask)
    with torch.inference_mode():
        gm(ids, mask.clone())
    torch.testing.assert_close(gm(ids, mask), model(ids, mask))


class OfIntegers(nn.Module):
    """Products of int8, [..., K] by [K, N], in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (16, 8), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(8))

    def forward(self, kept: Tensor) -> Tensor:
        sums = torch._int_mm(kept.reshape(-1, kept.size(-1)), self.weight).to(torch.float32)
        return (sums * self.scales.expand(sums.shape)).reshape(*kept.shape[:-1], 8)


def test_quantized_values_are_no_masks() -> None:
    """They are read by regions, whose products may be of integers: each call has others."""
    inputs = torch.randint(-128, 128, (3, 11, 16), dtype=torch.int8)
    gm = optimized(OfIntegers(), inputs)
    assert memo(gm) == []
    (region,) = gm.regions().values()
    assert any(node.target is ops.dequantize for node in region.graph.nodes)
