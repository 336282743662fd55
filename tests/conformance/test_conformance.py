"""The sweep of `make conformance`: a sample of it, and that it finds what it looks for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zendnn_cffi
from tests.conformance import cases, faulty, sweep
from tests.conformance.check import RIGHT, Verdict, check
from tests.conformance.group import Journal
from tests.conformance.source import copied, module_of
from tests.conformance.table import page

SWEEP = Path(sweep.__file__)


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script by itself: the sweep forks, which a process with threads cannot."""
    tested = Path(zendnn_cffi.__file__).parents[1]  # which may be the source tree, in place of an installed package
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONPATH": str(tested)},
        capture_output=True,
        text=True,
        timeout=1800,
    )


@pytest.mark.slow
def test_sample(tmp_path: Path) -> None:
    """One sample of each operator that regions know, in each dtype, form, spelling and entry; and of sixty others."""
    ended = run(SWEEP, "--sample", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-3000:]
    known = cases.vocabulary()
    assert len(known) >= 160
    for entry in ("optimize", "compile"):
        on_engine = 0
        for group in known:
            verdicts = Journal(sweep.path_of(group, entry, tmp_path)).verdicts()
            assert {v.verdict for v in verdicts.values()} <= {RIGHT, "raised as eager", "TorchDynamo's"}, group
            on_engine += any(v.offloaded for v in verdicts.values())
        assert on_engine >= 40  # of one sample each, some of no dimension: 55 on a Xeon with AVX-512


def test_a_sample_is_of_what_regions_know_and_some_others() -> None:
    first, again, other = sweep.sample("a"), sweep.sample("a"), sweep.sample("b")
    assert first == again != other
    known = {(entry, group) for entry, group, _ in first} & {(entry, group) for entry, group, _ in other}
    assert known >= {(entry, g) for entry in ("optimize", "compile") for g in ("softmax", "nn.Conv2d", "cat", "add")}


def test_faults_are_found_and_named(tmp_path: Path) -> None:
    """A wrong answer, an error, a crash and a hang are each their case's alone: the cases behind it run."""
    ended = run(Path(faulty.__file__), "--out", str(tmp_path))
    assert ended.returncode == 1, ended.stderr[-3000:]
    found = {g: [*Journal(sweep.path_of(g, "optimize", tmp_path)).verdicts().values()] for g in faulty.FAULTS}
    assert all([v.verdict for v in found[g]][::2] == [RIGHT, RIGHT] for g in faulty.FAULTS), found
    second = {g: (found[g][1].verdict, found[g][1].detail) for g in faulty.FAULTS}
    assert second == {
        "right": (RIGHT, ""),
        "wrong": ("wrong", "value: error 0.5 of 1, eager's own 0, allowed 1.6e-05 (call 1)"),
        "raise": ("raised", "optimize() raised ValueError: no such layout"),
        "warn": ("raised", "optimize() raised UserWarning: zendnn_cffi: zen_region_0 could not be lowered"),
        "crash": ("crashed", "by signal SIGABRT"),
        "hang": ("hung", "for 5 s"),
    }
    assert "CRASHED float32/alone/function/1: by signal SIGABRT" in ended.stdout

    again = run(Path(faulty.__file__), "--out", str(tmp_path), "right")
    assert again.returncode == 0 and "[" not in again.stdout, "what is done is not done again"


def test_a_journal_outlives_its_process(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "add.jsonl")
    assert journal.unfinished() is None and not journal.is_done(3)
    journal.write({"sources": "abc"})
    journal.write({"begin": "a"})
    journal.write({"key": "a", "verdict": RIGHT, "nodes": 2})
    journal.write({"begin": "b"})
    with journal.path.open("a") as file:
        file.write('{"key": "b", "verd')
    assert journal.unfinished() == "b" and journal.sources == "abc"
    assert journal.verdicts() == {"a": Verdict(RIGHT, nodes=2)}
    with journal.path.open("a") as file:
        file.write("\n")
    journal.write({"done": 3})
    assert journal.is_done(3) and journal.is_done(2) and not journal.is_done(4) and not journal.is_done(None)
    journal.write({"done": None})
    assert journal.is_done(None) and journal.is_done(10**6)


def test_a_sample_is_written_as_a_user_would() -> None:
    def call(*args: object, **kwargs: object) -> tuple[object, ...]:
        return args, kwargs

    x, y, i = torch.ones(2), torch.zeros(3), torch.arange(2)
    module, inputs = module_of(call, (x, [y, x], slice(None, 2)), {"index": i, "dtype": torch.float64, "p": 0.5})
    assert "return call(t0, [t1, t0], slice(None, 2, None), index=t2, dtype=" in module.code
    (args, kwargs) = module(*inputs)
    assert args[0] is inputs[0] is args[1][1] and args[2] == slice(None, 2)
    assert kwargs == {"index": inputs[2], "dtype": torch.float64, "p": 0.5}
    held, (first,) = module_of("add", (x, y), {}, hold=True)
    assert held.code == "def forward(self, t0):\n    return t0.add(self.t1)\n"
    assert isinstance(held.t1, torch.nn.Parameter) and not held.t1.requires_grad
    assert first is not x and torch.equal(first, x)


def test_copies_keep_strides_and_what_is_shared() -> None:
    base = torch.arange(12.0).view(3, 4)
    x, turned, again = copied((base, base.t(), base))
    assert turned.stride() == (1, 4) and turned.data_ptr() == x.data_ptr() != base.data_ptr() and again is x
    assert copied(torch.ones(1).expand(3)).stride() == (0,)
    assert torch.equal(copied(base.to_sparse()).to_dense(), base)


@pytest.mark.parametrize(
    ("group", "key", "own"),
    (
        ("nn.functional.relu", "float32/network/function/2", (1, 1)),  # absorbed
        ("nn.functional.max_pool2d", "float32/network/function/1", (1, 1)),
        ("transpose", "float32/network/function/1", (0, 0)),  # a view
        ("svd", "float32/network/function/4", (0, 1)),
        ("dot", "float32/network/function/0", (0, 1)),  # a linear of one dimension stays plain PyTorch
        ("nn.Conv2d", "float32/alone/module/0", (1, 1)),
    ),
)
def test_the_share_on_the_engine_is_the_operators_own(group: str, key: str, own: tuple[int, int]) -> None:
    verdict = check(group, dict(cases.cases(group))[key], "optimize")
    assert (verdict.verdict, verdict.offloaded, verdict.nodes) == (RIGHT, *own)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["float32/alone/function/0", "float32/network/function/0", "bfloat16/network/function/0"]
    monkeypatch.setattr(cases, "cases", lambda group: [(key, None) for key in keys])
    found = {
        ("optimize", "abs"): {keys[0]: Verdict(RIGHT), keys[1]: Verdict(RIGHT, offloaded=3, nodes=4)},
        ("compile", "abs"): {keys[0]: Verdict("wrong", "error 2"), keys[2]: Verdict("TorchDynamo's", "x")},
    }
    journal = Journal(tmp_path / "abs.jsonl")
    journal.write({"sources": "older"})
    text = page(found, [journal], label="avx2")
    assert "instruction set limited to AVX2" in text and "package sources `older` (1 groups)" in text
    assert "Of 6 cases 4 ran" in text
    assert "| `abs` | 2 | 4 | 2 | 0 | 1 | 75% |" in text
    assert '| `torch.compile(backend="zendnn")` | float32 | alone | 1 | 1 | 0 | 0 | 0 | 1 | 0 | 0 | 0 |' in text
    assert "- `abs` compile float32/alone/function/0: wrong: error 2" in text and "`abs` (1)" in text
