"""Whether calling a module does more than its forward."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# Before forward they set an attribute to what they compute from parameters, and do nothing else in evaluation mode.
_CALLS = frozenset(kind.__call__ for kind in (WeightNorm, SpectralNorm, BasePruningMethod))
_BEFORE = "_forward_pre_hooks"


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward, and more than to compute weights."""
    return any(getattr(module, name, None) for name in HOOKS if name != _BEFORE) or (
        len(computed_weights(module)) < len(getattr(module, _BEFORE, ()))
    )


def computed_weights(module: nn.Module) -> list[str]:
    """Return the attributes that hooks set before each forward: old-style weight_norm, spectral_norm, and pruning."""
    hooks = getattr(module, _BEFORE, None) or {}
    found = [hook for hook in hooks.values() if type(hook).__call__ in _CALLS]
    return [hook._tensor_name if isinstance(hook, BasePruningMethod) else hook.name for hook in found]
