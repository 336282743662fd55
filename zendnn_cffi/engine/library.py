"""Find the engine library, load it once, accept it only if it is what the declarations say.

    ZENDNN_CFFI_LIBRARY | zendnn_cffi/_engine/ | the installed distribution's _engine/ --load()--> Library

Nothing here runs at import: `ffi` needs declarations only, `lib` and `blis` load on first use of a function.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from zendnn_cffi.engine import abi, elf, host, openmp
from zendnn_cffi.engine.loaded import Library, exports
from zendnn_cffi.errors import LibraryError, MissingFunctionError
from zendnn_cffi.locks import new_lock
from zendnn_cffi.log import get_logger
from zendnn_cffi.values import dataclass

log = get_logger(__name__)
PACKAGE = Path(__file__).resolve().parents[1]
DISTRIBUTION = "zendnn-cffi"
LIBRARY_VARIABLE = "ZENDNN_CFFI_LIBRARY"
BLIS_VARIABLE = "ZENDNN_CFFI_BLIS_LIBRARY"
ISA_VARIABLE = "ZENDNN_MAX_CPU_ISA"  # read by the library itself
SUPPORTED_VERSIONS = ((5, 0), (5, 1))
ENGINE_FILE = "libamdZenDNN.so"
BLIS_FILES = ("libblis-mt.so", "libblis.so")
REMEDY = (
    f"Install the package again (pip install . builds the engine), or set {LIBRARY_VARIABLE} to a ZenDNN 5.0 or 5.1 "
    "library. zendnn_cffi.show_config() prints what was found."
)


@cache
def declarations(module: str) -> types.ModuleType:
    """Return the ABI-mode module `_zendnn`, `_blis` or `_onednn`: the generated one, or the same made in memory.

    A generated module older than the cdef/ beside it is passed over.
    """
    from zendnn_cffi import build_ffi

    row = build_ffi.binding(module)
    try:
        found = importlib.import_module(f"zendnn_cffi._generated.{module}")
        if not build_ffi.CDEF.is_dir() or build_ffi.fingerprint(row) == found.FINGERPRINT:
            return found
        log.debug("%s is older than cdef/: making it in memory", module)
    except ImportError:
        log.debug("%s was not generated: making it in memory", module)
    made = types.ModuleType(module)
    exec(compile(build_ffi.python_source(row), f"<{module}>", "exec"), made.__dict__)
    return made


@dataclass(frozen=True)
class Found:
    """Where the engine is: its file, the BLIS files to ask after or before it, and its config.json."""

    path: str
    origin: str
    config: Mapping[str, Any]
    blis: tuple[str, ...] = ()


def engine_folders() -> list[tuple[str, Path]]:
    """Return (origin, folder) for each place an installed engine may be, nearest first."""
    folders = [("package", PACKAGE / "_engine")]
    try:
        from importlib import metadata

        files = metadata.files(DISTRIBUTION) or []
    except ImportError:
        files = []
    for file in files:
        if file.name == "config.json" and file.parent.name == "_engine":
            folder = Path(str(file.locate())).resolve().parent
            if folder != folders[0][1]:
                folders.append(("installed distribution", folder))
    return folders


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the engine's config.json; empty if there is none or it does not parse."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def find() -> Found:
    """Return where the library is; LibraryError says where it was looked for and what to do."""
    override = os.environ.get(LIBRARY_VARIABLE)
    if override:
        return _found_by_variable(override)
    looked: list[str] = []
    for origin, folder in engine_folders():
        config = read_config(folder)
        if config.get("provider") == "none":
            raise LibraryError(f"no engine was built: {config.get('reason', 'no reason recorded')}. {REMEDY}")
        path = folder / str(config.get("library", ENGINE_FILE))
        if path.is_file():
            return Found(str(path), origin, config, _blis_beside(folder, path.name, config))
        looked.append(str(path))
    raise LibraryError(f"no ZenDNN library; looked for {' and '.join(looked)}. {REMEDY}")


def _found_by_variable(path: str) -> Found:
    if not os.path.isfile(path):
        raise LibraryError(f"{LIBRARY_VARIABLE}={path}: no such file. Correct or unset the variable.")
    folder = Path(path).resolve().parent
    config = read_config(folder)
    if config.get("library") != os.path.basename(path):
        config = {}
    # a libblis beside somebody else's library may be anybody's
    blis = _blis_beside(folder, os.path.basename(path), config) if config else ()
    return Found(path, LIBRARY_VARIABLE, config, blis)


def _blis_beside(folder: Path, library: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the separate BLIS config.json names, or the usual one where it names none; nothing if it is built in."""
    named = config.get("blis")
    names = BLIS_FILES if named is None else (str(named),)
    return tuple(str(folder / name) for name in names if name != library and (folder / name).is_file())


class BlisLibrary:
    """The declared BLIS functions that the BLIS at hand exports; what is absent is named when it is used."""

    def __init__(self, ffi: Any, libraries: list[tuple[str, Any]]) -> None:
        self.ffi = ffi
        self.paths = tuple(path for path, _ in libraries)
        self._libraries = tuple(library for _, library in libraries)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        for library in self._libraries:
            if exports(self.ffi, library, name):
                self.__dict__[name] = getattr(library, name)
                return self.__dict__[name]
        if name not in abi.declared_names(declarations("_blis")):
            raise AttributeError(f"no BLIS function or constant {name!r} is declared")
        raise MissingFunctionError(
            f"{name} is not in {' or '.join(self.paths)}: this BLIS was built without it. "
            f"{'Unset' if os.environ.get(BLIS_VARIABLE) else 'Set'} {BLIS_VARIABLE} to take another."
        )

    def __dir__(self) -> list[str]:
        return sorted({"ffi", "paths"} | set(abi.declared_names(declarations("_blis"))))


def open_library(ffi: Any, path: str) -> Any:
    """Return the opened library; LibraryError says why it does not load and what to do."""
    fault = elf.fault(path)
    if fault is not None:
        raise LibraryError(f"{path} cannot be loaded: {fault}. {REMEDY}")
    try:
        return ffi.dlopen(path, ffi.RTLD_LAZY | ffi.RTLD_LOCAL)
    except OSError as error:
        raise LibraryError(f"{path} cannot be loaded: {error}. {REMEDY}") from error


def _open_blis(found: Found) -> BlisLibrary:
    ffi = declarations("_blis").ffi
    override = os.environ.get(BLIS_VARIABLE)
    if override:
        if not os.path.isfile(override):
            raise LibraryError(f"{BLIS_VARIABLE}={override}: no such file. Correct or unset the variable.")
        paths = [override]  # alone: a comparison must not be answered by the other library
    else:
        paths = [*found.blis, found.path]
    opened = [(path, open_library(ffi, path)) for path in paths]
    for path, blis in opened:
        check_blis_integers(ffi, path, blis)
    return BlisLibrary(ffi, opened)


def check_blis_integers(ffi: Any, path: str, blis: Any) -> None:
    """Refuse a BLIS whose integers are not as declared: 64 bits in its own API, 32 in the BLAS functions."""
    for function, bits in (("bli_info_get_int_type_size", 64), ("bli_info_get_blas_int_type_size", 32)):
        if not exports(ffi, blis, function):
            continue
        found = getattr(blis, function)()
        takes_blas = bits == 64 or exports(ffi, blis, "sgemm_blis_impl")
        if takes_blas and found != bits:
            raise LibraryError(
                f"{path}: {function}() is {found}, declared as {bits}. Build BLIS with {bits}-bit integers."
            )


def _load(found: Found) -> Library:
    reason = host.unsuitable_reason()
    if reason is not None:
        raise LibraryError(f"{reason}. Models run as plain PyTorch.")
    runtime = openmp.ensure_runtime()
    module = declarations("_zendnn")
    raw = open_library(module.ffi, found.path)
    library = Library(module.ffi, raw, "zendnn_", found.path, "", openmp=runtime, config=found.config)
    _limit_instructions(library)
    library.version = abi.accept(library, module, SUPPORTED_VERSIONS)
    library.provider = str(found.config.get("provider", found.origin))
    blis = _open_blis(found)
    library.blis_lib, library.blis_ffi = blis, blis.ffi
    log.info("ZenDNN %s (%s) from %s, OpenMP %s", library.version, library.provider, library.path, runtime)
    return library


def _limit_instructions(library: Library) -> None:
    """Keep the library from kernels that no AMD CPU has, where the user has not chosen: must precede any other call.

    On CPUs with AMX tiles its bf16 kernels for them write beyond their results, which ends the process later.
    """
    if ISA_VARIABLE in os.environ or not library.has("set_max_cpu_isa"):  # abi.accept names what is missing
        return
    status = library.fn("set_max_cpu_isa")(library.const("cpu_isa_avx512_core_bf16"))
    if status != library.const("success"):
        log.warning("the instruction set could not be limited to AVX-512 with bf16: status %d", status)


_lock = new_lock()
_loaded: Library | None = None
_refused: tuple[tuple[str | None, ...], str] | None = None


def load() -> Library:
    """Return the library, loading and checking it on the first call; any thread may call.

    Raises   LibraryError with the reason and the remedy. A refusal is remembered until those variables change.
    """
    global _loaded, _refused
    if _loaded is not None:
        return _loaded
    with _lock:
        if _loaded is not None:
            return _loaded
        asked = (os.environ.get(LIBRARY_VARIABLE), os.environ.get(BLIS_VARIABLE))
        if _refused is not None and _refused[0] == asked:
            raise LibraryError(_refused[1])
        try:
            _loaded = _load(find())
        except LibraryError as error:
            _refused = (asked, str(error))
            raise
        return _loaded


def unavailable_reason() -> str | None:
    """Return why the library cannot be used, None if it can. Loads it; never raises."""
    try:
        load()
    except Exception as error:  # whatever goes wrong, the caller falls back to PyTorch
        return str(error) if isinstance(error, LibraryError) else f"{type(error).__name__}: {error}"
    return None


def is_available() -> bool:
    """Return whether the library is here, loads and is accepted. Never raises."""
    return unavailable_reason() is None


class LazyLibrary:
    """Stands for a loaded cffi library: constants at once, functions by loading on first use."""

    def __init__(self, module: str) -> None:
        self.__dict__["_module"] = module

    @property
    def ffi(self) -> Any:
        return declarations(self._module).ffi

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = declarations(self._module)
        if name not in abi.declared_names(module):
            raise AttributeError(f"{name!r} is not declared; dir() lists what is")
        if name in abi.declared_functions(module):
            library = load()
            value = getattr(library.lib if self._module == "_zendnn" else library.blis_lib, name)
        else:
            value = module.ffi.integer_const(name)
        self.__dict__[name] = value
        return value

    def __dir__(self) -> list[str]:
        return sorted({"ffi"} | set(abi.declared_names(declarations(self._module))))

    def __repr__(self) -> str:
        return f"<{self._module[1:]} library, {'loaded' if _loaded else 'not loaded'}>"


lib = LazyLibrary("_zendnn")
blis = LazyLibrary("_blis")


def __getattr__(name: str) -> Any:
    if name == "ffi":
        return declarations("_zendnn").ffi
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
