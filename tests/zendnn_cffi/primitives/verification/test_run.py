"""`make verify-library`: its cases, its child processes, and a sample of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.zendnn_cffi.primitives.verification.support import inner_product, misbehave, named, one_number
from zendnn_cffi import descriptors
from zendnn_cffi.primitives.verification import child, records, run
from zendnn_cffi.primitives.verification.groups import groups

SECONDS = 30


def test_cases_have_names_of_their_own_and_cover_every_primitive() -> None:
    names = [case.name for make in groups().values() for case in make()]
    assert len(set(names)) == len(names) > 20_000
    firsts = {name.split()[0] for name in names}
    shared = {"pooling_v2": "pooling", "logsoftmax": "softmax", "rnn": "recurrent"}
    assert firsts >= {shared.get(kind, kind) for kind in descriptors.KINDS}


def test_a_sample_finds_nothing_new() -> None:
    """On a CPU generation with results; on others what is wrong is found before its first use."""
    found = run.sample(SECONDS)
    known = records.verified(records.machine())
    assert len(found) > 50
    if known.kinds():
        whole = "groups" not in known.about  # which says how many of them a file has that is not complete
        contradicting = {k: problem for k, problem in found.items() if problem and known.get(k) == ""}
        assert not contradicting
        new = {kind: problem for kind, problem in found.items() if problem and not known.get(kind)}
        assert not (whole and new)
        assert not whole or sum(known.get(kind) is not None for kind in found) > 0.95 * len(found)


def test_what_ends_the_process_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "group.jsonl"
    done = {"kind": "first", "case": "a", "problem": ""}
    lines = [{"start": "first", "case": "a"}, done, {"start": "second", "case": "b"}]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half a li')
    assert run._position(log) == 1
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run._blame(log, "ends the process (signal 11)")
    assert run._position(log) == 2
    with log.open("a") as file:
        file.write(json.dumps({"kind": "second", "case": "c", "problem": ""}) + '\n{"complete": true}\n')
    assert run._position(log) is None
    assert run._results(log) == {"first": "", "second": "ends the process (signal 11): b"}
    assert run._run(["sh", "-c", "kill -SEGV $$"], log) == "ends the process (signal 11)"
    assert run._run(["true"], log) == ""
    with pytest.raises(RuntimeError, match="exit code 3"):
        run._run(["sh", "-c", "exit 3"], log)


def test_a_wrong_implementation_is_seen_between_guard_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    pd = named("ref:any", inner_product())
    assert child.problem_of(pd) == ""
    misbehave(monkeypatch, "ref:any", one_number)
    assert "wrong numbers" in child.problem_of(pd)
    assert torch.get_num_threads() == threads
