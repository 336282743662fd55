"""The quick-start notebook runs from top to bottom, and its outputs say what the text around them claims."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.notebooks import execute, number_after, outputs_containing


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook after running all its cells."""
    return execute("quickstart.ipynb", tmp_path_factory.mktemp("jupyter"))


def test_answers_are_right(executed: Any) -> None:
    first = outputs_containing(executed, "fast = zendnn_cffi.optimize(model, (image,))")
    assert number_after(first, "largest output:") < 1e-4
    assert "True" in outputs_containing(executed, "state_dict")
    convolution = outputs_containing(executed, "zf.convolution")
    assert number_after(convolution, "largest output:") < 1e-5


def test_explain_is_shown_as_a_table(executed: Any) -> None:
    shown = outputs_containing(executed, "zendnn_cffi.explain(fast)")
    assert "<table" in shown
    assert "conv" in shown


def test_bf16_error_is_of_the_size_of_eager_bf16s(executed: Any) -> None:
    text = outputs_containing(executed, "fast_bf16 = ")
    assert number_after(text, "optimized bf16:") < 2 * number_after(text, "eager bf16:") + 1e-2


def test_misuse_and_c_calls(executed: Any) -> None:
    assert "Error:" in outputs_containing(executed, 'b.astype("float64")')
    assert "zendnn_engine_create: success" in outputs_containing(executed, "zendnn_engine_create")
    assert "winograd" in outputs_containing(executed, "PrimitiveDesc(operation)")


def test_plot_is_drawn(executed: Any) -> None:
    kinds = [kind for cell in executed.cells for output in cell.get("outputs", ()) for kind in output.get("data", {})]
    assert "image/png" in kinds
