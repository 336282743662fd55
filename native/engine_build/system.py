"""Provider `system`: a ZenDNN library that is already on the machine, used where it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .common import BuildError, say
from .config import EngineConfig
from .elf_dynamic import read_dynamic

SUPPORTED = ((5, 0), (5, 1))

# Run in a process of its own: a library that does not fit may take the process down.
_ASK_VERSION = """
import ctypes, os, sys
library = ctypes.CDLL(sys.argv[1], mode=os.RTLD_LAZY)
class Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_int), ("minor", ctypes.c_int), ("patch", ctypes.c_int)]
library.zendnn_version.restype = ctypes.POINTER(Version)
version = library.zendnn_version().contents
print("version", version.major, version.minor, version.patch)
"""


def use_system(library: Path | None) -> EngineConfig:
    """Return a configuration that points at `library`; nothing is copied, so its own dependencies keep working.

    Raises   BuildError if it is not given, not an ELF library, or not a ZenDNN 5.0 or 5.1 with the C API.
    """
    if library is None:
        raise BuildError("ZENDNN_PROVIDER=system needs -DZENDNN_LIBRARY=<path of libamdZenDNN.so>.")
    library = library.resolve()
    if not library.is_file() or read_dynamic(library) is None:
        raise BuildError(f"ZENDNN_LIBRARY={library} is not a shared library for 64-bit Linux.")
    version = version_of(library)
    return EngineConfig(
        provider="system",
        zendnn_version=version,
        library=str(library),
        blis=str(library),
        options={"ZENDNN_LIBRARY": str(library)},
    )


def version_of(library: Path) -> str | None:
    """Return what the library's zendnn_version() says; None if it does not load in a bare process.

    That alone is no reason to refuse it: at run time torch may bring what it misses (an OpenMP runtime).
    Raises   BuildError if it loads but has no zendnn_version(), or is another ZenDNN than the declarations are for.
    """
    asked = subprocess.run([sys.executable, "-c", _ASK_VERSION, str(library)], capture_output=True, text=True)
    lines = [line.split() for line in asked.stdout.splitlines() if line.startswith("version ")]
    if asked.returncode != 0 or not lines:
        last = asked.stderr.strip().splitlines()[-1] if asked.stderr.strip() else f"exit status {asked.returncode}"
        if "zendnn_version" in last:
            raise BuildError(f"{library} has no zendnn_version(): not a ZenDNN with the C API (5.0 or 5.1).")
        say(f"the version of {library.name} is not known: it does not load in a bare process ({last})")
        return None
    major, minor, patch = (int(part) for part in lines[0][1:])
    if (major, minor) not in SUPPORTED:
        raise BuildError(f"{library} is ZenDNN {major}.{minor}.{patch}; the bindings are for 5.0 and 5.1.")
    return f"{major}.{minor}.{patch}"
