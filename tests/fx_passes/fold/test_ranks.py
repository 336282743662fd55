"""What a graph takes for granted of its arguments' dimensions: other calls are eager's, errors too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import zendnn_cffi
from fx_passes.fold.ranks import assume_ranks
from fx_passes.normalize import normalize
from fx_passes.trace.assumptions import Assumption
from tests.support.graphs import after, check_equal, count, image, model_of
from tests.tolerance import assert_close


def by_function(m: Any, y: Tensor) -> Tensor:
    return F.batch_norm(y, m.n.running_mean, m.n.running_var, m.n.weight, m.n.bias)


def conv(n: int, *sizes: int, transposed: bool = False, **options: Any) -> nn.Module:
    kinds = (
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        if transposed
        else (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    )
    return kinds[n - 1](*sizes, **options)


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "behind a convolution": lambda n: model_of(
        lambda m, x: m.n(m.c(x)), c=conv(n, 4, 8, 3, padding=1), n=NORMS[n - 1](8)
    ),
    "behind a deconvolution": lambda n: model_of(
        lambda m, x: m.n(m.c(x)), c=conv(n, 4, 8, 3, padding=1, transposed=True), n=NORMS[n - 1](8)
    ),
    "by a function": lambda n: model_of(
        lambda m, x: by_function(m, m.c(x)), c=conv(n, 4, 8, 3, padding=1), n=NORMS[n - 1](8)
    ),
    "before a convolution": lambda n: model_of(lambda m, x: m.c(m.n(x)), n=NORMS[n - 1](4), c=conv(n, 4, 8, 1)),
    "of a function before one": lambda n: model_of(
        lambda m, x: m.c(by_function(m, x)), n=NORMS[n - 1](4), c=conv(n, 4, 8, 1)
    ),
}


def outcome(model: nn.Module, *inputs: Any) -> Tensor | tuple[type[Exception], str]:
    """What a call returns, or its error."""
    try:
        with torch.no_grad():
            found: Tensor = model(*inputs)
            return found
    except Exception as error:
        return type(error), str(error)


def assert_same(ours: nn.Module, model: nn.Module, *inputs: Any) -> None:
    expected, found = outcome(model, *inputs), outcome(ours, *inputs)
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), found
        assert_close(found, expected, k=512)
    else:
        assert found == expected


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("case", MODELS)
def test_what_has_no_batch_is_not_normalized_by_channel(case: str, n: int) -> None:
    model = MODELS[case](n)
    gm = zendnn_cffi.optimize(model.float(), tune="off")
    assert gm._source[0].assumed == (Assumption("x", (), n + 2),)
    assert count(gm)["batch_norm"] == 0
    channels = 4 if "before" in case else 8
    batch, alone = torch.randn(2, 4, *(channels,) * n), torch.randn(4, *(channels,) * n)  # as many rows as channels
    for x in (batch, alone, alone[..., :3], batch[0, 0]):
        assert_same(gm, model, x)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_where_shapes_are_known_nothing_is_folded_that_has_no_batch(n: int) -> None:
    model = MODELS["by a function"](n).float()
    x = torch.randn(4, *(8,) * n)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="zendnn")
    assert_same(compiled, model, x)
    assert_same(compiled, model, torch.randn(2, 4, *(8,) * n))


@pytest.mark.parametrize("n", [2, 3])
def test_a_layer_of_one_number_of_dimensions_refuses_others(n: int) -> None:
    model = model_of(lambda m, x: m.n(x).relu(), n=NORMS[n - 1](8)).float()
    gm = zendnn_cffi.optimize(model, tune="off")
    for shape in ((2, 8, *(8,) * n), (8,) * (n + 1), (8, 8)):
        assert_same(gm, model, torch.randn(shape))


SOURCES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Assumption]] = {
    "of a list": (lambda m, x: m.n(m.c(x[1])), ([0, image(2, 4, 8)],), Assumption("x", (("item", 1),), 3)),
    "of a dict": (lambda m, x: m.n(m.c(x["a"])), ({"a": image(2, 4, 8)},), Assumption("x", (("item", "a"),), 3)),
    "with one more": (lambda m, x: m.n(m.c(x.relu().unsqueeze(1))), (image(2, 8),), Assumption("x", (), 2)),
    "with one fewer": (lambda m, x: m.n(m.c(x.relu()[:, 0])), (image(2, 3, 4, 8),), Assumption("x", (), 4)),
    "of pieces": (
        lambda m, x: m.n(m.c(torch.cat([x[:, 0:1] * 2, x.relu()[:, 1:]], 1))), (image(2, 4, 8),), Assumption("x", (), 3)
    ),
    "of the other argument": (lambda m, x, y: m.n(m.c(y)) + x, (0.5, image(2, 4, 8)), Assumption("y", (), 3)),
}  # fmt: skip


@pytest.mark.parametrize("case", SOURCES)
def test_what_decides_is_found(case: str) -> None:
    forward, inputs, assumption = SOURCES[case]
    channels = 1 if case == "with one more" else 4
    model = model_of(forward, c=nn.Conv1d(channels, 8, 3), n=nn.BatchNorm1d(8))
    gm: Any = after("fold_batch_norm", model)
    assert gm._source[0].assumed == (assumption,)
    assert count(gm)["batch_norm"] == 0
    gm.recompile()
    check_equal(model, gm, *inputs)


REFUSED: dict[str, Callable[..., Any]] = {
    "two arguments": lambda m, x, y: m.n(m.c(x + y)),
    "any of several ranks would do": lambda m, x: m.n(m.c(x * m.w)),
    "of what has no path": lambda m, x, *more: m.n(m.c(more[0])),
    "a function that is not known": lambda m, x: m.n(m.c(torch.fft.fft(x).real)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nothing_is_assumed_where_it_does_not_follow(case: str) -> None:
    model = model_of(REFUSED[case], c=nn.Conv1d(4, 8, 3), n=nn.BatchNorm1d(8))
    model.register_buffer("w", torch.ones(1, 4, 1, dtype=torch.float64))
    gm: Any = after("fold_batch_norm", model)
    assert gm._source[0].assumed == ()
    assert count(gm)["batch_norm"] == 1


LINEAR: dict[str, Callable[..., Any]] = {
    "behind": lambda m, x: m.n(m.l(x)),
    "before": lambda m, x: m.l(m.n(x)),
    "behind an activation": lambda m, x: m.l(m.n(m.l(x).relu())),
}


@pytest.mark.parametrize("case", LINEAR)
def test_a_linear_beside_it_takes_rows(case: str) -> None:
    """Of [N, 8, 8] the norm takes the middle for channels: such calls are plain PyTorch's."""
    model = model_of(LINEAR[case], l=nn.Linear(8, 8), n=nn.BatchNorm1d(8)).float()
    gm = zendnn_cffi.optimize(model, tune="off")
    assert gm._source[0].assumed == (Assumption("x", (), 2),)
    assert count(gm)["batch_norm"] == 0
    for shape in ((3, 8), (1, 8), (3, 8, 8), (3, 5, 8), (8,)):
        assert_same(gm, model, torch.randn(shape))


def test_rows_of_embeddings_have_one_dimension_more() -> None:
    def forward(m: Any, i: Tensor, x: Tensor) -> Any:
        return m.o(m.n(m.l(torch.cat([m.e(i[:, 0]), m.e(i[:, 1]), x], 1)).relu()))

    parts = {"e": nn.Embedding(7, 3), "l": nn.Linear(8, 8), "n": nn.BatchNorm1d(8), "o": nn.Linear(8, 4)}
    model = model_of(forward, **parts).float()
    gm = zendnn_cffi.optimize(model, tune="off")
    assert gm._source[0].assumed == (Assumption("i", (), 2),) and count(gm)["batch_norm"] == 0
    assert_same(gm, model, torch.randint(0, 7, (5, 2)), torch.randn(5, 2))


def test_a_module_that_compares_no_call_assumes_nothing() -> None:
    gm = normalize(fx.symbolic_trace(MODELS["behind a convolution"](2)))
    assert not any("rank" in node.meta for node in assume_ranks(gm).graph.find_nodes(op="placeholder"))


def test_it_holds_by_name_and_behind_several_arguments() -> None:
    model = model_of(lambda m, x, *more, y=None: m.n(m.c(x)), c=nn.Conv1d(4, 8, 3), n=nn.BatchNorm1d(8)).float()
    gm = zendnn_cffi.optimize(model, tune="off")
    batch, alone = torch.randn(2, 4, 10), torch.randn(4, 10)
    for inputs in ((batch,), (batch, 1), (alone, 1)):
        assert_same(gm, model, *inputs)
    with torch.no_grad():
        for x in (batch, alone):
            assert_close(gm(x=x), model(x=x), k=512)


def test_copies_and_files_rest_on_it(tmp_path: Path) -> None:
    model = MODELS["behind a convolution"](1).float()
    gm = zendnn_cffi.optimize(model, tune="off")
    batch, alone = torch.randn(2, 4, 8), torch.randn(4, 8)
    with torch.no_grad():
        gm(batch)
    for other in (copy.deepcopy(gm), copy.copy(gm)):
        assert_same(other, model, alone)
    zendnn_cffi.save(gm, tmp_path / "model.safetensors")
    loaded = zendnn_cffi.load(tmp_path / "model.safetensors")
    assert_same(loaded, model, batch)
    with pytest.raises(ValueError, match="saved for other arguments"):
        loaded(alone)


def test_it_is_found_again_where_the_tree_was_changed() -> None:
    model = MODELS["behind a convolution"](1).float()
    gm = zendnn_cffi.optimize(model, tune="off")
    gm.n = nn.BatchNorm1d(8).eval()
    model = copy.deepcopy(model)
    model.n = gm.n
    for _ in range(3):
        for x in (torch.randn(2, 4, 8), torch.randn(4, 8)):
            assert_same(gm, model, x)
    assert gm._source[0].assumed == (Assumption("x", (), 3),)
