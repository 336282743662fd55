"""Cut a 64-bit little-endian ELF file down to what the loader and readelf use: no .symtab, no .strtab, no .debug*.

Sections that are not loaded lie behind everything that is, so the file only becomes shorter: no address and no offset
of what stays changes. (LIEF's own strip keeps the file's size; binutils may be absent.)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .common import BuildError

_SHOFF_AT, _SHENTSIZE_AT = 40, 58  # ELF-64 header: e_shoff, then e_shentsize, e_shnum, e_shstrndx
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, addr, offset, size, link, info, addralign, entsize
_NOBITS, _ALLOC = 8, 2


@dataclass
class _Header:
    fields: list[int]
    name: bytes

    @property
    def end(self) -> int:
        return self.fields[4] + (0 if self.fields[1] == _NOBITS else self.fields[5])

    @property
    def is_needless(self) -> bool:
        kinds = (b".symtab", b".strtab", b".shstrtab")
        return not self.fields[2] & _ALLOC and (self.name in kinds or self.name.startswith(b".debug"))


def strip_elf(data: bytes) -> bytes:
    """Return the ELF image without its needless sections; .shstrtab and the section table are written anew.

    Raises   BuildError if the needless sections are not the last ones, so that cutting them would move others.
    """
    headers = _read_headers(data)
    kept = [header for header in headers if not header.is_needless]
    if headers[: len(kept)] != kept or any(kept_one.fields[6] >= len(kept) for kept_one in kept):
        raise BuildError("the library's symbol tables are not its last sections: stripping would move others.")
    end = max(max(header.end for header in kept), _end_of_segments(data))
    names = b"\0"
    for header in kept[1:]:
        header.fields[0] = len(names)
        names += header.name + b"\0"
    own_name, names = len(names), names + b".shstrtab\0"
    table_at = (end + len(names) + 7) & ~7
    shstrtab = [own_name, 3, 0, 0, end, len(names), 0, 0, 1, 0]
    table = b"".join(_SECTION.pack(*fields) for fields in [*(header.fields for header in kept), shstrtab])
    image = bytearray(data[:end]) + names.ljust(table_at - end, b"\0") + table
    struct.pack_into("<Q", image, _SHOFF_AT, table_at)
    struct.pack_into("<HHH", image, _SHENTSIZE_AT, _SECTION.size, len(kept) + 1, len(kept))
    return bytes(image)


def _read_headers(data: bytes) -> list[_Header]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise BuildError("not a 64-bit little-endian ELF file.")
    (at,) = struct.unpack_from("<Q", data, _SHOFF_AT)
    size, count, names_index = struct.unpack_from("<HHH", data, _SHENTSIZE_AT)
    rows = [list(_SECTION.unpack_from(data, at + size * index)) for index in range(count)]
    strings = rows[names_index]
    start, stop = strings[4], strings[4] + strings[5]
    return [_Header(row, data[start + row[0] : data.index(b"\0", start + row[0], stop)]) for row in rows]


def _end_of_segments(data: bytes) -> int:
    """Offset behind the last byte any program header covers."""
    (at,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    ends = []
    for index in range(count):
        _, _, offset, _, _, filesize = struct.unpack_from("<IIQQQQ", data, at + size * index)
        ends.append(offset + filesize)
    return max(ends)
