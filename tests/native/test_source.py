"""Provider `source`, with small stand-ins for AMD BLIS and ZenDNN that look for options and files as upstream does.

They record what they were told and build real (tiny) libraries, one needing the other, so that what is checked is the
plumbing: options handed over, outputs found, installed, and loadable from where they are installed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_build import source, toolchain
from engine_build.common import BuildError
from engine_build.elf_dynamic import read_dynamic

Call = Callable[..., "subprocess.CompletedProcess[str]"]
ErrorLine = Callable[["subprocess.CompletedProcess[str]"], str]

# The real BLIS installs include/blis/blis.h and a versioned libblis-mt.so.
BLIS_CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(standin_blis C)
file(WRITE ${CMAKE_BINARY_DIR}/told.txt "${BLIS_CONFIG_FAMILY} ${ENABLE_ADDON} ${ENABLE_THREADING} ${ENABLE_CBLAS} "
     "${BUILD_SHARED_LIBS} ${CMAKE_BUILD_TYPE}")
add_library(blis SHARED blis.c)
set_target_properties(blis PROPERTIES OUTPUT_NAME blis-mt VERSION 5.1.0 SOVERSION 5)
install(TARGETS blis LIBRARY DESTINATION lib)
install(FILES blis.h DESTINATION include/blis)
"""
BLIS_CONFIGURE = """#!/bin/sh
for word in "$@"; do case $word in --prefix=*) prefix=${word#--prefix=};; esac; done
echo "$@" > told.txt
here=$(dirname "$0")
printf 'install:\\n\\tmkdir -p %s/lib %s/include/blis\\n' "$prefix" "$prefix" > Makefile
soname=libblis-mt.so.5
printf '\\tcc -shared -fPIC -Wl,-soname,%s -o %s/lib/%s %s/blis.c\\n' $soname "$prefix" $soname "$here" >> Makefile
printf '\\tln -sf libblis-mt.so.5 %s/lib/libblis-mt.so\\n' "$prefix" >> Makefile
printf '\\tcp %s/blis.h %s/include/blis/\\n' "$here" "$prefix" >> Makefile
"""
# The real ZenDNN takes the environment's ZENDNN_BLIS_PATH and looks into include/LP64 and lib/LP64 there.
ZENDNN_CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(standin_zendnn C)
set(place $ENV{ZENDNN_BLIS_PATH})
find_library(BLIS NAMES libblis-mt.so libblis.so PATHS ${place}/lib PATH_SUFFIXES LP64 NO_DEFAULT_PATH REQUIRED)
find_path(BLIS_H NAMES blis.h PATHS ${place}/include PATH_SUFFIXES LP64 NO_DEFAULT_PATH REQUIRED)
file(WRITE ${CMAKE_BINARY_DIR}/told.txt "${BUILD_SHARED_LIBS} ${LPGEMM_V5_0} ${BLIS_API} ${FBGEMM_ENABLE} "
     "${_GLIBCXX_USE_CXX11_ABI} ${CMAKE_BUILD_TYPE} ${AMDBLIS_LOCAL_SOURCE}")
add_library(amdZenDNN SHARED EXCLUDE_FROM_ALL zendnn.c)
target_include_directories(amdZenDNN PRIVATE ${BLIS_H})
target_link_libraries(amdZenDNN PRIVATE ${BLIS})
set_target_properties(amdZenDNN PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
"""
ZENDNN_C = """
#include <blis.h>
static const int version[] = {5, 1, 0};
const int *zendnn_version(void) { return version; }
int zendnn_asks_blis(void) { return bli_answer(); }
"""


def write_tree(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def blis_tree(folder: Path, *, with_cmake: bool = True) -> Path:
    files = {"blis.c": "int bli_answer(void) { return 42; }\n", "blis.h": "int bli_answer(void);\n", "LICENSE": "BSD"}
    tree = write_tree(folder, files | ({"CMakeLists.txt": BLIS_CMAKE} if with_cmake else {"configure": BLIS_CONFIGURE}))
    if not with_cmake:
        (tree / "configure").chmod(0o755)
    return tree


def zendnn_tree(folder: Path, code: str = ZENDNN_C) -> Path:
    texts = {"LICENSE": "Apache", "THIRD-PARTY-PROGRAMS": "notices"}
    return write_tree(folder, {"CMakeLists.txt": ZENDNN_CMAKE, "zendnn.c": code, **texts})


def build_trees(build: Call, folder: Path, blis: Path, zendnn: Path, *more: str, **env: str) -> Any:
    local = (f"-DZENDNN_CFFI_USE_LOCAL_BLIS={blis}", f"-DZENDNN_CFFI_USE_LOCAL_ZENDNN={zendnn}")
    return build(folder, "-DZENDNN_PROVIDER=source", *local, *more, env=env)


@pytest.fixture(scope="module", params=[True, False], ids=["BLIS by CMake", "BLIS by configure"])
def built(request: pytest.FixtureRequest, build: Call, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    blis = blis_tree(folder / "blis", with_cmake=request.param)
    done = build_trees(build, folder / "build", blis, zendnn_tree(folder / "ZenDNN"))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_options_are_handed_over(built: Path) -> None:
    work = built / "build" / "work"
    blis = (work / "blis-build" / "told.txt").read_text()
    if (built / "blis" / "configure").exists():
        assert all(option in blis for option in ("-a aocl_gemm", "--enable-threading=openmp", "--enable-cblas"))
        assert blis.split()[-1] == "amdzen"
    else:
        assert blis == "amdzen aocl_gemm openmp ON ON Release"
    assert (work / "zendnn-build" / "told.txt").read_text() == f"ON 1 1 0 1 Release {built / 'blis'}"


def test_both_libraries_and_licences_are_installed(built: Path, run: Call, tmp_path: Path) -> None:
    assert run("cmake", "--install", built / "build", "--prefix", tmp_path).returncode == 0
    engine = tmp_path / "zendnn_cffi" / "_engine"
    assert sorted(p.name for p in engine.glob("*.so*")) == ["libamdZenDNN.so", "libblis-mt.so.5"]
    licences = sorted(p.name for p in (engine / "licenses").iterdir())
    assert licences == ["ZenDNN-LICENSE", "ZenDNN-THIRD-PARTY-PROGRAMS", "blis-LICENSE", "zendnn_cffi-LICENSE"]
    assert not any(path.is_symlink() for path in engine.rglob("*")), "a wheel holds no symbolic links"


def test_installed_library_finds_blis_beside_itself(built: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(built / "build" / "engine", tmp_path / "moved"))
    assert "libblis-mt.so.5" in read_dynamic(moved / "libamdZenDNN.so").needed  # type: ignore[union-attr]
    hidden = (built / "build" / "work").rename(built / "build" / "hidden")
    try:
        code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).zendnn_asks_blis())"
        words = [sys.executable, "-c", code, str(moved / "libamdZenDNN.so")]
        done = subprocess.run(words, capture_output=True, text=True)
    finally:
        hidden.rename(built / "build" / "work")
    assert done.stdout.strip() == "42", done.stderr


def test_config_says_how_it_was_built(built: Path) -> None:
    config = json.loads((built / "build" / "engine" / "config.json").read_text())
    assert (config["provider"], config["zendnn_version"]) == ("source", "5.1.0")
    assert (config["library"], config["blis"]) == ("libamdZenDNN.so", "libblis-mt.so.5")
    assert config["options"]["zendnn"]["LPGEMM_V5_0"] == "1"
    assert config["options"]["blis"]["ENABLE_ADDON"] == "aocl_gemm"
    assert config["built_with"]["compiler"]


def test_trees_are_only_read(built: Path) -> None:
    assert sorted(path.name for path in (built / "ZenDNN").iterdir()) == [
        "CMakeLists.txt", "LICENSE", "THIRD-PARTY-PROGRAMS", "zendnn.c"]  # fmt: skip


def test_compiler_error_is_one_line_with_the_log(build: Call, tmp_path: Path, error_line: ErrorLine) -> None:
    broken = zendnn_tree(tmp_path / "ZenDNN", code="#error no such kernel\n")
    line = error_line(build_trees(build, tmp_path / "b", blis_tree(tmp_path / "blis"), broken))
    assert "ZenDNN does not build here" in line and "no such kernel" in line
    log = Path(line.split("full output: ")[1].rstrip(")"))
    assert "no such kernel" in log.read_text()
    assert not (tmp_path / "b" / "engine" / "config.json").exists()


def test_tree_that_is_something_else_is_named(build: Call, tmp_path: Path, error_line: ErrorLine) -> None:
    other = write_tree(tmp_path / "blis", {"CMakeLists.txt": "cmake_minimum_required(VERSION 3.20)\nproject(x NONE)\n"})
    line = error_line(build_trees(build, tmp_path / "b", other, zendnn_tree(tmp_path / "ZenDNN")))
    assert "installed no blis.h; is the tree AMD's BLIS 5.1?" in line


def test_local_tree_must_exist(build: Call, tmp_path: Path, error_line: ErrorLine) -> None:
    line = error_line(build_trees(build, tmp_path / "b", tmp_path / "nowhere", tmp_path / "nowhere"))
    assert f"ZENDNN_CFFI_USE_LOCAL_BLIS={tmp_path / 'nowhere'} is not a source tree" in line


# ---- cloning -------------------------------------------------------------------------------------------------------


def rewrites(base: str) -> dict[str, str]:
    """The environment in which git takes the public addresses from `base` instead."""
    return {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{base}.insteadOf",
            "GIT_CONFIG_VALUE_0": "https://github.com/amd/", "GIT_CONFIG_GLOBAL": "/dev/null"}  # fmt: skip


def clone(place: Path, work: Path, local: Path | None = None) -> Path:
    return source.source_tree("blis", local, place, source.BLIS_REPOSITORY, source.BLIS_TAG, work)


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with the pinned tag where the public one is expected."""
    tree = blis_tree(tmp_path / "public" / "blis.git")
    identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "release"], ["tag", source.BLIS_TAG]):
        subprocess.run(["git", *words], cwd=tree, check=True)
    (tree / "later.c").write_text("")
    subprocess.run(["git", "add", "."], cwd=tree, check=True)
    subprocess.run(["git", *identity, "commit", "-qm", "later"], cwd=tree, check=True)
    for name, value in rewrites(f"file://{tmp_path / 'public'}/").items():
        monkeypatch.setenv(name, value)
    return tree


def test_absent_tree_is_cloned_at_the_pinned_tag(published: Path, tmp_path: Path) -> None:
    place = tmp_path / "third_party" / "blis"
    assert clone(place, tmp_path / "work") == place
    assert (place / "blis.c").exists() and not (place / "later.c").exists()
    assert [path.name for path in place.parent.iterdir()] == ["blis"]


def test_present_tree_is_used_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    place = blis_tree(tmp_path / "third_party" / "blis")
    assert clone(place, tmp_path) == place


def test_local_tree_wins_over_third_party(tmp_path: Path) -> None:
    blis_tree(tmp_path / "third_party" / "blis")
    local = blis_tree(tmp_path / "mine")
    assert clone(tmp_path / "third_party" / "blis", tmp_path, local) == local


def test_missing_network_is_one_line_with_what_to_do(tmp_path: Path, error_line: ErrorLine) -> None:
    third_party = source_checkout(tmp_path / "checkout") / "third_party"
    command = [sys.executable, third_party.parent / "native" / "engine.py", "source", "--out", tmp_path / "out"]
    command += ["--work", tmp_path / "work", "--license", third_party.parent / "LICENSE", "--third-party", third_party]
    command += ["--local-zendnn", zendnn_tree(tmp_path / "ZenDNN")]
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **rewrites("http://127.0.0.1:9/")},
        capture_output=True,
        text=True,
    )
    line = error_line(done)
    assert "cannot clone https://github.com/amd/blis.git at 5.1: check the network, or put the sources into" in line
    assert str(third_party / "blis") in line and "ZENDNN_CFFI_USE_LOCAL_BLIS" in line
    assert not list(third_party.iterdir()), "a part of the clone was left"


def source_checkout(folder: Path) -> Path:
    """A copy of what the build reads, so that a clone does not land in this checkout."""
    root = Path(__file__).resolve().parents[2]
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "native", folder / "native", ignore=ignore)
    shutil.copy(root / "LICENSE", folder / "LICENSE")
    (folder / "third_party").mkdir()
    return folder


def test_something_else_in_place_is_not_deleted(published: Path, tmp_path: Path) -> None:
    place = write_tree(tmp_path / "third_party" / "blis", {"notes.txt": "mine"})
    with pytest.raises(BuildError, match="holds something that is not blis's source"):
        clone(place, tmp_path / "work")
    assert (place / "notes.txt").read_text() == "mine"


def test_git_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match="git is needed to clone"):
        clone(tmp_path / "third_party" / "blis", tmp_path)


# ---- the compiler --------------------------------------------------------------------------------------------------


def fake_compiler(folder: Path, says: str) -> Path:
    path = folder / "c++"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("says", "accepted"),
    [
        ("g++ (Debian 12.2.0-14) 12.2.0", True),
        ("g++ (GCC) 13.1.1 20230614 (Red Hat 13.1.1-4)", True),
        ("AMD clang version 17.0.6 (CLANG: AOCC_5.0.0-Build#1377)", True),
        ("g++ (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0", False),
        ("g++ (GCC) 12.1.0", False),
    ],
)
def test_old_compilers_are_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, accepted: bool
) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, says)))
    if accepted:
        assert toolchain.require_compiler() == says
    else:
        with pytest.raises(BuildError, match="needs gcc 12.2 or newer"):
            toolchain.require_compiler()


def test_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no working no-such-compiler was found"):
        toolchain.require_compiler()


def test_soname_and_needed_are_read_from_the_file(built: Path) -> None:
    dynamic = read_dynamic(built / "build" / "engine" / "libblis-mt.so.5")
    assert dynamic is not None and dynamic.soname == "libblis-mt.so.5"
    assert ctypes.CDLL(str(built / "build" / "engine" / "libblis-mt.so.5")).bli_answer() == 42
