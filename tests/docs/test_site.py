"""The documentation site builds without a warning, its links hold, and its reference has every public name."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import zendnn_cffi

ROOT = Path(__file__).resolve().parents[2]


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what a browser fetches with it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in ("script", "img", "iframe") and "src" in found:
            self.fetched.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.fetched.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_links_and_anchors_hold(site: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > 30
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            known = pages[target].anchors if target in pages else set()
            if not target.is_file() or (anchor and anchor not in known):
                broken.append((path.relative_to(site).as_posix(), link))
    assert not broken


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        assert page.fetched
        elsewhere = [source for source in page.fetched if urlsplit(source).scheme not in ("", "data")]
        missing = [s for s in page.fetched if not urlsplit(s).scheme and not (path.parent / unquote(s)).exists()]
        assert not elsewhere and not missing


def test_every_public_name_is_in_the_reference(site: Path, pages: dict[Path, Page]) -> None:
    anchors = set().union(*(page.anchors for path, page in pages.items() if path.parent.name == "reference"))
    wanted = {f"zendnn_cffi.{name}" for name in zendnn_cffi.__all__}
    for name in ("functional", "descriptors"):
        module = getattr(zendnn_cffi, name)
        wanted |= {f"zendnn_cffi.{name}.{each}" for each in module.__all__ if callable(getattr(module, each))}
    assert not wanted - anchors


def test_search_finds_a_function_by_its_name(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = [entry["location"] for entry in entries if "optimize" in entry["title"]]
    assert "docs/reference/optimize.html#zendnn_cffi.optimize" in found
    assert (site / "search" / "search_index.js").is_file()  # what a browser reads without a server


@pytest.fixture(scope="module")
def markdown() -> Callable[[str], str]:
    """What makes Markdown of docstrings."""
    found: Callable[[str], str] = runpy.run_path(str(ROOT / "docs" / "site" / "docstrings.py"))["markdown"]
    return found


ROWS = """Return it.

model           in evaluation mode
                as [N, C]
release_weights after the call
stride, padding, dilation
                one int
name, source    of `x_y`
Returns         what optimize() returns
"""
MARKDOWN = r"""Return it.

`model`
:   in evaluation mode as \[N, C\]

`release_weights`
:   after the call

`stride, padding, dilation`
:   one int

`name, source`
:   of `x_y`

**Returns**
:   what [optimize()][zendnn_cffi.optimize] returns"""


def test_rows_become_a_list(markdown: Callable[[str], str]) -> None:
    """Also those of names as long as their column, or longer."""
    assert markdown(ROWS.rstrip()) == MARKDOWN


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Two lines of text are\none paragraph, x_y.", r"Two lines of text are one paragraph, x\_y."),
        ("Text:\n    y = f(x)\n", "Text:\n\n```python\ny = f(x)\n```"),
        ("Text.\n\n    f(x)     or other words", "Text.\n\n```text\nf(x)     or other words\n```"),
        ("reoptimize() and zf.load() are others", "reoptimize() and zf.load() are others"),
        (
            "src      [N]\nRaises   it\nMore text follows.",
            "`src`\n:   \\[N\\]\n\n**Raises**\n:   it\n\nMore text follows.",
        ),
    ],
)
def test_text_and_code(markdown: Callable[[str], str], docstring: str, expected: str) -> None:
    assert markdown(docstring) == expected
