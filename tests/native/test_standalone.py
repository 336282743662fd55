"""The LIEF edit: each step does all it should or stops, and a failure leaves no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lief
import pytest
from engine_build import standalone
from engine_build.common import BuildError


@pytest.fixture(scope="module")
def result(engine: Path) -> Any:
    return lief.ELF.parse(str(engine / "libamdZenDNN.so"))


@pytest.fixture(scope="module")
def shipped(shipped_library: Path) -> Any:
    return lief.ELF.parse(str(shipped_library))


def init_array(library: Any) -> dict[int, int]:
    section = library.get_section(".init_array")
    start, end = section.virtual_address, section.virtual_address + section.size
    return {r.address: r.addend for r in library.dynamic_relocations if start <= r.address < end}


def test_fifteen_initialisers_do_nothing_and_no_other_changed(shipped: Any, result: Any) -> None:
    before, after = init_array(shipped), init_array(result)
    names = {symbol.value: symbol.name for symbol in shipped.symtab_symbols if symbol.is_function}
    changed = {address for address in before if before[address] != after[address]}
    assert {names[before[address]] for address in changed} == standalone.PLUGIN_INITIALISERS
    assert len(changed) == len(standalone.PLUGIN_SOURCES) == 15
    assert {names[after[address]] for address in changed} == {"frame_dummy"}


def test_nothing_but_torch_leaves_the_needed_libraries(shipped: Any, result: Any) -> None:
    assert [name for name in shipped.libraries if name not in standalone.TORCH_LIBRARIES] == list(result.libraries)


def test_no_run_path(result: Any) -> None:
    tags = {entry.tag for entry in result.dynamic_entries}
    assert not tags & {lief.ELF.DynamicEntry.TAG.RUNPATH, lief.ELF.DynamicEntry.TAG.RPATH}


def test_absent_symbols_are_weak_and_versioned_ones_as_they_were(shipped: Any, result: Any) -> None:
    def bindings(library: Any) -> dict[str, tuple[bool, bool]]:
        weak = lief.ELF.Symbol.BINDING.WEAK
        return {
            symbol.name: (symbol.symbol_version.has_auxiliary_version, symbol.binding == weak)
            for symbol in library.dynamic_symbols
            if symbol.shndx == 0 and symbol.name
        }

    before, after = bindings(shipped), bindings(result)
    assert before.keys() == after.keys()
    assert all(is_weak for versioned, is_weak in after.values() if not versioned)
    assert all(before[name] == after[name] for name, (versioned, _) in after.items() if versioned)
    assert all(after[name][1] for name in standalone.TORCH_DATA)


def test_code_and_data_are_untouched(shipped: Any, result: Any) -> None:
    for name in (".text", ".rodata", ".plt", ".eh_frame", ".data", ".data.rel.ro", ".tdata"):
        old, new = shipped.get_section(name), result.get_section(name)
        assert (old.virtual_address, old.size) == (new.virtual_address, new.size), name
        assert bytes(old.content) == bytes(new.content), name


def test_exported_functions_stay(shipped: Any, result: Any) -> None:
    def exported(library: Any) -> set[str]:
        return {symbol.name for symbol in library.dynamic_symbols if symbol.shndx != 0}

    assert exported(shipped) == exported(result)
    assert sum(name.startswith("zendnn_") for name in exported(result)) == 144


class Renamed:
    """A symbol under another name, as in a library built from changed sources."""

    def __init__(self, symbol: Any, name: str) -> None:
        self._symbol, self.name = symbol, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._symbol, attribute)


class Altered:
    """The shipped library with one attribute replaced; LIEF objects themselves refuse assignment."""

    def __init__(self, library: Any, **replaced: Any) -> None:
        self._library = library
        self.__dict__.update(replaced)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._library, attribute)


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("_GLOBAL__sub_I_Sdpa_ref.cpp", "lacks 1 of the expected static initialisers: _GLOBAL__sub_I_Sdpa_ref.cpp"),
        ("frame_dummy", "0 functions named frame_dummy"),
    ],
)
def test_missing_function_is_named(shipped_library: Path, gone: str, message: str) -> None:
    library = lief.ELF.parse(str(shipped_library))
    symbols = [Renamed(symbol, "other") if symbol.name == gone else symbol for symbol in library.symtab_symbols]
    with pytest.raises(BuildError, match=message):
        standalone.redirect_initialisers(Altered(library, symtab_symbols=symbols))


def test_initialiser_that_no_entry_refers_to_is_noticed(shipped_library: Path) -> None:
    library = lief.ELF.parse(str(shipped_library))
    value = next(s.value for s in library.symtab_symbols if s.name == "_GLOBAL__sub_I_Conv.cpp")
    relocations = [r for r in library.dynamic_relocations if r.addend != value]
    with pytest.raises(BuildError, match="refers to 14 of the 15"):
        standalone.redirect_initialisers(Altered(library, dynamic_relocations=relocations))


def test_missing_needed_library_is_named(result: Any) -> None:
    with pytest.raises(BuildError, match="lacks 3 of the expected needed libraries: libc10.so, libtorch.so"):
        standalone.drop_torch_libraries(result)


def test_missing_data_symbol_is_named(shipped: Any) -> None:
    symbols = [symbol for symbol in shipped.dynamic_symbols if symbol.name != "cpuinfo_isa"]
    with pytest.raises(BuildError, match="undefined data symbols: cpuinfo_isa"):
        standalone.weaken_absent_symbols(Altered(shipped, dynamic_symbols=symbols))


def test_adapting_twice_is_refused_and_keeps_the_target(engine: Path, tmp_path: Path) -> None:
    target = tmp_path / "libamdZenDNN.so"
    target.write_bytes(b"what was there")
    with pytest.raises(BuildError, match="static initialisers"):
        standalone.make_standalone(engine / "libamdZenDNN.so", target)
    assert target.read_bytes() == b"what was there"
    assert list(tmp_path.iterdir()) == [target]


def test_failed_check_leaves_no_file(shipped_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "rename", lambda library: None)
    with pytest.raises(BuildError, match=r"failed its check \(the soname\)"):
        standalone.make_standalone(shipped_library, tmp_path / "libamdZenDNN.so")
    assert not list(tmp_path.iterdir())


def test_not_a_library(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not ELF")
    with pytest.raises(BuildError, match="not an ELF library"):
        standalone.make_standalone(tmp_path / "text", tmp_path / "out")
