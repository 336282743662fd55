"""config.json: what the installed engine is, and where it came from. Read by zendnn_cffi.engine and show_config()."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .common import sha256_of, written_whole


@dataclass
class EngineConfig:
    """The keys of config.json. Paths inside the package are file names relative to config.json."""

    provider: str  # prebuilt, source, system or none
    zendnn_version: str | None = None
    library: str | None = None  # file name of the ZenDNN library
    blis: str | None = None  # file name of the library that has BLIS: the same one, or a separate one
    sha256: str | None = None  # of the library as installed
    source_sha256: str | None = None  # of the file it was made from, where there is one
    blis_version: str | None = None
    blis_sha256: str | None = None
    reason: str | None = None  # why there is no engine; provider "none" only
    options: dict[str, object] = field(default_factory=dict)
    built_with: dict[str, str] = field(default_factory=dict)


def write_config(out: Path, config: EngineConfig) -> None:
    """Complete the hashes from the files in `out` and write config.json beside them."""
    if config.library is not None:
        config.sha256 = sha256_of(out / config.library)
    if config.blis is not None and config.blis != config.library:
        config.blis_sha256 = sha256_of(out / config.blis)
    config.built_with = {"python": platform.python_version(), "machine": platform.machine(), **config.built_with}
    with written_whole(out / "config.json") as temporary:
        temporary.write_text(json.dumps(asdict(config), indent=2) + "\n")


def copy_licences(out: Path, files: Mapping[str, Path | bytes]) -> None:
    """Write licence texts into out/licenses under the given names."""
    folder = out / "licenses"
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in files.items():
        if isinstance(source, bytes):
            (folder / name).write_bytes(source)
        else:
            shutil.copyfile(source, folder / name)
