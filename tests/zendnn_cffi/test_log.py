"""ZENDNN_CFFI_LOG puts our records on stderr; without it the application's logging decides."""

from __future__ import annotations

import logging

import pytest

from zendnn_cffi import log

EMIT = """
import zendnn_cffi
from zendnn_cffi.log import get_logger
for level in ("debug", "info", "warning", "error"):
    getattr(get_logger("zendnn_cffi.somewhere"), level)("a %s record", level)
"""


@pytest.mark.parametrize(
    ("level", "shown"),
    [("debug", 4), ("INFO", 3), ("Warning", 2), ("error", 1), ("critical", 0)],
)
def test_level_decides_what_is_shown(run_python, level: str, shown: int) -> None:
    lines = run_python(EMIT, env={log.VARIABLE: level}).stderr.splitlines()
    assert len(lines) == shown
    assert all(line.split(":")[0].endswith("zendnn_cffi.somewhere") for line in lines)


def test_nothing_is_shown_without_the_variable(run_python) -> None:
    assert run_python(EMIT, env={log.VARIABLE: None}).stderr == ""


def test_wrong_level_is_named_with_the_right_ones(run_python) -> None:
    first = run_python("import zendnn_cffi", env={log.VARIABLE: "loud"}).stderr
    assert "ZENDNN_CFFI_LOG=LOUD is not a level; use one of debug, info, warning, error, critical" in first


def test_loading_is_logged(run_python) -> None:
    shown = run_python("from zendnn_cffi.engine import library; library.load()", env={log.VARIABLE: "info"}).stderr
    assert "INFO zendnn_cffi.engine.library: ZenDNN 5." in shown


def test_configuring_again_replaces_the_handler() -> None:
    logger = logging.getLogger(log.ROOT)
    before, level = list(logger.handlers), logger.level
    try:
        log.configure("info")
        log.configure("debug")
        assert len([h for h in logger.handlers if h not in before]) == 1
        assert logger.level == logging.DEBUG
        log.configure("")
        assert [h for h in logger.handlers if h not in before] == []
    finally:
        logger.setLevel(level)
        logger.handlers[:] = before


@pytest.mark.parametrize(
    ("name", "logger"),
    [
        ("zendnn_cffi", "zendnn_cffi"),
        ("zendnn_cffi.x", "zendnn_cffi.x"),
        ("fx_passes.fuse", "zendnn_cffi.fx_passes.fuse"),
    ],
)
def test_loggers_stand_under_one_root(name: str, logger: str) -> None:
    assert log.get_logger(name).name == logger
