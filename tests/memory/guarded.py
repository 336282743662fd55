"""Run tests with memory where reading beyond a block, or after it was freed, ends the process.

    python tests/memory/guarded.py                              the binding's and the compiler's tests (half an hour)
    python tests/memory/guarded.py tests/zendnn_cffi/primitives -x

The C library's malloc is replaced by guarded.c, which gcc compiles; arguments are pytest's. Tests take about twice
their time. A crash comes with Python's stack; `gdb --args` shows C's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("guarded.c")
DEFAULT = ("tests/zendnn_cffi", "tests/fx_passes")
# What measures memory or asks for more than there is.
LEFT_OUT = ("--deselect=tests/zendnn_cffi/primitives/test_allocation.py", "--ignore=tests/zendnn_cffi/serving")


def compiled(folder: Path) -> Path:
    """Compile guarded.c to a shared library there. Raises CalledProcessError, FileNotFoundError without gcc."""
    library = folder / "guarded.so"
    subprocess.run(["gcc", "-O2", "-Wall", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def environment(library: Path) -> dict[str, str]:
    """This process's variables, with malloc replaced in the next one."""
    return os.environ | {"LD_PRELOAD": str(library)}


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(arguments or (*DEFAULT, *LEFT_OUT))]
        return subprocess.run(command, env=environment(compiled(Path(folder)))).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
