"""Files of choices: found under their key, few, and never half of one."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fx_passes.saved import choices


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZENDNN_CFFI_CACHE", str(tmp_path))
    return tmp_path / choices.FOLDER


def test_a_value_comes_back_under_its_key() -> None:
    choices.write("a", {"x": [1, 2.5, None]})
    choices.write("b", [])
    assert choices.read("a") == {"x": [1, 2.5, None]} and choices.read("b") == [] and choices.read("c") is None


def test_those_that_were_not_used_for_the_longest_go(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(choices, "MOST_FILES", 3)
    for number, key in enumerate("abc"):
        choices.write(key, key)
        path = choices._path_of(key)
        assert path is not None
        os.utime(path, (number + 1, number + 1))
    assert choices.read("a") == "a"  # used now
    choices.write("d", "d")
    assert [choices.read(key) for key in "abcd"] == ["a", None, "c", "d"]
    assert len(list(folder.iterdir())) == 3


def test_what_is_too_long_is_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    choices.write("a", "x" * 100)
    monkeypatch.setattr(choices, "MOST_BYTES", 50)
    choices.write("b", "x" * 100)
    assert choices.read("a") is None and choices.read("b") is None


def test_without_a_folder_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("ZENDNN_CFFI_CACHE", "")
    choices.write("a", 1)
    assert choices.read("a") is None and not folder.exists()


def test_a_folder_that_is_read_only_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image: nobody can note there what was used."""
    choices.write("a", "kept")

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert choices.read("a") == "kept"


def test_a_folder_that_is_a_file_is_no_error(folder: Path) -> None:
    folder.write_text("")
    choices.write("a", 1)
    assert choices.read("a") is None


def test_the_code_of_another_time_is_another(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.py").write_text("x = 1")
    (tmp_path / ".#a.py").symlink_to("somebody@a.machine")  # an editor's, while a file is changed
    before = list(choices._files(str(tmp_path)))
    os.utime(tmp_path / "inner" / "a.py", (1, 1))
    assert len(before) == 1 and list(choices._files(str(tmp_path))) != before
