"""The quick-start notebook runs from top to bottom, and its outputs say what the text around them claims."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the notebook after running all its cells in a kernel of this interpreter."""
    kernels = tmp_path_factory.mktemp("jupyter") / "kernels" / "python3"
    kernels.mkdir(parents=True)
    command = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (kernels / "kernel.json").write_text(f'{{"argv": {command}, "display_name": "Python 3", "language": "python"}}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(kernels.parents[1]))
        patch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
        return client.execute()


def text_of(cell: Any) -> str:
    """Return everything a cell printed or displayed as text or HTML."""
    parts = []
    for output in cell.get("outputs", ()):
        parts.append(output.get("text", ""))
        parts += [str(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(parts)


def outputs_containing(executed: Any, source: str) -> str:
    """Return the output of the only cell whose source contains `source`."""
    (cell,) = [cell for cell in executed.cells if cell.cell_type == "code" and source in cell.source]
    return text_of(cell)


def number_after(text: str, label: str) -> float:
    return float(text.split(label)[1].split()[0])


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
