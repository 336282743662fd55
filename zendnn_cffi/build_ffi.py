"""Join cdef/*.h and write the out-of-line ABI-mode modules: no compiler, nothing to link.

    python zendnn_cffi/build_ffi.py --out DIR      writes DIR/_zendnn.py, DIR/_blis.py, DIR/_onednn.py

Needs cffi only, and never imports the package it stands in: the build runs it by path. One set of declarations serves
two libraries. The headers spell ZenDNN; `Binding.prefix` respells them, `#ifdef ZENDNN` marks the lines that differ:

    cdef/*.h --select(#ifdef)--> text --respell(prefix)--> C declarations --cffi--> _zendnn.py | _onednn.py
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CDEF = Path(__file__).resolve().parent / "cdef"


@dataclass(frozen=True)
class Binding:
    """One generated module: which headers, in which order, spelled and selected how."""

    module: str
    headers: tuple[str, ...]
    prefix: str = "zendnn_"
    defines: frozenset[str] = frozenset()


# Order matters: a header uses only what stands before it.
DNN_HEADERS = (
    "types.h",
    "format_tags.h",
    "memory.h",
    "descriptors.h",
    "operations.h",
    "primitive.h",
    "attributes.h",
    "service.h",
    "debug.h",
)
BINDINGS = (
    Binding("_zendnn", DNN_HEADERS, defines=frozenset({"ZENDNN"})),
    Binding("_blis", ("blis.h", "aocl_gemm.h")),
    Binding("_onednn", DNN_HEADERS, prefix="dnnl_"),
)


def binding(module: str) -> Binding:
    """Return the row of BINDINGS that writes `module`."""
    return next(row for row in BINDINGS if row.module == module)


def select(text: str, defines: frozenset[str]) -> str:
    """Resolve #ifdef/#ifndef/#else/#endif, which cffi does not know; ValueError where they do not pair."""
    kept: list[str] = []
    active: list[bool] = []
    for line in text.splitlines():
        words = line.split()
        directive = words[0] if words else ""
        if directive in ("#ifdef", "#ifndef"):
            active.append((words[1] in defines) == (directive == "#ifdef"))
        elif directive in ("#else", "#endif"):
            if not active:
                raise ValueError(f"{directive} without #ifdef")
            condition = active.pop()
            if directive == "#else":
                active.append(not condition)
        elif all(active):
            kept.append(line)
    if active:
        raise ValueError("#ifdef without #endif")
    return "\n".join(kept) + "\n"


def respell(text: str, prefix: str) -> str:
    """Replace the zendnn_ and ZENDNN_ of every identifier by `prefix`."""
    if prefix == "zendnn_":
        return text
    return text.replace("zendnn_", prefix).replace("ZENDNN_", prefix.upper())


def declarations(row: Binding) -> str:
    """Return the C declarations of one module: comments stripped, conditions resolved, prefix applied."""
    joined = "\n".join((CDEF / name).read_text(encoding="utf-8") for name in row.headers)
    plain = re.sub(r"/\*.*?\*/", "", joined, flags=re.DOTALL)
    return respell(select(plain, row.defines), row.prefix)


def fingerprint(row: Binding) -> str:
    """Return a hash of everything the module is made from, to recognise one left over from older declarations."""
    made_from = [row.prefix, *sorted(row.defines)]
    made_from += [(CDEF / name).read_text(encoding="utf-8") for name in row.headers]
    return hashlib.sha256("\0".join(made_from).encode()).hexdigest()


def python_source(row: Binding) -> str:
    """Return the text of the out-of-line ABI-mode module: defines `ffi` and `FINGERPRINT`."""
    import cffi
    from cffi import recompiler

    builder = cffi.FFI()
    builder.cdef(declarations(row))
    builder.set_source(row.module, None)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / f"{row.module}.py"
        recompiler.make_py_source(builder, row.module, str(written))  # emit_python_code, but silent
        text = written.read_text(encoding="utf-8")
    return f'{text.rstrip()}\nFINGERPRINT = "{fingerprint(row)}"\n'


def write_module(row: Binding, folder: Path) -> Path:
    """Write one module into `folder`, whole or not at all, and return its path."""
    target = folder / f"{row.module}.py"
    unfinished = folder / f".{row.module}.{os.getpid()}.tmp"
    unfinished.write_text(python_source(row), encoding="utf-8")
    unfinished.replace(target)
    return target


def main(arguments: list[str] | None = None) -> int:
    """Write every module; the command line of this file."""
    parser = argparse.ArgumentParser(description="Write the ABI-mode cffi modules.")
    parser.add_argument("--out", required=True, type=Path, help="folder for _zendnn.py, _blis.py, _onednn.py")
    folder: Path = parser.parse_args(arguments).out
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text('"""Written by build_ffi.py: do not edit."""\n', encoding="utf-8")
    for row in BINDINGS:
        print(write_module(row, folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
