"""The demo runs to its end, says that the answers are right, and leaves its picture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from demo import digits, screen, vision

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return what the quick demo prints, without measuring (the machine may be busy), and the folder it writes to."""
    out = tmp_path_factory.mktemp("demo")
    command = [sys.executable, str(ROOT / "demo" / "run.py"), "--quick", "--tune", "off", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONUTF8": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, out


def test_demo_shows_the_real_library(shown: tuple[str, Path]) -> None:
    assert "5.1.0 (zendnn_cffi.lib.zendnn_version())" in shown[0]


def test_demo_keeps_the_digits_right(shown: tuple[str, Path]) -> None:
    assert "optimized, fp32" in shown[0]
    assert "same answer on 450 of 450" in shown[0]


@pytest.mark.needs("avx512")
def test_demo_ran_all_convolutions_in_zendnn(shown: tuple[str, Path]) -> None:
    lines = [line.split() for line in shown[0].splitlines() if " x convolution" in line]
    assert sum(int(words[0]) for words in lines) == 53
    assert all(words[-1] for words in lines)


def test_demo_draws_its_picture(shown: tuple[str, Path]) -> None:
    picture = shown[1] / "resnet50.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_library_prints_no_banner(shown: tuple[str, Path]) -> None:
    assert "Execution has entered" not in shown[0]


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "convnext_tiny"])
def test_random_models_are_well_conditioned(name: str) -> None:
    """float32 must be close to float64, or the models would prove nothing about ours."""
    model, images = vision.build(name), vision.image_batch(1)
    with torch.inference_mode():
        single = model(images)
        double = model.double()(images.double())
    assert (single - double).abs().max() <= 2e-5 * double.abs().max()


def test_build_is_seeded_and_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, second, other = (vision.build("mobilenet_v3_small", seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["classifier.0.weight"], other["classifier.0.weight"])


def test_statistics_are_no_identity() -> None:
    norms = [m for m in vision.build("resnet18").modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        assert norm.running_mean is not None and norm.running_var is not None
        assert not norm.training and norm.momentum == 0.1
        assert norm.running_mean.abs().max() > 0.01
        assert (norm.running_var - 1).abs().max() > 0.01


@pytest.mark.parametrize("side", [33, 224])
def test_photograph_is_normalised(side: int) -> None:
    photograph = vision.photograph("china", side)
    assert photograph.shape == (1, 3, side, side)
    assert photograph.min() > -2.2 and photograph.max() < 2.7


def test_digits_are_split_without_overlap() -> None:
    data = digits.load()
    assert len(data.train_labels) + len(data.test_labels) == 1797
    assert data.train_images.max() <= 1.0


@pytest.mark.parametrize(("share", "filled"), [(-1.0, 0), (0.0, 0), (0.5, 5), (1.0, 10), (7.0, 10)])
def test_bar(share: float, filled: int) -> None:
    assert screen.bar(share, 10).count("█") == filled
