"""The platform tag that is true of a library: manylinux_2_X where systems with glibc 2.X have all that it needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from .elf_dynamic import Dynamic, read_dynamic

# PEP 600 and auditwheel's policies: what every such system has. libgomp is none of it: torch, which this package
# depends on, brings one, and zendnn_cffi.engine.openmp maps it before the engine.
_SYSTEM = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2",
           "libgcc_s.so.1", "libstdc++.so.6"}  # fmt: skip
_FROM_TORCH = {"libgomp.so.1"}
# The newest that systems with the oldest glibc named here have; a library that needs more gets no manylinux tag.
_GLIBC_OF_NEWEST = (2, 27)
_NEWEST = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}


def platform_tag(libraries: Iterable[Path]) -> str | None:
    """Return the tag for a package with these libraries; None without any, and where no manylinux tag would be true."""
    found = [read_dynamic(path) for path in libraries]
    known = [library for library in found if library is not None]
    if not known or len(known) != len(found):
        return None
    inside = {library.soname for library in known}
    glibc = (0, 0)
    for library in known:
        needs = glibc_needed(library, inside)
        if needs is None:
            return None
        glibc = max(glibc, needs)
    return f"manylinux_{glibc[0]}_{glibc[1]}_x86_64"


def glibc_needed(library: Dynamic, inside: set[str | None]) -> tuple[int, int] | None:
    """The oldest glibc that has what the library asks for; None where something else is not to be relied on.

    inside  names of libraries that lie beside it
    """
    if not set(library.needed) <= _SYSTEM | _FROM_TORCH | inside:
        return None
    versions = [parsed for name in library.versions if (parsed := _version(name)) is not None]
    if any(number > _NEWEST[family] for family, number in versions if family in _NEWEST):
        return None
    glibc = [(number[0], number[1]) for family, number in versions if family == "GLIBC"]
    newest_runtime = any(family in _NEWEST for family, _ in versions)
    return max([*glibc, _GLIBC_OF_NEWEST if newest_runtime else (2, 17)])


def _version(name: str) -> tuple[str, tuple[int, ...]] | None:
    """("GLIBC", (2, 17)) of "GLIBC_2.17"; None of what is no version of that form."""
    match = re.fullmatch(r"([A-Z]+)_(\d+(?:\.\d+)*)", name)
    return (match[1], tuple(map(int, match[2].split(".")))) if match else None
