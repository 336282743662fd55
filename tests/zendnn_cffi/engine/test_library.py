"""Finding, loading and accepting the engine; what happens where there is none, or the wrong one."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zendnn_cffi
from zendnn_cffi.engine import abi, host
from zendnn_cffi.engine import library as module
from zendnn_cffi.errors import LibraryError, MissingFunctionError

VARIABLES = (module.LIBRARY_VARIABLE, module.BLIS_VARIABLE)
DECLARED = sorted(abi.declared_functions(module.declarations("_zendnn")))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The loader as in a new process: nothing loaded, nothing refused, nothing warned of."""
    for name, value in (("_loaded", None), ("_refused", None)):
        monkeypatch.setattr(module, name, value)
    return module


def stub(functions: list[str], version: tuple[int, int, int] = (5, 1, 0)) -> str:
    """Return C text exporting `functions` that do nothing, and zendnn_version that answers."""
    lines = [f"void *{name}(void) {{ return 0; }}" for name in functions if name != "zendnn_version"]
    if "zendnn_version" in functions:
        lines.append("struct v { int major, minor, patch; const char *hash; unsigned cpu, gpu; };")
        lines.append(f'static struct v version = {{ {version[0]}, {version[1]}, {version[2]}, "stub", 2, 0 }};')
        lines.append("struct v *zendnn_version(void) { return &version; }")
    return "\n".join(lines)


# ---- a good library


def test_loads_once_and_says_what_it_is(library: Any) -> None:
    assert module.load() is library
    assert library.version.split(".")[0] == "5"
    assert (library.prefix, Path(library.path).is_file()) == ("zendnn_", True)
    assert zendnn_cffi.is_available() is True
    assert zendnn_cffi.unavailable_reason() is None
    assert library.version in repr(library)


def test_names_are_reached_without_prefix(library: Any) -> None:
    assert library.const("f32") == 3
    assert library.const("ARG_DST") == 17
    assert library.ffi.sizeof(library.ctype("dims_t")) == 96
    assert library.new("memory_desc_t *").ndims == 0
    assert list(library.new("dims_t", [1, 2]))[:3] == [1, 2, 0]
    assert library.has("matmul_desc_init")
    assert not library.has("pooling_forward_desc_init")
    assert library.desc_flags == (False, False)
    with pytest.raises(AttributeError, match="no constant zendnn_nonsense or ZENDNN_nonsense"):
        library.const("nonsense")
    with pytest.raises(AttributeError):
        library.fn("nonsense")
    with pytest.raises(AttributeError):
        library.const("memory_create")  # a function


def test_many_threads_get_one_library(run_python) -> None:
    code = """
import threading
from zendnn_cffi.engine import library
go, got = threading.Barrier(8), []
def work():
    go.wait()
    got.append(library.load())
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
print(len(got), len(set(map(id, got))))
"""
    assert run_python(code).stdout.split() == ["8", "1"]


def test_import_loads_neither_library_nor_torch(run_python) -> None:
    code = """
import sys, zendnn_cffi
from zendnn_cffi import ffi, lib, blis, ZenDNNError, LibraryError, is_available
lib.zendnn_f32, blis.BLIS_TRANSPOSE, ffi.new("zendnn_memory_desc_t *"), dir(lib), dir(blis), dir(zendnn_cffi), repr(lib)
maps = open("/proc/self/maps").read()
print([n for n in ("torch", "numpy", "cffi.api") if n in sys.modules], "libamdZenDNN" in maps, "libgomp" in maps)
"""
    in_memory = "['cffi.api'] False False"
    assert run_python(code).stdout.strip() in (
        "[] False False",
        in_memory,
    )  # cffi itself only where nothing is generated


def test_bare_import_takes_nothing_but_the_standard_library(run_python) -> None:
    code = """
import sys
before = set(sys.modules)
import zendnn_cffi
print(sorted({name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""
    assert run_python(code).stdout.strip() == "['zendnn_cffi']"


# ---- the lazy names


def test_lib_gives_functions_constants_and_their_names(library: Any) -> None:
    lib = zendnn_cffi.lib
    assert lib.zendnn_version().major == 5
    assert lib.zendnn_nhwc == lib.zendnn_acdb == 20
    assert lib.ZENDNN_ARG_WEIGHTS == 33
    assert set(DECLARED) < set(dir(lib))
    assert hasattr(lib, "zendnn_sgemm")
    assert not hasattr(lib, "zendnn_nonsense")
    with pytest.raises(AttributeError, match="'zendnn_nonsense' is not declared"):
        _ = lib.zendnn_nonsense
    assert lib.ffi is zendnn_cffi.ffi
    assert zendnn_cffi.ffi.typeof("zendnn_memory_desc_t") is library.ctype("memory_desc_t")


def test_lib_functions_are_fetched_once() -> None:
    assert zendnn_cffi.lib.zendnn_status2str is zendnn_cffi.lib.zendnn_status2str
    assert "zendnn_status2str" in zendnn_cffi.lib.__dict__


@pytest.mark.parametrize("name", sorted(zendnn_cffi._EXPORTS))
def test_package_fetches_its_names(name: str) -> None:
    assert getattr(zendnn_cffi, name) is not None
    assert name in dir(zendnn_cffi)


def test_public_names_are_the_ones_fetched() -> None:
    assert set(zendnn_cffi.__all__) == {
        name for name in (*zendnn_cffi._EXPORTS, *zendnn_cffi._MODULES) if not name.startswith("__")
    }


def test_package_shows_what_users_need_and_nothing_else() -> None:
    _ = zendnn_cffi.optimize, zendnn_cffi.show_config  # what fetching them imports is not shown either
    shown = {name for name in dir(zendnn_cffi) if not name.startswith("__")}
    assert shown == set(zendnn_cffi.__all__)
    assert {"__version__", "__config__"} < set(dir(zendnn_cffi))


def test_package_refuses_other_names() -> None:
    with pytest.raises(AttributeError, match="module 'zendnn_cffi' has no attribute 'nonsense'"):
        _ = zendnn_cffi.nonsense


# ---- a wrong library


def loading(monkeypatch: pytest.MonkeyPatch, path: str | os.PathLike[str]) -> pytest.ExceptionInfo[LibraryError]:
    monkeypatch.setenv(module.LIBRARY_VARIABLE, str(path))
    assert zendnn_cffi.is_available() is False
    reason = zendnn_cffi.unavailable_reason()
    with pytest.raises(LibraryError) as caught:
        module.load()
    assert str(caught.value) == reason
    return caught


@pytest.mark.parametrize("absent", [1, 7, len(DECLARED)])
def test_all_missing_functions_are_named_at_once(fresh, monkeypatch, compile_c, absent: int) -> None:
    kept, missing = DECLARED[absent:], DECLARED[:absent]
    message = str(loading(monkeypatch, compile_c(stub(kept))).value)
    assert f"lacks {absent} of 144 functions" in message
    assert [name for name in DECLARED if f"{name}," in message or f"{name}." in message] == missing


def test_missing_functions_are_in_an_attribute(compile_c) -> None:
    from zendnn_cffi.engine.engines import load_engine

    with pytest.raises(abi.IncompatibleError) as caught:
        load_engine("zendnn", compile_c(stub(DECLARED[3:])))
    assert caught.value.missing == tuple(DECLARED[:3])


@pytest.mark.parametrize("version", [(4, 2, 0), (5, 2, 0), (2, 6, 0)])
def test_wrong_version_is_refused(fresh, monkeypatch, compile_c, version: tuple[int, int, int]) -> None:
    message = str(loading(monkeypatch, compile_c(stub(DECLARED, version))).value)
    assert "is version {}.{}.{}; these declarations are for 5.0 or 5.1".format(*version) in message


def test_absent_file_is_named_with_its_variable(fresh, monkeypatch, tmp_path: Path) -> None:
    message = str(loading(monkeypatch, tmp_path / "none.so").value)
    assert f"{module.LIBRARY_VARIABLE}={tmp_path / 'none.so'}: no such file" in message


@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF" + bytes(200)])
def test_corrupt_file_says_what_to_do(fresh, monkeypatch, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.so").write_bytes(content)
    message = str(loading(monkeypatch, tmp_path / "bad.so").value)
    assert f"{tmp_path / 'bad.so'} cannot be loaded: " in message
    assert "Install the package again" in message


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5])
def test_interrupted_download_is_refused(fresh, monkeypatch, tmp_path: Path, library: Any, part: float) -> None:
    """The loader itself would die of SIGBUS."""
    with open(library.path, "rb") as whole:
        (tmp_path / "part.so").write_bytes(whole.read(100 + int(os.path.getsize(library.path) * part)))
    assert "cannot be loaded: truncated" in str(loading(monkeypatch, tmp_path / "part.so").value)


def test_library_for_another_machine_is_refused(fresh, monkeypatch, tmp_path: Path, library: Any) -> None:
    with open(library.path, "rb") as whole:
        header = bytearray(whole.read(4096))
    header[18:20] = (183).to_bytes(2, "little")  # e_machine: aarch64
    (tmp_path / "arm.so").write_bytes(header)
    assert "not a shared library for 64-bit x86" in str(loading(monkeypatch, tmp_path / "arm.so").value)


def test_folder_instead_of_a_file_is_refused(fresh, monkeypatch, tmp_path: Path) -> None:
    assert "no such file" in str(loading(monkeypatch, tmp_path).value)


def test_refusal_is_remembered_until_the_variable_changes(fresh, monkeypatch, tmp_path: Path, library: Any) -> None:
    loading(monkeypatch, tmp_path / "none.so")
    (tmp_path / "none.so").write_bytes(b"now here, still refused: one reason for the whole process")
    assert "no such file" in str(loading(monkeypatch, tmp_path / "none.so").value)
    monkeypatch.setenv(module.LIBRARY_VARIABLE, library.path)
    assert zendnn_cffi.is_available() is True


# ---- where it is looked for


@pytest.fixture
def engine_folder(fresh, monkeypatch, tmp_path: Path) -> Callable[..., Path]:
    """Make a folder with stand-in engine files the package's own _engine/."""
    monkeypatch.delenv(module.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(module, "PACKAGE", tmp_path)

    def make(config: dict[str, Any] | str | None, *files: str) -> Path:
        folder = tmp_path / "_engine"
        folder.mkdir()
        if config is not None:
            (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        for file in files:
            (folder / file).write_bytes(b"")
        return folder

    return make


def test_packaged_engine_is_found(engine_folder) -> None:
    folder = engine_folder({"provider": "prebuilt", "library": "libamdZenDNN.so"}, "libamdZenDNN.so", "libblis.so")
    found = module.find()
    assert found.path == str(folder / "libamdZenDNN.so")
    assert found.origin == "package"
    assert found.blis == (str(folder / "libblis.so"),)
    assert found.config["provider"] == "prebuilt"


@pytest.mark.parametrize(
    ("named", "found"),
    [("libblis-mt.so.5", ["libblis-mt.so.5"]), ("libamdZenDNN.so", []), ("absent.so", []), (None, ["libblis.so"])],
)
def test_blis_is_named_by_the_configuration(engine_folder, named: str | None, found: list[str]) -> None:
    folder = engine_folder({"blis": named}, "libamdZenDNN.so", "libblis-mt.so.5", "libblis.so")
    assert list(module.find().blis) == [str(folder / name) for name in found]


def test_library_is_named_by_the_configuration(engine_folder) -> None:
    folder = engine_folder({"library": "libzendnn-custom.so"}, "libzendnn-custom.so", "libamdZenDNN.so")
    assert module.find().path == str(folder / "libzendnn-custom.so")


@pytest.mark.parametrize("config", [None, "{ not json", "[]"])
def test_engine_without_a_readable_configuration_is_found(engine_folder, config: str | None) -> None:
    folder = engine_folder(config, "libamdZenDNN.so")
    assert module.find().path == str(folder / "libamdZenDNN.so")
    assert module.find().config == {}


def test_build_without_engine_gives_its_reason(engine_folder) -> None:
    engine_folder({"provider": "none", "reason": "no engine for this platform"})
    assert "no engine was built: no engine for this platform" in (zendnn_cffi.unavailable_reason() or "")


def test_a_stranger_beside_a_given_library_is_not_its_blis(engine_folder, monkeypatch, tmp_path: Path) -> None:
    folder = engine_folder(None, "libamdZenDNN.so", "libblis.so")
    monkeypatch.setenv(module.LIBRARY_VARIABLE, str(folder / "libamdZenDNN.so"))
    assert module.find().blis == ()
    (folder / "config.json").write_text(json.dumps({"library": "libamdZenDNN.so"}))
    assert module.find().blis == (str(folder / "libblis.so"),)


def test_variable_overrides_the_package(engine_folder, monkeypatch, library: Any) -> None:
    engine_folder({"provider": "none", "reason": "none"})
    monkeypatch.setenv(module.LIBRARY_VARIABLE, library.path)
    found = module.find()
    assert (found.path, found.origin) == (library.path, module.LIBRARY_VARIABLE)


def test_source_tree_uses_the_installed_distribution(fresh, monkeypatch, tmp_path: Path) -> None:
    """A clone imported in place has no _engine/; `pip install .` put one into site-packages."""
    site, info = tmp_path / "site", tmp_path / "site" / "zendnn_cffi-9.9.dist-info"
    engine = site / "zendnn_cffi" / "_engine"
    engine.mkdir(parents=True)
    info.mkdir()
    (engine / "config.json").write_text(json.dumps({"provider": "prebuilt"}))
    (engine / "libamdZenDNN.so").write_bytes(b"")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zendnn_cffi\nVersion: 9.9\n")
    names = ("config.json", "libamdZenDNN.so")
    (info / "RECORD").write_text("".join(f"zendnn_cffi/_engine/{name},,\n" for name in names))
    monkeypatch.delenv(module.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(module, "PACKAGE", tmp_path / "clone" / "zendnn_cffi")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    found = module.find()
    assert found.path == str(engine / "libamdZenDNN.so")
    assert found.origin == "installed distribution"


def test_nothing_anywhere_says_where_it_looked(fresh, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv(module.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    monkeypatch.setattr(module, "DISTRIBUTION", "zendnn-cffi-not-installed")
    reason = zendnn_cffi.unavailable_reason() or ""
    assert str(tmp_path / "_engine" / "libamdZenDNN.so") in reason
    assert module.LIBRARY_VARIABLE in reason


# ---- an unsuitable machine


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64"), ("win32", "AMD64")])
def test_other_platform_is_named(fresh, monkeypatch, system: str, machine: str) -> None:
    monkeypatch.setattr(host, "sys", SimpleNamespace(platform=system))
    monkeypatch.setattr(host, "platform", SimpleNamespace(machine=lambda: machine, processor=lambda: ""))
    reason = zendnn_cffi.unavailable_reason() or ""
    assert f"this is {system} on {machine}" in reason
    assert "plain PyTorch" in reason


@pytest.mark.parametrize("lacking", host.REQUIRED_FLAGS)
def test_cpu_without_an_instruction_set_is_named(fresh, monkeypatch, lacking: str) -> None:
    flags = frozenset(host.REQUIRED_FLAGS) - {lacking}
    monkeypatch.setattr(host, "cpu_flags", lambda: flags)
    monkeypatch.setattr(host, "cpu_name", lambda: "Old CPU 3000")
    assert f"Old CPU 3000 lacks {lacking}" in (zendnn_cffi.unavailable_reason() or "")


def test_unreadable_cpu_flags_do_not_forbid_loading(monkeypatch) -> None:
    monkeypatch.setattr(host, "cpu_flags", frozenset)
    assert host.unsuitable_reason() is None


# ---- stderr


USE_EVERYTHING = """
import os, sys
from zendnn_cffi.engine import library, abi
before = len(os.listdir("/proc/self/fd"))
lib = library.load()
assert len(os.listdir("/proc/self/fd")) == before, "a descriptor leaked"
desc = lib.new("matmul_desc_t *"); m = abi.make_desc(lib, (4, 4), "f32", "ab")
assert lib.fn("matmul_desc_init")(desc, m, m, lib.ffi.NULL, m) == 0
engine = lib.ffi.new("zendnn_engine_t *"); pd = lib.ffi.new("zendnn_primitive_desc_t *")
assert lib.fn("engine_create")(engine, 1, 0) == 0
assert lib.fn("primitive_desc_create")(pd, desc, lib.ffi.NULL, engine[0], lib.ffi.NULL) == 0
os.write(2, b"mine\\n")
"""


def test_no_banner_appears(run_python) -> None:
    assert run_python(USE_EVERYTHING).stderr == "mine\n"


def test_the_banner_is_there_to_be_silenced(run_python) -> None:
    """The day the library no longer prints it, quiet_stderr can go."""
    code = "from contextlib import nullcontext\nfrom zendnn_cffi.engine import abi\nabi.quiet_stderr = nullcontext\n"
    assert abi.BANNER.decode() in run_python(code + USE_EVERYTHING).stderr


def test_loading_works_where_no_memory_file_can_be_made(run_python) -> None:
    code = "import os\ndef refuse(name): raise OSError(38, 'not implemented')\nos.memfd_create = refuse\n"
    assert abi.BANNER.decode() in run_python(code + USE_EVERYTHING).stderr


def test_no_banner_appears_where_python_makes_no_memory_files(run_python) -> None:
    """One that was built on an old system, as conda's, has no os.memfd_create."""
    assert run_python("import os\ndel os.memfd_create\n" + USE_EVERYTHING).stderr == "mine\n"


def test_loading_works_without_stderr(run_python) -> None:
    code = "import os; os.close(2)\nfrom zendnn_cffi.engine import library\nprint(library.load().version)"
    assert run_python(code).stdout.startswith("5.")


def test_what_other_threads_write_meanwhile_arrives(run_python) -> None:
    code = """
import os, threading
from zendnn_cffi.engine import abi
inside, written = threading.Semaphore(0), threading.Semaphore(0)
def chatter():
    for _ in range(20):
        inside.acquire()
        os.write(2, b"x" * 10 + b"\\n")
        written.release()
thread = threading.Thread(target=chatter); thread.start()
for _ in range(20):
    with abi.quiet_stderr():
        os.write(2, abi.BANNER + b".\\n")
        inside.release()
        written.acquire()
thread.join()
"""
    done = run_python(code)
    assert done.stderr.count("x" * 10) == 20
    assert "ZenDNN Info" not in done.stderr


def test_only_late_writers_are_waited_for(run_python) -> None:
    """A write is on its way where there is another thread alone; without one, a start would wait for nothing."""
    code = """
import threading
from zendnn_cffi.engine import abi
waited = []
abi.time.sleep = waited.append
with abi.quiet_stderr():
    pass
print(len(waited))
end = threading.Event()
threading.Thread(target=end.wait).start()
with abi.quiet_stderr():
    pass
end.set()
print(len(waited))
"""
    assert run_python(code).stdout.split() == ["0", "1"]


# ---- BLIS beside the engine


def test_blis_override_that_is_absent_is_named(fresh, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv(module.BLIS_VARIABLE, str(tmp_path / "libblis.so"))
    assert f"{module.BLIS_VARIABLE}={tmp_path / 'libblis.so'}: no such file" in (zendnn_cffi.unavailable_reason() or "")


def test_load_from_a_finalizer_thread_does_not_deadlock(library: Any) -> None:
    got: list[Any] = []
    with module._lock:  # reentrant for its owner, and loaded libraries are returned without it
        thread = threading.Thread(target=lambda: got.append(module.load()))
        thread.start()
        thread.join(timeout=30)
    assert got == [library]


def test_missing_function_error_is_an_attribute_error() -> None:
    assert issubclass(MissingFunctionError, AttributeError)
    assert issubclass(MissingFunctionError, LibraryError)


def test_copy_of_the_package_loads_its_own_engine(run_python, tmp_path: Path, library: Any) -> None:
    """The layout `pip install` makes: engine beside the modules, no variable set."""
    target = tmp_path / "zendnn_cffi"
    shutil.copytree(module.PACKAGE, target, ignore=shutil.ignore_patterns("_engine", "__pycache__"))
    (target / "_engine").mkdir()
    (target / "_engine" / "libamdZenDNN.so").symlink_to(library.path)
    (target / "_engine" / "config.json").write_text(json.dumps({"provider": "prebuilt", "library": "libamdZenDNN.so"}))
    code = "from zendnn_cffi.engine import library; found = library.load(); print(found.provider, found.path)"
    done = run_python(code, package=target, env=dict.fromkeys(VARIABLES))
    assert done.stdout.split() == ["prebuilt", str(target / "_engine" / "libamdZenDNN.so")]
