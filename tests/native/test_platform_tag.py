"""The wheel's platform tag: what libraries need decides it, and what is not sure gets none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import lief
import pytest
from engine_build.elf_dynamic import Dynamic, read_dynamic
from engine_build.platform_tag import glibc_needed, platform_tag


def test_versions_are_those_that_lief_reads(engine: Path) -> None:
    library = engine / "libamdZenDNN.so"
    found = read_dynamic(library)
    needed = lief.ELF.parse(library).symbols_version_requirement
    assert found is not None
    assert sorted(found.versions) == sorted(v.name for entry in needed for v in entry.get_auxiliary_symbols())


@pytest.mark.parametrize(
    ("needed", "versions", "expected"),
    [
        (("libc.so.6",), ("GLIBC_2.2.5", "GLIBC_2.14"), (2, 17)),  # manylinux begins there
        (("libc.so.6", "libm.so.6"), ("GLIBC_2.17", "GLIBC_2.31", "GLIBC_2.9"), (2, 31)),
        (("libstdc++.so.6", "libc.so.6"), ("GLIBC_2.17", "GLIBCXX_3.4.21"), (2, 27)),
        (("libgomp.so.1", "libc.so.6"), ("GOMP_4.0", "GLIBC_2.28"), (2, 28)),  # torch brings it
        (("libstdc++.so.6", "libc.so.6"), ("GLIBC_2.17", "GLIBCXX_3.4.30"), None),  # newer than such systems have
        (("libblis.so", "libc.so.6"), ("GLIBC_2.17",), (2, 17)),  # lies beside it
        (("libnuma.so.1", "libc.so.6"), ("GLIBC_2.17",), None),
        (("libc.musl-x86_64.so.1",), (), None),
    ],
)  # fmt: skip
def test_what_libraries_need(needed: tuple[str, ...], versions: tuple[str, ...], expected: tuple[int, int]) -> None:
    assert glibc_needed(Dynamic("libx.so", needed, versions), {"libx.so", "libblis.so"}) == expected


def test_several_libraries_get_the_newest_need(engine: Path, tmp_path: Path) -> None:
    plain = tmp_path / "libplain.so"
    (tmp_path / "plain.c").write_text("int plain(void) { return 1; }")
    subprocess.run(["cc", "-shared", "-nostdlib", "-fPIC", "-o", plain, tmp_path / "plain.c"], check=True)
    own = platform_tag([engine / "libamdZenDNN.so"])
    assert platform_tag([plain]) == "manylinux_2_17_x86_64"
    assert platform_tag([plain, engine / "libamdZenDNN.so"]) == own == "manylinux_2_27_x86_64"


def test_no_library_and_what_is_no_library_get_none(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    assert platform_tag([]) is None
    assert platform_tag([tmp_path / "text.so"]) is None
