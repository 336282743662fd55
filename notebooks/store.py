"""Run notebooks and store them with their outputs: python notebooks/store.py [quickstart ...]"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
_PATH = re.compile(r"(?<![\w./:])/(?:[\w.+-]+/)+(?=[\w.+-])")  # the folders of an absolute path


def run(path: Path) -> Any:
    """Return the notebook after running all its cells."""
    notebook = nbformat.read(path, as_version=4)
    metadata = notebook.metadata
    client = NotebookClient(
        notebook,
        timeout=None,
        startup_timeout=600,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute()
    notebook.metadata = metadata
    return notebook


def clean(notebook: Any) -> Any:
    """Take out of the outputs what is this machine's alone: warnings, folders, and lines that progress left empty."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_noise(output)]
            for output in cell.outputs:
                if output.output_type == "stream":
                    output.text = _PATH.sub(".../", output.text)
    return notebook


def _is_noise(output: Any) -> bool:
    empty = output.output_type == "display_data" and not any(output.data.values())
    return bool(empty or output.get("name") == "stderr")


def main(names: list[str]) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(clean(run(path)), path)
        print("stored:", path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
