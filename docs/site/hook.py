"""The site's pages: every file where it lies in the repository, and notebooks as pages with their outputs."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "benchmarks/README.md"),
    *("demo/litserve_serving.py", "demo/ray_serving.py", "demo/spark_batches.py"),
)


class NotebookPage(File):
    """A notebook, rendered as a page."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Name all files by their paths in the repository: MkDocs knows those of one folder, by their paths in it."""
    found: list[File] = []
    for file in files:
        if file.src_dir == config.docs_dir:
            uri, inclusion = f"{Path(config.docs_dir).name}/{file.src_uri}", file.inclusion
            file = File.generated(config, uri, abs_src_path=file.abs_src_path, inclusion=inclusion)
        found.append(file)
    found += [File.generated(config, name, abs_src_path=str(ROOT / name)) for name in OUTSIDE]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        uri = path.relative_to(ROOT).as_posix()
        found.append(NotebookPage.generated(config, uri, content=notebook_page(json.loads(path.read_text()))))
    return Files(found)


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        shown = [_output(output) for output in cell.get("outputs", ())]
        parts += [f'<div class="notebook-output">\n{each}\n</div>' for each in shown if each]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    """An output as HTML: its richest form that a page can show; empty where there is nothing to see."""
    data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
    for kind in ("text/html", "image/svg+xml"):
        if kind in data:
            return data[kind]
    for kind in ("image/png", "image/jpeg"):
        if kind in data:
            return f'<img alt="output of the cell above" src="data:{kind};base64,{data[kind].strip()}">'
    text = data.get("text/plain", "".join(output.get("text", ""))).rstrip()
    return f"<pre>{html.escape(text)}</pre>" if text else ""
