"""Nothing passed to the functions and objects may kill the process or give a wrong number: random calls in children.

More of them: ZENDNN_CFFI_FUZZ_CALLS=50000 pytest tests/zendnn_cffi/functional/test_fuzz.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("fuzz.py")
CALLS = int(os.environ.get("ZENDNN_CFFI_FUZZ_CALLS", "400"))


def run(kind: str, seed: int, trace: Path, threads: int) -> tuple[int, int]:
    """Return how many calls returned and how many were refused; fails where the child does."""
    paths = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[3])) if p)
    child = subprocess.run(
        [sys.executable, str(CHILD), kind, str(seed * 10_000_000), str(CALLS), str(trace)],
        capture_output=True,
        text=True,
        timeout=1200 + CALLS,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)},
    )
    last = trace.read_text() if trace.exists() else ""
    assert child.returncode == 0, f"exit {child.returncode}, last call {last}\n{child.stdout}\n{child.stderr[-3000:]}"
    returned, refused = (int(word) for word in child.stdout.replace(",", " ").split() if word.isdigit())
    return returned, refused


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_calls_return_or_raise_what_is_documented(seed: int, tmp_path: Path) -> None:
    returned, refused = run("garbage", seed, tmp_path / "trace", threads=2)
    assert returned > CALLS // 10 and refused > CALLS // 10, (returned, refused)


@pytest.mark.parametrize("seed", [4, 5])
def test_calls_that_return_are_right(seed: int, tmp_path: Path) -> None:
    assert run("right", seed, tmp_path / "trace", threads=seed - 3) == (CALLS, 0)
