"""Look at a shared library's file before the loader does: a truncated one kills the process, no error is returned."""

from __future__ import annotations

import os
import struct

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
SEGMENT = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr
MACHINE_X86_64, TYPE_SHARED, SEGMENT_LOAD = 62, 3, 1


def fault(path: str | os.PathLike[str]) -> str | None:
    """Return what is wrong with the file as a shared library for 64-bit x86, None if nothing shows.

    The loader maps what the program headers promise and dies of SIGBUS where the file ends early, as after an
    interrupted download.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            raw = file.read(HEADER.size)
            if len(raw) < HEADER.size or raw[:4] != b"\x7fELF":
                return "not an ELF file"
            ident, kind, machine, _, _, table, _, _, _, entry, count, _, _, _ = HEADER.unpack(raw)
            if ident[4] != 2 or ident[5] != 1 or machine != MACHINE_X86_64 or kind != TYPE_SHARED:
                return "not a shared library for 64-bit x86"
            file.seek(table)
            segments = file.read(entry * count)
    except OSError as error:
        return error.strerror or str(error)
    if entry < SEGMENT.size or len(segments) < entry * count or count == 0:
        return f"truncated: its program headers lie beyond its {size} bytes"
    for at in range(0, entry * count, entry):
        kind, _, offset, _, _, length, _, _ = SEGMENT.unpack_from(segments, at)
        if kind == SEGMENT_LOAD and offset + length > size:
            return f"truncated: {size} bytes where at least {offset + length} belong"
    return None
