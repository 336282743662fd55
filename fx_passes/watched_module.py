"""WatchedModule: a module that computes by a graph, and makes it again once what it was made of was changed.

What was changed is found by `fx_passes.changes`. After a write to parameters alone, what was packed of them is packed
again; after a change of layers, the tree is traced again. One call in between is plain PyTorch's.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from fx_passes import first_call
from fx_passes.aliasing.inputs import WrittenInputs
from fx_passes.call_kinds import CallKinds
from fx_passes.changes import Watch, changes_graph, count_fused_steps, has_global_hooks
from fx_passes.first_writes import FirstWrites
from fx_passes.graph.graph import copy_graph
from fx_passes.graph.hooks import HOOKS
from fx_passes.graph.skeleton_module import SkeletonModule
from fx_passes.region.kept import Kept
from fx_passes.trace.traced import WHOLE, Traced
from fx_passes.whole_model import whole_model_graph
from zendnn_cffi.errors import is_of_signal_handler
from zendnn_cffi.locks import new_lock

log = logging.getLogger("zendnn_cffi.passes")

Build = Callable[..., Any]  # returns an OptimizedModule

_OPTIMIZE = "change the original, and optimize it"
_RELEASED = (
    "{}: this module was made by optimize(..., release_weights=True) and keeps packed weights alone, not the"
    " parameters; use the original model, or optimize it without release_weights"
)


class WatchedModule(SkeletonModule):
    """A skeleton module with the trace that its graph was made of.

    build(traced, **options) is what made it, and makes it again.
    """

    _source: tuple[Traced, Build, dict[str, Any]]
    _released: bool  # parameters were given up
    _watch: Watch | None
    _seen: Watch | None  # what a call found that was not as it was watched
    _told: bool  # by invalidate()
    _lock: Any
    _awaits_call: int  # calls that may still give the example
    _checked: bool
    _is_whole: bool
    _only_reads: bool  # calls change nothing that lasts
    optimized_submodules: dict[str, WatchedModule]  # of a model that stays PyTorch's as a whole
    call_kinds: CallKinds  # further graphs
    first_writes: FirstWrites | None  # None: calls of the model's own forward write where they do
    _owner: weakref.ref[Any] | None  # the module whose further graph this one is
    written_inputs: WrittenInputs | None

    def __init__(self, traced: Traced, build: Build, options: dict[str, Any]) -> None:
        super().__init__(traced.root)
        self._source = (traced, build, options)
        self._released = False
        self._watch = self._seen = None
        self._told = False
        self._lock = new_lock()
        self._awaits_call = first_call.TRIES if traced.awaits_call else 0
        self.optimized_submodules = {}
        self.call_kinds, self._owner = CallKinds(), None
        self.first_writes = FirstWrites(traced.root, traced.shared) if traced.shared else None
        self._read_from(traced, None if traced.graph is None else copy_graph(traced.graph))

    def _read_from(self, traced: Traced, graph: fx.Graph | None) -> None:
        """Compute by this graph, which was made of the traced one, or by the model's forward."""
        self._is_whole = WHOLE in traced.leaves
        self._checked = not traced.is_for_all or (self._is_whole and traced.kind is not None)
        self.call_kinds.remember(traced)
        if self.first_writes is not None:
            self.first_writes.remember(traced)
        self.graph = whole_model_graph(traced.root) if graph is None else graph
        written = None if graph is None else WrittenInputs(self)
        self.written_inputs = written or None
        self._only_reads = written is not None and written.only_reads and not (traced.leaves or traced.restored)

    def _is_settled(self) -> bool:
        """Whether graph and packed weights are those of the tree as it is; made again where it stayed for two calls.

        One call in between would pay for packing, or for a graph, that the next change makes worthless.
        """
        self._adopt()
        before, now = self._watch, Watch(self)
        if before is None or has_global_hooks():
            self._begin_watch(before or now)
            return before is None
        written = now.written(before)
        same_graph = now.gives_graph_of(before) and not changes_graph(written)
        if not same_graph and self._source[0].restored:
            self._refuse_other_layers(is_converted=not now.has_dtypes_of(before))
        if written or not same_graph:
            if not same_graph or self._went_into_released(written):
                self._refuse_if_released("a call after its parameters or layers were changed")
            is_new = not (same_graph and self._keeps_nothing and now.same_tensors(before))
            is_known = self._told or self._released  # plain PyTorch cannot be asked, of a released module
            if is_new and not is_known and not (self._seen is not None and self._seen.unchanged(self)):
                self._seen = now
                return False
            with torch.inference_mode(False):
                self._forget(written) if same_graph else self._rebuild()
            for module in self.call_kinds.modules:
                module._told = True  # plain PyTorch has had its call
            now = Watch(self)
        self._begin_watch(now)
        self._seen, self._told = None, False
        return True

    def _rebuild(self) -> None:
        """Trace the tree again, and take over the graph and the regions made of it."""
        from fx_passes.trace.trace import retrace  # a loaded module that nobody changes does without

        traced, build, options = self._source
        log.info("%s was changed: it is traced again", type(self._tree).__name__)
        self.call_kinds.forget_tried()
        try:
            again = retrace(traced)
            again.shared = traced.shared
            fresh = build(again, **options)
        except Exception as error:  # whatever a tree raises that does not fit together any longer
            if is_of_signal_handler(error):
                raise
            reason = f"it was changed, and cannot be traced again: {type(error).__name__}: {error}".splitlines()[0]
            again = Traced(traced.root, None, {WHOLE: reason}, kind=traced.kind, shared=traced.shared)
            fresh = build(again, **options)
        self._take_over(fresh)

    def _take_over(self, fresh: WatchedModule) -> None:
        """Compute by the graph and the regions of another module over the same tree."""
        awaits_call = self._awaits_call if fresh._source[0].awaits_call else 0
        for name in [name for name in self._held if name not in self._tree._modules]:
            del self._held[name]
        self._held.update(fresh._held)
        self._source = fresh._source
        self._read_from(fresh._source[0], fresh.graph)
        self.optimized_submodules.update(fresh.optimized_submodules)
        self.write_first_by(self.first_writes)
        self._awaits_call = awaits_call
        owner = self if self._owner is None else self._owner()
        if owner is not None:
            owner.call_kinds.share_packed(owner)

    def write_first_by(self, first_writes: FirstWrites | None) -> None:
        """Let it tell what calls of the model's own forward write to; None: it is that model that they write to."""
        for module in (self, *self.call_kinds.modules, *self.optimized_submodules.values()):
            module.first_writes = first_writes

    def begin_watch(self) -> None:
        """The graph and its regions are as they will be: notice from now on what is changed."""
        count_fused_steps()
        if self._watch is None:
            self._is_open = False
        self._begin_watch(Watch(self))

    def _begin_watch(self, watch: Watch) -> None:
        self._watch, self._own = watch, watch.own

    def follow_changes(self) -> None:
        """Before it is copied: the graph must be the tree's."""
        for path, submodule in self.optimized_submodules.items():
            submodule.follow_changes()
            self._source[0].submodules[path] = submodule._source[0]
        for module in self.call_kinds.modules:
            module.follow_changes()
        with self._lock:
            if self._watch is not None and not self._watch.unchanged(self):
                self._told = True
                self._is_settled()

    @property
    def _keeps_nothing(self) -> bool:
        """Whether nothing was made of the parameters yet."""
        return not any(getattr(part, "lowered", None) or getattr(part, "kept", None) for part in self.keeping())

    @property
    def is_released(self) -> bool:
        """Whether parameters were given up."""
        return bool(self._released)

    def keeping(self) -> list[Any]:
        """The parts that make something of parameters: they have `constants`, by name."""
        own = (module for name, module in self._held.items() if name not in self._tree._modules)
        return [module for module in own if hasattr(module, "constants")]

    def _forget(self, names: set[str]) -> None:
        self._forget_passed()
        for part in self.keeping():
            if names.intersection(part.constants):
                part.forget() if hasattr(part, "forget") else part.invalidate()

    def _refuse_other_layers(self, is_converted: bool) -> None:
        """Raise ValueError where a graph from a file, which reads parameters and calls no layers, is wrong now.

        is_converted  whether dtypes of parameters were changed: tensors that forward makes keep theirs, and promote
        """
        for path, module in self._tree.named_modules():
            if path and (any(getattr(module, name, None) for name in HOOKS) or is_parametrized(module)):
                what = f"{path} has a hook or a parametrization"
                raise ValueError(f"{what}, and this module, from a file, calls no layers: {_OPTIMIZE}")
        for constants, name in [(part.constants, name) for part in self.keeping() for name in part.constants]:
            try:
                value = constants[name]
            except KeyError:
                raise ValueError(f"{name}, which this module from a file reads, is gone: {_OPTIMIZE}") from None
            if is_converted and value is not None and self._is_made(name) and self._is_wider(value.dtype):
                raise ValueError(
                    f"the parameters' dtypes were changed, and the forward of this module, from a file, makes tensors"
                    f" of {value.dtype}: {_OPTIMIZE}"
                )

    def _is_wider(self, dtype: torch.dtype) -> bool:
        """Whether tensors of a dtype promote what is computed from parameters."""
        dtypes = {p.dtype for p in self._tree.parameters() if p.is_floating_point()}
        return dtype.is_floating_point and any(torch.promote_types(own, dtype) != own for own in dtypes)

    def _is_made(self, name: str) -> bool:
        """Whether a constant is neither a parameter nor a buffer: conversions leave it as it is."""
        path, _, attribute = name.rpartition(".")
        return attribute in self._tree.get_submodule(path).__dict__

    def _went_into_released(self, names: set[str]) -> bool:
        """Whether packed weights were made from one of these that cannot be made again."""
        kept = [part.constants for part in self.keeping() if isinstance(part.constants, Kept)]
        return any(names.intersection(each.still) for each in kept)

    def _forget_passed(self) -> None:
        if (refusals := self._source[0].refusals) is not None:
            refusals.forget()

    def _refuse_if_released(self, what: str) -> None:
        if self._released:
            raise RuntimeError(_RELEASED.format(what))

    def regions(self) -> dict[str, nn.Module]:
        """Return the region modules by name.

        Those of optimized submodules have the submodule's path before it, those of further graphs kind_2, kind_3.
        """
        own = {name: module for name, module in self._held.items() if hasattr(module, "invalidate")}
        for path, submodule in self.optimized_submodules.items():
            own |= {f"{path}.{name}": region for name, region in submodule.regions().items()}
        for number, module in enumerate(self.call_kinds.modules, 2):
            own |= {f"kind_{number}.{name}": region for name, region in module.regions().items()}
        return own

    def invalidate(self) -> None:
        """Tell everything that keeps what it made of parameters that they may have changed.

        Needed after what PyTorch does not count: writes through .data or numpy, other numbers in a module's attributes.
        """
        self._told = True
        self._forget_passed()
        if self._watch is not None:
            self._watch.expire()
        for part in (*self.optimized_submodules.values(), *self.call_kinds.modules, *self.regions().values()):
            part.invalidate()
        for module in self._held.values():
            if hasattr(module, "forget"):
                module.forget()
