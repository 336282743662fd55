"""What is installed and what is running: __version__, __config__ and show_config()."""

from __future__ import annotations

import re
from typing import Any

from . import library

__all__ = ["__config__", "__version__", "describe", "show_config"]


def _version() -> str:
    """Return the version of the source tree this package stands in, else of the installed distribution."""
    project = library.PACKAGE.parent / "pyproject.toml"
    if project.is_file():
        found = re.search(r'^version\s*=\s*"([^"]+)"', project.read_text(encoding="utf-8"), flags=re.MULTILINE)
        if found:
            return found.group(1)
    from importlib import metadata

    try:
        return metadata.version(library.DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "0+unknown"


__version__ = _version()


def show_config() -> None:
    """placeholder"""


__config__: dict[str, Any] = {}
