"""What was not asked for the longest is forgotten first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from zendnn_cffi.recent import Recent


def test_the_most_recent_are_kept() -> None:
    recent: Recent[list[int]] = Recent(most=2)
    for key in ("a", "b", "a", "c"):
        if recent.get(key) is None:
            recent.keep(key, [])
    assert recent.get("a") == [] and recent.get("b") is None and recent.get("c") == []
    assert len(recent) == 2
    recent.most = 1
    assert len(recent) == 1 and recent.get("c") == [] and recent.most == 1
    recent.clear()
    assert recent.get("c") is None and len(recent) == 0


def test_the_first_of_two_for_one_key_stays() -> None:
    recent: Recent[str] = Recent(most=2)
    assert recent.keep(1, "first") == recent.keep(1, "second") == recent.get(1) == "first"


def test_a_map_of_no_size_keeps_nothing() -> None:
    recent: Recent[str] = Recent(most=0)
    assert recent.keep(1, "own") == "own" and recent.get(1) is None


def test_threads_agree() -> None:
    recent: Recent[object] = Recent(most=8)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: recent.keep("key", object()), range(200)))
    assert len(set(map(id, found))) == 1
