"""Models that are called in several ways, and what tests ask of modules with a graph for each."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi


class Encoder(nn.Module):
    """Token ids to scores, as BERT has it: an attention mask, flags, and a batch of one that is treated by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.up, self.down, self.head = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 16)

    def forward(
        self, ids: Tensor, mask: Tensor | None = None, both: bool = False, parts: Any = (), scale: float = 1.0
    ) -> Any:
        _, *rest = ids.shape
        assert rest  # torch.export alone gives graphs of it
        x = self.embed(ids)
        if ids.shape[0] == 1:
            x = x + 1.0
        hidden = self.down(F.gelu(self.up(x))) + x
        for part in parts:
            hidden = hidden + part
        hidden = hidden * torch.tensor([scale, 2.0 * scale] * 32)
        if mask is not None:
            hidden = hidden * mask.unsqueeze(-1)
        scores = self.head(hidden)
        return {"scores": scores, "hidden": hidden} if both else {"scores": scores}


class Optional(nn.Module):
    """torch.fx gives graphs of it, for either branch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 24)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.relu(self.layer(x)) if mask is None else F.relu(self.layer(x)) * mask


IDS, MASK = torch.randint(0, 40, (3, 7), generator=torch.Generator().manual_seed(0)), torch.ones(3, 7).tril()
KINDS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "ids": ((IDS,), {}),
    "mask": ((IDS, MASK), {}),
    "flag": ((IDS,), {"both": True}),
    "mask and flag": ((IDS,), {"mask": MASK, "both": True}),
    "dtype": ((IDS.int(),), {}),
    "one": ((IDS[:1],), {}),
    "number": ((IDS,), {"scale": 3.0}),
    "list": ((IDS,), {"parts": [torch.ones(64)]}),
}
X, X_MASK = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)), torch.rand(3, 24)


def check(module: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(module(*args, **kwargs), model(*args, **kwargs), atol=1e-5, rtol=1e-5)


def offloaded(module: Any, args: Any, kwargs: Any) -> int:
    """How many programs of regions one call runs."""
    ran: list[Any] = []

    def run(region: Any, program: Any, inputs: Any) -> Any:
        ran.append(region)
        return program(inputs)

    for region in module.regions().values():
        region.on_run = run
    with torch.no_grad():
        module(*args, **kwargs)
    for region in module.regions().values():
        region.on_run = None
    return len(ran)


def served(model: nn.Module, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """A module with a graph for each of these calls."""
    fast = zendnn_cffi.optimize(model.eval(), tune="off")
    with torch.no_grad():
        for args, kwargs in calls * 2:
            fast(*args, **kwargs)
    assert len(fast.call_kinds.modules) == len(calls) - 1
    return fast


def there_and_back(fast: Any, path: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zendnn_cffi.save(fast, path, **options)
    return zendnn_cffi.load(path)


@contextlib.contextmanager
def nothing_is_made() -> Iterator[None]:
    """Whoever chooses, packs, measures or traces fails."""
    with contextlib.ExitStack() as stack:
        for name in (
            "fx_passes.region.variants.choose_variant",
            "fx_passes.plan.prepack.prepack",
            "fx_passes.search.measure.Bench.check_and_time",
            "fx_passes.trace.trace._trace",
        ):
            stack.enter_context(mock.patch(name, lambda *args, **kwargs: 1 / 0))
        yield
