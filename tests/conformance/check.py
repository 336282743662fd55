"""Run one case in eager PyTorch and through this package, and compare."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import zendnn_cffi
from tests.conformance.cases import Case, Maker
from tests.conformance.outcome import Outcome, Rules, brief, difference, outcome
from tests.conformance.source import copied
from zendnn_cffi import backend

RIGHT, RAISED_AS_EAGER = "right", "raised as eager"
WRONG, RAISED, CRASHED, HUNG = "wrong", "raised", "crashed", "hung"
TORCH_COMPILE = "TorchDynamo's"  # torch.compile differs from eager PyTorch with a backend that changes nothing, too
FAULTS = (WRONG, RAISED, CRASHED, HUNG)

# Operators whose numbers are whatever the memory held
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_",
                 "resize_as_"}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What became of a case.

    verdict          one of the words above
    detail           how it differs, "" for what does not
    offloaded, nodes operations that the engine ran, of those that compute; surrounding layers are left out
    """

    verdict: str
    detail: str = ""
    offloaded: int = 0
    nodes: int = 0


# What to call, the module that owns parameters and buffers, and the optimized modules once it was called
Built = tuple[Callable[..., Any], Any, Callable[[], list[fx.GraphModule]]]


def _optimize(case: Case, model: Any) -> Built:
    args, kwargs = copied((case.args, case.kwargs))
    example = args if not kwargs else dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)
    fast = zendnn_cffi.optimize(model, example, tune="off")
    return fast, fast, lambda: [fast]


def _compile(case: Case, model: Any) -> Built:
    before = set(map(id, backend.compiled_modules()))
    run = torch.compile(model, backend="zendnn", options={"tune": "off"})
    return run, model, lambda: [m for m in backend.compiled_modules() if id(m) not in before]


ENTRIES: dict[str, Callable[[Case, Any], Built]] = {"optimize": _optimize, "compile": _compile}


def check(group: str, make: Maker, entry: str) -> Verdict:
    """Return the verdict on one case: two calls, the second with other numbers, each compared with eager's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = make()
        rules = Rules(values=group.partition(".")[0] not in UNINITIALIZED, strides=not case.layers)
        return _check(case, ENTRIES[entry], rules, entry == "compile")


# TorchDynamo's own error, while it captures: with sizes it takes for free ones it may come after other samples alone.
_BEFORE_BACKENDS = "raised TorchRuntimeError: RuntimeError when making fake tensor call"


def _check(case: Case, build: Callable[[Case, Any], Built], rules: Rules, compiled: bool) -> Verdict:
    calls = _two_calls(case)
    eager_model = copy.deepcopy(case.model)
    eager = [outcome(eager_model, eager_model, *copied(call)) for call in calls]
    found, modules = _ours(case, build, eager, rules, calls)
    if found and compiled and (_BEFORE_BACKENDS in found or _dynamo_differs(case, eager, rules, calls)):
        return Verdict(TORCH_COMPILE, found)
    if found:
        return Verdict(RAISED if found.startswith(("raised", "warned", "optimize")) else WRONG, found)
    if all(e.error is not None for e in eager):
        return Verdict(RAISED_AS_EAGER, brief(eager[0].error))
    return Verdict(RIGHT, "", *own_operations(modules(), case.layers))


def own_operations(modules: list[fx.GraphModule], layers: int) -> tuple[int, int]:
    """Return (operations that the engine ran, operations that compute) without those of the layers around.

    A layer is two operations, a product and an activation. What was absorbed into another operation counts by itself;
    what left no operation behind at all, though it computes, was folded into a layer's weights: one of one. Where the
    layers themselves did not go to the engine, neither did the operator: none of one.
    """
    nodes = [node for module in modules for node in zendnn_cffi.explain(module).nodes]
    computing = [node for node in nodes if node.computes]
    by_engine = [node for node in computing if node.offloaded]
    offloaded = len(by_engine) + sum(len(node.post_ops) for node in by_engine) - 2 * layers
    if offloaded < 0:
        return 0, 1
    every = offloaded + len(computing) - len(by_engine)
    if every == 0 and len(computing) == len(nodes):
        return (1, 1) if layers else (0, 0)
    return offloaded, every


def _two_calls(case: Case) -> list[tuple[Any, Any]]:
    """The case's arguments, and the same with its floating-point numbers halved."""

    def half(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != case.dtype or value.layout is not torch.strided:
            return value
        return value * 0.5

    return [(case.args, case.kwargs), pytree.tree_map(half, (case.args, case.kwargs))]


def _ours(
    case: Case, build: Callable[[Case, Any], Built], eager: list[Outcome], rules: Rules, calls: list[tuple[Any, Any]]
) -> tuple[str, Callable[[], list[fx.GraphModule]]]:
    """How ours differs from eager, and the optimized modules."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be lowered")  # a defect of ours, not a right answer
        try:
            run, model, modules = build(case, copy.deepcopy(case.model))
        except Exception as error:  # optimize() never raises on a model in evaluation mode
            return f"optimize() raised {brief(error)}", list
        for number, (call, expected) in enumerate(zip(calls, eager, strict=True), 1):
            args, kwargs = copied(call)
            found = difference(outcome(run, model, args, kwargs), expected, partial(_float64, case, call), rules)
            if found:
                return f"{found} (call {number})", modules
    return "", modules


def _float64(case: Case, call: tuple[Any, Any]) -> Outcome:
    """The same call with every number of the case's dtype in float64."""

    def widen(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.dtype == case.dtype else value

    model = copy.deepcopy(case.model).double()
    return outcome(model, model, *pytree.tree_map(widen, copied(call)))


def _dynamo_differs(case: Case, eager: list[Outcome], rules: Rules, calls: list[tuple[Any, Any]]) -> bool:
    """Whether torch.compile differs from eager with a backend that changes nothing, too."""

    def build(case: Case, model: Any) -> Built:
        return torch.compile(model, backend="eager"), model, list

    torch._dynamo.reset()
    return bool(_ours(case, build, eager, rules, calls)[0])
