"""Where the package keeps what it learned about this machine."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "ZENDNN_CFFI_CACHE"


def cache_folder() -> Path | None:
    """Where results are kept, None where the user wants no file."""
    named = os.environ.get(CACHE_VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "zendnn_cffi"
