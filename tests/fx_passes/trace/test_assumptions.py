"""Attributes that users gave tensors: a forward that reads them goes eager's way with each tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.trace.assumptions import EVERY, Assumption, Bare, Present, own_attributes


class Reads(nn.Module):
    """A linear layer, and what read makes of its result and the input."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.read = nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, x)


def caught(m: Any, x: Any) -> Any:
    try:
        return m.a(x) * x.tag
    except AttributeError:
        return -m.a(x)


def by_getter(m: Any, x: Any) -> Any:
    try:
        return m.a(x) * operator.attrgetter("tag")(x)
    except AttributeError:
        return -m.a(x)


def tag_of(x: Any) -> Any:
    return getattr(x, "tag", None)


def by_helper(m: Any, x: Any) -> Any:
    tag = tag_of(x)
    return m.a(x) if tag is None else m.a(x) * tag


def deletes(m: Any, x: Any) -> Any:
    if hasattr(x, "tag"):
        del x.tag
    return m.a(x)


def gives_input(m: Any, x: Any) -> Any:
    x.tag = 3.0
    return m.a(x) * x.tag


def gives_result(m: Any, x: Any) -> Any:
    y = m.a(x)
    y.tag = 3.0
    return y


READS: dict[str, Callable[[Any, Any], Any]] = {
    "getattr": lambda m, x: m.a(x) * (getattr(x, "tag", None) or 1),
    "hasattr": lambda m, x: m.a(x) if hasattr(x, "tag") else -m.a(x),
    "attribute": lambda m, x: m.a(x) * x.tag,
    "__dict__": lambda m, x: m.a(x) * x.__dict__.get("tag", 2),
    "vars": lambda m, x: m.a(x) if "tag" in vars(x) else -m.a(x),
    "dir": lambda m, x: m.a(x) if "tag" in dir(x) else -m.a(x),
    "of the operand itself": lambda m, x: m.a(x) * (1 if hasattr(x.float(), "tag") else 2),
    "of a parameter": lambda m, x: m.a(x) * getattr(m.a.weight, "tag", 1),
    "of a parameter, missing": lambda m, x: m.a(x) * getattr(m.a.bias, "tag", 1),
    **{function.__name__: function for function in (caught, by_getter, by_helper, deletes, gives_input, gives_result)},
}
# Forwards of which a graph remains, for tensors without attributes.
IN_GRAPH = ("getattr", "hasattr", "caught", "by_helper", "of the operand itself", "of a parameter, missing")


def tensors() -> list[Tensor]:
    torch.manual_seed(1)
    given = [torch.randn(2, 4) for _ in range(4)]
    given[1].tag, given[2].tag = 7.0, -3.0  # type: ignore[attr-defined]
    return given


def outcome(function: Any, x: Tensor) -> Any:
    try:
        y = function(x)
    except Exception as error:
        return type(error)
    return y, vars(y), vars(x)


@pytest.mark.parametrize("example", (None, 0, 1), ids=("symbolic", "bare", "given"))
@pytest.mark.parametrize("name", READS)
def test_forwards_that_read_attributes(name: str, example: int | None) -> None:
    model = Reads(READS[name]).eval()
    if "parameter" in name:
        model.a.weight.tag = 5.0  # type: ignore[assignment]
    fast: Any = zendnn_cffi.optimize(model, None if example is None else (tensors()[example],), tune="off")
    with torch.no_grad():
        for ours, theirs in zip(tensors(), tensors(), strict=True):
            expected, found = outcome(model, theirs), outcome(fast, ours)
            if isinstance(expected, type):
                assert found is expected
                continue
            torch.testing.assert_close(found[0], expected[0])
            assert found[1:] == expected[1:]
    if example == 0 and name in IN_GRAPH:
        assert not fast.leaves and fast.regions()
    elif example == 1 and "parameter" not in name:
        assert fast.leaves and not fast.regions()


def test_the_condition_is_saved(tmp_path: Any) -> None:
    fast: Any = zendnn_cffi.optimize(Reads(READS["hasattr"]).eval(), tune="off")
    bare, given = tensors()[:2]
    with torch.no_grad():
        fast(bare)
    zendnn_cffi.save(fast, tmp_path / "model.safetensors")
    arrange = zendnn_cffi.load(tmp_path / "model.safetensors")._source[0].arrange
    assert arrange((bare,), {}) is not None
    assert arrange((given,), {}) is None


def test_what_pytorch_gives_tensors_is_left_out() -> None:
    marked = torch.randn(2, 4)
    torch._dynamo.mark_dynamic(marked, 0)
    assert not own_attributes([marked, nn.Buffer(torch.ones(1)), nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize("path", ((), (("item", 0),)))
def test_of_containers(path: Any) -> None:
    bare, given = tensors()[:2]
    for name, values in ((EVERY, {"x": [bare]}), ("x", {"x": [bare]})):
        assert Assumption(name, path if name != EVERY else (), Bare).holds(values)
    assert not Assumption(EVERY, (), Bare).holds({"x": [bare], "y": {"z": given}})
    assert Assumption("x", (("attr", "tag"),), Present).holds({"x": given})
    assert not Assumption("x", (("attr", "tag"),), Present).holds({"x": bare})
