"""The INT8 notebook: digits are read as well in integers, and sentences rank alike."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.notebooks import execute, number_after, outputs_containing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook after running all its cells, with two layers of the encoder, fewer sentences and rounds."""
    shorter = {
        "calibrating = 8": "calibrating = 2",
        "rounds=30": "rounds=5",
        "AutoModel.from_pretrained(MODEL_DIR)": "AutoModel.from_pretrained(MODEL_DIR, num_hidden_layers=2)",
    }
    return execute("int8.ipynb", tmp_path_factory.mktemp("jupyter"), shorter)


def test_digits_are_read_as_well(executed: Any) -> None:
    text = outputs_containing(executed, "taken = milliseconds(runs, batch)")
    eager, floats, integers = (
        number_after(text, name) for name in ("eager PyTorch", "zendnn_cffi, float32", "zendnn_cffi, int8")
    )
    assert eager > 97 and floats == eager
    assert integers >= eager - 0.3
    report = outputs_containing(executed, "print(quantized.report)")
    assert "4 of 4 layers in int8" in report


def test_vectors_are_near(executed: Any) -> None:
    text = outputs_containing(executed, "mixed = zendnn_cffi.quantize(encoder, calibration, budget=24)")
    cosines = [float(found) for found in re.findall(r"cosine to eager ([\d.]+)", text)]
    assert len(cosines) == 4
    assert cosines[1] > 0.9999 and cosines[2] > 0.99 and cosines[3] > 0.99


def test_the_frontier_is_drawn_and_what_stayed_float_is_listed(executed: Any) -> None:
    (cell,) = [cell for cell in executed.cells if "report.frontier" in cell.source]
    assert any("image/png" in output.get("data", {}) for output in cell.outputs)
    vectors = outputs_containing(executed, "mixed = zendnn_cffi.quantize(encoder, calibration, budget=24)")
    found = re.search(r"int8, (\d+) of (\d+) layers", vectors)
    assert found is not None
    listed = outputs_containing(executed, 'layer.computes_in != "int8"').splitlines()
    assert len(listed) >= int(found[2]) - int(found[1])  # one that was chosen may still be faster in float


def test_rankings(executed: Any) -> None:
    lines = outputs_containing(executed, "queries = [").splitlines()[-3:]
    counts = [int(number_after(line, "same order for")) for line in lines]
    assert counts[0] == 4 and counts[2] >= 2  # two layers know less of meanings, so more scores are nearly equal
