"""OptimizedModule: the GraphModule that optimize() returns.

It carries the whole module tree of the skeleton (so state_dict has the original keys in the original order) and the
traced graph before any pass. Copying and unpickling run the passes again on that: regions are not carried along. Where
parameters were released, there is nothing to run them on: copies are made of the graph and its parts then.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes.aliasing.inputs import WrittenInputs
from fx_passes.changes import Watch, count_fused_steps, has_global_hooks, in_functional_call
from fx_passes.graph.graph import IN_WORK, copy_graph
from fx_passes.memoize.watched import changes_functions, is_traced_by_fx, is_watched
from fx_passes.submodule import SubmoduleForward, plain_forward
from fx_passes.trace.state import HOOK_ATTRIBUTES
from fx_passes.trace.trace import WHOLE, Traced, retrace
from fx_passes.whole_model import whole_model_graph
from zendnn_cffi.locks import new_lock
from zendnn_cffi.runtime.uncompiled import keep_uncompiled, set_dynamo_hook

log = logging.getLogger("zendnn_cffi.passes")

Build = Callable[..., "OptimizedModule"]

# What reading tells nothing about a module's parts.
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)

_RELEASED = (
    "{}: this module was made by optimize(..., release_weights=True) and keeps packed weights alone, not the"
    " parameters; use the original model, or optimize it without release_weights"
)


class OptimizedModule(fx.GraphModule):
    """An fx.GraphModule over a skeleton, in evaluation mode.

    The skeleton is this module's own. While nobody has asked for a part of it (is_open is False), nobody can have
    replaced one: calls then look for written weights alone.

    build(traced, **options) -> OptimizedModule is what made it; a deep copy or an unpickled one is made the same way.
    Called with arguments that the graph is not right for, it runs the skeleton's own forward; so it does after a change
    of its parameters or layers. Where the next call finds the same, they are packed, or traced, again.
    """

    def __init__(self, traced: Traced, build: Build, options: dict[str, Any]) -> None:
        root = traced.root
        super().__init__(nn.Module(), fx.Graph(), class_name=type(root).__name__)
        # The very same dicts: what .to() or load_state_dict changes here, it changes in the skeleton. Hooks are called
        # with this module in place of the model; of the skeleton only forward is called, which runs none.
        for name in root.__dict__:
            if name in ("_parameters", "_buffers", "_non_persistent_buffers_set") or name.endswith(HOOK_ATTRIBUTES):
                object.__setattr__(self, name, root.__dict__[name])
        self.__dict__["_modules"].update(root._modules)
        self._source: tuple[Traced, Build, dict[str, Any]]
        object.__setattr__(self, "_source", (traced, build, options))
        self._is_open = True  # until it is handed out
        self._owns_storage = False
        self._release_due: Callable[[OptimizedModule], bool] | None = None
        self._released = False
        self._watch: Watch | None = None
        self._seen: Watch | None = None  # what a call found that was not as it was watched
        self._told = False  # by invalidate()
        self._follows_tree = False  # nobody has this module itself: its parts are replaced in the tree alone
        self._lock = new_lock()
        self.optimized_submodules: dict[str, OptimizedModule] = {}  # of a model that stays PyTorch's as a whole
        self._read_from(traced, None if traced.graph is None else copy_graph(traced.graph))
        self.training = False

    def _read_from(self, traced: Traced, graph: fx.Graph | None) -> None:
        """Compute by this graph, which was made of the traced one, or by the model's forward."""
        self._checked = bool(traced.specialized or traced.given or traced.assumed) or traced.guards is not None
        self._is_whole = WHOLE in traced.leaves
        self.graph = whole_model_graph(traced.root) if graph is None else graph
        self.written_inputs = None if graph is None else WrittenInputs(self) or None

    def take_submodules(self, submodules: Mapping[str, OptimizedModule]) -> None:
        """Let these compute in place of the submodules that they were made of: by path in the tree, which stays."""
        self.__dict__["optimized_submodules"] = dict(submodules)
        for path, optimized in submodules.items():
            module = self._tree.get_submodule(path)
            module.__dict__["forward"] = SubmoduleForward(module, optimized)
            # whoever has this module may replace what is in them, in the tree
            optimized.__dict__["_is_open"] = optimized.__dict__["_follows_tree"] = True
            optimized.begin_watch()

    @property
    def root(self) -> nn.Module:
        """The module tree that was traced: its forward is the model's own."""
        self.__dict__["_is_open"] = True
        root: nn.Module = self._source[0].root
        return root

    @property
    def _tree(self) -> nn.Module:
        """As root, for this module's own use."""
        tree: nn.Module = self._source[0].root
        return tree

    @property
    def _held(self) -> dict[str, Any]:
        """Submodules, as _modules; for this module's own use."""
        held: dict[str, Any] = self.__dict__["_modules"]
        return held

    @property
    def children_by_name(self) -> dict[str, Any]:
        """The dictionary in which others replace the outermost submodules."""
        return self._tree._modules if self._follows_tree else self._held

    @property
    def is_open(self) -> bool:
        """Whether somebody may hold parts of the module tree, and replace what is in them."""
        return self._is_open

    def __getattr__(self, name: str) -> Any:
        """The model's own attributes are the skeleton's, whose forward may assign to them."""
        held = self.__dict__
        source = held.get("_source")
        if source is None:
            return super().__getattr__(name)
        root = source[0].root
        if name in root.__dict__:
            value = root.__dict__[name]
            if not isinstance(value, _SCALARS):
                held["_is_open"] = True
            return value
        if name in root._modules or name in root._parameters or name in root._buffers:
            held["_is_open"] = True
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        source = self.__dict__.get("_source")
        if isinstance(value, torch.Tensor | nn.Module) or (source is not None and name in source[0].root.__dict__):
            self.__dict__["_is_open"] = True
        if source is None or name in self.__dict__ or not self._is_of_the_skeleton(name, value):
            super().__setattr__(name, value)
        elif isinstance(value, nn.Parameter | nn.Module):
            del source[0].root.__dict__[name]
            super().__setattr__(name, value)
        else:
            source[0].root.__dict__[name] = value

    def _is_of_the_skeleton(self, name: str, value: Any) -> bool:
        """Whether an attribute that this has not is one that forward reads: what was a buffer may become a tensor."""
        if name in self._tree.__dict__:
            return True
        is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        return is_tensor and self._watch is not None and not any(name in held for held in self._kept_by_name())

    def _kept_by_name(self) -> tuple[dict[str, Any], ...]:
        held = self.__dict__
        return held["_parameters"], held["_buffers"], held["_modules"]

    def __delattr__(self, name: str) -> None:
        """As nn.Module's; the model's own attributes are the skeleton's."""
        source = self.__dict__.get("_source")
        self.__dict__["_is_open"] = True
        if source is not None and name not in self.__dict__ and name in source[0].root.__dict__:
            del source[0].root.__dict__[name]
        else:
            super().__delattr__(name)

    @contextmanager
    def compiled_once(self) -> Iterator[None]:
        """Check the graph, and write it as Python code, when all passes have run, not after each of them."""
        self.__dict__[IN_WORK] = True
        try:
            yield
        finally:
            self.__dict__[IN_WORK] = False
        self.graph.lint()
        self.recompile()

    def recompile(self) -> Any:
        """As fx.GraphModule's; calls then pass through this class before they reach the graph's code."""
        if self.__dict__.get(IN_WORK):
            return None
        code = super().recompile()
        cls: Any = type(self)
        run_graph = cls.forward

        @functools.wraps(run_graph)
        def forward(self: OptimizedModule, *args: Any, **kwargs: Any) -> Any:
            hook = set_dynamo_hook(None)
            try:
                return self._call(args, kwargs)
            finally:
                set_dynamo_hook(hook)

        keep_uncompiled(forward, "an optimized module runs programs of ZenDNN")
        cls.forward, cls.run_graph = forward, run_graph
        return code

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = self._watch
        if watch is None or is_traced_by_fx() or not (watch.unchanged(self) if self._is_open else watch.unwritten()):
            by_pytorch = self._call_changed(args, kwargs)
            if by_pytorch is not None:
                return by_pytorch[0]
        if torch._C._len_torch_function_stack() and changes_functions():
            self._refuse_if_released("a call under a mode that PyTorch's functions go through")
            return self._by_pytorch(*args, **kwargs)
        if self._checked:
            arranged = self._source[0].arrange(args, kwargs)
            if arranged is None:
                self._refuse_if_released("a call with arguments that it was not traced for")
                return self._by_pytorch(*args, **kwargs)
            args, kwargs = arranged
        if self.written_inputs is not None and self.written_inputs.are_shared(
            args, kwargs, None if watch is None else watch.places
        ):
            self._refuse_if_released("a call whose inputs share memory, one of which it writes to,")
            return self._by_pytorch(*args, **kwargs)
        means_another = torch.is_autocast_enabled("cpu") or torch.get_default_dtype() is not self._source[0].dtype
        if means_another and not self._released and type(self._tree) is not nn.Module:
            return self._by_pytorch(*args, **kwargs)  # it may switch autocast off; captured graphs (no forward) do too
        if torch.is_grad_enabled() and not self._is_whole and not _ask_for_gradients(args, kwargs):
            with torch.no_grad():  # a parameter that plain PyTorch reads would make what follows track gradients
                result = self.run_graph(*args, **kwargs)
        else:
            result = self.run_graph(*args, **kwargs)
        if self._release_due is not None:
            self._release()
        return result

    def _by_pytorch(self, *args: Any, **kwargs: Any) -> Any:
        return plain_forward(self.root)(*args, **kwargs)

    def _call_changed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """A call that found a change: its result by plain PyTorch, or None where the graph is right (again)."""
        if in_functional_call() or is_watched() or is_traced_by_fx():
            self._refuse_if_released("a call with other parameters")
            self._adopt()
            return (self._by_pytorch(*args, **kwargs),)
        with self._lock:
            if self._is_settled():
                return None
        if self._is_whole or _ask_for_gradients(args, kwargs):
            return (self._by_pytorch(*args, **kwargs),)
        with torch.no_grad():
            return (self._by_pytorch(*args, **kwargs),)

    def _is_settled(self) -> bool:
        """Whether graph and packed weights are those of the tree as it is; made again where it stayed for two calls.

        One call in between would pay for packing, or for a graph, that the next change makes worthless.
        """
        self._adopt()
        before, now = self._watch, Watch(self)
        if before is None or has_global_hooks():
            self._watch = before or now
            return before is None
        written, same_graph = now.written(before), now.structure == before.structure
        if written or not same_graph:
            self._refuse_if_released("a call after its parameters or layers were changed")
            is_new = not self._told and not (same_graph and self._keeps_nothing and now.same_tensors(before))
            if is_new and not (self._seen is not None and self._seen.unchanged(self)):
                self._seen = now
                return False
            with torch.inference_mode(False):
                self._forget(written) if same_graph else self._rebuild()
            now = Watch(self)
        self._watch, self._seen, self._told = now, None, False
        return True

    def _adopt(self) -> None:
        """Let the skeleton have what was put, or removed, here: submodules in their order, or another dictionary."""
        ours, tree = self._held, self._tree
        if self._follows_tree:
            for name in ("_parameters", "_buffers"):
                self.__dict__[name] = tree.__dict__[name]
            own = {} if self._watch is None else self._watch.own
            ours.clear()
            ours.update({**tree._modules, **own})
            return
        if self._watch is not None:
            for name, module in self._watch.own.items():
                ours.setdefault(name, module)
        for name in ("_parameters", "_buffers"):
            tree.__dict__[name] = self.__dict__[name]
        theirs = tree._modules
        for name in [*theirs]:
            if name not in ours:
                del theirs[name]
            elif ours[name] is not theirs[name]:
                theirs[name] = ours[name]
        order = [name for name in ours if name in theirs]
        if order != [*theirs]:
            for name in order:
                theirs[name] = theirs.pop(name)

    def _rebuild(self) -> None:
        """Trace the tree again, and take over the graph and the regions made of it."""
        traced, build, options = self._source
        log.info("%s was changed: it is traced again", type(self._tree).__name__)
        try:
            fresh = build(retrace(traced), **options)
        except Exception as error:  # whatever a tree raises that does not fit together any longer
            reason = f"it was changed, and cannot be traced again: {type(error).__name__}: {error}".splitlines()[0]
            fresh = build(Traced(traced.root, None, {WHOLE: reason}), **options)
        for name in [name for name in self._held if name not in self._tree._modules]:
            del self._held[name]
        self._held.update(fresh._held)
        self._source = fresh._source
        self._read_from(fresh._source[0], fresh.graph)

    def begin_watch(self) -> None:
        """The graph and its regions are as they will be: notice from now on what is changed."""
        count_fused_steps()
        if self._watch is None:
            self._is_open = False
        self._watch = Watch(self)

    def follow_changes(self) -> None:
        """Before it is copied: the graph must be the tree's."""
        for path, submodule in self.optimized_submodules.items():
            submodule.follow_changes()
            self._source[0].submodules[path] = submodule._source[0]
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

    @property
    def notes(self) -> list[str]:
        """What explain() says of the whole."""
        names = ", ".join(self.optimized_submodules)
        about = [f"Its forward is PyTorch's, which calls optimized submodules: {names}"] if names else []
        if self._seen is None:
            return about
        return [*about, "Parameters or layers were changed: the last call ran as plain PyTorch. The next one packs them"
                " again, unless they were changed once more."]  # fmt: skip

    def keeping(self) -> list[Any]:
        """The parts that make something of parameters: they have `constants`, by name."""
        own = (module for name, module in self._held.items() if name not in self._tree._modules)
        return [module for module in own if hasattr(module, "constants")]

    def _forget(self, names: set[str]) -> None:
        for part in self.keeping():
            if names.intersection(part.constants):
                part.forget() if hasattr(part, "forget") else part.invalidate()

    def release_after_first_call(self, release: Callable[[OptimizedModule], bool]) -> None:
        """Free, after the first call, the parameters of which only packed copies are needed from then on.

        release  does it, and says whether there were any; copies of the module are made as it has settled then
        """
        self._release_due = release

    def _release(self) -> None:
        from fx_passes.plan.heap import trim_heap

        with self._lock:
            release, self._release_due = self._release_due, None
            was_open = self._is_open
            if release is not None and release(self):
                self._released = True
                self.begin_watch()
            self._is_open = was_open
        if self._released:
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
        """Return the region modules by name; those of optimized submodules with the submodule's path before it."""
        own = {name: module for name, module in self._held.items() if hasattr(module, "invalidate")}
        for path, submodule in self.optimized_submodules.items():
            own |= {f"{path}.{name}": region for name, region in submodule.regions().items()}
        return own

    def invalidate(self) -> None:
        """Tell everything that keeps what it made of parameters that they may have changed.

        Needed after what PyTorch does not count: writes through .data or numpy, other numbers in a module's attributes.
        """
        self._told = True
        if self._watch is not None:
            self._watch.expire()
        for part in (*self.optimized_submodules.values(), *self.regions().values()):
            part.invalidate()
        for module in self._held.values():
            if hasattr(module, "forget"):
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
        self.follow_changes()
        traced, build, options = self._source
        again: OptimizedModule = build(traced, **options)
        again._release_due = self._release_due
        again._is_open = self._is_open = True  # they have one tree
        return again

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedModule:
        self.follow_changes()
        traced, build, options = self._source
        again: OptimizedModule = build(traced.copy(copy.deepcopy(traced.root, memo)), **copy.deepcopy(options, memo))
        again._owns_storage = True
        again._release_due = self._release_due
        again._is_open = self._is_open  # who holds parts of this one may have been copied along
        return again

    def __reduce__(self) -> tuple[Any, ...]:
        self.follow_changes()
        return _rebuild, (*self._source, self._is_open, self._release_due)


def _ask_for_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor among the arguments requires a gradient."""
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in pytree.tree_leaves((args, kwargs)))


def _rebuild(
    traced: Traced,
    build: Build,
    options: dict[str, Any],
    is_open: bool = True,
    release: Callable[[OptimizedModule], bool] | None = None,
) -> OptimizedModule:
    """Unpickle."""
    again: OptimizedModule = build(traced, **options)
    again._owns_storage = True
    again._release_due = release
    again._is_open = is_open
    return again


def _opening(name: str) -> property:
    """A dict of nn.Module's own, by which one reaches parts of the module: who reads it may replace them."""

    def read(self: Any) -> Any:
        held = self.__dict__
        held["_is_open"] = True
        try:
            return held[name]
        except KeyError:
            raise AttributeError(name) from None  # before nn.Module.__init__

    def write(self: Any, value: Any) -> None:
        self.__dict__[name] = value

    return property(read, write)


for _name in ("_modules", "_parameters", "_buffers"):
    setattr(OptimizedModule, _name, _opening(_name))
