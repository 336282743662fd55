"""Memory that ends the process where it is used wrongly, and tests of this package that run with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.memory.guarded import compiled, environment

ROOT = Path(__file__).resolve().parents[2]
_BEGIN = """
import ctypes
c = ctypes.CDLL(None)
c.malloc.restype = c.realloc.restype = ctypes.c_void_p
c.malloc.argtypes, c.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
c.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
block = c.malloc(4000)
ctypes.memset(block, 1, 4000)
"""
_WRONG = {
    "read beyond": "ctypes.string_at(block + 4000, 1)",
    "written beyond": "ctypes.memset(block + 4000, 1, 1)",
    "read after free": "c.free(block); ctypes.string_at(block, 1)",
    "written after realloc": "c.realloc(block, 9000); ctypes.memset(block, 1, 1)",
}
_RIGHT = """
assert ctypes.string_at(block, 4000) == bytes([1]) * 4000
block = c.realloc(block, 70000)
assert ctypes.string_at(block, 4000) == bytes([1]) * 4000
c.free(block)
import torch
x = torch.arange(5000.0)
assert x.data_ptr() % 64 == 0 and float((x + 1).sum()) == 12502500.0
c.guarded_blocks.restype = c.plain_blocks.restype = ctypes.c_uint64
assert c.guarded_blocks() > 1000 and not c.plain_blocks(), (c.guarded_blocks(), c.plain_blocks())
"""
# Programs that come and go, and primitives made of what others left.
_HERE = (
    "tests/zendnn_cffi/api/test_cache.py",
    "tests/zendnn_cffi/primitives/test_primitive.py",
    "tests/zendnn_cffi/runtime/test_other_threads.py",
    "tests/fx_passes/lower/windows/test_convolution.py",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("guarded"))


def run(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(library), cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("wrong", _WRONG)
def test_wrong_use_ends_the_process(wrong: str, library: Path) -> None:
    assert run(library, "-c", _BEGIN + _WRONG[wrong]).returncode == -signal.SIGSEGV


def test_right_use_does_not(library: Path) -> None:
    done = run(library, "-c", _BEGIN + _RIGHT)
    assert done.returncode == 0, done.stderr


def test_nothing_of_ours_uses_memory_wrongly(library: Path) -> None:
    """A few hundred tests; `make memory` runs nearly all."""
    done = run(library, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_HERE)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
