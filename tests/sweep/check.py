"""Run one model eager and optimized: are the answers alike, how much did ZenDNN compute, how long is the first call?"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

import zendnn_cffi
from fx_passes.report.explain import Explanation
from tests.conformance.outcome import brief
from tests.support.answers import TOLERANCE, offloaded, relative_error
from tests.support.hugging_face import tensors_of
from tests.sweep.case import Case, NotRun, Source
from tests.zoo.check import in_turns, is_slower, ratio_quartiles
from zendnn_cffi import backend

RIGHT, WRONG, RAISED, CRASHED, HUNG, NOT_RUN = "right", "wrong", "raised", "crashed", "hung", "not run"
FAULTS = (WRONG, RAISED, CRASHED, HUNG)
ENTRIES = ("optimize", "compile")

_BEYOND_EAGER = 3.0  # times eager's own error against float64, where that is large: then both are chance
_SEED = 15


@dataclass
class Verdict:
    """What came out.

    error                of any output, relative to that output's largest value
    offloaded, nodes     operations that ZenDNN ran, of all that compute something
    regions              how many
    first_s, eager_s     CPU seconds: optimize() and the first call; a call of eager PyTorch
    left                 the most frequent reasons for which operations stayed outside of regions
    ratios               quartiles of our time by eager's with `tune="full"`, where times were asked for
    """

    verdict: str
    detail: str = ""
    error: float = 0.0
    offloaded: int = 0
    nodes: int = 0
    regions: int = 0
    first_s: float = 0.0
    eager_s: float = 0.0
    left: str = ""
    ratios: list[float] = field(default_factory=list)

    @property
    def slower(self) -> bool:
        """Whether ours takes longer than eager, beyond noise."""
        return bool(self.ratios) and is_slower((self.ratios[0], self.ratios[1], self.ratios[2]))

    @property
    def share(self) -> float:
        return self.offloaded / max(self.nodes, 1)

    def __str__(self) -> str:
        if self.verdict == NOT_RUN:
            return f"{NOT_RUN}: {self.detail}"
        said = self.verdict if self.verdict == RIGHT else f"{self.verdict.upper()}: {self.detail}"
        times = f", ours / eager {self.ratios[1]:.2f}{' SLOWER' if self.slower else ''}" if self.ratios else ""
        return (
            f"{said}, error {self.error:.1e}, ZenDNN ran {self.offloaded} of {self.nodes} in {self.regions} regions, "
            f"first call {self.first_s:.1f} s, eager {self.eager_s:.2f} s{times}"
        )


def check(source: Source, name: str, entry: str, tune: str, rounds: int = 0) -> Verdict:
    """Return the verdict on the model of this name; rounds: turns of ours and eager that are timed."""
    try:
        case = source.build(name)
    except NotRun as error:
        return Verdict(NOT_RUN, str(error))
    except Exception as error:  # a model that its own library does not make
        return Verdict(NOT_RUN, brief(error))
    try:
        eager, eager_s = _timed(lambda: _call(case.model, case))
        again = _call(case.model, case)
    except Exception as error:
        return Verdict(NOT_RUN, brief(error))
    if difference(again, eager)[0] > 0.0:
        return Verdict(NOT_RUN, "two calls of eager PyTorch with one seed differ")
    try:
        return _compared(case, eager, eager_s, entry, tune, rounds)
    except Exception as error:
        return Verdict(RAISED, brief(error), eager_s=eager_s)


def _compared(case: Case, eager: Any, eager_s: float, entry: str, tune: str, rounds: int) -> Verdict:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be lowered")  # a defect of ours, not a right answer
        warnings.filterwarnings("error", message="zendnn_cffi:")
        (run, answer), first_s = _timed(lambda: _first(case, entry, tune))
        second = _call(run, case)
    modules = [run] if entry == "optimize" else backend.compiled_modules()
    found = Verdict(RIGHT, first_s=round(first_s, 2), eager_s=round(eager_s, 3))
    found.offloaded, found.nodes, found.regions = offloaded(modules)
    found.left = _left([zendnn_cffi.explain(module) for module in modules])
    for which, theirs in (("first call", answer), ("second call", second)):
        error, how = difference(theirs, eager)
        found.error = max(found.error, error)
        if error > TOLERANCE and not _is_chance(case, theirs, eager):
            found.verdict, found.detail = WRONG, f"{which}: {how}"
            break
    if rounds:
        found.ratios = _ratios(run if tune == "full" else _first(case, entry, "full")[0], case, rounds)
    return found


def _ratios(run: Callable[..., Any], case: Case, rounds: int) -> list[float]:
    """Quartiles of our time by eager's, of measured implementations: estimates alone may choose slower ones."""
    turns = in_turns({"ours": lambda: _call(run, case), "eager": lambda: _call(case.model, case)}, rounds)
    return [round(ratio, 3) for ratio in ratio_quartiles(turns["ours"], turns["eager"])]


def _first(case: Case, entry: str, tune: str) -> tuple[Callable[..., Any], Any]:
    run: Callable[..., Any]
    if entry == "optimize":
        run = zendnn_cffi.optimize(case.model, case.kwargs or case.args, tune=tune)
    else:
        backend.register()
        run = torch.compile(case.model, backend="zendnn", options={"tune": tune})
    return run, _call(run, case)


def _call(run: Callable[..., Any], case: Case) -> Any:
    torch.manual_seed(_SEED)
    with torch.no_grad():
        return run(*case.args, **case.kwargs)


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return run(), time.process_time() - began


def difference(ours: Any, eager: Any) -> tuple[float, str]:
    """Return the largest error of any output, relative to its largest value, and what differs."""
    if type(ours) is not type(eager):
        return float("inf"), f"type {type(ours).__name__}, eager's {type(eager).__name__}"
    mine, theirs = tensors_of(ours), tensors_of(eager)
    if len(mine) != len(theirs):
        return float("inf"), f"{len(mine)} tensors, eager's {len(theirs)}"
    worst, how = 0.0, ""
    for i, (a, e) in enumerate(zip(mine, theirs, strict=True)):
        if a.shape != e.shape or a.dtype != e.dtype:
            return float("inf"), f"output {i}: {a.dtype} {tuple(a.shape)}, eager's {e.dtype} {tuple(e.shape)}"
        error = relative_error(a, e)
        if error > worst:
            worst, how = error, f"output {i} of {len(mine)}: error {error:.1e}"
    return worst, how


def _is_chance(case: Case, ours: Any, eager: Any) -> bool:
    """Whether eager PyTorch itself is about as far from float64 as ours: a network that amplifies rounding."""
    try:
        model = copy.deepcopy(case.model).double()
        wide = Case(model, _double(case.args), _double(case.kwargs))
        exact = tensors_of(_call(model, wide))
    except Exception:  # not in float64
        return False
    mine, theirs = tensors_of(ours), tensors_of(eager)
    if not len(mine) == len(theirs) == len(exact) or any(m.shape != x.shape for m, x in zip(mine, exact, strict=True)):
        return False
    return all(
        relative_error(m, x) <= max(TOLERANCE, _BEYOND_EAGER * relative_error(e, x))
        for m, e, x in zip(mine, theirs, exact, strict=True)
    )


def _double(tree: Any) -> Any:
    return pytree.tree_map(lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, tree)


def _left(explanations: list[Explanation]) -> str:
    """The most frequent reasons for which operations outside of regions stayed there."""
    counts: dict[str, int] = {}
    for node in (n for e in explanations for n in e.nodes if n.computes and not n.region):
        counts[node.reason] = counts.get(node.reason, 0) + 1
    most = sorted(counts.items(), key=lambda item: -item[1])[:2]
    return "; ".join(f"{count} x {reason[:100]}" for reason, count in most)
