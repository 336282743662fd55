"""The LitServe example, with real LitServe and HTTP: right answers from workers that share a file."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_server_answers_as_the_model_does(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"ZENDNN_CFFI_CACHE": str(tmp_path)}
    command = [sys.executable, str(ROOT / "demo" / "litserve_serving.py"), "--requests", "40", "--workers", "2"]
    done = subprocess.run([*command, "--port", str(port)], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "LitServe: 40 of 40 answers right" in done.stdout
