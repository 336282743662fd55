"""What depends on sizes alone is computed once for each combination of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.memoize.memoised import Memoised


class Encoder(nn.Module):
    """Token and position embeddings, a linear, a mask of what comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.linear = nn.Embedding(50, 16), nn.Embedding(64, 16), nn.Linear(16, 16)
        self.register_buffer("numbers", torch.arange(64).expand(1, -1))

    def forward(self, ids: Tensor) -> Any:
        length = ids.shape[1]
        x = self.linear(self.tokens(ids) + self.places(self.numbers[:, :length]))
        later = torch.arange(length)[:, None] >= torch.arange(length)[None, :]
        return torch.softmax((x @ x.transpose(1, 2)).masked_fill(~later, -1e9), -1) @ x


class Returned(Encoder):
    def forward(self, ids: Tensor) -> Any:
        places = self.places(self.numbers[:, : ids.shape[1]] * 1)
        return self.linear(self.tokens(ids) + places), places


class Written(Encoder):
    def forward(self, ids: Tensor) -> Any:
        places = self.places(self.numbers[:, : ids.shape[1]] * 1)
        x = self.linear(self.tokens(ids) + places)
        places += x.sum()
        return x * places.sum()


class Shaping(Encoder):
    """Each of two layers shapes the same table for itself."""

    def forward(self, ids: Tensor) -> Any:
        places = self.places(self.numbers[:, : ids.shape[1]] * 1)
        x = self.linear(self.tokens(ids) + places.unsqueeze(1).cos().flatten(0, 1))
        return self.linear(x * places.unsqueeze(1).cos().flatten(0, 1))


def memo(gm: Any) -> list[Memoised]:
    return [module for module in gm.modules() if isinstance(module, Memoised)]


def ids(n: int, length: int) -> Tensor:
    return torch.randint(0, 50, (n, length), generator=torch.Generator().manual_seed(length))


def optimized(model: nn.Module) -> Any:
    class Shaped(nn.Module):  # a condition on a value: torch.export follows it, symbolic tracing does not
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Any:
            return self.model(ids) if ids.shape[1] > 1 else self.model(ids * 1)

    return zendnn_cffi.optimize(Shaped().eval(), (ids(2, 9),), tune="off")


def test_lengths_in_turn_each_computed_once() -> None:
    model = Encoder().eval()
    gm = optimized(model)
    (module,) = memo(gm)
    with torch.no_grad():
        for length in (9, 7, 9, 30, 7):
            torch.testing.assert_close(gm(ids(2, length)), model(ids(2, length)))
        kept = dict(module.combinations._combinations)
        assert len(kept) == 3
        gm(ids(3, 9))
        assert all(module.combinations.get(key) is value for key, value in kept.items())
    assert not [n for n in gm.graph.nodes if n.op == "call_function" and "arange" in str(n.target)]


def test_no_more_than_sixteen_are_kept() -> None:
    gm = optimized(Encoder().eval())
    (module,) = memo(gm)
    with torch.no_grad():
        for length in range(2, 30):
            gm(ids(2, length))
    assert module.kept == 16


@pytest.mark.parametrize("kind", (Returned, Written))
def test_what_the_caller_gets_or_somebody_writes_to_is_made_anew(kind: type[Encoder]) -> None:
    model = kind().eval()
    gm = optimized(model)
    with torch.no_grad():
        for _ in range(3):
            got, want = gm(ids(2, 9)), model(ids(2, 9))
            torch.testing.assert_close(got, want)
            if isinstance(got, tuple):
                got[1].zero_()


def test_new_parameters_are_noticed() -> None:
    gm = optimized(Encoder().eval())
    other = Encoder().eval()
    with torch.no_grad():
        gm(ids(2, 9))
        gm.load_state_dict({f"model.{name}": value for name, value in other.state_dict().items()})
        torch.testing.assert_close(gm(ids(2, 9)), other(ids(2, 9)))


def test_gradients_and_inference_mode_do_not_meet() -> None:
    """Results kept from inference mode must not come back where gradients are recorded."""
    gm = optimized(Encoder().eval())
    with torch.inference_mode():
        first = gm(ids(2, 9))
    torch.testing.assert_close(gm(ids(2, 9)).detach(), first)
    with torch.no_grad():
        torch.testing.assert_close(gm(ids(2, 9)), first)


def test_equal_operations_are_computed_once() -> None:
    model = Shaping().eval()
    gm = optimized(model)
    (module,) = memo(gm)
    with torch.no_grad():
        torch.testing.assert_close(gm(ids(2, 9)), model(ids(2, 9)))
    (result,) = next(iter(module.graph.find_nodes(op="output"))).args[0]
    assert isinstance(result, torch.fx.Node)
