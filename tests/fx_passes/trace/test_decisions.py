"""The example answers what a forward asks of sizes, dtypes and devices; the graph is for calls with these answers."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zendnn_cffi
from fx_passes.trace.decisions import DECIDED, QUESTIONS, Undecided, decided
from fx_passes.trace.trace import retrace
from tests.tolerance import assert_close

Ask = Callable[[Tensor], Any]
SHAPE = (2, 4, 6, 6)


class Asking(nn.Module):
    """A convolution, then what the answer to a question about its result makes of that."""

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.conv, self.ask = nn.Conv2d(4, 4, 3, padding=1), ask

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y * 2 if self.ask(y) else y.relu()


class Padding(nn.Module):
    """Pads to whole windows, and attends within each."""

    def __init__(self, window: int = 4) -> None:
        super().__init__()
        self.window, self.conv, self.linear = window, nn.Conv2d(8, 8, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, 8, L, 1]"""
        x = self.conv(x).flatten(2).transpose(1, 2)
        n, length, width = x.shape
        if missing := (self.window - length % self.window) % self.window:
            x = F.pad(x, (0, 0, 0, missing))
        x = self.linear(x).view(n, -1, self.window, width)
        x = (x @ x.transpose(-1, -2)).softmax(-1) @ x
        return x.reshape(n, -1, width)[:, :length]


def _key(y: Tensor) -> bool:
    return {"6x6": True}.get(f"{y.shape[2]}x{y.shape[3]}", False)


def _looked_up(y: Tensor) -> bool:
    return {(6, 6): True}.get((y.shape[2], y.shape[3]), False)


def _loops(y: Tensor) -> bool:
    total = 0
    for size in y.shape[2:]:
        total = total + size
    return total == 12


# a question -> sizes for which the answer is the example's, and for which it is another
ASKED: dict[str, tuple[Ask, tuple[int, ...], tuple[int, ...]]] = {
    "bool": (lambda y: y.shape[-1] > 5, (3, 4, 9, 9), (2, 4, 5, 5)),
    "size as bool": (lambda y: y.size(3) % 5, (3, 4, 6, 6), (2, 4, 5, 5)),
    "int": (lambda y: int(math.sqrt(y.shape[2] * y.shape[3])) == 6, (3, 4, 4, 9), (2, 4, 5, 5)),
    "float": (lambda y: float(y.shape[2]) == 6.0, (3, 4, 6, 2), (2, 4, 5, 5)),
    "len": (lambda y: len(y) == 2, (2, 4, 3, 3), (3, 4, 6, 6)),
    "len of sizes": (lambda y: len(y.shape) == 4, (3, 4, 7, 7), (4, 6, 6)),
    "text": (lambda y: str(y.shape[2]) == "6", (3, 4, 6, 2), (2, 4, 5, 5)),
    "text of sizes": (lambda y: str(y.shape[2:]) == "torch.Size([6, 6])", (3, 4, 6, 6), (2, 4, 5, 5)),
    "sizes": (lambda y: y.shape[2:] == (6, 6), (3, 4, 6, 6), (2, 4, 5, 5)),
    "formatted": (_key, (3, 4, 6, 6), (2, 4, 5, 5)),
    "hash": (_looked_up, (3, 4, 6, 6), (2, 4, 5, 5)),
    "sizes one after the other": (_loops, (3, 4, 6, 6), (2, 4, 5, 5)),
    "contains": (lambda y: 6 in y.shape, (2, 4, 6, 6), (2, 4, 5, 5)),
    "unpacked": (lambda y: [*y.shape][2] == 6, (3, 4, 6, 2), (2, 4, 5, 5)),
    "rows": (lambda y: [row + 0 for row in y][-1].shape[0] == 4, (2, 4, 3, 3), (3, 4, 6, 6)),
    "numel": (lambda y: y.numel() == 288, (1, 4, 12, 6), (2, 4, 5, 5)),
    "dim": (lambda y: y.dim() == 4, (3, 4, 7, 7), (4, 6, 6)),
    "class of a part": (lambda y: isinstance(y.size()[1:][0], int) and y.shape[3] == 6, (3, 4, 2, 6), (2, 4, 5, 5)),
}  # fmt: skip


def image(n: int, length: int) -> Tensor:
    return torch.randn(n, 8, length, 1)


def optimized(model: nn.Module, *example: Tensor, **options: Any) -> Any:
    torch.manual_seed(0)
    return zendnn_cffi.optimize(model.eval(), example, tune="off", **options)


def serves(gm: Any, *args: Tensor) -> bool:
    """Whether the module's own graph computes this call."""
    return gm._source[0].arrange(args, {}) is not None


def same(gm: Any, model: nn.Module, *args: Tensor) -> None:
    with torch.no_grad():
        result, expected = gm(*args), model(*args)
    assert result.dtype == expected.dtype and result.shape == expected.shape
    assert_close(result, expected.double(), k=64)


@pytest.mark.parametrize("name", ASKED)
def test_the_example_answers(name: str) -> None:
    ask, alike, other = ASKED[name]
    model = Asking(ask)
    gm = optimized(model, torch.randn(SHAPE))
    assert decided(gm._source[0].graph) and gm._source[0].decided_by is not None
    assert len(gm.regions()) == 1 and not gm.leaves
    for shape, by_graph in ((SHAPE, True), (alike, True), (other, False)):
        x = torch.randn(shape)
        assert serves(gm, x) == by_graph, shape
        same(gm, model, x)


def test_devices_and_dtypes() -> None:
    model = Asking(lambda y: str(y.device) == "cpu" and y.device.type == "cpu" and y.dtype == torch.float32)
    gm = optimized(model, torch.randn(SHAPE))
    answers = [answer for node in decided(gm._source[0].graph) for answer in node.meta[DECIDED].values()]
    assert "cpu" in answers and len(gm.regions()) == 1
    same(gm, model, torch.randn(SHAPE))


@pytest.mark.parametrize(
    "ask",
    (
        lambda y: y.sum() > 0,
        lambda y: int(y.sum()) > 0,
        lambda y: y.stride(0) > 1,
        lambda y: y.is_contiguous(),
        lambda y: y.requires_grad,
        lambda y: torch.equal(y, y),
        lambda y: y.sum().item() > 0,
        lambda y: y.element_size() == 4,
    ),
)
def test_what_no_size_tells_is_not_answered(ask: Ask) -> None:
    """Meta tensors have other strides, or none of the numbers."""
    model, x = Asking(ask), torch.randn(SHAPE)
    gm = optimized(model, x)
    assert gm._source[0].decided_by is None
    for each in (x, -x, torch.randn(3, 4, 5, 5), x.transpose(2, 3)):
        same(gm, model, each)


@pytest.mark.parametrize("shape", ((2, 6, 8), (2, 8), (1, 2, 3, 4, 5)), ids=str)
def test_what_are_no_images_is_exported(shape: tuple[int, ...]) -> None:
    """Sequences and caches come with many sizes."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(1, 1, 1), nn.Linear(shape[-1], 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x if x.shape[0] < 9 else x.relu())

    model, x = Last(), torch.randn(shape)
    gm = optimized(model, x)
    assert gm._source[0].guards is not None and gm._source[0].decided_by is None
    same(gm, model, x)


def test_sizes_changed_in_place() -> None:
    class Squeezing(Asking):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x) * 2
            y.unsqueeze_(0)
            return y + 1 if y.shape[0] == 1 else y

    model, x = Squeezing(bool), torch.randn(SHAPE)
    gm = optimized(model, x)
    assert gm._source[0].decided_by is None
    same(gm, model, x)


@settings(deadline=None, max_examples=12)
@given(sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=2, max_size=5))
def test_calls_of_all_sizes(sizes: list[tuple[int, int]]) -> None:
    model = Padding()
    gm = optimized(model, image(*sizes[0]))
    assert gm.regions()
    for n, length in (*sizes, *sizes):
        same(gm, model, image(n, length))


def test_other_sizes_have_further_graphs() -> None:
    """torch.export makes the second, which may be for more sizes; the example decides again for those that follow."""
    model = Asking(lambda y: int(math.sqrt(y.shape[2])) % 2)
    gm = optimized(model, torch.randn(SHAPE))
    for size in (9, 9, 9, 16, 16, 16, 25, 25):
        same(gm, model, torch.randn(2, 4, size, size))
    further = [module._source[0] for module in gm.call_kinds.modules]
    assert further[0].guards is not None
    assert serves(gm.call_kinds.modules[0], torch.randn(2, 4, 9, 9))
    assert "decided which way forward goes" in str(zendnn_cffi.explain(gm))


def test_many_sizes_have_a_graph_of_torch_export() -> None:
    """Which compares symbols; sizes without answers are followed once."""
    model = Asking(lambda y: y.shape[-1] > 1)
    gm = optimized(model, torch.randn(SHAPE))
    refusals = gm._source[0].refusals
    for size in (6, 7, 8, 9, 10, 11, 7, 12):
        same(gm, model, torch.randn(2, 4, size, size))
        same(gm, model, torch.randn(3, 4, size, size))
    assert [serves(gm, torch.randn(2, 4, size, size)) for size in (6, 7, 8, 9, 13)] == [True, True, True, False, False]
    (further,) = gm.call_kinds.modules
    assert further._source[0].guards is not None and serves(further, torch.randn(2, 4, 13, 13))
    assert gm._calls_of_others == 1
    assert not serves(gm, torch.randn(2, 4, 6, 1))
    refusals.serve_all_sizes()
    assert serves(gm, torch.randn(2, 4, 13, 13)) and not serves(gm, torch.randn(2, 4, 6, 1))
    assert len(refusals._others) == 1


def test_a_batch_of_another_size_keeps_the_graph() -> None:
    model = Padding()
    gm = optimized(model, image(2, 6))
    for n in (1, 2, 5):
        assert serves(gm, image(n, 6))
        same(gm, model, image(n, 6))
    assert not serves(gm, image(2, 8))
    assert not serves(gm, image(2, 6).to(torch.bfloat16))
    for n in range(6, 16):
        assert serves(gm, image(n, 6))


def test_copies_and_changed_layers_keep_the_answers() -> None:
    model, x, other = Padding(), image(2, 6), image(2, 8)
    gm = optimized(model, x)
    for copied in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm)), copy.copy(gm)):
        assert serves(copied, x) and not serves(copied, other)
        same(copied, model, x)
        same(copied, model, other)
    again = retrace(gm._source[0])
    assert again.decided_by is not None and decided(again.graph)  # type: ignore[arg-type]
    gm.linear = nn.Linear(8, 8)
    changed = Padding().eval()
    changed.conv, changed.linear = model.conv, gm.linear
    for _ in range(3):
        same(gm, changed, x)
        same(gm, changed, other)


def test_a_file_has_a_graph_for_all_sizes(tmp_path: Path) -> None:
    model = Padding()
    gm = optimized(model, image(2, 6))
    same(gm, model, image(3, 6))
    zendnn_cffi.save(gm, tmp_path / "padding.zen")
    loaded: Any = zendnn_cffi.load(tmp_path / "padding.zen")
    assert loaded._source[0].decided_by is None and loaded.regions()
    for n in (1, 2, 3, 5):
        same(loaded, model, image(n, 6))
    assert serves(gm, image(2, 6))
    same(gm, model, image(2, 6))


def test_where_there_is_one_graph_it_is_for_all_sizes() -> None:
    """Without parameters there is no other graph."""
    model = Asking(lambda y: y.shape[-1] > 5)
    gm = optimized(model, torch.randn(SHAPE), release_weights=True)
    assert gm._source[0].decided_by is None


def test_without_an_example_the_first_call_is_one() -> None:
    model = Padding().eval()
    gm: Any = zendnn_cffi.optimize(model, tune="off")
    same(gm, model, image(2, 6))
    assert gm._source[0].decided_by is not None and len(gm.regions()) == 1


def test_under_a_mode_plain_pytorch_runs() -> None:
    """Sizes may be symbols there."""
    gm = optimized(Padding(), image(2, 6))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert gm(mode.from_tensor(image(2, 7))).shape == (2, 7, 8)
    assert torch.func.vmap(gm)(torch.randn(3, 2, 8, 6, 1)).shape == (3, 2, 6, 8)


def test_assertions_of_sizes_are_answers() -> None:
    class Checking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            torch._assert(y.shape[2] % 2 == 0, "odd")
            return self.b(y if y.shape[2] > 3 else y.relu())

    model, x = Checking(), image(2, 6)
    gm = optimized(model, x)
    assert len(gm.regions()) == 1 and not gm.graph.find_nodes(op="call_function", target=torch._assert)
    same(gm, model, x)
    with pytest.raises(AssertionError, match="odd"):
        gm(image(2, 7))


def test_no_endless_graph() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(int(x.shape[0])):
                x = x + 1
            return x

    model = Counting()
    gm = optimized(model, torch.zeros(13_000, 1, 1, 1))
    assert gm._source[0].graph is None
    x = torch.zeros(3, 1, 1, 1)
    assert torch.equal(gm(x), model(x))


def _values() -> Iterator[tuple[str, Any]]:
    for question in QUESTIONS:
        for value in (3, 0, 2.5, "a", True, None, torch.Size((2, 3)), (), torch.float32, torch.zeros(2, 3)):
            yield question, value


@pytest.mark.parametrize(("question", "value"), [*_values()], ids=str)
def test_questions_have_plain_answers(question: str, value: Any) -> None:
    try:
        answer = QUESTIONS[question](value)
    except (Undecided, TypeError, ValueError, AttributeError):
        return
    assert not isinstance(answer, Tensor)
