"""The big sweep: its verdicts, that it goes on where it was, its page, and how models are made."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.hugging_face import tensors_of
from tests.sweep import faulty
from tests.sweep.case import MOST_PARAMETERS, Case, NotRun, in_turns, parameters_of
from tests.sweep.check import RIGHT, Verdict, check, difference
from tests.sweep.hugging_face_missing import complete, missing
from tests.sweep.hugging_face_models import HUGGING_FACE
from tests.sweep.hugging_face_widths import as_wide_as_asked
from tests.sweep.hugging_face_written import WRITTEN
from tests.sweep.page import page, write_page
from tests.sweep.process import Journal, Run, run_apart
from tests.sweep.record import Key, of_journals, of_page, plain
from tests.sweep.statistics_of_norms import with_statistics
from tests.sweep.vision_models import TIMM, TORCHVISION
from zendnn_cffi.engine.host import cpu_name


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, faulty.__file__ or "", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_every_fault_has_its_verdict_and_what_is_done_is_kept(tmp_path: Path) -> None:
    ended = run("--out", str(tmp_path), "--limit", "10")
    assert ended.returncode == 1, ended.stderr[-3000:]
    journal = Journal(tmp_path / "faulty-optimize.jsonl")
    assert {name: v.verdict for name, v in journal.verdicts.items()} == {
        "right": "right",
        "wrong": "wrong",
        "raises": "raised",
        "crashes": "crashed",
        "hangs": "hung",
        "draws": "not run",
        "refused": "not run",
        "huge": "not run",
    }
    assert journal.verdicts["right"].offloaded == journal.verdicts["right"].nodes == 1
    assert journal.verdicts["raises"].detail == "ValueError: no such layout"
    assert [*journal.verdicts] == in_turns([*faulty.FAMILIES.values()]), "one of every family first"

    again = run("--out", str(tmp_path), "--limit", "10", "right", "wrong")
    assert again.returncode == 1 and "faulty optimize" not in again.stdout
    timed = run("--out", str(tmp_path), "--rounds", "1", "right")
    assert len(Journal(journal.path).verdicts["right"].ratios) == 3, timed.stderr[-3000:]


def test_of_a_family_the_first_that_runs(tmp_path: Path) -> None:
    run("--out", str(tmp_path), "--limit", "10", "--families")
    assert [*Journal(tmp_path / "faulty-optimize.jsonl").verdicts] == ["huge", "right", "crashes"]


def test_a_journal_outlives_its_process(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out" / "a.jsonl")
    journal.add("first", Verdict("hung", "for 3 s"), "abc")
    with journal.path.open("a") as file:
        file.write('{"name": "sec\n')
    journal.add("first", Verdict(RIGHT, offloaded=2, nodes=3), "def")
    again = Journal(journal.path)
    assert again.verdicts == {"first": Verdict(RIGHT, offloaded=2, nodes=3)} and again.runs == {
        "first": Run(cpu_name(), "def")
    }


def test_memory_beyond_a_limit_is_refused_to_a_model(tmp_path: Path) -> None:
    def work() -> Verdict:
        try:
            torch.empty(12 << 30, dtype=torch.uint8)
        except RuntimeError as error:
            return Verdict("not run", str(error))
        return Verdict(RIGHT)

    assert "allocate" in run_apart(work, 60.0, tmp_path / "log").detail


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ({"a": torch.ones(2)}, "type dict, eager's OrderedDict"),
        (OrderedDict(a=torch.ones(3)), "eager's torch.float32 (2,)"),
        (OrderedDict(a=torch.ones(2).double()), "torch.float64 (2,), eager's torch.float32"),
        (OrderedDict(a=torch.ones(2), b=torch.ones(2)), "2 tensors, eager's 1"),
        (OrderedDict(a=torch.tensor([1.0, 1.5])), "error 5.0e-01"),
        (OrderedDict(a=torch.tensor([1.0, float("nan")])), "error inf"),
        (OrderedDict(a=torch.ones(2)), ""),
    ],
)
def test_differences(ours: Any, said: str) -> None:
    error, how = difference(ours, OrderedDict(a=torch.ones(2)))
    assert (error > 0) == bool(said) and said in how


class Amplifier(nn.Module):
    """A layer whose rounding is amplified until it is all that is left."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(300, 300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y - (y.double() * (1 - 1e-9)).float() if y.dtype == torch.float32 else y * 1e-9


def test_float64_decides_where_rounding_is_all() -> None:
    torch.manual_seed(0)
    case = Case(Amplifier().eval(), (torch.randn(3, 300),))
    source = faulty.Source(lambda: {"a": ["a"]}, lambda name: case)
    assert check(source, "a", "optimize", "off").verdict == RIGHT


def test_models_with_too_many_parameters_are_not_run() -> None:
    assert parameters_of(lambda: nn.Linear(3, 5)) == 20
    with pytest.raises(NotRun, match="100M parameters"):
        parameters_of(lambda: nn.Linear(10**4, 10**4))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (TORCHVISION, "squeezenet1_1"),
        (TORCHVISION, "lraspp_mobilenet_v3_large"),
        (TIMM, "lcnet_035"),
        (HUGGING_FACE, "bert"),
    ],
)
@pytest.mark.parametrize("entry", ["optimize", "compile"])
def test_a_model_of_each_library(source: Any, name: str, entry: str) -> None:
    verdict = check(source, name, entry, "off")
    assert verdict.verdict == RIGHT, verdict
    assert verdict.offloaded > verdict.nodes / 2 and verdict.first_s > 0


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("deepseek_v2", "input_ids"),  # its configuration leaves a number to its users
        ("blip_2_qformer", "encoder_hidden_states"),  # the error says what it wants
        ("decision_transformer", "states"),  # the line that raises it does
        ("apertus1p5", "input_ids"),  # too large where names alone shrink it
        ("bamba", "attention_mask"),  # heads of its states fill a width that is shrunk
        ("qwen2_vl_text", "attention_mask"),  # sections of its rotary embedding fill a head that is shrunk
        ("gemma3n_text", "attention_mask"),  # layers that share keys come after those that are left
        ("lightglue", "pixel_values"),  # images come in pairs
        ("vilt", "pixel_values"),  # an image to each text
        ("granite_speech5_encoder", "input_features"),  # its error says how wide they are
        ("moonshine_streaming", "input_values"),  # its configuration lacks a number that it reads
        ("csm", "input_ids"),  # a convolution within has as many groups as channels
        ("musicgen", "input_ids"),  # a row for each codebook
    ],
)
def test_tiny_models_that_take_more_than_their_defaults(name: str, asked: str) -> None:
    case = HUGGING_FACE.build(name)
    assert asked in case.kwargs and sum(p.numel() for p in case.model.parameters()) < 5e7


@pytest.mark.parametrize("name", ["blip-2", "clap"])
def test_configurations_written_by_hand(name: str) -> None:
    assert name in WRITTEN
    case = HUGGING_FACE.build(name)
    with torch.no_grad():
        answers = [tensors_of(case.model(**case.kwargs)) for _ in range(2)]
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*answers, strict=True))
    assert sum(p.numel() for p in case.model.parameters()) < MOST_PARAMETERS


@pytest.mark.parametrize(
    ("layer", "shape", "asked"),
    [
        (nn.Linear(6, 2), (2, 3, 4), (2, 3, 6)),
        (nn.LayerNorm(6), (2, 3, 4), (2, 3, 6)),
        (nn.Conv2d(3, 2, 1), (1, 4, 5, 5), None),  # its message names no width
    ],
)
def test_the_width_that_an_error_names(layer: nn.Module, shape: tuple[int, ...], asked: tuple[int, ...] | None) -> None:
    kwargs = {"x": torch.ones(shape), "ids": torch.ones(shape, dtype=torch.int64)}
    with pytest.raises(RuntimeError) as raised:
        layer(kwargs["x"])
    wider = as_wide_as_asked(kwargs, raised.value)
    assert (wider and tuple(wider["x"].shape)) == asked
    if wider:
        layer(wider["x"])
        assert wider["ids"] is kwargs["ids"] and as_wide_as_asked(wider, raised.value) is None


@pytest.mark.parametrize("said", ("Input image size", "Image size"))
def test_sides_of_images_that_an_error_names(said: str) -> None:
    error = ValueError(f"{said} (4*4) doesn't match model (6*8).")
    wider = as_wide_as_asked({"pixel_values": torch.ones(1, 3, 4, 4)}, error)
    assert wider is not None and wider["pixel_values"].shape == (1, 3, 6, 8)


def test_torchvision_s_models_of_every_task() -> None:
    families = TORCHVISION.names()
    for one in ("resnet50", "fasterrcnn_resnet50_fpn", "fcn_resnet50", "r3d_18", "raft_small"):
        assert [one in names for names in families.values()].count(True) == 1


def test_the_page(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    journal.add("a", Verdict(RIGHT, offloaded=1, nodes=4, left="3 x not an operation", first_s=12.0), "abc")
    journal.add("b_1", Verdict("wrong", "first call: error 2"), "abc")
    journal.add("c", Verdict("not run", "no"), "abc")
    text = page(of_journals({("timm", "optimize"): journal}))
    assert "| timm | optimize | 3 | 1 | 1 | 0 | 0 | 0 | 1 | 25% |" in text
    assert "- timm `b_1` (optimize): WRONG: first call: error 2" in text
    assert "- timm `a` (optimize): 12 s; 0 regions" in text
    assert "- timm `a` (optimize): 1 of 4; 3 x not an operation" in text
    assert "| timm | `a` | optimize | right |" in text and "| timm | `c` | optimize | no | 1 |" in text
    assert f"| 1 | {cpu_name()} | `abc` | 3 |" in text


def test_pages_name_files_without_the_folders_of_a_machine() -> None:
    assert plain("not in module 'a' from '/opt/venv/lib/a.py' 1/2") == "not in module 'a' from 'a.py' 1/2"


def test_what_a_sweep_does_not_run_stays_on_the_page(tmp_path: Path) -> None:
    before, after = Journal(tmp_path / "before.jsonl"), Journal(tmp_path / "after.jsonl")
    kept = Verdict(RIGHT, error=2e-6, offloaded=1, nodes=4, regions=2, first_s=1.25, left="3 x an_op [1|2], \\d")
    wrong = Verdict("wrong", "output 0: torch.float32 (2, 3)", nodes=5)
    out = Verdict("not run", "an `error` | <of> theirs_")
    for name, verdict in {"kept": kept, "wrong": wrong, "out": out, "again": out}.items():
        before.add(name, verdict, "abc")
    after.add("again", Verdict(RIGHT, offloaded=1, nodes=1, ratios=[0.5, 0.75, 1.0]), "def")
    path = tmp_path / "page.md"
    write_page({("timm", "optimize"): before}, path)
    write_page({("timm", "optimize"): after}, path)
    found = of_page(path.read_text())
    names = {key.name: found[key] for key in found}
    was, now = Run(cpu_name(), "abc"), Run(cpu_name(), "def")
    assert names.pop("again") == (Verdict(RIGHT, offloaded=1, nodes=1, ratios=[0.75] * 3), now)
    assert names == {"kept": (kept, was), "wrong": (wrong, was), "out": (out, was)}
    assert Key("timm", "optimize", "kept") in found


def test_deep_random_networks_compute_something() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8)) for _ in range(40)]
    for layer in layers:
        nn.init.normal_(layer[0].weight, std=0.02)
    case = Case(nn.Sequential(*layers).eval(), (torch.randn(2, 8, 5, 5),))
    assert case.model(*case.args).abs().max() < 1e-30
    assert with_statistics(case).model(*case.args).std() > 0.5
    assert not any(m.training for m in case.model.modules())


def test_norms_of_one_value_a_channel_keep_their_statistics() -> None:
    case = Case(nn.Sequential(nn.BatchNorm1d(3)).eval(), (torch.randn(1, 3),))
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    after = with_statistics(case).model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_numbers_that_a_configuration_lacks() -> None:
    inner, outer = SimpleNamespace(), SimpleNamespace()
    inner.__dict__.update(to_dict=None, model_type="a", width=8)
    outer.__dict__.update(inner=inner)
    said = "AttributeError: 'SimpleNamespace' object has no attribute 'width'"
    lacking = missing(outer, said, {})
    assert lacking == {("SimpleNamespace", "width"): 8}
    assert complete(outer, lacking).width == 8
    assert missing(outer, said, lacking) is None, "what is known does not help again"
    assert missing(outer, said.replace("width", "unheard_of"), {}) is None
