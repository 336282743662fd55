"""Choices kept between processes: a file for each, in the folder of what was measured.

They hold for the code, the library and the CPU that they were made with. A file is written whole or not at all, and one
that cannot be read is as good as none. Those that were not used for the longest go first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from zendnn_cffi.engine.folders import cache_folder
from zendnn_cffi.engine.host import cpu_name
from zendnn_cffi.engine.library import PACKAGE, load
from zendnn_cffi.primitives.verification.records import machine

log = logging.getLogger("zendnn_cffi.saved")

FOLDER = "choices"
MOST_FILES, MOST_BYTES = 256, 8 << 20  # kept; and of one of them, before it is compressed
_PREFIXES = ("ZENDNN", "BLIS_")  # of variables that the library and this package read
_NO_MATTER = ("ZENDNN_CFFI_CACHE", "ZENDNN_CFFI_LOG", "ZENDNN_CFFI_DEBUG", "ZENDNN_CFFI_BENCHMARK")


def read(key: str) -> Any:
    """What was kept under a key; None where there is nothing that can be read."""
    path = _path_of(key)
    if path is None:
        return None
    try:
        unpack = zlib.decompressobj()
        text = unpack.decompress(path.read_bytes(), MOST_BYTES)
        if not unpack.eof:
            raise ValueError("it is cut off, or too long")
        found = json.loads(text)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, zlib.error, RecursionError) as error:
        log.info("%s cannot be read: %s", path, error)
        return None
    with contextlib.suppress(OSError):  # the folder may be read-only
        os.utime(path)  # it was used
    return found


def write(key: str, value: Any) -> None:
    """Keep a value, where that is possible."""
    path, text = _path_of(key), json.dumps(value, separators=(",", ":")).encode()
    if path is None or len(text) > MOST_BYTES:
        return
    beside = path.with_name(f"{path.name}-{os.urandom(8).hex()}.new")  # processes of two containers may have one number
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(zlib.compress(text, 1))
        beside.replace(path)
        _make_room(path.parent)
    except OSError as error:
        log.info("%s cannot be written: %s", path, error)
        with contextlib.suppress(OSError):
            beside.unlink()


def _path_of(key: str) -> Path | None:
    """The file of a key; None where the user wants no files."""
    folder = cache_folder()
    if folder is None:
        return None
    about = f"{key}|{_library()}|{torch.__version__}|{_code()}|{_variables()}"
    return folder / FOLDER / hashlib.sha256(about.encode()).hexdigest()[:32]


def _make_room(folder: Path) -> None:
    """Remove files where there are too many."""
    files = [entry for entry in os.scandir(folder) if entry.is_file()]
    if len(files) > MOST_FILES:
        for entry in sorted(files, key=lambda entry: entry.stat().st_mtime_ns)[: len(files) - MOST_FILES]:
            with contextlib.suppress(OSError):
                os.unlink(entry.path)


@lru_cache(maxsize=1)
def _library() -> str:
    """What tells one library on one CPU from another, a build of the same version among them."""
    library = load()
    about = os.stat(library.path)
    return f"{cpu_name()}|{machine()}|{library.path}|{about.st_size}|{about.st_mtime_ns}"


def _variables() -> str:
    """Variables of the environment that choices may depend on."""
    known = {k: v for k, v in os.environ.items() if k.startswith(_PREFIXES) and not k.startswith(_NO_MATTER)}
    return repr(sorted(known.items()))


@lru_cache(maxsize=1)
def _code() -> str:
    """What tells one state of both packages from another: the size and time of each file."""
    digest = hashlib.sha256()
    for folder in (PACKAGE, Path(__file__).resolve().parent.parent):
        for line in sorted(_files(str(folder))):
            digest.update(line.encode())
    return digest.hexdigest()


def _files(folder: str) -> Iterator[str]:
    """The files in a folder: code, and the times and checks that ship."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                if entry.name != "__pycache__":
                    yield from _files(entry.path)
            elif not entry.name.endswith((".so", ".pyc")):
                try:
                    about = entry.stat()
                except OSError:  # it is gone, or an editor's link that leads nowhere
                    continue
                yield f"{entry.path} {about.st_size} {about.st_mtime_ns}\n"
