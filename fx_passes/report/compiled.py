"""The optimized modules behind torch.compile and behind replaced forwards, and which of them compute a given model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from fx_passes.module import OptimizedModule

_made: WeakKeyDictionary[Any, OptimizedModule] = WeakKeyDictionary()  # by owner; in the order in which they came


def register(owner: Any, module: OptimizedModule) -> None:
    """Know a module as made by torch.compile, for as long as what calls it lives."""
    _made[owner] = module


def compiled_modules() -> list[OptimizedModule]:
    """Return the optimized modules that live behind torch.compile, oldest first.

    `explain()` and `profile()` take what torch.compile returned as well.
    """
    return list(_made.values())


def is_compiled(module: Any) -> bool:
    """Whether torch.compile made it, or something in it was compiled; graphs come with the first call."""
    if hasattr(module, "_torchdynamo_orig_callable") or hasattr(module, "_orig_mod"):
        return True
    return any(
        part.__dict__.get("_compiled_call_impl") is not None or hasattr(part.forward, "_torchdynamo_orig_callable")
        for part in (module.modules() if isinstance(module, nn.Module) else ())
    )


def behind(compiled: Any) -> list[OptimizedModule]:
    """Return the modules that compute what torch.compile made, oldest first: those that hold one of its tensors.

    compiled  what torch.compile returned, or a model in which something was compiled. A function has no tensors of
              its own: all are returned.
    """
    owner = _owner(compiled)
    if owner is None:
        return compiled_modules()
    own = set(map(id, _tensors(owner)))
    return [module for module in compiled_modules() if not own.isdisjoint(map(id, _tensors(module)))]


def replaced_forwards(whole: Any) -> dict[str, list[OptimizedModule]]:
    """What computes in place of forwards that replace_forward() replaced, by path: for each kind of call that came.

    whole  a model, or what replace_forward() returned
    """
    return {path: each.modules for path, each in _standing_in(whole).items()}


def why_plain(whole: Any) -> list[str]:
    """Why calls of replaced forwards in it stayed plain PyTorch, each reason once."""
    return list(dict.fromkeys(reason for each in _standing_in(whole).values() for reason in each.reasons))


def _standing_in(whole: Any) -> dict[str, Any]:
    """What replace_forward() returned, by path."""
    forwards = {"": whole}
    if isinstance(whole, nn.Module):
        forwards = {path: part.__dict__.get("forward") for path, part in whole.named_modules()}
    return {path: each for path, each in forwards.items() if getattr(each, "stands_in", False) is True}


def _owner(compiled: Any) -> nn.Module | None:
    """The model that was compiled; None where it was a function."""
    original: Callable[..., Any] | None = getattr(compiled, "_torchdynamo_orig_callable", None)
    owner = compiled if original is None else getattr(original, "__self__", original)
    return owner if isinstance(owner, nn.Module) else None


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        for held in (part.__dict__["_parameters"], part.__dict__["_buffers"]):
            yield from (tensor for tensor in held.values() if tensor is not None)
