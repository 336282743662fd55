"""The detector notebook learns to find digits, and its boxes are the same before and after."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.notebooks import execute, number_after, outputs_containing


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook after running all its cells, with fewer steps of training.

    On one thread: its training is many short operations, which took four times as long on two.
    """
    shorter = {"steps = 500": "steps = 100", "least=0.75": "least=0.15", "range(20)": "range(3)"}
    return execute("detector.ipynb", tmp_path_factory.mktemp("jupyter"), shorter, threads=1)


def test_one_region_with_the_same_outputs(executed: Any) -> None:
    text = outputs_containing(executed, "fast = zendnn_cffi.optimize(model, (image,))")
    assert number_after(text, "scores: largest error / largest output:") < 1e-4
    assert number_after(text, "boxes: largest error / largest output:") < 1e-4
    assert "convolution" in text


def test_the_same_digits_are_found(executed: Any) -> None:
    eager, ours = outputs_containing(executed, "def judge").splitlines()
    assert eager.split(":")[1].split() == ours.split(":")[1].split()
    assert number_after(eager, "PyTorch:") + number_after(eager, "digits found,") > 10  # after a fifth of the training


def test_boxes_are_drawn_and_times_printed(executed: Any) -> None:
    kinds = [kind for cell in executed.cells for output in cell.get("outputs", ()) for kind in output.get("data", {})]
    assert "image/jpeg" in kinds
    lines = outputs_containing(executed, "half = zendnn_cffi.optimize").splitlines()
    assert len(lines) == 6 and all(line.endswith(" ms") for line in lines)
