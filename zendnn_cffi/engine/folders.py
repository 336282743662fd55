"""Where the package keeps what it learned about this machine."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "ZENDNN_CFFI_CACHE"


def cache_folder() -> Path | None:
    """Where results are kept, None where the user wants no file, or has no home, as some users of containers."""
    named = os.environ.get(CACHE_VARIABLE)
    if named == "":
        return None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base, "zendnn_cffi").expanduser() if named is None else Path(named).expanduser()
    except RuntimeError:
        return None
