"""Provider `source`: build AMD BLIS, then ZenDNN 5.1, as shared libraries.

    trees     ZENDNN_CFFI_USE_LOCAL_*  or  third_party/*  or  a clone of the pinned tag into third_party/
    BLIS      its CMake (or configure where a tree has none)  -> prefix -> include/LP64, lib/LP64 as ZenDNN looks for it
    ZenDNN    its CMake target amdZenDNN, told where that is  -> libamdZenDNN.so, which finds BLIS beside itself

Everything is built in the work folder; the trees are only read.
"""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path

from .common import BuildError, run, say
from .config import EngineConfig, copy_licences
from .elf_dynamic import read_dynamic
from .pins import BLIS_REPOSITORY, BLIS_TAG, ZENDNN_REPOSITORY, ZENDNN_TAG
from .system import version_of
from .toolchain import generator_arguments, job_arguments, require_compiler

LIBRARY = "libamdZenDNN.so"
BLIS_LIBRARIES = ("libblis-mt.so", "libblis.so")

BLIS_OPTIONS = {
    "BLIS_CONFIG_FAMILY": "amdzen",
    "ENABLE_ADDON": "aocl_gemm",
    "ENABLE_THREADING": "openmp",
    "ENABLE_CBLAS": "ON",
    "BUILD_SHARED_LIBS": "ON",
}
BLIS_CONFIGURE = ("-a", "aocl_gemm", "--enable-threading=openmp", "--enable-cblas", "--enable-shared", "amdzen")
ZENDNN_OPTIONS = {
    "BUILD_SHARED_LIBS": "ON",
    "LPGEMM_V5_0": "1",
    "BLIS_API": "1",
    "FBGEMM_ENABLE": "0",
    "_GLIBCXX_USE_CXX11_ABI": "1",
    # Both libraries are installed into one folder, wherever that is.
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
}


def build_source(out: Path, work: Path, options: Namespace) -> EngineConfig:
    """Build both libraries and put them, with their licences, into `out`.

    Raises   BuildError for a missing compiler, a tree that can neither be found nor cloned, or a failed build.
    """
    compiler = require_compiler()
    third_party: Path = options.third_party
    blis_tree = source_tree("blis", options.local_blis, third_party / "blis", BLIS_REPOSITORY, BLIS_TAG, work)
    zendnn_place = third_party / "ZenDNN"
    zendnn_tree = source_tree("ZenDNN", options.local_zendnn, zendnn_place, ZENDNN_REPOSITORY, ZENDNN_TAG, work)
    prefix = build_blis(blis_tree, work, options)
    blis = arrange_for_zendnn(prefix, work / "zendnn-blis")
    library = build_zendnn(zendnn_tree, blis_tree, work / "zendnn-blis", work, options)
    name = install(library, out)
    blis_name = install(blis, out)
    copy_licences(out, {**licences_of(blis_tree, "blis"), **licences_of(zendnn_tree, "ZenDNN")})
    return EngineConfig(
        provider="source",
        zendnn_version=version_of(out / name),
        library=name,
        blis=blis_name,
        options={
            "blis": {"tree": str(blis_tree), **BLIS_OPTIONS},
            "zendnn": {"tree": str(zendnn_tree), "CMAKE_BUILD_TYPE": options.build_type, **ZENDNN_OPTIONS},
        },
        built_with={"compiler": compiler},
    )


def source_tree(name: str, local: Path | None, place: Path, repository: str, tag: str, work: Path) -> Path:
    """Return the source tree: `local` if given, else `place`, cloned first if it is not there."""
    variable = f"ZENDNN_CFFI_USE_LOCAL_{name.upper()}"
    if local is not None:
        if not is_tree(local):
            raise BuildError(f"{variable}={local} is not a source tree of {name} (no CMakeLists.txt, no configure).")
        return local.resolve()
    if is_tree(place):
        return place
    if shutil.which("git") is None:
        raise BuildError(f"git is needed to clone {repository}: install it, or put {name} {tag} into {place}.")
    say(f"cloning {repository} at {tag}")
    partial = place.with_name(f".{place.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    run(
        ["git", "clone", "--depth", "1", "--branch", tag, repository, partial],
        log=work / f"clone-{name}.log",
        env={"GIT_TERMINAL_PROMPT": "0"},
        failure=f"cannot clone {repository} at {tag}: check the network, or put the sources into {place}, "
        f"or point {variable} at them",
    )
    if place.exists():  # an empty folder, or one that is no source tree: the latter is not ours to delete
        try:
            place.rmdir()
        except OSError:
            raise BuildError(f"{place} holds something that is not {name}'s source: move it away.") from None
    partial.rename(place)
    return place


def is_tree(folder: Path) -> bool:
    """Return whether the folder looks like a source tree that can be built."""
    return (folder / "CMakeLists.txt").is_file() or (folder / "configure").is_file()


def build_blis(tree: Path, work: Path, options: Namespace) -> Path:
    """Build and install BLIS below `work`; return its prefix."""
    prefix, build = work / "blis-install", work / "blis-build"
    log, failure = work / "blis-build.log", "AMD BLIS does not build here"
    say("building AMD BLIS, some minutes")
    if (tree / "CMakeLists.txt").is_file():
        settings = {"CMAKE_BUILD_TYPE": options.build_type, "CMAKE_INSTALL_PREFIX": str(prefix), **BLIS_OPTIONS}
        configure_cmake(options.cmake, tree, build, settings, log=work / "blis-configure.log", failure=failure)
        run([options.cmake, "--build", build, *job_arguments(options.jobs)], log=log, failure=failure)
        run([options.cmake, "--install", build], log=work / "blis-install.log", failure=failure)
        return prefix
    build.mkdir(parents=True, exist_ok=True)
    configure: list[str | Path] = [tree / "configure", f"--prefix={prefix}", *BLIS_CONFIGURE]
    run(configure, cwd=build, log=work / "blis-configure.log", failure=failure)
    jobs = "-j" + job_arguments(options.jobs)[1]
    run(["make", jobs, "install"], cwd=build, log=log, failure=failure)
    return prefix


def arrange_for_zendnn(prefix: Path, target: Path) -> Path:
    """Copy an installed BLIS into the folders ZENDNN_BLIS_PATH must have; return the library there."""
    headers = sorted(prefix.rglob("blis.h"))
    libraries = [found for name in BLIS_LIBRARIES for found in sorted(prefix.rglob(name))]
    if not headers or not libraries:
        missing = "blis.h" if not headers else " or ".join(BLIS_LIBRARIES)
        raise BuildError(f"AMD BLIS was built but installed no {missing}; is the tree AMD's BLIS {BLIS_TAG}?")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(headers[0].parent, target / "include" / "LP64")
    (target / "lib" / "LP64").mkdir(parents=True)
    for file in sorted(libraries[0].parent.glob("libblis*")):
        shutil.copy2(file, target / "lib" / "LP64" / file.name)
    return target / "lib" / "LP64" / libraries[0].name


def build_zendnn(tree: Path, blis_tree: Path, blis_path: Path, work: Path, options: Namespace) -> Path:
    """Build the target amdZenDNN; return the library."""
    build, failure = work / "zendnn-build", "ZenDNN does not build here"
    environment = {"ZENDNN_BLIS_PATH": str(blis_path), "PYTHON_PATH": sys.executable}
    settings = {"CMAKE_BUILD_TYPE": options.build_type, "AMDBLIS_LOCAL_SOURCE": str(blis_tree), **ZENDNN_OPTIONS}
    say("building ZenDNN, many minutes")
    configure_cmake(
        options.cmake, tree, build, settings, log=work / "zendnn-configure.log", env=environment, failure=failure
    )
    command = [options.cmake, "--build", build, "--target", "amdZenDNN", *job_arguments(options.jobs)]
    run(command, log=work / "zendnn-build.log", env=environment, failure=failure)
    found = sorted(build.rglob(LIBRARY), key=lambda path: path.stat().st_mtime)
    if not found:
        raise BuildError(f"ZenDNN was built but left no {LIBRARY} below {build}; is the tree ZenDNN {ZENDNN_TAG}?")
    return found[-1]


def configure_cmake(
    cmake: str,
    tree: Path,
    build: Path,
    settings: dict[str, str],
    *,
    log: Path,
    failure: str,
    env: dict[str, str] | None = None,
) -> None:
    """Configure a CMake tree out of source with the given cache entries."""
    entries = [f"-D{name}={value}" for name, value in settings.items()]
    run([cmake, "-S", tree, "-B", build, *generator_arguments(build), *entries], log=log, env=env, failure=failure)


def install(library: Path, out: Path) -> str:
    """Copy a library under the name others need it by, its soname (a wheel has no symbolic links); return that name."""
    dynamic = read_dynamic(library)
    if dynamic is None:
        raise BuildError(f"{library} is not a shared library for 64-bit Linux.")
    name = dynamic.soname or library.name
    shutil.copyfile(library, out / name)
    os.chmod(out / name, 0o755)
    return name


def licences_of(tree: Path, name: str) -> dict[str, Path | bytes]:
    """Return the licence and notice files at the top of a tree."""
    words = ("licen", "notice", "third", "copying")
    files: Iterable[Path] = (file for file in sorted(tree.iterdir()) if file.is_file())
    return {f"{name}-{file.name}": file for file in files if any(word in file.name.lower() for word in words)}
