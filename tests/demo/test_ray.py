"""The Ray example, with real Ray: right answers, also where a replica is ended in the midst."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_serve_and_data_answer_as_the_model_does(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # its workers read it, too
    environment = os.environ | {"PYTHONPATH": path, "RAY_TMPDIR": "/tmp", "ZENDNN_CFFI_CACHE": str(tmp_path)}
    command = [sys.executable, str(ROOT / "demo" / "ray_serving.py"), "--kill", "--requests", "120"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "Ray Serve: 120 of 120 answers right" in done.stdout
    assert "Ray Data: 256 of 256 classes right" in done.stdout
