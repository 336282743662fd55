"""A representative dozen of torchvision's models, right through optimize; all of them are in `make zoo`."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import zendnn_cffi
from demo import vision
from tests.support.answers import TOLERANCE
from tests.zoo.check import CALLS, SETTLE, Times, Verdict, check, in_turns

# One of every kind of network, small ones first.
DOZEN = {
    "alexnet": "large strides, large linear layers",
    "squeezenet1_1": "concatenation of two branches",
    "mobilenet_v2": "depthwise convolutions, clip, linear bottlenecks",
    "mobilenet_v3_small": "hardswish, squeeze-and-excite",
    "shufflenet_v2_x0_5": "channel shuffle: chunk, view, transpose",
    "resnet18": "residual sums",
    "resnext50_32x4d": "grouped convolutions",
    "googlenet": "inception blocks, max pooling with ceil_mode",
    "densenet121": "batch norm before convolution, growing concatenation",
    "efficientnet_b0": "swish, squeeze-and-excite, stochastic depth",
    "regnet_y_400mf": "grouped convolutions with squeeze-and-excite",
    "convnext_tiny": "layer norm over channels, gelu, layer scale",
    "vit_b_32": "attention",
    "swin_t": "shifted windows: roll, pad, relative position bias",
}


@pytest.mark.parametrize("name", DOZEN)
def test_model_is_right(name: str) -> None:
    verdict = check(name, tune="off")  # measured on a busy machine, "auto" might give the model back to PyTorch
    print(verdict)
    assert verdict.error <= TOLERANCE
    assert verdict.offloaded > 0


def test_dozen_names_exist() -> None:
    assert set(DOZEN) <= set(vision.classification_models())


def test_inception_with_its_own_image_size_and_batch() -> None:
    verdict = check("inception_v3", batch=2, tune="off")
    assert verdict.error <= TOLERANCE


@pytest.mark.parametrize("name", ["squeezenet1_1", "mnasnet0_5"])
def test_model_is_right_when_tuned(name: str) -> None:
    verdict = check(name, tune="auto")
    assert verdict.error <= TOLERANCE


@pytest.mark.needs("avx512")
def test_resnet50_runs_all_53_convolutions_in_zendnn() -> None:
    model, images = vision.build("resnet50"), vision.image_batch(1)
    optimized = zendnn_cffi.optimize(model, (images,), tune="off")
    with torch.inference_mode():
        records = zendnn_cffi.profile(optimized, images).records
    assert sum(record.kind == "convolution" for record in records) == 53
    assert all(record.implementation for record in records)


@pytest.mark.parametrize(
    ("optimized_ms", "slower"),
    [
        ([5.0, 5.0, 5.0, 5.0], False),
        ([10.2, 10.2, 10.2, 10.2], False),  # within noise
        ([12.0, 12.0, 12.0, 12.0], True),
        ([9.0, 9.0, 14.0, 14.0], False),  # rounds disagree
        ([9.9, 12.0, 12.0, 12.0], True),
        ([9.0, 9.0, 9.0, 99.0], False),  # one disturbed round
    ],
)
def test_slower_is_said_beyond_noise_alone(optimized_ms: list[float], slower: bool) -> None:
    times = Times.of([20.0] * 4, [10.0] * 4, optimized_ms)
    assert times.slower is slower
    assert (times.eager_ms, times.channels_last_ms) == (20.0, 10.0)
    verdict = Verdict("resnet18", 1e-6, 20, 20, 1.0, times)
    assert verdict.passed and verdict.slower is slower
    assert ("SLOWER" in str(verdict)) is slower


def test_runs_take_turns() -> None:
    calls: list[str] = []
    medians = in_turns({name: partial(calls.append, name) for name in "abc"}, 3)
    turn = SETTLE + CALLS
    assert calls[:3] == ["a", "b", "c"]  # warm
    assert [*calls[3::turn]] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert all(len(rounds) == 3 for rounds in medians.values())


def test_a_region_that_cannot_be_lowered_is_no_right_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr("fx_passes.region.variants.choose_variant", refuse)
    with pytest.raises(UserWarning, match="could not be lowered"):
        check("squeezenet1_1", tune="off")


def test_model_is_compared_with_channels_last() -> None:
    verdict = check("squeezenet1_1", tune="off", rounds=2)
    assert verdict.times is not None
    assert min(verdict.times.eager_ms, verdict.times.channels_last_ms, verdict.times.optimized_ms) > 0
