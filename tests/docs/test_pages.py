"""The code of every page runs as it stands there, and every link between pages leads somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zendnn_cffi
from fx_passes.pipeline import PASSES, PlainRegion, cutting_passes
from tests.support.torchvision_models import import_torchvision

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


# The names that a page's first block takes for the reader's own.
READERS_OWN = {
    "README.md": """
import torch
from torch import nn
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()
images = torch.randn(2, 3, 8, 8)
del torch, nn
""",
}
WITH_CODE = [page for page in PAGES if python_blocks(page)]


@pytest.fixture
def as_installed() -> Iterator[None]:
    """The backend is registered, as the entry points of an installed package do it; the compiler begins anew."""
    import_torchvision()  # whichever build of it is there; transformers imports it, too
    zendnn_cffi.backend.register()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def page_of(page: Path) -> Any:
    """A parameter. Lines of first_lines.md assert that layers run in ZenDNN: with AVX2 alone, PyTorch may be faster."""
    marks = [pytest.mark.needs("avx512")] if page.name == "first_lines.md" else []
    return pytest.param(page, marks=marks, id=str(page.relative_to(ROOT)))


@pytest.mark.parametrize("page", [page_of(page) for page in WITH_CODE])
@pytest.mark.usefixtures("as_installed")
def test_code_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # pages write files
    names: dict[str, Any] = {"__name__": "example"}
    exec(READERS_OWN.get(str(page.relative_to(ROOT)), ""), names)
    for number, block in enumerate(python_blocks(page), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    if page.name == "README.md":
        assert "implementation" in capsys.readouterr().out  # the table that explain prints
        x, w, b = names["x"], names["w"], names["b"]
        assert torch.allclose(names["y"], torch.nn.functional.conv2d(x, w, b, padding=1), atol=1e-3)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_all_python_is_in_blocks_that_run(page: Path) -> None:
    """None is indented text, or in a block of another name."""
    outside = re.sub(r"^```python\n.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(
        r"^(?: {4}|\t)?(?:>>> |import |from \w+ import |\w+ = \w+\.\w+\().*", outside, flags=re.MULTILINE
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def test_the_oldest_pytorch_is_the_one_declared() -> None:
    declared = re.search(r'"torch>=([\d.]+),<3"', (ROOT / "pyproject.toml").read_text())
    stated = re.search(
        r"PyTorch ([\d.]+) or newer is needed, and the tests ran with ([\d.]+)", (ROOT / "README.md").read_text()
    )
    assert declared and stated and stated[1] == declared[1]
    assert stated[2].startswith(f"{declared[1]}.")  # the oldest one was run


def test_every_pass_is_listed_in_order() -> None:
    text = (ROOT / "docs" / "passes.md").read_text()
    passes = (*PASSES, *cutting_passes(torch.nn.Module(), PlainRegion))
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| `([\w/]+\.py)` \|$", text, flags=re.MULTILINE)
    assert rows == [(each.__name__, f"{each.__module__.replace('.', '/')}.py") for each in passes]


# Files of PyTorch and of an installed package, which pages name too.
ELSEWHERE = {"_blis.py", "_onednn.py", "_zendnn.py", "minifier_launcher.py", "repro.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", page.read_text())) - ELSEWHERE
    folders = (ROOT, ROOT / "fx_passes", ROOT / "zendnn_cffi", page.parent)
    assert not [name for name in named if not any((folder / name).is_file() for folder in folders)]
