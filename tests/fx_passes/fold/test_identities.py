"""Operations that return what they are given."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fx_passes.fold.identities import fold_identities
from fx_passes.pipeline import compile_graph
from tests.support.graphs import after, check, check_equal, check_twice, count, image, model_of


class Wide(nn.Module):
    """A model that torch.fx cannot trace, around another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) if x.shape[0] < 100 else x


def test_copies_that_only_order_memory_disappear() -> None:
    model = model_of(lambda m, x: m.l(x.transpose(1, 3).contiguous().reshape(2, -1).relu()), l=nn.Linear(189, 2))
    assert count(check(model, image(2, 3, 9, 7)))["contiguous"] == 0
    check_twice(after("fold_identities", model), fold_identities)


def test_copies_whose_strides_can_be_seen_stay() -> None:
    model = model_of(lambda m, x: m.c(x).transpose(1, 3).contiguous(), c=nn.Conv2d(3, 4, 1))
    gm = check(model, image())
    assert gm(image()).is_contiguous()


def test_repeated_activations() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return x.relu().relu(), F.relu6(x).relu(), F.relu6(x).clamp(-1, 7), F.relu6(x).clamp(1, 7)

    assert count(check(model_of(forward), image()))["eltwise"] == 5


def test_what_makes_integers_floating_point_numbers_is_no_repetition() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y, z = F.relu6(x), x.relu()
        return y.clamp(-1, 7), y.clamp(-1.0, 7.0), y.clamp(min=0.0), F.hardtanh(y, -1.0, 7.0), z.clamp(min=0)

    gm = check(model_of(forward), torch.arange(-3, 9))
    assert count(gm)["eltwise"] == 4
    check_equal(model_of(forward), gm, torch.randn(9))


def test_relu_of_absolute_values_is_no_operation() -> None:
    """lp_pool has it: the library's relu would make 0 of a NaN."""
    model = model_of(lambda m, x: F.leaky_relu(x, 0.5).abs().relu())
    assert count(check(model, image()))["eltwise"] == 2


def test_operations_that_change_nothing() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = torch.cat((m.l(x) * 1.0,), 1)
        return m.l(y / 1 + 0.0), torch.cat((x,), 1)

    model = model_of(forward, l=nn.Linear(7, 7))
    gm = compile_graph(Wide(model), (image(2, 7),))  # exported, so that dtypes are known
    assert count(gm)["concat"] == 1  # what is returned has to be a copy
    assert not count(gm)["binary"]
    check_equal(Wide(model), gm, image(3, 7))
