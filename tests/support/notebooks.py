"""Run a notebook in a kernel of this interpreter, and read what its cells printed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def execute(name: str, folder: Path, shorter: Mapping[str, str] | None = None, threads: int | None = None) -> Any:
    """Return the notebook after running all its cells.

    folder   where kernels are registered; must be empty
    shorter  source -> what stands for it, so that less is computed; each occurs once
    threads  of the kernel (None: as many as here)
    """
    kernels = folder / "kernels" / "python3"
    kernels.mkdir(parents=True)
    command = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (kernels / "kernel.json").write_text(f'{{"argv": {command}, "display_name": "Python 3", "language": "python"}}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(kernels.parents[1]))
        patch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        if threads is not None:
            patch.setenv("OMP_NUM_THREADS", str(threads))
        notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
        for old, new in (shorter or {}).items():
            (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and old in cell.source]
            cell.source = cell.source.replace(old, new)
        resources = {"metadata": {"path": str(NOTEBOOKS)}}
        client = NotebookClient(notebook, timeout=600, startup_timeout=300, resources=resources)
        return client.execute()


def text_of(cell: Any) -> str:
    """Return everything a cell printed or displayed as text or HTML."""
    parts = []
    for output in cell.get("outputs", ()):
        parts.append(output.get("text", ""))
        parts += [str(value) for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(part.rstrip("\n") for part in parts if part)


def outputs_containing(executed: Any, source: str) -> str:
    """Return the output of the only cell whose source contains `source`."""
    (cell,) = [cell for cell in executed.cells if cell.cell_type == "code" and source in cell.source]
    return text_of(cell)


def number_after(text: str, label: str) -> float:
    """Return the number that follows `label`."""
    return float(text.split(label)[1].split()[0])
