"""`python -m zendnn_cffi --help`."""

import sys

from zendnn_cffi.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
