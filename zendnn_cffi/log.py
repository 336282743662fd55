"""Logging under "zendnn_cffi". ZENDNN_CFFI_LOG=LEVEL (debug, info, warning, error) adds a handler on stderr.

Without the variable nothing is configured: the records go where the application's logging sends them.
"""

from __future__ import annotations

import logging
import os

ROOT = "zendnn_cffi"
VARIABLE = "ZENDNN_CFFI_LOG"
LEVELS = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}
FORMAT = "%(levelname)s %(name)s: %(message)s"


def get_logger(name: str = ROOT) -> logging.Logger:
    """Return the logger for a module: get_logger(__name__), or "zendnn_cffi.<name>" for names outside the package."""
    return logging.getLogger(name if name.split(".")[0] == ROOT else f"{ROOT}.{name}")


def configure(level: str | None = None) -> None:
    """Send our records of `level` and above to stderr; level None reads ZENDNN_CFFI_LOG. Calling again replaces."""
    wanted = (level if level is not None else os.environ.get(VARIABLE, "")).strip().upper()
    logger = logging.getLogger(ROOT)
    for handler in [h for h in logger.handlers if getattr(h, "zendnn_cffi", False)]:
        logger.removeHandler(handler)
    if not wanted:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.zendnn_cffi = True  # type: ignore[attr-defined]
    logger.addHandler(handler)
    if wanted in LEVELS:
        logger.setLevel(LEVELS[wanted])
    else:
        logger.warning("%s=%s is not a level; use one of %s", VARIABLE, wanted, ", ".join(LEVELS).lower())


logging.getLogger(ROOT).addHandler(logging.NullHandler())
configure()
