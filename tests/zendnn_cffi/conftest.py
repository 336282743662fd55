"""What the binding's tests share: child processes, a C compiler, tables of facts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zendnn_cffi

PACKAGE = Path(zendnn_cffi.__file__).resolve().parent
FACTS = Path(__file__).resolve().parents[3] / "shared" / "zendnn"
# Tables made from the binary by other code, where they lie beside the checkout.
collect_ignore = [] if FACTS.is_dir() else ["test_abi_facts.py"]

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def library() -> Any:
    """The loaded engine: its absence is a failure, not a skip."""
    from zendnn_cffi.engine.library import load

    return load()


@pytest.fixture(scope="session")
def run_python() -> RunPython:
    """Run code in a fresh interpreter that finds this package; environment values None are removed."""

    def run(code: str, *, env: dict[str, str | None] | None = None, package: Path = PACKAGE, check: bool = True) -> Any:
        settings = dict(os.environ, PYTHONPATH=str(package.parent), OMP_NUM_THREADS="2")
        for name, value in (env or {}).items():
            settings.pop(name, None)
            if value is not None:
                settings[name] = value
        done = subprocess.run(
            [sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=300, cwd="/"
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


@pytest.fixture(scope="session")
def compile_c(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile C text into a shared library, or a program with shared=False, and return its path."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "these tests make stand-in libraries: install a C compiler"

    def build(text: str, *, shared: bool = True, name: str = "stub") -> Path:
        folder = tmp_path_factory.mktemp("c")
        source, target = folder / f"{name}.c", folder / (f"{name}.so" if shared else name)
        source.write_text(text)
        flags = ["-shared", "-fPIC"] if shared else []
        subprocess.run([compiler, "-w", *flags, str(source), "-o", str(target)], check=True)
        return target

    return build


@pytest.fixture(scope="session")
def facts() -> Callable[[str], dict[str, Any]]:
    """Return the table of that name: abi (ZenDNN) or aocl (LPGEMM)."""
    return lambda name: json.loads((FACTS / f"{name}.json").read_text())
