"""Submodules that are graphs, where the model as a whole is none: the backbone, neck and heads of a detector.

    forward: pictures -> transform -> backbone -> head -> as many boxes as the data says
    found:                            backbone    head

The model is called once on the example to learn what each submodule is called with; once for each level of its tree,
where the arguments of all are too large to be held. A copy is called, which has parameters of its own where code of no
installed library could write to them by numpy's arrays. Operators write aside.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fx_passes.spellings.recurrent import STACKS
from fx_passes.trace.aside import writes_aside
from fx_passes.trace.compared import callable_copy, copy_of_example
from fx_passes.trace.reached import Reached
from fx_passes.trace.skeleton import written_since
from fx_passes.trace.state import Snapshot
from zendnn_cffi.errors import is_of_signal_handler

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
Found = TypeVar("Found")

# What torchvision's detectors call the method that selects boxes. torch.export follows it for minutes.
POST_PROCESSING = "postprocess_detections"
_MAX_LEVELS = 4
# Of a layer alone, as the last one of a language model whose layers are graphs each: PyTorch's products with so many
# weights take 1.1 to 2.5 times as long (Zen 3). Its convolutions are as fast.
_LEAST_WEIGHTS = 2e6
_LEAST_PRODUCTS = 50e6  # of numbers, for each thread: a millisecond
_HELD_BYTES = 256 << 20  # of arguments of submodules that may not be asked for

log = logging.getLogger("zendnn_cffi.passes")


def detectors(root: nn.Module) -> list[str]:
    """Modules whose results depend on the numbers in pictures; parts of them are graphs for pictures of all sizes."""
    return [path for path, module in root.named_modules() if hasattr(module, POST_PROCESSING)]


class Observed:
    """What calls of a copy of a model on its example show.

    example  the arguments of a call; None: submodules are traced without arguments
    reached  the code that the model may come to
    written  (path of a module, name) of tensors that a call of the model writes to
    refused  whether the model raised on the example
    """

    def __init__(self, root: nn.Module, example: Call | None, reached: Reached) -> None:
        self.root, self.example, self.reached = root, example, reached
        self.written: list[tuple[str, str]] = []
        self.refused = False
        self._below: dict[str, Call] | None = None  # of submodules below those that were asked for

    def has_fixed_weights(self, path: str) -> bool:
        """Whether calls of the model leave the parameters of the submodule there as they are."""
        if self.example is None:
            return not self.reached.may_write_uncounted
        names = (owner for owner, name in self.written if name in self.root.get_submodule(owner)._parameters)
        return not any(f"{owner}.".startswith(f"{path}.") for owner in names)

    def calls(self, submodules: dict[str, nn.Module]) -> dict[str, Call]:
        """The arguments of the first call of each of these in a call of the model; of those alone that are called."""
        if self.example is None:
            return {}
        if self._below is not None:
            return {path: call for path, call in self._below.items() if path in submodules}
        called: dict[str, Call] = {}
        below = _Held(_HELD_BYTES)

        def note(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path in submodules:
                called.setdefault(path, (args, kwargs))
            else:
                below.add(path, (args, kwargs))

        is_near = self.reached.has_near_code
        copied = callable_copy(self.root, own_parameters=is_near)
        for path in _with_those_below(submodules):
            copied.get_submodule(path).register_forward_pre_hook(functools.partial(note, path), with_kwargs=True)
        shared, rng, aside = Snapshot(copied), torch.get_rng_state(), None
        try:
            args, kwargs = copy_of_example(self.example)
            with torch.no_grad(), writes_aside(self.root) as aside:
                copied(*args, **kwargs)
        except Exception as error:  # whatever a model raises; what it called before is known
            if is_of_signal_handler(error):
                raise
            self.refused = True
            log.info("%s: the example: %s: %s", type(self.root).__name__, type(error).__name__, error)
        finally:
            torch.set_rng_state(rng)
            shared.restore_shared()
        self.written = [] if aside is None else aside.names()
        if is_near:
            self.written += (each for each in written_since(copied, self.root) if each not in self.written)
        self._below = below.calls
        return called


class _Held:
    """Arguments of first calls, as long as they are few bytes.

    calls  by path; None where they were too many
    """

    def __init__(self, most_bytes: int) -> None:
        self.calls: dict[str, Call] | None = {}
        self._left_bytes = most_bytes
        self._storages: set[int] = set()

    def add(self, path: str, call: Call) -> None:
        if self.calls is None or path in self.calls:
            return
        for tensor in pytree.tree_leaves(call):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._storages:
                    self._storages.add(storage.data_ptr())
                    self._left_bytes -= storage.nbytes()
        self.calls[path] = call
        if self._left_bytes < 0:
            self.calls = None


def find_submodules(
    root: nn.Module, observed: Observed, trace: Callable[[nn.Module, Call | None], Found | None]
) -> dict[str, Found]:
    """Return the outermost submodules of root that trace makes a graph of, by path.

    trace  returns None for a module that is no graph
    """
    found: dict[str, Found] = {}
    level = dict(_children("", root))
    for depth in range(_MAX_LEVELS):
        if depth and not level:
            break
        calls = observed.calls(level)
        below: dict[str, nn.Module] = {}
        for path, module in level.items():
            traced = None
            call = calls.get(path)
            is_called = call is not None or observed.example is None
            if is_called and _is_worth_a_graph(module, call) and observed.has_fixed_weights(path):
                traced = trace(module, call)
            if traced is None:
                below.update(_children(path, module))
            else:
                found[path] = traced
        level = below
    return found


def _with_those_below(level: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """These submodules, and all that may be asked for where these are no graphs."""
    found, below = dict(level), level
    for _ in range(_MAX_LEVELS - 1):
        below = {name: child for path, module in below.items() for name, child in _children(path, module)}
        found.update(below)
    return found


def _has_many_weights(module: nn.Module) -> bool:
    """Whether it is a layer that may be worth a graph of its own."""
    return type(module) is nn.Linear and module.weight.numel() >= _LEAST_WEIGHTS


def _is_worth_a_graph(module: nn.Module, call: Call | None) -> bool:
    """Of a layer: whether what a call of ours costs is little beside its products."""
    if type(module) is not nn.Linear:
        return True
    args, kwargs = call or ((), {})
    x = next(iter((*args, *kwargs.values())), None)
    return isinstance(x, torch.Tensor) and x.numel() * module.out_features >= _LEAST_PRODUCTS * torch.get_num_threads()


def _children(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Submodules with parameters and a forward that is their class's; of lists of modules those in them.

    Heads that select boxes, and compute on them, are left out: how many there are changes with each picture, and each
    number would be lowered for itself.
    """
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _children(inner, child)
            continue
        if isinstance(child, torch.jit.ScriptModule) or "forward" in child.__dict__ or hasattr(child, POST_PROCESSING):
            continue
        is_much = isinstance(child, STACKS) or next(child.children(), None) is not None or _has_many_weights(child)
        if is_much and next(child.parameters(), None) is not None:
            yield inner, child
