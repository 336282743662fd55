"""How nested CMake builds are run: generator, parallelism, compiler version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from .common import BuildError

OLDEST_GCC = (12, 2)


def generator_arguments(build: Path) -> list[str]:
    """Prefer Ninja where there is one. The environment's CMAKE_GENERATOR and a folder's earlier choice win."""
    if "CMAKE_GENERATOR" in os.environ or (build / "CMakeCache.txt").exists() or shutil.which("ninja") is None:
        return []
    return ["-G", "Ninja"]


def job_arguments(jobs: int) -> list[str]:
    """The --parallel option: the given number of jobs, or one per processor this process may use."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ["--parallel", str(jobs or available or 1)]


def require_compiler() -> str:
    """Return "name version" of the C++ compiler (CXX, else g++); BuildError if absent or a GCC older than 12.2.

    AMD BLIS has kernels for Zen 4 and 5 that older GCCs do not compile.
    """
    compiler = os.environ.get("CXX") or "g++"
    advice = "ZENDNN_PROVIDER=source needs gcc 12.2 or newer: install it, or point CC and CXX at it"
    try:
        shown = subprocess.run([*compiler.split(), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise BuildError(f"{advice} (no working {compiler} was found).") from None
    first = shown.splitlines()[0] if shown else compiler
    if "clang" in shown.lower():
        return first
    version = re.search(r"(\d+)\.(\d+)(?:\.\d+)?\s*$", first) or re.search(r" (\d+)\.(\d+)", first)
    if version and (int(version[1]), int(version[2])) < OLDEST_GCC:
        raise BuildError(f"{advice} (found {first}).")
    return first
