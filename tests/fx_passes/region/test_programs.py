"""What a region keeps: which program goes, what is forgotten with it, and parameters that move."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fx_passes.region import programs as module
from fx_passes.region.programs import Borrowed, Programs, threads_of
from zendnn_cffi.runtime.arenas import clock


class Lowered:
    """A program as far as it is kept."""

    def __init__(self, nodes: int = 0) -> None:
        self.nodes = range(nodes)
        self.program = SimpleNamespace(last_used=0)
        self.closed = 0

    def run(self) -> None:
        self.program.last_used = next(clock)

    def close(self) -> None:
        self.closed += 1


def small() -> bool:
    return False


def test_the_least_recently_used_goes_and_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PROGRAMS", 3)
    programs = Programs(small)
    kept: dict[Any, Any] = {(n,): Lowered() for n in range(4)}
    for n in range(3):
        programs.put((n,), kept[n,], "")
    for n in (1, 0, 2):
        kept[n,].run()
    programs.put((3,), kept[3,], "")
    assert [*programs.found] == [(0,), (2,), (3,)] and programs.are_full
    assert [lowered.closed for lowered in kept.values()] == [0, 1, 0, 0]
    programs.clear()
    assert not programs.found and not programs.are_full
    assert [lowered.closed for lowered in kept.values()] == [1, 1, 1, 1]


def test_signatures_without_a_program_take_no_programs_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took that of every program but one before, when a model met many that plain PyTorch runs."""
    monkeypatch.setattr(module, "MAX_PROGRAMS", 2)
    monkeypatch.setattr(module, "MAX_SIGNATURES", 6)
    programs = Programs(small)
    for n in range(20):
        programs.put((n,), None if n % 2 else Lowered(), "slower")  # type: ignore[arg-type]
    assert [*programs.found] == [(13,), (15,), (16,), (17,), (18,), (19,)]
    programs.touch((13,))
    programs.found[(16,)].run()  # type: ignore[union-attr]
    programs.put((20,), Lowered(), "")  # type: ignore[arg-type]
    assert [*programs.found] == [(13,), (16,), (17,), (19,), (20,)]


def test_one_that_is_lowered_anew_is_not_taken_for_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PROGRAMS", 2)
    programs = Programs(small)
    for n in range(2):
        programs.put((n,), Lowered(), "")  # type: ignore[arg-type]
    programs.found[(1,)].run()  # type: ignore[union-attr]
    programs.put((0,), Lowered(), "")  # type: ignore[arg-type]
    programs.put((2,), Lowered(), "")  # type: ignore[arg-type]
    assert [*programs.found] == [(0,), (2,)]


def test_what_takes_its_own_place_closes_what_was_there() -> None:
    programs, old, new = Programs(small), Lowered(), Lowered()
    programs.put((1,), old, "")  # type: ignore[arg-type]
    programs.put((1,), new, "")  # type: ignore[arg-type]
    assert [*programs.found.values()] == [new] and (old.closed, new.closed) == (1, 0)


def test_reasons_go_with_their_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SIGNATURES", 2)
    programs = Programs(small)
    for n in range(3):
        programs.put((n,), None, f"reason {n}")
    assert [programs.reason((n,)) for n in range(3)] == ["", "reason 1", "reason 2"]
    programs.touch((1,))
    programs.put((3,), None, "reason 3")
    assert [*programs.found] == [(1,), (3,)], "the one that was used stays"
    programs.put((1,), Lowered(), "")  # type: ignore[arg-type]
    assert programs.reason((1,)) == ""


def test_large_ones_go_down_to_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEWEST_PROGRAMS", 2)
    programs = Programs(lambda: True)
    for n in range(5):
        programs.put((n,), Lowered(), "")  # type: ignore[arg-type]
    assert [*programs.found] == [(3,), (4,)]


def test_nodes_of_all_regions_count_and_each_keeps_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_all", weakref.WeakSet())
    monkeypatch.setattr(module, "SURE_PROGRAMS", 2)
    monkeypatch.setattr(module, "MOST_NODES", 100)
    first, second = Programs(small), Programs(small)
    for n in range(10):
        first.put((n,), Lowered(10), "")  # type: ignore[arg-type]
    assert len(first.found) == 10 and first.nodes == 100 and not first.are_full
    for n in range(2):
        second.put((n,), Lowered(40), "")  # type: ignore[arg-type]
    assert len(second.found) == 2, "so many stay, whatever the other region has"
    second.put((2,), None, "slower")
    second.put((3,), Lowered(40), "")  # type: ignore[arg-type]
    assert [*second.found] == [(1,), (2,), (3,)] and second.are_full
    second.put((3,), Lowered(40), "")  # type: ignore[arg-type]
    assert second.are_full, "one that was lowered anew says nothing of room"
    first.put((10,), Lowered(10), "")  # type: ignore[arg-type]
    assert [*first.found] == [(9,), (10,)], "others took the room meanwhile"
    del first
    gc.collect()
    second.put((4,), Lowered(10), "")  # type: ignore[arg-type]
    assert [*second.found] == [(1,), (2,), (3,), (4,)] and second.nodes == 90 and not second.are_full


def test_programs_that_pack_much_do_not_push_out_what_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEWEST_PROGRAMS", 1)
    programs = Programs(lambda: True)
    for n in range(3):
        programs.put((n,), None, "slower")
    for n in range(3, 5):
        programs.put((n,), Lowered(), "")  # type: ignore[arg-type]
    assert [*programs.found] == [(0,), (1,), (2,), (4,)]


def test_parameters_that_move_are_noticed() -> None:
    weight, other, made = torch.ones(4), torch.ones(4), torch.ones(4)
    borrowed = Borrowed()
    borrowed.note([weight, made], [weight, other])
    borrowed.note([weight], [weight])
    assert not borrowed.have_moved()
    made.share_memory_(), other.share_memory_()
    assert not borrowed.have_moved(), "no program reads the one, and the other is no parameter"
    weight.share_memory_()
    assert borrowed.have_moved()
    borrowed.note([other], [other])
    assert borrowed.have_moved(), "it still does, whatever another program reads"
    borrowed.clear()
    assert not borrowed.have_moved()


@pytest.mark.parametrize("signature", [(2, ((1,), torch.float32, (1,))), ((2, "causal"), ((1,), torch.float32, (1,)))])
def test_threads(signature: tuple[Any, ...]) -> None:
    assert threads_of(signature) == 2
