"""Stripping: the file gets shorter, and everything a loader or debugger reads of what stays is the same."""

from __future__ import annotations

import struct
from pathlib import Path

import lief
import pytest
from engine_build.common import BuildError
from engine_build.elf_strip import strip_elf


@pytest.fixture(scope="module")
def pair(shipped_library: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    data = shipped_library.read_bytes()
    return data, strip_elf(data)


def test_symbol_tables_go_and_the_rest_stays(pair: tuple[bytes, bytes]) -> None:
    before, after = (lief.ELF.parse(list(data)) for data in pair)
    old = {section.name: section for section in before.sections}
    new = {section.name: section for section in after.sections}
    assert old.keys() - new.keys() == {".symtab", ".strtab"}
    for name, section in new.items():
        if name != ".shstrtab":
            kept = old[name]
            assert (section.offset, section.size, section.virtual_address, section.link, section.flags) == (
                kept.offset, kept.size, kept.virtual_address, kept.link, kept.flags), name  # fmt: skip


def test_everything_loaded_is_the_same_bytes(pair: tuple[bytes, bytes]) -> None:
    before, after = pair
    (table,) = struct.unpack_from("<Q", before, 32)
    size, count = struct.unpack_from("<HH", before, 54)
    end = 0
    for index in range(count):
        _, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", before, table + index * size)
        end = max(end, offset + length)
    header = 64  # e_shoff and the section counts change, nothing else up to the end of the last segment
    assert before[header:end] == after[header:end]
    assert len(after) < len(before)


def test_stripping_twice_changes_nothing(pair: tuple[bytes, bytes]) -> None:
    assert strip_elf(pair[1]) == pair[1]


def test_other_files_are_refused() -> None:
    with pytest.raises(BuildError, match="not a 64-bit"):
        strip_elf(b"MZ" + bytes(100))


def test_tables_in_the_middle_are_refused(pair: tuple[bytes, bytes]) -> None:
    data = bytearray(pair[0])
    (at,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    comment, symtab = (at + size * (count - offset) for offset in (5, 3))
    data[comment : comment + size], data[symtab : symtab + size] = (
        data[symtab : symtab + size], data[comment : comment + size])  # fmt: skip
    with pytest.raises(BuildError, match="not its last sections"):
        strip_elf(bytes(data))
