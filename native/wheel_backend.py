"""Build backend: scikit-build-core's, and a wheel that is named after what its library needs of the system."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from engine_build.platform_tag import platform_tag
from scikit_build_core.build import (  # noqa: F401  (the hooks that stay as they are)
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from scikit_build_core.build import build_wheel as _build_wheel


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel; return its name. Its tag is manylinux_2_X where that is true of the library in it."""
    name: str = _build_wheel(wheel_directory, config_settings, metadata_directory)
    built = Path(wheel_directory) / name
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(built) as archive:
        inside = [entry for entry in archive.namelist() if entry.endswith(".so")]
        tag = platform_tag(Path(archive.extract(entry, folder)) for entry in inside)
    if tag is None:
        return name
    command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, str(built)]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]).name
