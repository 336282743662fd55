"""Read what a 64-bit little-endian ELF library says of itself and needs, with the standard library only."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRTAB, _SONAME, _VERNEED, _VERNEEDNUM = 1, 5, 14, 0x6FFFFFFE, 0x6FFFFFFF


@dataclass(frozen=True)
class Dynamic:
    """What the dynamic section says about names; versions: those of symbols that it needs, such as "GLIBC_2.17"."""

    soname: str | None
    needed: tuple[str, ...]
    versions: tuple[str, ...] = ()


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

    def place(address: int) -> int | None:
        """Where in the file the byte is that will be at an address."""
        return next((offset + address - virtual for virtual, offset, filesize in loaded
                     if virtual <= address < virtual + filesize), None)  # fmt: skip

    base = None if strings is None else place(strings)
    if base is None:
        return None

    def text(value: int) -> str:
        return data[base + value : data.index(b"\0", base + value)].decode()

    soname = next((text(value) for tag, value in entries if tag == _SONAME), None)
    needed = tuple(text(value) for tag, value in entries if tag == _NEEDED)
    tags = dict(entries)
    versions = place(tags[_VERNEED]) if _VERNEED in tags else None
    if versions is None:
        return Dynamic(soname, needed)
    return Dynamic(soname, needed, tuple(map(text, _needed_versions(data, versions, tags[_VERNEEDNUM]))))


def _needed_versions(data: bytes, at: int, count: int) -> Iterator[int]:
    """Where in the string table the version names are that `count` records (Elf64_Verneed) from `at` on ask for."""
    for _ in range(count):
        _, names, _, first, following = struct.unpack_from("<HHIII", data, at)
        name_at = at + first
        for _ in range(names):
            _, _, _, name, step = struct.unpack_from("<IHHII", data, name_at)  # Elf64_Vernaux
            yield name
            name_at += step
        at += following
