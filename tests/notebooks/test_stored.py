"""Notebooks are stored with the outputs of one run from top to bottom, and stay small."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.support.notebooks import NOTEBOOKS

STORED = sorted(NOTEBOOKS.glob("*.ipynb"))
MOST_BYTES = 400_000


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_with_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [output.output_type for cell in cells for output in cell.outputs]
    assert len(kinds) > len(cells) // 2 and "error" not in kinds
    assert not [output for cell in cells for output in cell.outputs if output.get("name") == "stderr"]


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_small(path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES
