"""OptimizedModule: the GraphModule that optimize() returns.

It carries the whole module tree of the skeleton (so state_dict has the original keys in the original order) and the
traced graph before any pass. Copying and unpickling run the passes again on that: regions are not carried along.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from fx_passes.trace import Traced

MakeRegion = Callable[..., nn.Module]
Build = Callable[..., "OptimizedModule"]


class OptimizedModule(fx.GraphModule):
    """An fx.GraphModule over a skeleton, in evaluation mode.

    build(traced, **options) -> OptimizedModule is what made it; a deep copy or an unpickled one is made the same way.
    """

    def __init__(self, traced: Traced, build: Build, options: dict[str, Any]) -> None:
        root = traced.root
        super().__init__(nn.Module(), fx.Graph(), class_name=type(root).__name__)
        # The very same dicts: what .to() or load_state_dict changes here, it changes in the skeleton.
        object.__setattr__(self, "_parameters", root._parameters)
        object.__setattr__(self, "_buffers", root._buffers)
        object.__setattr__(self, "_non_persistent_buffers_set", root._non_persistent_buffers_set)
        self._modules.update(root._modules)
        for name, value in root.__dict__.items():
            if name.endswith(("hooks", "_with_kwargs", "_always_called")):
                object.__setattr__(self, name, copy.copy(value))  # called with this module in place of the model
            elif name not in self.__dict__ and name != "forward":
                object.__setattr__(self, name, value)
        object.__setattr__(self, "_source", (traced, build, options))
        self.graph = copy_graph(traced.graph)
        self.training = False
        self.register_load_state_dict_post_hook(_invalidate)

    def regions(self) -> dict[str, nn.Module]:
        """Return the region modules by name."""
        return {name: module for name, module in self._modules.items() if hasattr(module, "invalidate")}

    def invalidate(self) -> None:
        """Tell every region that parameters may have changed; they look at them again on the next call."""
        for region in self.regions().values():
            region.invalidate()  # type: ignore[operator]

    def train(self, mode: bool = True) -> OptimizedModule:
        """Stay in evaluation mode: train(False) is eval(); train(True) raises RuntimeError."""
        if mode:
            raise RuntimeError(
                "an optimized module has evaluation semantics only (batch normalization is folded, dropout is gone):"
                " train the original model, and optimize it again afterwards"
            )
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> OptimizedModule:
        super()._apply(fn, recurse)
        self.invalidate()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedModule:
        traced, build, options = self._source
        again = Traced(copy.deepcopy(traced.root, memo), copy_graph(traced.graph), traced.leaves, traced.specialized)
        return build(again, **copy.deepcopy(options, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        traced, build, options = self._source
        return _rebuild, (build, traced, options)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of graph that shares nothing with it but targets."""
    return copy.deepcopy(graph)


def _rebuild(build: Build, traced: Traced, options: dict[str, Any]) -> OptimizedModule:
    """Unpickle."""
    return build(traced, **options)


def _invalidate(module: nn.Module, _incompatible_keys: Any) -> None:
    """After load_state_dict."""
    assert isinstance(module, OptimizedModule)
    module.invalidate()


def unshare(tensor: torch.Tensor) -> None:
    """Give tensor storage of its own."""
    tensor.data = tensor.data.clone()
