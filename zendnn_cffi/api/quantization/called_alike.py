"""Graphs of torch.export that are called as their model is: what may be left out there may be left out here.

    Before: def forward(self, x, mask):                    mask was None in the example, and is not looked at
    After:  def forward(self, x, mask=None, scale=2.0):    mask has to be None, and scale, which was left out, 2.0

torch.export compares numbers, flags and sizes with the example's, and nothing where that has None.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

from fx_passes.trace.guards import Call
from fx_passes.trace.outputs import is_plain
from fx_passes.trace.traced import forward_signature

_BY_NAME = inspect.Parameter.KEYWORD_ONLY
_OTHERS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def call_alike(exported: fx.GraphModule, model: nn.Module, example: Call) -> None:
    """Let exported take its arguments as model does, in place; the example is the one that it was exported with."""
    info = exported.graph._codegen.pytree_info
    parameters = forward_signature(model).parameters.values()
    own = [each for each in parameters if each.kind not in _OTHERS]
    by_position, by_name = example
    given = {**dict(zip((each.name for each in own), by_position, strict=False)), **by_name}
    known = {each.name for each in own}
    own += [inspect.Parameter(name, _BY_NAME) for name in by_name if name not in known]  # taken by **kwargs
    if given.keys() == set(info.orig_args):  # else *args took some
        exported.graph.set_codegen(CalledAlike(info, own, given))
        exported.recompile()


class CalledAlike(_PyTreeCodeGen):
    """Code whose forward has the signature of a model.

    own    the parameters of the model's forward, without *args and **kwargs
    given  what the example has for those that it gives
    """

    def __init__(self, info: _PyTreeInfo, own: Iterable[inspect.Parameter], given: dict[str, Any]) -> None:
        super().__init__(info)
        self._own = [(each.name, each.kind is _BY_NAME, each.default) for each in own]
        self._none = {name for name, value in given.items() if value is None}
        self._given = given.keys() - self._none

    def additional_globals(self) -> list[tuple[str, Any]]:
        """Defaults, and what compares arguments with the example's."""
        defaults = [
            (_global_of(name), _Default(default))
            for name, _, default in self._own
            if default is not inspect.Parameter.empty and not _is_written(default)
        ]
        return [*super().additional_globals(), *defaults, (_same.__name__, _same), (_present.__name__, _present)]

    def process_inputs(self, *inputs: Any) -> Any:
        """As PyTorch's, of calls that leave the last arguments out: torch.export interprets the graph itself."""
        defaults = {name: default for name, _, default in self._own if default is not inspect.Parameter.empty}
        left_out = self.pytree_info.orig_args[len(inputs) :]
        if defaults.keys() >= set(left_out):
            inputs = (*inputs, *(defaults[name] for name in left_out))
        return super().process_inputs(*inputs)

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **layout: Any) -> str:
        """The code of PyTorch's, with another signature, and comparisons before the arguments are taken apart."""
        end = f"){maybe_return_annotation}:"
        head, _, body = super().gen_fn_def(free_vars, maybe_return_annotation, **layout).partition(end)
        signature, comparisons = ["self"], ""
        for name, by_name, default in self._own:
            if by_name and "*" not in signature:
                signature.append("*")
            has_default = default is not inspect.Parameter.empty
            written = repr(default) if _is_written(default) else f"{_global_of(name)}.value"
            signature.append(f"{name}={written}" if has_default else name)
            if name in self._none:
                comparisons += f"\n    {_same.__name__}({name!r}, {name}, None)"
            elif name not in self._given:
                comparisons += f"\n    {_same.__name__}({name!r}, {name}, {written})"
            elif default is None:
                comparisons += f"\n    {_present.__name__}({name!r}, {name})"
        return f"{head.partition('(')[0]}({', '.join(signature)}{end}{comparisons}{body}"


def flat_arguments(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What an exported graph's placeholders stand for in a call."""
    bound = inspect.signature(gm.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    names = gm.graph._codegen.pytree_info.orig_args
    return list(gm.graph.process_inputs(*(bound.arguments[name] for name in names)))


class _Default:
    """A default that code cannot spell: fx gives equal globals one name, and those of PyTorch another."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _global_of(name: str) -> str:
    return f"_default_{name}"


def _is_written(default: Any) -> bool:
    """Whether code can spell it: 2.0, and not infinity."""
    return default is None or (
        type(default) in (bool, int, float, str) and (type(default) is not float or math.isfinite(default))
    )


def _same(name: str, value: Any, only: Any) -> None:
    if value is only or (is_plain(only) and type(value) is type(only) and value == only):
        return
    given = f"a {type(value).__name__}" if isinstance(value, torch.Tensor) or not is_plain(value) else repr(value)
    raise ValueError(
        f"this module was quantized for calls with {name}={only!r}, got {given}: give quantize() example_inputs and"
        f" calibration data that have {name}"
    )


def _present(name: str, value: Any) -> None:
    if value is None:
        raise ValueError(
            f"this module was quantized for calls that have {name}: give quantize() example_inputs and calibration"
            " data without it"
        )
