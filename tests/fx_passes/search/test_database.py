"""The file of measured results: many writers, damage, read-only folders."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pwd
import sqlite3
from pathlib import Path

import pytest

from fx_passes.search import database
from fx_passes.search.database import CACHE_VARIABLE, CHECKED, Database, Result, cache_folder

MACHINE = "a machine"


def filled(folder: Path | None, count: int = 3) -> Database:
    database = Database(MACHINE, folder)
    for i in range(count):
        database.put(f"key {i}", Result(float(i), 1e-6 * i, i % 2 == 0))
    database.save()
    return database


def test_results_come_back(tmp_path: Path) -> None:
    filled(tmp_path)
    again = Database(MACHINE, tmp_path)
    assert len(again) == 3 and again.get("key 1") == Result(1.0, 1e-6, False) and again.get("other") is None


def test_infinite_and_unknown_errors_come_back(tmp_path: Path) -> None:
    database = Database(MACHINE, tmp_path)
    database.put("wrong", Result(float("inf"), float("nan"), False))
    database.save()
    known = Database(MACHINE, tmp_path).get("wrong")
    assert known is not None and known.time_ns == float("inf") and not known.right


def test_verdicts_of_others_are_no_reason_to_choose_again(tmp_path: Path) -> None:
    """Where times came, regions that went by estimates are made again."""
    early, late = Database("machine", tmp_path), Database("machine", tmp_path)
    early.put(f"{CHECKED}candidate", Result(1.0, 0.0, True))
    early.save()
    assert not late.reload() and late.verdict("candidate") is not None
    early.put("candidate", Result(1.0, 0.0, True))
    early.save()
    assert late.reload() and late.get("candidate") is not None


def test_machines_have_files_of_their_own(tmp_path: Path) -> None:
    filled(tmp_path)
    assert len(Database("another machine", tmp_path)) == 0
    assert len(list(tmp_path.iterdir())) == 1


def write(folder: str, writer: int) -> None:
    """One of several processes."""
    for i in range(20):
        database = Database(MACHINE, Path(folder))
        database.put(f"{writer} {i}", Result(float(i), 0.0, True))
        database.put("shared", Result(float(writer), 0.0, True))
        database.save()


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=write, args=(str(tmp_path / "deep" / "folder"), n)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    database = Database(MACHINE, tmp_path / "deep" / "folder")
    assert len(database) == 4 * 20 + 1
    assert not list(tmp_path.rglob("*.damaged"))


def test_a_file_that_others_write_to_for_long_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.01)
    before = filled(tmp_path)
    assert before.path is not None
    before.put("more", Result(5.0, 0.0, True))
    other = sqlite3.connect(before.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    late = Database(MACHINE, tmp_path)
    before.save()
    other.close()
    assert len(late) == 0 and not list(tmp_path.rglob("*.damaged"))
    assert late.reload() and len(late) == 3
    before.save()
    assert late.reload() and late.get("more") == Result(5.0, 0.0, True)


@pytest.mark.parametrize(
    "damage",
    (
        lambda data: b"",
        lambda data: b"not a database at all" * 100,
        lambda data: data[: len(data) // 2],
        lambda data: data[:100] + os.urandom(len(data) - 100),
        lambda data: data[:10],
        lambda data: os.urandom(5000),
    ),
)
def test_a_damaged_file_is_begun_anew(tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture) -> None:
    path = filled(tmp_path, 200).path
    assert path is not None
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with caplog.at_level(logging.WARNING, "zendnn_cffi.search"):
        fresh = Database(MACHINE, tmp_path)
    assert all(fresh.get(f"key {i}") in (None, Result(float(i), 1e-6 * i, i % 2 == 0)) for i in range(200))
    fresh.put("new", Result(1.0, 0.0, True))
    fresh.save()
    assert Database(MACHINE, tmp_path).get("new") == Result(1.0, 0.0, True)


def test_another_table_is_set_aside(tmp_path: Path) -> None:
    path = filled(tmp_path).path
    assert path is not None
    path.unlink()
    connection = sqlite3.connect(path)
    with connection:
        connection.execute("CREATE TABLE results (something TEXT)")
        connection.execute("INSERT INTO results VALUES ('else')")
    connection.close()
    assert len(Database(MACHINE, tmp_path)) == 0
    filled(tmp_path)
    assert len(Database(MACHINE, tmp_path)) == 3


def test_nowhere_to_write(tmp_path: Path) -> None:
    """A file where the folder should be: results live as long as the process."""
    (tmp_path / "taken").write_text("")
    database = filled(tmp_path / "taken")
    assert database.get("key 2") == Result(2.0, 2e-6, True)
    assert len(Database(MACHINE, tmp_path / "taken")) == 0


def test_read_only_folder(tmp_path: Path) -> None:
    filled(tmp_path)
    (path,) = tmp_path.iterdir()
    path.chmod(0o444)
    tmp_path.chmod(0o555)
    try:
        database = Database(MACHINE, tmp_path)
        assert len(database) in (0, 3)  # readable to most; the superuser writes anyway
        database.put("new", Result(1.0, 0.0, True))
        database.save()
        assert database.get("new") is not None
    finally:
        tmp_path.chmod(0o755)


def test_a_file_that_may_only_be_read_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in an image, or another user's: it is as good as one's own, and stays where it is."""
    path = filled(tmp_path).path
    assert path is not None
    content, connect = path.read_bytes(), sqlite3.connect
    monkeypatch.setattr(
        database.sqlite3, "connect", lambda name, **how: connect(f"file:{name}?mode=ro", uri=True, **how)
    )
    late = Database(MACHINE, tmp_path)
    assert len(late) == 3
    late.put("new", Result(1.0, 0.0, True))
    late.save()
    assert late.get("new") is not None and late.as_kept().measured().keys() == {"key 0", "key 1", "key 2"}
    assert path.read_bytes() == content and [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("said", ["disk I/O error", "unable to open database file", "database or disk is full"])
def test_a_disk_that_does_not_answer_damages_nothing(
    tmp_path: Path, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)

    def refuse(*_: object, **__: object) -> sqlite3.Connection:
        raise sqlite3.OperationalError(said)

    with monkeypatch.context() as patched:
        patched.setattr(database.sqlite3, "connect", refuse)
        late = Database(MACHINE, tmp_path)
        assert len(late) == 0
    assert late.reload() and len(late) == 3


def test_a_file_that_another_process_has_just_begun_stays(tmp_path: Path) -> None:
    early = Database(MACHINE, tmp_path)
    assert early.path is not None
    early.path.touch()
    late = Database(MACHINE, tmp_path)
    early.put("key", Result(1.0, 0.0, True))
    early.save()
    assert late.reload() and late.get("key") is not None and len(list(tmp_path.iterdir())) == 1


def test_no_folder_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert cache_folder() is None
    assert len(filled(None)) == 3 and filled(None).path is None
    filled(None).clear()


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "~/somewhere")
    assert cache_folder() == Path.home() / "somewhere"
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "zendnn_cffi"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "zendnn_cffi"


@pytest.mark.parametrize("named", [None, "~/somewhere", "~no-such-user/somewhere"])
def test_who_has_no_home_keeps_no_file(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As users of containers that no list of users has."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if named is None:
        monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(CACHE_VARIABLE, named)
    assert cache_folder() is None


def test_clear_forgets_the_file(tmp_path: Path) -> None:
    database = filled(tmp_path)
    database.clear()
    assert len(database) == 0 and len(Database(MACHINE, tmp_path)) == 0


def test_saving_twice_writes_once(tmp_path: Path) -> None:
    database = filled(tmp_path)
    assert database.path is not None
    database.path.unlink()
    database.save()
    assert not database.path.exists()
