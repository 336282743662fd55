"""The libraries one set of declarations serves: ZenDNN, and oneDNN 2.6 as an engine to compare with.

    onednn = load_engine("onednn")          the installed onednn-cpu-gomp, or the path of a libdnnl.so.2
    onednn.fn("matmul_desc_init"), onednn.const("f32"), onednn.new("memory_desc_t *")

Code that reaches everything through a Library's fn, const, new and ctype runs on either.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from zendnn_cffi.engine import abi, host, library, openmp
from zendnn_cffi.engine.loaded import Library
from zendnn_cffi.errors import LibraryError
from zendnn_cffi.locks import new_lock


@dataclass(frozen=True)
class EngineKind:
    """One supported library: its generated module, prefix, versions, and the distribution that carries it."""

    name: str
    module: str
    prefix: str
    versions: tuple[tuple[int, int], ...]
    distribution: str
    file: str


KINDS = {
    kind.name: kind
    for kind in (
        EngineKind(
            "zendnn", "_zendnn", "zendnn_", library.SUPPORTED_VERSIONS, library.DISTRIBUTION, library.ENGINE_FILE
        ),
        EngineKind("onednn", "_onednn", "dnnl_", ((2, 6),), "onednn-cpu-gomp", "libdnnl.so.2"),
    )
}
_lock = new_lock()
_loaded: dict[tuple[str, str], Library] = {}


def load_engine(name: str, path: str | os.PathLike[str] | None = None) -> Library:
    """Return the library `name` ("zendnn" or "onednn") from `path`, checked against its declarations; once per path.

    Without a path: ZenDNN is the one `library.load()` gives, oneDNN the installed onednn-cpu-gomp==2022.2.1.
    Raises   ValueError for another name, LibraryError if the library is absent, does not load or differs.
    """
    kind = KINDS.get(name)
    if kind is None:
        raise ValueError(f"engine {name!r}: choose one of {', '.join(KINDS)}")
    if path is None and kind.name == "zendnn":
        return library.load()
    file = os.path.realpath(path if path is not None else installed(kind))
    with _lock:
        if (name, file) not in _loaded:
            _loaded[name, file] = _load(kind, file)
        return _loaded[name, file]


def _load(kind: EngineKind, path: str) -> Library:
    reason = host.unsuitable_reason()
    if reason is not None:
        raise LibraryError(reason)
    if not os.path.isfile(path):
        raise LibraryError(f"{path}: no such file")
    runtime = openmp.ensure_runtime()
    module = library.declarations(kind.module)
    opened = Library(module.ffi, library.open_library(module.ffi, path), kind.prefix, path, "", openmp=runtime)
    opened.version = abi.accept(opened, module, kind.versions)
    opened.provider = kind.name
    return opened


def installed(kind: EngineKind) -> str:
    """Return the library file of the installed distribution that carries `kind`; LibraryError if there is none."""
    from importlib import metadata

    try:
        files = metadata.files(kind.distribution) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == kind.file:
            return str(file.locate())
    raise LibraryError(f"no {kind.file}: pip install --no-deps {kind.distribution}==2022.2.1, or give its path.")
