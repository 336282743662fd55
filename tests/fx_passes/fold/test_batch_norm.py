"""Batch normalizations computed by their linear neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fx_passes.fold.batch_norm import fold_batch_norm
from fx_passes.graph import inference
from fx_passes.module import OptimizedModule
from tests.support.graphs import after, check, check_equal, check_twice, count, image, model_of, post_ops

BEHIND = {
    "conv1d": (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), (2, 3, 9)),
    "conv2d": (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), (2, 3, 5, 7)),
    "conv2d without bias": (nn.Conv2d(3, 4, (1, 3), bias=False), nn.BatchNorm2d(4), (1, 3, 5, 7)),
    "conv2d grouped": (nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6, eps=0.1), (1, 4, 5, 7)),
    "conv3d": (nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3), (1, 2, 3, 4, 5)),
    "not affine": (nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False), (1, 3, 5, 7)),
    "deconv1d": (nn.ConvTranspose1d(3, 4, 3, stride=2), nn.BatchNorm1d(4), (2, 3, 9)),
    "deconv2d grouped": (
        nn.ConvTranspose2d(4, 6, 3, groups=2, output_padding=1, stride=2),
        nn.BatchNorm2d(6),
        (1, 4, 5, 7),
    ),
}


@pytest.mark.parametrize("case", BEHIND)
def test_folds_into_the_producer(case: str) -> None:
    linear, norm, shape = BEHIND[case]
    model = model_of(lambda m, x: m.n(m.c(x)).relu(), c=linear, n=norm)
    gm = check(model, image(*shape))
    assert count(gm)["batch_norm"] == 0
    assert post_ops(gm) == [("eltwise:relu",)]
    check_twice(after("fold_batch_norm", model), fold_batch_norm)


def test_folds_behind_a_linear_where_there_are_two_dimensions() -> None:
    model = model_of(lambda m, x: m.n(m.l(x.flatten(1))), l=nn.Linear(21, 5), n=nn.BatchNorm1d(5))
    assert count(check(model, image(4, 3, 7)))["batch_norm"] == 0


def test_of_three_dimensions_batch_norm_takes_another_for_the_channels() -> None:
    model = model_of(lambda m, x: m.n(m.l(x)), l=nn.Linear(7, 5), n=nn.BatchNorm1d(5))
    gm: Any = check(model, image(2, 5, 7))  # by the model's own forward: the graph is for rows
    assert count(gm)["batch_norm"] == 0 and gm._source[0].arrange((image(2, 5, 7),), {}) is None
    assert gm._source[0].arrange((image(2, 7),), {}) is not None
    check_equal(model, gm, image(2, 7))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_folds_into_a_convolution_behind_without_padding(groups: int, bias: bool) -> None:
    model = model_of(lambda m, x: m.c(m.n(x)), n=nn.BatchNorm2d(4), c=nn.Conv2d(4, 6, 3, groups=groups, bias=bias))
    gm = check(model, image(2, 4, 7, 5))
    assert count(gm)["batch_norm"] == 0


def test_folds_into_a_linear_behind() -> None:
    model = model_of(lambda m, x: m.l(m.n(x.flatten(1))), n=nn.BatchNorm1d(6), l=nn.Linear(6, 3))
    assert count(check(model, image(5, 2, 3)))["batch_norm"] == 0


def test_the_zeros_of_padding_are_not_normalized() -> None:
    model = model_of(lambda m, x: m.c(m.n(x)), n=nn.BatchNorm2d(3), c=nn.Conv2d(3, 4, 3, padding=1))
    assert count(check(model, image()))["batch_norm"] == 1


def _two_readers(m: Any, x: torch.Tensor) -> Any:
    y = m.c(x)
    return m.n(y), y


REFUSED = {
    "a second reader": _two_readers,
    "something between": lambda m, x: m.n(m.c(x).relu()),
    "the batch's own statistics": lambda m, x: m.own(m.c(x)),
    "training mode of its own": lambda m, x: nn.functional.batch_norm(m.c(x), None, None, training=True),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refuses(why: str) -> None:
    own = nn.BatchNorm2d(3, track_running_stats=False)
    gm = check(model_of(REFUSED[why], c=nn.Conv2d(3, 3, 1), n=nn.BatchNorm2d(3), own=own), image())
    assert count(gm)["fold_bn_weight"] == 0


def test_shared_convolution_folds_once_for_each_norm() -> None:
    model = model_of(
        lambda m, x: m.a(m.c(x)) + m.b(m.c(x)), c=nn.Conv2d(3, 3, 1), a=nn.BatchNorm2d(3), b=nn.BatchNorm2d(3)
    )
    gm = check(model, image())
    assert count(gm)["fold_bn_weight"] == 2


def test_alone_it_takes_the_activation() -> None:
    gm = check(model_of(lambda m, x: m.n(x).relu(), n=nn.BatchNorm2d(3)), image())
    assert post_ops(gm) == [("eltwise:relu",)]


def test_new_weights_are_looked_up_after_load_state_dict() -> None:
    model = model_of(lambda m, x: m.n(m.c(x)), c=nn.Conv2d(3, 3, 1), n=nn.BatchNorm2d(3))
    gm = check(model, image())
    assert isinstance(gm, OptimizedModule)
    other = model_of(type(model).forward, c=nn.Conv2d(3, 3, 1), n=nn.BatchNorm2d(3))
    gm.load_state_dict(other.state_dict())
    check_equal(other, gm, image())


def test_ranks_of_a_residual_network_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each normalization asked down to the first: the square of the depth."""
    rule, asked = inference._rank, list[Any]()

    def spy(node: Any) -> Any:
        asked.append(node)
        return rule(node)

    monkeypatch.setattr(inference, "_rank", spy)

    def nodes_asked(depth: int) -> int:
        blocks = {f"c{n}": nn.Conv2d(4, 4, 3, padding=1) for n in range(depth)}
        norms = {f"n{n}": nn.BatchNorm2d(4) for n in range(depth)}

        def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
            for n in range(depth):
                x = x + m.get_submodule(f"n{n}")(m.get_submodule(f"c{n}")(x))
            return x

        model = model_of(forward, **blocks, **norms)
        asked.clear()
        assert count(check(model, image(1, 4, 5, 5)))["batch_norm"] == 0
        return len(asked)

    assert nodes_asked(16) < 3 * nodes_asked(8)
