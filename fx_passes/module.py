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
from torch.utils import _pytree as pytree

from fx_passes.graph import copy_graph
from fx_passes.partition.remembering import Remembering
from fx_passes.trace import WHOLE, Traced, forward_signature

Build = Callable[..., "OptimizedModule"]

# Endings of the attributes in which a module keeps its hooks.
_HOOKS = ("hooks", "_with_kwargs", "_always_called")


_RELEASED = (
    "{}: this module was made by optimize(..., release_weights=True) and keeps packed weights alone;"
    " use the original model, or optimize it without release_weights"
)


class OptimizedModule(fx.GraphModule):
    """An fx.GraphModule over a skeleton, in evaluation mode.

    build(traced, **options) -> OptimizedModule is what made it; a deep copy or an unpickled one is made the same way.
    Called with arguments that the graph is not right for, it runs the skeleton's own forward.
    """

    def __init__(self, traced: Traced, build: Build, options: dict[str, Any]) -> None:
        root = traced.root
        super().__init__(nn.Module(), fx.Graph(), class_name=type(root).__name__)
        # The very same dicts: what .to() or load_state_dict changes here, it changes in the skeleton.
        for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
            object.__setattr__(self, name, getattr(root, name))
        self._modules.update(root._modules)
        for name, value in root.__dict__.items():
            if name.endswith(_HOOKS):
                object.__setattr__(self, name, copy.copy(value))  # called with this module in place of the model
            elif name not in self.__dict__ and name != "forward":
                object.__setattr__(self, name, value)
        object.__setattr__(self, "_source", (traced, build, options))
        self._owns_storage = False
        self._release_due = self._released = False
        self._checked = bool(traced.specialized or traced.given) or traced.guards is not None
        self.graph = copy_graph(traced.graph) if traced.graph is not None else whole_model_graph(root)
        self.training = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._checked:
            traced = self._source[0]
            arranged = traced.arrange(args, kwargs)
            if arranged is None:
                if self._released:
                    raise RuntimeError(_RELEASED.format("a call with arguments that it was not traced for"))
                return traced.root(*args, **kwargs)
            args, kwargs = arranged
        if torch.is_grad_enabled() and self.leaves.keys() != {WHOLE} and not _ask_for_gradients(args, kwargs):
            with torch.no_grad():  # a parameter that plain PyTorch reads would make what follows track gradients
                result = super().__call__(*args, **kwargs)
        else:
            result = super().__call__(*args, **kwargs)
        if self._release_due:
            self._release()
        return result

    def release_after_first_call(self) -> None:
        """Free, after the first call, the parameters of which only packed copies are needed from then on."""
        self._release_due = True

    def _release(self) -> None:
        from fx_passes.plan.release import release, trim_heap

        regions: list[Any] = list(self.regions().values())
        if not all(lowered for region in regions for lowered in region.lowered.values()):
            regions = [r for r in regions if r.lowered and all(r.lowered.values())]  # plain PyTorch needs the others
        self._release_due = False
        if regions and release(self, regions):
            self._released = True
            trim_heap()

    def _refuse_if_released(self, what: str) -> None:
        if self._released:
            raise RuntimeError(_RELEASED.format(what))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module's. Raises RuntimeError once weights were released."""
        self._refuse_if_released("state_dict()")
        return super().state_dict(*args, **kwargs)

    @property
    def leaves(self) -> dict[str, str]:
        """Submodules that could not be traced and stay whole ("": the model itself), with the reason."""
        return dict(self._source[0].leaves)

    def regions(self) -> dict[str, nn.Module]:
        """Return the region modules by name."""
        return {name: module for name, module in self._modules.items() if hasattr(module, "invalidate")}

    def invalidate(self) -> None:
        """Tell everything that keeps what it made of parameters that they may have changed."""
        for region in self.regions().values():
            region.invalidate()
        for module in self._modules.values():
            if isinstance(module, Remembering):
                module.forget()

    def train(self, mode: bool = True) -> OptimizedModule:
        """Stay in evaluation mode: train(False) is eval(); train(True) raises RuntimeError."""
        if mode:
            raise RuntimeError(
                "an optimized module has evaluation semantics only (batch normalization is folded, dropout is gone):"
                " train the original model, and optimize it again afterwards"
            )
        return self

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's. The model this was made from keeps its values: storage stops being shared first."""
        self._refuse_if_released("load_state_dict()")
        if not assign:
            self._unshare()
        result = super().load_state_dict(state_dict, strict, assign)
        self.invalidate()
        return result

    def _unshare(self) -> None:
        if self._owns_storage:
            return
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.data = tensor.data.clone()
        self._owns_storage = True

    def _apply(self, fn: Any, recurse: bool = True) -> OptimizedModule:
        self._refuse_if_released("converting it")
        super()._apply(fn, recurse)
        self.invalidate()
        return self

    def __copy__(self) -> OptimizedModule:
        self._refuse_if_released("copying it")
        traced, build, options = self._source
        return build(traced, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedModule:
        self._refuse_if_released("copying it")
        traced, build, options = self._source
        again = build(traced.copy(copy.deepcopy(traced.root, memo)), **copy.deepcopy(options, memo))
        again._owns_storage = True
        return again

    def __reduce__(self) -> tuple[Any, ...]:
        self._refuse_if_released("pickling it")
        return _rebuild, self._source


def _ask_for_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor among the arguments requires a gradient."""
    return any(getattr(value, "requires_grad", False) for value in pytree.tree_leaves((args, kwargs)))


def _rebuild(traced: Traced, build: Build, options: dict[str, Any]) -> OptimizedModule:
    """Unpickle."""
    again = build(traced, **options)
    again._owns_storage = True
    return again


class WholeModel:
    """Callable node target: the forward of a model that could not be traced, given every parameter of its signature."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.parameters = tuple(forward_signature(root).parameters.values())
        self.__name__ = self.__qualname__ = "whole_model"

    def __call__(self, *values: Any) -> Any:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for p, value in zip(self.parameters, values, strict=True):
            if p.kind is p.VAR_POSITIONAL:
                args.extend(value)
            elif p.kind is p.VAR_KEYWORD:
                kwargs.update(value)
            elif p.kind is p.KEYWORD_ONLY:
                kwargs[p.name] = value
            else:
                args.append(value)
        return self.root.forward(*args, **kwargs)


def whole_model_graph(root: nn.Module) -> fx.Graph:
    """One call of root.forward, with its own signature."""
    graph = fx.Graph()
    call = WholeModel(root)
    values = []
    for p in call.parameters:
        stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        default = () if p.default is p.empty else (p.default,)
        values.append(graph.create_node("placeholder", stars + p.name, default, name=p.name))
    graph.output(graph.call_function(call, tuple(values)))
    return graph
