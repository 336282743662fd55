"""Tensors that forward makes are new ones in each call, though symbolic tracing makes them once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.pipeline import compile_graph


class Making(nn.Module):
    def __init__(self, compute: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.compute = nn.Linear(4, 4), compute
        self.kept = torch.zeros(3, 4)  # no buffer, and no tensor that forward makes

    def forward(self, x: Tensor) -> Any:
        return self.compute(self.linear(x), self)


def several(x: Tensor, m: Any) -> Tensor:
    total = torch.zeros(3, 4)
    total.add_(x)
    total += x
    return total * 2


def slices(x: Tensor, m: Any) -> Tensor:
    whole = torch.zeros(3, 8)
    left, right = whole[:, :4], whole[:, 4:]
    left.add_(x)
    right.sub_(x)
    return whole + 0


def read_before(x: Tensor, m: Any) -> Tensor:
    made = torch.ones(3, 4)
    before = x + made
    return before + made.mul_(x)


WRITTEN: dict[str, Callable[[Tensor, Any], Any]] = {
    "in place": lambda x, m: torch.zeros(3, 4).add_(x),
    "several times": several,
    "slices of one": slices,
    "read before": read_before,
    "out": lambda x, m: torch.add(x, 1, out=torch.zeros(3, 4)),
    "unread": lambda x, m: (torch.ones(3, 4).mul_(x), torch.ones(3, 4) * x)[1],
}


@pytest.mark.parametrize("name", WRITTEN)
def test_writes_do_not_add_up(name: str) -> None:
    model = Making(WRITTEN[name]).eval()
    model = nn.Sequential(nn.Linear(4, 4), model, nn.Linear(8 if name == "slices of one" else 4, 4)).eval()
    gm: Any = compile_graph(model)
    exported = [zendnn_cffi.optimize(model, example, tune="off") for example in (None, (torch.zeros(3, 4),))]
    with torch.no_grad():
        for number in range(3):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
            for each in (gm, *exported):
                torch.testing.assert_close(each(x), model(x))
    assert [*gm.leaves] == ["1"] and "writes to a tensor that it makes" in gm.leaves["1"]  # that module alone
    assert len(gm.regions()) == 2 and not any(each.leaves for each in exported)


@pytest.mark.parametrize(
    "compute",
    [lambda x, m: (x, torch.ones(3)), lambda x, m: {"x": x, "view": torch.ones(3, 4)[1:]}],
    ids=("returned", "a view returned"),
)
def test_the_caller_may_write_to_what_it_gets(compute: Callable[[Tensor, Any], Any]) -> None:
    model, x = Making(compute).eval(), torch.randn(3, 4)
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        first = gm(x)
        made = first["view"] if isinstance(first, dict) else first[1]
        made.fill_(7)
        again = gm(x)
        torch.testing.assert_close(again, model(x))
        assert (again["view"] if isinstance(again, dict) else again[1]).data_ptr() != made.data_ptr()


def test_what_is_only_read_stays_a_constant() -> None:
    gm = zendnn_cffi.optimize(Making(lambda x, m: x + torch.ones(4)).eval(), tune="off")
    nodes = [n for module in (gm, *gm.regions().values()) for n in module.graph.nodes]
    assert not any(n.target is torch.ops.aten.clone.default for n in nodes)


def test_a_tensor_of_the_module_keeps_what_is_written() -> None:
    """As in eager: forward did not make it."""
    model, x = Making(lambda x, m: m.kept.add_(x) * 1).eval(), torch.ones(3, 4)
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        first, second = gm(x), gm(x)
    torch.testing.assert_close(second, 2 * first)


class Unknown(nn.Module):
    """No symbolic tracing follows it: it stays whole."""

    def forward(self, x: Tensor, made: Tensor) -> Tensor:
        return x * made.add_(1) if x.sum() > -1e9 else x


def test_a_module_that_stays_whole_gets_a_new_one() -> None:
    """And what gives it one is traced all the same."""

    class Giving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unknown, self.last = nn.Linear(4, 4), Unknown(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(self.unknown(self.first(x), torch.zeros(4)))
            return result

    model, x = Giving().eval(), torch.randn(3, 4)
    gm = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(gm(x), model(x))
    assert [*gm.leaves] == ["unknown"] and len(gm.regions()) == 2


@pytest.mark.parametrize(
    "made",
    (
        lambda: torch.ones(3).expand(2, 3),
        lambda: torch.arange(12.0)[1:9:2],
        lambda: torch.ones(2, 3).t(),
        lambda: torch.arange(9.0).as_strided((2, 2, 2), (2, 0, 1), 1),
    ),
)
def test_strides_of_what_is_made_are_kept(made: Callable[[], Tensor]) -> None:
    model = Making(lambda x, m: (x, made())).eval()
    gm = zendnn_cffi.optimize(model, tune="off")
    x, expected = torch.randn(3, 4), made()
    (_, first), (_, second) = gm(x), gm(x)
    assert torch.equal(first, expected) and first.stride() == expected.stride()
    assert first.data_ptr() != second.data_ptr()


def test_what_is_returned_twice_is_one_tensor_and_views_share_memory() -> None:
    def several(x: Tensor, m: Any) -> tuple[Any, ...]:
        made, flags = torch.eye(4), torch.ones(3, dtype=torch.bool)
        return x, made, {"again": made, "part": made[1:, ::2]}, made.view(torch.int32), flags, flags

    gm = zendnn_cffi.optimize(Making(several).eval(), tune="off")
    x = torch.randn(3, 4)
    for _ in range(2):
        _, made, others, _, flags, again = gm(x)
        assert others["again"] is made and flags is again
        made.mul_(3)
        assert torch.equal(made, 3 * torch.eye(4)) and torch.equal(others["part"], 3 * torch.eye(4)[1:, ::2])
