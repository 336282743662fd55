"""Whether calling a module does more than its forward."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

Module = TypeVar("Module", bound=nn.Module)

# Endings of the attributes in which a module keeps its hooks.
HOOK_ATTRIBUTES = ("hooks", "_with_kwargs", "_always_called")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# Before forward they, and pruning, set an attribute to what they compute from parameters, and do nothing else in
# evaluation mode.
_CALLS = frozenset(kind.__call__ for kind in (WeightNorm, SpectralNorm))
_BEFORE = "_forward_pre_hooks"
_COLLECTING = "transformers.utils.output_capturing"
_ASKING = "output_"
_BY_CONFIGURATION = ("output_hidden_states", "output_attentions")


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward, and more than to compute weights."""
    return any(getattr(module, name, None) for name in HOOKS if name != _BEFORE) or (
        len(computed_weights(module)) < len(getattr(module, _BEFORE, ()))
    )


def hooked_inside(root: nn.Module) -> str:
    """Name a submodule whose hooks each call has to run: a graph without calls of modules would not; "" for none.

    Those of Transformers that collect hidden states do nothing but for the calls that ask for these.
    """
    for path, module in root.named_modules():
        if path and has_hooks(module):
            hooks = [hook for name in HOOKS for hook in (getattr(module, name, None) or {}).values()]
            if not all(getattr(hook, "__module__", "") == _COLLECTING or _computed_by(hook) for hook in hooks):
                return path
    return ""


def outputs_are_collected() -> bool:
    """Whether Transformers collects what layers return in the call that runs now: hidden states, attentions."""
    collecting: Any = sys.modules.get(_COLLECTING)
    return collecting is not None and bool(collecting._active_collector.get())


def let_outputs_be_collected(root: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Have Transformers put its hooks on layers where a call asks for what these collect: it does so in the first one.

    Tracing would find a forward that changes its layers' hooks, and keep the model in parts.
    """
    collecting: Any = sys.modules.get(_COLLECTING)
    asked = {name for name, value in kwargs.items() if name.startswith(_ASKING) and value}
    if collecting is None or not (asked or any(map(_collects_always, root.modules()))):
        return
    for module in root.modules():
        if _is_collected_from(module):
            collecting.maybe_install_capturing_hooks(module)


def _collects_always(module: nn.Module) -> bool:
    """Whether a model's configuration asks for what its layers return."""
    config = getattr(module, "config", None)
    return _is_collected_from(module) and any(getattr(config, name, False) for name in _BY_CONFIGURATION)


def _is_collected_from(module: nn.Module) -> bool:
    """Whether the module's forward is one that Transformers put a collecting function around."""
    function: Any = getattr(type(module), "forward", None)  # TorchScript's modules have none
    while function is not None:
        if getattr(function, "__globals__", {}).get("__name__") == _COLLECTING:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def has_own_forward(module: nn.Module) -> bool:
    """Whether somebody put another forward in the place of the class's: `model.forward = ...`, accelerate's hooks."""
    own = module.__dict__.get("forward")
    return own is not None and not getattr(own, "is_of_class", False)


def hook_owners(root: nn.Module) -> list[Any]:
    """Return what has hooks of root's modules as methods, or is one itself: who registered them looks into it."""
    hooks = [
        hook for module in root.modules() for name in HOOKS for hook in (getattr(module, name, None) or {}).values()
    ]
    owners = [getattr(hook, "__self__", hook) for hook in hooks if not _computed_by(hook)]
    return [owner for owner in owners if not isinstance(owner, nn.Module | functools.partial)]  # these may hold modules


def computed_weights(module: nn.Module) -> list[str]:
    """Return the attributes that hooks set before each forward: old-style weight_norm, spectral_norm, and pruning."""
    hooks = getattr(module, _BEFORE, None) or {}
    return [name for hook in hooks.values() if (name := _computed_by(hook))]


def without_hooks(module: Module) -> Module:
    """Take the module's own hooks away, of a copy: they are run around its forward, and are no part of its graph.

    Those that compute weights stay, as forward needs these.
    """
    for name in HOOKS:
        hooks = getattr(module, name, None) or {}
        for key in [key for key, hook in hooks.items() if name != _BEFORE or not _computed_by(hook)]:
            del hooks[key]
    return module


def set_computed_weights(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Do before the module's forward what its own hooks do there to compute weights, and nothing else of hooks."""
    for hook in [*module._forward_pre_hooks.values()]:
        if _computed_by(hook):
            hook(module, args)


def _computed_by(hook: Any) -> str:
    """The attribute that a hook computes; empty where it is one of another kind."""
    if type(hook).__call__ in _CALLS:
        return str(hook.name)
    pruning: Any = sys.modules.get("torch.nn.utils.prune")  # not imported, nobody prunes; importing it takes 3 ms
    is_pruning = pruning is not None and type(hook).__call__ is pruning.BasePruningMethod.__call__
    return str(hook._tensor_name) if is_pruning else ""
