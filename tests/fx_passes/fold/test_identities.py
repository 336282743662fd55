"""Operations that return what they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi  # noqa: F401 - the backend
from fx_passes.fold.identities import fold_identities
from fx_passes.pipeline import compile_graph
from tests.support.exported import needs_export
from tests.support.graphs import after, check, check_equal, check_twice, count, image, model_of


class Wide(nn.Module):
    """A model that torch.fx cannot trace, around another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) if needs_export(x) and x.shape[0] < 100 else x


def test_copies_that_only_order_memory_disappear() -> None:
    model = model_of(lambda m, x: m.l(x.transpose(1, 3).contiguous().reshape(2, -1).relu()), l=nn.Linear(189, 2))
    assert count(check(model, image(2, 3, 9, 7)))["contiguous"] == 0
    check_twice(after("fold_identities", model), fold_identities)


def test_copies_whose_strides_can_be_seen_stay() -> None:
    model = model_of(lambda m, x: m.c(x).transpose(1, 3).contiguous(), c=nn.Conv2d(3, 4, 1))
    gm = check(model, image())
    assert gm(image()).is_contiguous()


def _channels_first(m: Any, x: torch.Tensor) -> Any:
    """Tokens made a picture again, which lies in order, and is added to another."""
    n, c, h, w = x.shape
    tokens = m.l(x.permute(0, 2, 3, 1).reshape(n, h * w, c)).reshape(n, h, w, c)
    return tokens.permute(0, 3, 1, 2).contiguous() + x


@pytest.mark.parametrize("last", (lambda m, x: x.relu(), lambda m, x: m.c(x), lambda m, x: torch.sin(m.c(x).abs())))
def test_copies_whose_order_later_results_have_stay(last: Callable[[Any, torch.Tensor], Any]) -> None:
    model = model_of(lambda m, x: last(m, _channels_first(m, x)), l=nn.Linear(3, 3), c=nn.Conv2d(3, 4, 1)).float()
    fast, picture = zendnn_cffi.optimize(model, tune="off"), image(2, 3, 9, 7).float()
    for x in (picture, picture.contiguous(memory_format=torch.channels_last)):
        eager, ours = model(x), fast(x)
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager)
    assert "inner_product" in {node.became for node in zendnn_cffi.explain(fast).nodes}


def test_copies_before_what_makes_rows_disappear() -> None:
    model = model_of(lambda m, x: m.k(_channels_first(m, x).mean((2, 3))), l=nn.Linear(3, 3), k=nn.Linear(3, 2))
    assert count(check(model, image(2, 3, 9, 7)))["contiguous"] == 0


def test_repeated_activations() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        return x.relu().relu(), F.relu6(x).relu(), F.relu6(x).clamp(-1, 7), F.relu6(x).clamp(1, 7)

    assert count(check(model_of(forward), image()))["eltwise"] == 5


def test_a_repeated_activation_that_is_written_to_is_a_copy() -> None:
    """What it repeats has another reader, further down."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        first = x.relu()
        second = first.relu()
        second[0] = 5
        return m.l(first), second

    check(model_of(forward, l=nn.Linear(7, 7)), image(3, 7))


def test_what_makes_integers_floating_point_numbers_is_no_repetition() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y, z = F.relu6(x), x.relu()
        return y.clamp(-1, 7), y.clamp(-1.0, 7.0), y.clamp(min=0.0), F.hardtanh(y, -1.0, 7.0), z.clamp(min=0)

    gm = check(model_of(forward), torch.arange(-3, 9))
    assert count(gm)["eltwise"] == 5  # of the two that repeat one value, the second is another result
    check_equal(model_of(forward), gm, torch.randn(9))


@pytest.mark.parametrize("has_example", (False, True))
def test_the_smallest_integer_has_no_absolute_value(has_example: bool) -> None:
    model, x = model_of(lambda m, x: x.abs().relu()), torch.tensor([-128, -127, 5], dtype=torch.int8)
    fast = zendnn_cffi.optimize(model, (x,) if has_example else None, tune="off")
    assert fast(x).tolist() == model(x).tolist() == [0, 127, 5]


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


COPIES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "times 1": lambda x: x * 1.0,
        "divided by 1": lambda x: x / 1,
        "concat": lambda x: torch.cat((x,)),
        "pad": lambda x: F.pad(x, (0, 0)),
    }
)


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("place", ("input", "buffer", "value"))
def test_copies_of_what_is_written_to_afterwards_stay(place: str, copy: str) -> None:
    """The write changed the copy, too."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        source = {"input": x, "buffer": m.buffer, "value": m.l(x).view(-1)}[place]
        copied = COPIES[copy](source)
        source[:2].add_(3)
        return copied.relu(), source

    def fresh() -> nn.Module:
        model = model_of(forward, l=nn.Linear(7, 7))
        model.register_buffer("buffer", image(2, 7))
        return Wide(model)

    torch.manual_seed(0)
    eager = fresh()
    torch.manual_seed(0)
    gm = compile_graph(fresh(), (image(2, 7),))
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled: Any = torch.compile(fresh(), backend="zendnn", options={"tune": "off"})
    with torch.no_grad():
        for _ in range(2):
            expected = eager(image(2, 7))
            torch.testing.assert_close(gm(image(2, 7)), expected)
            torch.testing.assert_close(compiled(image(2, 7)), expected)


def test_a_repeated_activation_is_another_result() -> None:
    model = model_of(lambda m, x: ((y := m.l(x).relu()), y.relu()), l=nn.Linear(7, 7))
    y, z = check(model, image(2, 7))(image(2, 7))
    assert y.data_ptr() != z.data_ptr()


SAME_MEMORY: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "squeeze": lambda x: x.squeeze(0),
        "permuted twice": lambda x: x.permute(1, 0).permute(1, 0),
        "squeeze of the last": lambda x: torch.squeeze(x, -1),
        "alias": lambda x: torch.ops.aten.alias.default(x),
    }
)


@pytest.mark.parametrize("view", SAME_MEMORY)
@pytest.mark.parametrize("entry", ("example", "compile"))
def test_a_view_of_all_is_a_tensor_of_its_own(entry: str, view: str) -> None:
    """It was the input itself: x.unsqueeze_(0) of the result changed both."""
    model = Wide(model_of(lambda m, x: (SAME_MEMORY[view](x), m.l(x)), l=nn.Linear(7, 7)))
    torch._dynamo.reset()
    fast: Any = (
        torch.compile(model, backend="zendnn", options={"tune": "off"})
        if entry == "compile"
        else compile_graph(model, (image(2, 7),))
    )
    x = image(2, 7)
    with torch.no_grad():
        result, _ = fast(x)
    assert result is not x and result.data_ptr() == x.data_ptr() and result.shape == x.shape
