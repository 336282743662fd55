"""Run one model of the table by both entries beside eager: alike, how much on the engine, and who is faster."""

from __future__ import annotations

import functools
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zendnn_cffi
from tests.conformance.outcome import brief
from tests.families.rows import Row
from tests.support.answers import offloaded, relative_error
from tests.zoo.check import in_turns
from zendnn_cffi import backend

OPTIMIZE, COMPILE = "optimize", "torch.compile"
ENTRIES = (OPTIMIZE, COMPILE)
EAGER, INDUCTOR = "eager", "Inductor"
ROUNDS, CALLS, ENOUGH_SECONDS = 9, 5, 4.0


@dataclass
class Outcome:
    """What one entry made of the model.

    fault      why it is no answer, or no right one; "" where it is right
    note       where it is TorchDynamo's answer, not eager's: what PyTorch's own backend that changes nothing gives, too
    error      the largest of any output, relative to that output's largest value
    offloaded  operations that the engine computes, of `nodes` that compute
    share      of the time of a call inside the engine's primitives, None where not measured
    first_call_s, first_call_cpu_s
               from the model to the first answer: by the clock, which other work of the machine makes longer, and
               of all threads' processor time
    """

    fault: str = ""
    note: str = ""
    error: float = 0.0
    offloaded: int = 0
    nodes: int = 0
    regions: int = 0
    first_call_s: float = 0.0
    first_call_cpu_s: float = 0.0
    share: float | None = None


@dataclass
class Verdict:
    """What came out for a row.

    entries   by entry
    medians   ms of each round, by contender; empty where no times were taken
    inductor  why Inductor has no time
    """

    name: str
    entries: dict[str, Outcome] = field(default_factory=dict)
    medians: dict[str, list[float]] = field(default_factory=dict)
    inductor: str = ""
    sources: str = ""

    @property
    def is_right(self) -> bool:
        return bool(self.entries) and not any(outcome.fault for outcome in self.entries.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Verdict:
        entries = {name: Outcome(**outcome) for name, outcome in found["entries"].items()}
        return cls(**{**found, "entries": entries})


class Different(Exception):
    """Two results are not alike."""


def difference(actual: Any, expected: Any, where: str = "the result") -> float:
    """The largest error of any tensor, relative to that tensor's largest value.

    Raises  Different where containers, dtypes, shapes or integers differ
    """
    if type(actual) is not type(expected):
        raise Different(f"{where} is a {type(actual).__name__}, eager's a {type(expected).__name__}")
    if isinstance(expected, Tensor):
        return _tensors_differ(actual, expected, where)
    if isinstance(expected, Mapping):
        if [*actual] != [*expected]:
            raise Different(f"{where} has keys {[*actual]}, eager's {[*expected]}")
        pairs = [(actual[key], value, f"{where}[{key!r}]") for key, value in expected.items()]
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        if len(actual) != len(expected):
            raise Different(f"{where} has {len(actual)} elements, eager's {len(expected)}")
        pairs = [(one, other, f"{where}[{i}]") for i, (one, other) in enumerate(zip(actual, expected, strict=True))]
    elif hasattr(expected, "__dict__"):
        return difference(vars(actual), vars(expected), where)
    else:
        if actual != expected:
            raise Different(f"{where} is {actual!r}, eager's {expected!r}")
        return 0.0
    return max((difference(*pair) for pair in pairs), default=0.0)


def _tensors_differ(actual: Tensor, expected: Tensor, where: str) -> float:
    for name in ("dtype", "shape", "requires_grad"):
        if getattr(actual, name) != getattr(expected, name):
            raise Different(f"{where} has {name} {getattr(actual, name)}, eager's {getattr(expected, name)}")
    if expected.is_contiguous() and not actual.is_contiguous():
        raise Different(f"{where} has strides {actual.stride()}, eager's {expected.stride()}: view() would fail")
    error = relative_error(actual, expected)
    if error and not expected.is_floating_point():
        raise Different(f"{where}: other integers than eager's")
    if math.isinf(error):
        raise Different(f"{where}: other infinities than eager's")
    return error


def check(row: Row, *, timed: bool = False, inductor: bool = True) -> Verdict:
    """Return the verdict on a row; timed: with kernels measured here, and times in turns."""
    backend.register()
    torch._dynamo.reset()
    torch._dynamo.config.allow_rnn = row.recurrent
    verdict = Verdict(row.name)
    model = row.made()
    args, kwargs = row.call()
    tuning = {"tune": "auto" if timed else "off"}
    runs: dict[str, Callable[[], Any]] = {EAGER: lambda: model(*args, **kwargs)}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be lowered")  # a defect of ours, not a right answer
        expected = model(*args, **kwargs)
        for entry in ENTRIES:
            made, outcome = _first_call(entry, row, model, tuning, expected)
            verdict.entries[entry] = outcome
            if made is not None:
                runs[entry] = functools.partial(made, *args, **kwargs)
                if timed:
                    outcome.share = _share(made, args, kwargs)
        if inductor and not row.recurrent:
            compiled, verdict.inductor = _by_inductor(model, row, expected)
            if compiled is not None:
                runs[INDUCTOR] = lambda: compiled(*args, **kwargs)
        if timed:
            verdict.medians = in_turns(runs, ROUNDS, CALLS, ENOUGH_SECONDS)
    return verdict


def _first_call(
    entry: str, row: Row, model: nn.Module, tuning: dict[str, Any], expected: Any
) -> tuple[Callable[..., Any] | None, Outcome]:
    """The model by an entry, None where it raised, and how it compares with eager."""
    outcome = Outcome()
    args, kwargs = row.call()
    before = set(map(id, backend.compiled_modules()))
    began, began_cpu = time.perf_counter(), _processor_s()
    try:
        fast: Any
        if entry == OPTIMIZE:
            fast = zendnn_cffi.optimize(model, kwargs or args, **tuning)
        else:
            fast = torch.compile(model, backend="zendnn", options=tuning)
        answers = [fast(*args, **kwargs)]
        outcome.first_call_s = time.perf_counter() - began
        outcome.first_call_cpu_s = _processor_s() - began_cpu
        answers.append(fast(*args, **kwargs))
        outcome.error, outcome.fault = _compared(answers, expected, row.tolerance)
        if outcome.fault and entry == COMPILE:
            _ask_dynamo(outcome, row, model, answers)
    except Exception as error:
        outcome.fault = f"raised {brief(error, 160)}"
        return None, outcome
    behind = [module for module in backend.compiled_modules() if id(module) not in before]  # others' may live on
    modules = [fast] if entry == OPTIMIZE else behind
    outcome.offloaded, outcome.nodes, outcome.regions = offloaded(modules)
    return fast, outcome


def _processor_s() -> float:
    """Of this process and of the children that have ended: compilers that PyTorch started."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _compared(answers: Sequence[Any], expected: Any, tolerance: float) -> tuple[float, str]:
    """The largest error, and what is wrong about it."""
    try:
        error = max(difference(answer, expected) for answer in answers)
    except Different as found:
        return float("inf"), f"wrong: {found}"
    return error, f"wrong: error {error:.1e}" if error > tolerance else ""


def _ask_dynamo(outcome: Outcome, row: Row, model: nn.Module, answers: Sequence[Any]) -> None:
    """Whether TorchDynamo by itself gives the answers that are not eager's."""
    args, kwargs = row.call()
    error, fault = _compared(answers, torch.compile(model, backend="eager")(*args, **kwargs), row.tolerance)
    if not fault:
        outcome.note, outcome.fault, outcome.error = outcome.fault, "", error


def _share(made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The engine's share of a call's time."""
    began = time.perf_counter()
    made(*args, **kwargs)
    runs = max(1, min(10, round(0.3 / (time.perf_counter() - began))))
    try:
        profile = zendnn_cffi.profile(made, *args, runs=runs, **kwargs)
    except TypeError:  # nothing of it is in a region
        return 0.0
    return min(1.0, profile.engine_ns / max(profile.total_ns, 1))


def _by_inductor(model: nn.Module, row: Row, expected: Any) -> tuple[Callable[..., Any] | None, str]:
    """The model by Inductor with frozen weights, or why there is none."""
    import torch._inductor.config

    args, kwargs = row.call()
    torch._inductor.config.freezing = True
    try:
        compiled: Callable[..., Any] = torch.compile(model)
        difference(compiled(*args, **kwargs), expected)
    except Different as found:
        return None, f"wrong: {found}"
    except Exception as error:
        return None, brief(error, 160)
    return compiled, ""
