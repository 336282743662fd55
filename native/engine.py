"""Command line of the engine build, called by CMakeLists.txt; `python native/engine.py --help` lists the steps."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine_build.command_line import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
