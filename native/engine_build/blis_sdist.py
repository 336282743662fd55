"""ZENDNN_CFFI_BLIS=sdist: compile BLIS 0.7.0 from the sources inside the sdist of the Python package `blis`.

The sdist records how each object file is compiled (blis/_src/make/linux-x86_64.jsonl) and carries the configured
header (blis/_src/include/linux-x86_64/blis.h). Its own setup.py replays those records; here they become CMake object
libraries, so that compiler, generator, parallelism and rebuilding are CMake's. The result is a plain BLIS: the typed
and object API, single-threaded, without CBLAS and without AOCL's LPGEMM.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

from .common import BuildError, require_sha256, run, say
from .config import EngineConfig, copy_licences
from .fetch import fetch
from .pins import BLIS_SDIST, BLIS_SDIST_BLIS_VERSION
from .toolchain import generator_arguments, job_arguments

LIBRARY = "libblis.so"
PLATFORM = "linux-x86_64"
PROJECT = Path(__file__).resolve().parent.parent / "blis_sdist"


def add_blis_from_sdist(
    config: EngineConfig, out: Path, work: Path, *, sdist: Path | None, cmake: str, jobs: int
) -> None:
    """Compile libblis.so into `out`, beside the engine, and enter it into `config`.

    Raises   BuildError for a failed download, a sdist that is not the pinned one, or a failed compilation.
    """
    if sdist is None:
        sdist = fetch(BLIS_SDIST, work / "download")
    elif not sdist.is_file():
        raise BuildError(f"ZENDNN_CFFI_BLIS_SDIST={sdist} is not a file.")
    else:
        require_sha256(sdist, BLIS_SDIST.sha256, str(sdist))
    source = unpack(sdist, work / "blis-sdist")
    library = compile_library(source, work / "blis-sdist-build", cmake=cmake, jobs=jobs)
    shutil.copyfile(library, out / LIBRARY)
    copy_licences(out, {"blis-LICENSE": source.parent.parent / "LICENSE"})
    config.blis = LIBRARY
    config.blis_version = BLIS_SDIST_BLIS_VERSION
    config.options["blis"] = "sdist"
    config.options["blis_sdist"] = f"{BLIS_SDIST.name}=={BLIS_SDIST.version}"
    config.options["blis_sdist_sha256"] = BLIS_SDIST.sha256


def unpack(sdist: Path, into: Path) -> Path:
    """Extract the sdist once; return its blis/_src folder."""
    root = into / f"{BLIS_SDIST.name}-{BLIS_SDIST.version}"
    if not root.is_dir():
        partial = into.with_name(into.name + ".part")
        shutil.rmtree(partial, ignore_errors=True)
        with tarfile.open(sdist) as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(partial, filter="data")
            else:  # Python before 3.10.12; the archive's hash was checked
                archive.extractall(partial)
        shutil.rmtree(into, ignore_errors=True)
        partial.rename(into)
    source = root / "blis" / "_src"
    if not (source / "make" / f"{PLATFORM}.jsonl").is_file():
        raise BuildError(f"{sdist.name} has no recorded compile lines for {PLATFORM}.")
    return source


def compile_library(source: Path, build: Path, *, cmake: str, jobs: int) -> Path:
    """Configure and build ../blis_sdist; return the library."""
    records = read_records(source / "make" / f"{PLATFORM}.jsonl")
    build.mkdir(parents=True, exist_ok=True)
    objects = build / "objects.cmake"
    text = "".join(as_cmake_call(group, sources) for group, sources in grouped(records).items())
    if not objects.exists() or objects.read_text() != text:
        objects.write_text(text)
    say(f"compiling BLIS {BLIS_SDIST_BLIS_VERSION}: {len(records)} object files, some minutes")
    configure: list[str | Path] = [cmake, "-S", PROJECT, "-B", build, *generator_arguments(build)]
    configure += [f"-DBLIS_SOURCE={source}", f"-DBLIS_OBJECTS={objects}"]
    run(
        configure,
        log=build / "configure.log",
        failure="ZENDNN_CFFI_BLIS=sdist needs a C compiler: install gcc or clang, or leave that option out",
    )
    run(
        [cmake, "--build", build, *job_arguments(jobs)],
        log=build / "build.log",
        failure="the BLIS sdist does not compile here; without ZENDNN_CFFI_BLIS=sdist the engine's own BLIS serves",
    )
    return build / LIBRARY


Group = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]  # flags, macros, include options


def read_records(path: Path) -> list[dict[str, object]]:
    """Return the compile records; the first line of the file is the recording machine's environment."""
    with path.open(encoding="utf-8") as stream:
        records = [json.loads(line) for line in stream if line.strip()]
    return [record for record in records if "environment" not in record]


def grouped(records: list[dict[str, object]]) -> dict[Group, list[str]]:
    """Collect the sources that are compiled alike, in recorded order."""
    groups: dict[Group, list[str]] = {}
    for record in records:
        flags, macros, include, source = (record[key] for key in ("flags", "macros", "include", "source"))
        assert isinstance(flags, list) and isinstance(macros, list) and isinstance(include, list)
        group = (tuple(flags), tuple(macros), tuple(dict.fromkeys(include)))
        groups.setdefault(group, []).append(str(source))
    return groups


def as_cmake_call(group: Group, sources: list[str]) -> str:
    """Write one group as a call of blis_objects() in ../blis_sdist/CMakeLists.txt."""
    flags, macros, include = group
    return (
        "blis_objects(\n"
        f"  FLAGS {_arguments(flags)}\n"
        f"  DEFINITIONS {_arguments(macro.removeprefix('-D') for macro in macros)}\n"
        f"  INCLUDES {_arguments(option.removeprefix('-I') for option in include)}\n"
        f"  SOURCES {_arguments(sources)})\n"
    )


def _arguments(words: Iterable[str]) -> str:
    """Quote words as CMake bracket arguments, in which nothing is special."""
    return " ".join(f"[==[{word}]==]" for word in words)
