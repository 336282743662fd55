"""Read soname and needed libraries of a 64-bit little-endian ELF library, with the standard library only."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRTAB, _SONAME = 1, 5, 14


@dataclass(frozen=True)
class Dynamic:
    """What the dynamic section says about names."""

    soname: str | None
    needed: tuple[str, ...]


def read_dynamic(path: Path) -> Dynamic | None:
    """Return the names in the dynamic section; None if the file is not such a library."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return None
    (at,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    segments = [struct.unpack_from("<IIQQQQQQ", data, at + size * index) for index in range(count)]
    loaded = [(virtual, offset, filesize) for kind, _, offset, virtual, _, filesize, _, _ in segments if kind == _LOAD]
    dynamic = [(offset, filesize) for kind, _, offset, _, _, filesize, _, _ in segments if kind == _DYNAMIC]
    if not dynamic:
        return None
    start, length = dynamic[0]
    entries = [struct.unpack_from("<QQ", data, start + at) for at in range(0, length - 15, 16)]
    strings = next((value for tag, value in entries if tag == _STRTAB), None)
    base = next((offset + strings - virtual for virtual, offset, filesize in loaded
                 if strings is not None and virtual <= strings < virtual + filesize), None)  # fmt: skip
    if base is None:
        return None

    def text(value: int) -> str:
        return data[base + value : data.index(b"\0", base + value)].decode()

    soname = next((text(value) for tag, value in entries if tag == _SONAME), None)
    return Dynamic(soname, tuple(text(value) for tag, value in entries if tag == _NEEDED))
