"""How many CPUs a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zendnn_cffi.engine import host


def test_usable_cpus_follow_affinity_and_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = os.sched_getaffinity(0)
    monkeypatch.setattr(host, "_control_groups", lambda: [tmp_path])
    assert host.usable_cpus() == len(every)
    os.sched_setaffinity(0, {min(every)})
    try:
        assert host.usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, every)
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: range(8))
    for text, cpus in (("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("garbage", 8)):
        (tmp_path / "cpu.max").write_text(f"{text}\n")
        assert host.usable_cpus() == cpus, text
    (tmp_path / "cpu.max").unlink()
    for quota, cpus in (("-1", 8), ("300000", 3)):
        (tmp_path / "cpu.cfs_quota_us").write_text(quota)
        (tmp_path / "cpu.cfs_period_us").write_text("100000")
        assert host.usable_cpus() == cpus, quota


def test_control_groups_are_found_up_to_the_outermost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "cgroup"
    listed.write_text("4:cpu,cpuacct:/a/b\n3:memory:/m\n0::/c\n")
    monkeypatch.setattr(host, "_CONTROL_GROUPS", tmp_path / "fs")
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, **how: read(listed if str(self) == "/proc/self/cgroup" else self, **how)
    )
    root = tmp_path / "fs"
    assert host._control_groups() == [
        root / "cpu/a/b", root / "cpu/a", root / "cpu", root / "c", root
    ]  # fmt: skip


def test_the_largest_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CACHES", tmp_path)
    host.last_cache_bytes.cache_clear()
    try:
        assert host.last_cache_bytes() == 32 << 20, "where nothing can be read"
        for number, size in enumerate(("32K", "1024K", "garbage", "16M", "")):
            (tmp_path / f"index{number}").mkdir()
            (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
        host.last_cache_bytes.cache_clear()
        assert host.last_cache_bytes() == 16 << 20
    finally:
        host.last_cache_bytes.cache_clear()
    monkeypatch.undo()
    assert host.last_cache_bytes() >= 1 << 20
    host.last_cache_bytes.cache_clear()
