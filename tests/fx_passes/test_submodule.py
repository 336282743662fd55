"""A model that is no graph computes by optimized submodules: alike, as it is changed and copied, and explained."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.pipeline import compile_graph
from tests.support.detector import Detector


def pictures(*sides: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(sides))
    return [torch.randn(3, *side, generator=generator) for side in sides]


IMAGES = pictures((8, 9), (12, 11))


def detector() -> nn.Module:
    torch.manual_seed(0)
    return Detector().eval()


def check(fast: nn.Module, model: nn.Module, images: list[Tensor] = IMAGES) -> None:
    """Containers, shapes and numbers are eager's."""
    with torch.no_grad():
        ours, eager = fast(images), model(images)
    assert [type(each) for each in ours] == [dict] * len(images)
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other)


def offloaded(fast: Any) -> dict[str, int]:
    """Submodule -> how many operations of it the engine computes."""
    found = dict.fromkeys(fast.optimized_submodules, 0)
    for node in zendnn_cffi.explain(fast).nodes:
        if node.offloaded:
            found[node.region.partition(".zen_region")[0]] += 1
    return found


def test_backbone_and_head_are_the_engine_s() -> None:
    model = detector()
    fast: Any = zendnn_cffi.optimize(model, (IMAGES,), tune="off")
    check(fast, model)
    check(fast, model, pictures((16, 10)))
    assert {path: len(each.regions()) for path, each in fast.optimized_submodules.items()} == {"backbone": 1, "head": 1}
    assert [*fast.regions()] == ["backbone.zen_region_0", "head.zen_region_0"]
    counts = offloaded(fast)
    assert counts["backbone"] >= 2 and counts["head"] >= 4
    explanation = zendnn_cffi.explain(fast)
    assert "backbone, head" in str(explanation) and explanation.svg()
    assert "ran as plain PyTorch" not in str(explanation)
    assert any(record.region for record in zendnn_cffi.profile(fast, IMAGES, runs=1).records)


def test_without_an_example_those_that_need_none() -> None:
    model = detector()
    fast: Any = compile_graph(model)
    check(fast, model)
    assert [*fast.optimized_submodules] == ["backbone", "spare", "head.towers.0"]


def test_the_tree_is_the_model_s() -> None:
    model = detector()
    fast: Any = zendnn_cffi.optimize(model, (IMAGES,), tune="off")
    assert [*fast.state_dict()] == [*model.state_dict()]
    assert [name for name, _ in fast.named_modules()] == [name for name, _ in model.named_modules()]
    assert "forward" not in model.backbone.__dict__


@pytest.mark.parametrize("again", (copy.copy, copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))))
def test_copies_have_submodules_of_their_own(again: Any) -> None:
    model = detector()
    fast: Any = zendnn_cffi.optimize(model, (IMAGES,), tune="off")
    check(fast, model)
    copied = again(fast)
    check(copied, model)
    assert [*copied.optimized_submodules] == ["backbone", "head"]
    assert copied.optimized_submodules["head"] is not fast.optimized_submodules["head"]
    assert min(offloaded(copied).values()) > 0
    check(fast, model)


def test_what_is_changed_is_noticed() -> None:
    model, other = detector(), Detector().eval()
    fast: Any = zendnn_cffi.optimize(model, (IMAGES,), tune="off")
    check(fast, model)
    with torch.no_grad():
        model.head.towers[0][0].weight.mul_(2.0)  # shared
    for _ in range(3):
        check(fast, model)
    fast.load_state_dict(other.state_dict())
    for _ in range(3):
        check(fast, other)
    assert min(offloaded(fast).values()) > 0
    fast.backbone.act = nn.Tanh()
    other.backbone.act = nn.Tanh()
    for _ in range(3):
        check(fast, other)
    fast.double()
    other.double()
    for _ in range(3):
        check(fast, other, [image.double() for image in IMAGES])


def test_hooks_run_once() -> None:
    model = detector()
    fast: Any = zendnn_cffi.optimize(model, (IMAGES,), tune="off")
    calls: list[str] = []
    fast.head.register_forward_hook(lambda *_: calls.append("head"))
    for _ in range(3):
        check(fast, model)
    assert calls == ["head"] * len(IMAGES) * 3


def test_gradients_go_through_plain_pytorch() -> None:
    model = detector()
    fast: Any = zendnn_cffi.optimize(model, (IMAGES,), tune="off")
    assert not fast(IMAGES)[0]["scores"].requires_grad
    wanted = [image.clone().requires_grad_() for image in IMAGES]
    fast(wanted)[0]["scores"].sum().backward()
    assert wanted[0].grad is not None and bool(wanted[0].grad.any())


def test_weights_are_not_released() -> None:
    model = detector()
    fast: Any = zendnn_cffi.optimize(model, (IMAGES,), tune="off", release_weights=True)
    for _ in range(2):
        check(fast, model)
    assert [*fast.state_dict()] == [*model.state_dict()]
