"""What is installed and what is running: __version__, __config__ and show_config()."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TextIO

from zendnn_cffi.engine import host, library, openmp
from zendnn_cffi.errors import LibraryError

ENVIRONMENT_PREFIXES = ("ZENDNN_", "OMP_", "GOMP_", "BLIS_", "KMP_")
PEERS = ("torch", "cffi", "numpy")


def package_version() -> str:
    """Return the version of the source tree this package stands in, else of the installed distribution."""
    project = library.PACKAGE.parent / "pyproject.toml"
    if project.is_file():
        found = re.search(r'^version\s*=\s*"([^"]+)"', project.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if found:
            return found.group(1)
    return _distribution_version(library.DISTRIBUTION) or "0+unknown"


def _distribution_version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def engine_config() -> Mapping[str, Any]:
    """Return the engine's config.json, read-only, without loading the engine.

    Keys as the build wrote them: provider, zendnn_version, blis, library, sha256, source_sha256, options, built_with.
    Without a config.json: provider "system" and the library's path, or provider "none" and the reason.
    """
    try:
        found = library.find()
    except LibraryError as error:
        return MappingProxyType({"provider": "none", "reason": str(error)})
    return MappingProxyType(dict(found.config) or {"provider": "system", "library": found.path})


@lru_cache(maxsize=8)
def _file_sha256(path: str, size: int, mtime_ns: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def file_sha256(path: str) -> str:
    """Return the hash of a file; hashed once until its size or time changes."""
    status = os.stat(path)
    return _file_sha256(path, status.st_size, status.st_mtime_ns)


def describe() -> dict[str, str]:
    """Return what show_config() prints, as ordered name -> text. Loads the engine if it can; never raises for it."""
    facts = {"zendnn_cffi": package_version(), "python": platform.python_version()}
    facts |= {name: _distribution_version(name) or "not installed" for name in PEERS}
    facts |= {"platform": f"{sys.platform} {platform.machine()}", "cpu": host.cpu_name()}
    reason = library.unavailable_reason()
    facts["available"] = "yes" if reason is None else f"no: {reason}"
    if reason is None:
        facts |= _describe_engine(library.load())
    else:
        facts["provider"] = str(engine_config().get("provider"))
    facts["environment"] = (
        " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(ENVIRONMENT_PREFIXES)) or "none set"
    )
    return facts


def _describe_engine(loaded: library.Library) -> dict[str, str]:
    """Return the facts only a loaded engine can give."""
    ffi, blis = loaded.ffi, loaded.blis_lib
    isa = loaded.fn("cpu_isa2str")(loaded.fn("get_effective_cpu_isa")())
    digest = file_sha256(loaded.path)
    recorded = loaded.config.get("sha256")
    suffix = f" (config.json says {recorded})" if recorded not in (None, digest) else ""
    runtimes = openmp.mapped_runtimes()
    warning = "" if len(runtimes) <= 1 else " (more than one: they compete for the cores)"
    return {
        "zendnn": loaded.version,
        "provider": loaded.provider,
        "library": loaded.path,
        "sha256": digest + suffix,
        "isa": ffi.string(isa).decode(),
        "threads": str(openmp.thread_count()),
        "openmp": ", ".join(runtimes) + warning,
        "blis": f"{_blis_version(blis)} from {', '.join(blis.paths)}",
    }


def _blis_version(blis: library.BlisLibrary) -> str:
    if not hasattr(blis, "bli_info_get_version_str"):
        return "unknown version"
    version = blis.ffi.string(blis.bli_info_get_version_str()).decode()
    if hasattr(blis, "bli_arch_query_id") and hasattr(blis, "bli_arch_string"):
        version += f" ({blis.ffi.string(blis.bli_arch_string(blis.bli_arch_query_id())).decode()} kernels)"
    return version


def show_config(file: TextIO | None = None) -> None:
    """Print versions, engine, instruction set, threads, OpenMP and BLIS; the reason where the engine is unavailable."""
    facts = describe()
    width = max(map(len, facts))
    for name, text in facts.items():
        print(f"{name:<{width}}  {text}", file=file)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return package_version()
    if name == "__config__":
        return engine_config()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
