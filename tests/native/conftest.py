"""Fixtures of the engine's build: run it as CMake does, once per session where the result is only read."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "native"
if str(NATIVE) not in sys.path:
    sys.path.insert(0, str(NATIVE))

# Built once and kept between runs (git ignores build/): CMake rebuilds what changed.
KEPT = ROOT / "build" / "tests"


def tool(name: str) -> str:
    """Return a command-line tool, the one installed beside this Python first."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is needed by these tests: pip install {name}"
    return found


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run() -> Run:
    """run(*words, env={}, cwd=None) -> finished process, output captured as text."""

    def call(*words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> object:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ZENDNN_")}
        path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
        environment |= {"PATH": path, **(env or {})}
        command = [str(word) for word in words]
        return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, errors="replace")

    return call  # type: ignore[return-value]


@pytest.fixture(scope="session")
def build(run: Run) -> Run:
    """build(folder, "-DNAME=value", ..., env={}) -> the process that failed, or the last one: configure, then build."""

    def call(folder: Path, *options: str, env: Mapping[str, str] | None = None) -> object:
        configured = run(
            tool("cmake"), "-S", NATIVE, "-B", folder, *options, f"-DPython_EXECUTABLE={sys.executable}", env=env
        )
        return run(tool("cmake"), "--build", folder, env=env) if configured.returncode == 0 else configured

    return call  # type: ignore[return-value]


@pytest.fixture(scope="session")
def prebuilt(build: Run) -> Path:
    """The build folder of the default provider, finished: engine/ and work/ inside."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:  # tests in another process want the same folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = build(KEPT / "prebuilt")
    assert done.returncode == 0, done.stdout + done.stderr
    return KEPT / "prebuilt"


@pytest.fixture(scope="session")
def engine(prebuilt: Path) -> Path:
    """The folder that becomes zendnn_cffi/_engine."""
    return prebuilt / "engine"


@pytest.fixture(scope="session")
def shipped_library(prebuilt: Path) -> Path:
    """libzentorch.so as it is in the wheel."""
    return prebuilt / "work" / "libzentorch.so"


@pytest.fixture(scope="session")
def error_line() -> Callable[[subprocess.CompletedProcess[str]], str]:
    """error_line(process) -> the one line a failed build says; the test fails if there is none or several."""

    def find(done: subprocess.CompletedProcess[str]) -> str:
        assert done.returncode != 0, "the build should have failed"
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("zendnn_cffi: error: ")]
        assert len(lines) == 1, done.stdout + done.stderr
        return lines[0]

    return find
