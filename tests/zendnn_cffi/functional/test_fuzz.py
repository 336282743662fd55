"""Nothing passed to the functions and objects may kill the process: arguments nobody would pass, in a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("fuzz.py")
CALLS = int(os.environ.get("ZENDNN_CFFI_FUZZ_CALLS", "400"))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_calls_return_or_raise_what_is_documented(seed: int, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    paths = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[3])) if p)
    child = subprocess.run(
        [sys.executable, str(CHILD), str(seed), str(CALLS), str(trace)],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, "PYTHONPATH": paths},
    )
    last = trace.read_text() if trace.exists() else ""
    assert child.returncode == 0, f"exit {child.returncode}, last call {last}\n{child.stdout}\n{child.stderr[-3000:]}"
    returned, refused = (int(word) for word in child.stdout.replace(",", " ").split() if word.isdigit())
    assert returned > CALLS // 10 and refused > CALLS // 10, child.stdout
