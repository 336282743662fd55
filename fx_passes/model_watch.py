"""Noticing what was changed on a model that an optimized module was made of, where the model is what is called.

The optimized module shares numbers with it, and not layers or attributes. Writing to parameters in place is noticed by
fx_passes/changes.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fx_passes.graph.hooks import HOOK_ATTRIBUTES
from fx_passes.graph.inner import plain_tensors
from fx_passes.trace.attributes import Attributes, is_same
from fx_passes.trace.skeleton import OF_MODULES
from zendnn_cffi.runtime.dictionaries import Dictionaries
from zendnn_cffi.runtime.locations import Locations


class ModelWatch:
    """A model as it is now: layers, parameters, hooks, training flags, and attributes that forwards may read."""

    def __init__(self, model: nn.Module) -> None:
        modules = [each for each in model.modules() if not isinstance(each, torch.jit.ScriptModule)]
        self._model, self._spaces = model, [module.__dict__ for module in modules]
        self._parts = self._now()
        self._attributes = Attributes(modules)
        held = (value for found, _ in self._parts for value in found.values() if isinstance(value, torch.Tensor))
        self._locations = Locations(each for value in held for each in plain_tensors(value))
        dictionaries = [*(held for held, _ in self._parts), *self._attributes.dictionaries]
        self._dictionaries = Dictionaries(dictionaries, self._holds_the_same)

    def unchanged(self) -> bool:
        """Whether an optimized module of then is one of now."""
        return (
            self._dictionaries.unchanged()
            and (self._attributes.looks_unchanged() or self._attributes.unchanged())
            and self._locations.unchanged()
        )

    def has_its_memory(self) -> bool:
        """Whether parameters and buffers of then lie where they lay: after a conversion they never do again."""
        return self._locations.unchanged()

    def _holds_the_same(self) -> bool:
        now = self._now()
        return len(now) == len(self._parts) and all(map(_are_equal, now, self._parts)) and self._attributes.unchanged()

    def _now(self) -> list[tuple[dict[Any, Any], list[Any]]]:
        """Each dictionary that makes a module what it is, and what it holds."""
        found = []
        for space in self._spaces:
            for name, held in space.items():
                if isinstance(held, dict) and (name in OF_MODULES or name.endswith(HOOK_ATTRIBUTES)):
                    found.append((held, [part for item in held.items() for part in item]))
            forward = None if space is self._model.__dict__ else space.get("forward")  # the model's is our own
            found.append((space, [space.get("training"), forward]))
        return found


def _are_equal(one: tuple[dict[Any, Any], list[Any]], other: tuple[dict[Any, Any], list[Any]]) -> bool:
    (held, values), (known, before) = one, other
    if held is not known or len(values) != len(before):
        return False
    return all(map(is_same, values, before))  # names, and numbers of hooks, may be other objects
