"""Make the library of the zentorch wheel stand alone: a ZenDNN that loads in a process without torch.

As shipped, libzentorch.so is ZenDNN 5.1 and AOCL-BLIS linked together with the PyTorch plug-in's own code. Only the
plug-in needs libtorch, and it is reached in two ways before anybody calls it:

    static initialisers    15 entries of .init_array register torch operators  -> point at frame_dummy (a no-op) instead
    the dynamic section    DT_NEEDED libtorch, libc10, libtorch_cpu; a RUNPATH -> taken out; new soname

What the plug-in's code still refers to stays undefined and is never called. Those symbols become weak, so that the
loader accepts their absence, under immediate binding (RTLD_NOW, LD_BIND_NOW) as well. No machine code is changed.

Each edit is counted against what it must find, the written file is read back and checked again, and only then does
it get its final name: an input that differs anywhere stops the build with one line.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .common import BuildError, written_whole
from .elf_strip import strip_elf

SONAME = "libamdZenDNN.so"
DO_NOTHING = "frame_dummy"
PLUGIN_SOURCES = (
    "CausalAttentionMask", "Conv", "Embed", "EmbedBag", "Fused_EB_MLP", "MaskedMultiHeadAttention", "Matmul", "MoE",
    "PagedAttention", "QLinear", "Rope", "Sdpa_ref", "WOQMatmul", "WeightReorder", "utils",
)  # fmt: skip
PLUGIN_INITIALISERS = frozenset(f"_GLOBAL__sub_I_{name}.cpp" for name in PLUGIN_SOURCES)
TORCH_LIBRARIES = frozenset({"libtorch.so", "libc10.so", "libtorch_cpu.so"})
# Torch's data: read by relocations when the library is loaded, so these must not stay strong in any case.
TORCH_DATA = frozenset(
    {"_ZN3c1019UndefinedTensorImpl10_singletonE", "_ZTVN5torch8autograd12AutogradMetaE", "cpuinfo_isa"}
)
# The one function that proves this is ZenDNN's C API and not just any library with such initialisers.
LANDMARK = "zendnn_version"


def make_standalone(source: Path, target: Path) -> None:
    """Write the stand-alone form of the library `source` to `target`.

    Raises   BuildError naming what was not found as expected; `target` is then left as it was.
    """
    import lief

    library = lief.ELF.parse(str(source))
    if library is None:
        raise BuildError(f"{source} is not an ELF library.")
    do_nothing = redirect_initialisers(library)
    drop_torch_libraries(library)
    weaken_absent_symbols(library)
    rename(library)
    with written_whole(target) as temporary:
        library.write(str(temporary))
        temporary.write_bytes(strip_elf(temporary.read_bytes()))
        written = lief.ELF.parse(str(temporary))
        if written is None:
            raise BuildError("LIEF wrote a library that cannot be read back; report this with your LIEF version.")
        verify(written, do_nothing)
        temporary.chmod(0o755)


def redirect_initialisers(library: Any) -> dict[int, int]:
    """Point the plug-in's entries of .init_array at frame_dummy; return {address of entry: new value}."""
    addresses = {symbol.name: symbol.value for symbol in library.symtab_symbols if symbol.name in PLUGIN_INITIALISERS}
    _require_all(PLUGIN_INITIALISERS, addresses, "static initialisers")
    do_nothing = {symbol.value for symbol in library.symtab_symbols if symbol.name == DO_NOTHING}
    if len(do_nothing) != 1:
        raise BuildError(f"the library has {len(do_nothing)} functions named {DO_NOTHING}, expected one.")
    value = do_nothing.pop()
    doomed = set(addresses.values())
    changed = {}
    for relocation in _init_array_relocations(library):
        if relocation.addend in doomed:
            relocation.addend = value
            changed[relocation.address] = value
    if len(changed) != len(PLUGIN_INITIALISERS):
        raise BuildError(f".init_array refers to {len(changed)} of the {len(PLUGIN_INITIALISERS)} static initialisers.")
    return changed


def drop_torch_libraries(library: Any) -> None:
    """Remove torch from DT_NEEDED, and the build machine's RUNPATH."""
    import lief

    needed = [name for name in library.libraries if name in TORCH_LIBRARIES]
    _require_all(TORCH_LIBRARIES, needed, "needed libraries")
    for name in needed:
        library.remove_library(name)
    for tag in (lief.ELF.DynamicEntry.TAG.RUNPATH, lief.ELF.DynamicEntry.TAG.RPATH):
        for entry in [entry for entry in library.dynamic_entries if entry.tag == tag]:
            library.remove(entry)


def weaken_absent_symbols(library: Any) -> None:
    """Make every undefined symbol without a version weak.

    libc, libstdc++ and libgomp version theirs, torch does not: these are torch's symbols. The few others among them
    (found in libstdc++ and libc under their default version) bind as before, weak or not.
    """
    import lief

    absent = list(_unversioned_undefined(library))
    _require_all(TORCH_DATA, (symbol.name for symbol in absent), "undefined data symbols")
    for symbol in absent:
        symbol.binding = lief.ELF.Symbol.BINDING.WEAK


def rename(library: Any) -> None:
    """Set the soname, so that the loader never takes it for zentorch's own library in the same process."""
    import lief

    sonames = [entry for entry in library.dynamic_entries if entry.tag == lief.ELF.DynamicEntry.TAG.SONAME]
    if len(sonames) != 1:
        raise BuildError(f"the library has {len(sonames)} sonames, expected one.")
    sonames[0].name = SONAME


def verify(library: Any, initialisers: dict[int, int]) -> None:
    """Check the written library from its bytes; raise BuildError naming the first thing that is not as intended."""
    import lief

    tag, strong = lief.ELF.DynamicEntry.TAG, lief.ELF.Symbol.BINDING.GLOBAL
    now = {relocation.address: relocation.addend for relocation in _init_array_relocations(library)}
    problems = [
        ("the static initialisers", any(now.get(address) != value for address, value in initialisers.items())),
        ("torch in DT_NEEDED", bool(TORCH_LIBRARIES & set(library.libraries))),
        ("a RUNPATH", any(entry.tag in (tag.RUNPATH, tag.RPATH) for entry in library.dynamic_entries)),
        ("the soname", [e.name for e in library.dynamic_entries if e.tag == tag.SONAME] != [SONAME]),
        ("strong undefined symbols", any(s.binding == strong for s in _unversioned_undefined(library))),
        ("a missing C API", not any(s.name == LANDMARK and s.shndx != 0 for s in library.dynamic_symbols)),
    ]
    wrong = [what for what, is_wrong in problems if is_wrong]
    if wrong:
        raise BuildError(f"the adapted library failed its check ({', '.join(wrong)}); nothing was installed.")


def _init_array_relocations(library: Any) -> list[Any]:
    """Dynamic relocations that fill .init_array: in position-independent code the entries' values live there."""
    section = library.get_section(".init_array")
    if section is None:
        raise BuildError("the library has no .init_array section.")
    start, end = section.virtual_address, section.virtual_address + section.size
    return [relocation for relocation in library.dynamic_relocations if start <= relocation.address < end]


def _unversioned_undefined(library: Any) -> list[Any]:
    """Undefined dynamic symbols that no version of a needed library pins down."""
    return [
        symbol
        for symbol in library.dynamic_symbols
        if symbol.shndx == 0
        and symbol.name
        and not (symbol.symbol_version is not None and symbol.symbol_version.has_auxiliary_version)
    ]


def _require_all(expected: frozenset[str], found: Iterable[str], what: str) -> None:
    """Raise BuildError naming what of `expected` is absent."""
    missing = sorted(expected - set(found))
    if missing:
        raise BuildError(f"the library lacks {len(missing)} of the expected {what}: {', '.join(missing)}.")
