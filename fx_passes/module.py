"""OptimizedModule: the GraphModule that optimize() returns.

It carries the whole module tree of the skeleton (so state_dict has the original keys in the original order) and the
traced graph before any pass. Copying and unpickling run the passes again on that: regions are not carried along. Where
parameters were released, there is nothing to run them on: copies are made of the graph and its parts then.
"""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes import first_call
from fx_passes.call_kinds import Source, is_as_watched
from fx_passes.changes import Watch, in_functional_call
from fx_passes.graph.bindings import code_by_bindings
from fx_passes.graph.graph import IN_WORK, lint
from fx_passes.graph.hooks import outputs_are_collected
from fx_passes.memoize.watched import are_elsewhere, changes_functions, is_traced_by_fx, is_watched, override_functions
from fx_passes.submodule import SubmoduleForward, plain_forward
from fx_passes.trace.assumptions import Assumption
from fx_passes.trace.quiet import structures_copied
from fx_passes.trace.traced import Traced
from fx_passes.watched_module import Build, WatchedModule
from fx_passes.whole_model import is_whole_model_graph
from zendnn_cffi.errors import NoDataError, ZenDNNError, interrupts
from zendnn_cffi.runtime.uncompiled import keep_uncompiled, set_dynamo_hook

log = logging.getLogger("zendnn_cffi.passes")

_SHARED = (
    "inputs share memory, one of which this module writes to: a module from a file has no order of reads and writes for"
    " that. Give it copies, or call the original"
)
_EXPORTED = (
    "a module that optimize() made of an exported graph, as quantize() does, cannot be pickled, as PyTorch's exported"
    " modules cannot: zendnn_cffi.save(module, path) writes it to a file, and zendnn_cffi.load(path) reads that"
)
_KEPT = "zendnn_cffi: release_weights=True changes nothing, all parameters are kept: {}"


class OptimizedModule(WatchedModule):
    """An fx.GraphModule over a skeleton, in evaluation mode.

    build(traced, **options) -> OptimizedModule is what made it; a deep copy or an unpickled one is made the same way.
    Called with arguments that the graph is not right for, it runs the skeleton's own forward; so it does after a change
    of its parameters or layers. Where the next call finds the same, they are packed, or traced, again.
    """

    _owns_storage: bool
    _release_due: Callable[[OptimizedModule], str | None] | None
    _kept_because: str  # why release_weights=True releases nothing
    _calls_of_others: int  # with arguments that the graph is not for

    def __init__(self, traced: Traced, build: Build, options: dict[str, Any]) -> None:
        super().__init__(traced, build, options)
        self._owns_storage = False
        self._release_due = None
        self._kept_because = ""
        self._calls_of_others = 0
        self.training = False

    def rest_on(self, assumption: Assumption) -> None:
        """Compare each call with what a pass took for granted of the arguments."""
        traced, build, options = self._source
        if assumption not in traced.assumed:
            self._source = replace(traced, assumed=(*traced.assumed, assumption)), build, options
        self._checked = True

    def take_submodules(self, submodules: Mapping[str, OptimizedModule]) -> None:
        """Let these compute in place of the submodules that they were made of: by path in the tree, which stays."""
        self.__dict__["optimized_submodules"] = dict(submodules)
        for path, optimized in submodules.items():
            module = self._tree.get_submodule(path)
            module.__dict__["forward"] = SubmoduleForward(module, optimized)
            # whoever has this module may replace what is in them, in the tree
            optimized.__dict__["_is_open"] = optimized.__dict__["_follows_tree"] = True
            optimized.begin_watch()
        self.write_first_by(self.first_writes)

    @contextmanager
    def compiled_once(self) -> Iterator[None]:
        """Check the graph, and write it as Python code, when all passes have run, not after each of them."""
        self.__dict__[IN_WORK] = True
        try:
            yield
        finally:
            self.__dict__[IN_WORK] = False
        lint(self.graph, self)
        self.recompile()

    def recompile(self) -> Any:
        """As fx.GraphModule's; calls then pass through this class before they reach the graph's code."""
        if self.__dict__.get(IN_WORK):
            return None
        if self.__dict__.get("_watch") is not None:
            self._awaits_call = 0  # somebody edited the graph, which another would do away with
        with code_by_bindings(self):
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
        if is_whole_model_graph(self.graph):  # arguments reach the model's forward as they are given
            run_graph = cls._by_pytorch
        cls.forward, cls.run_graph = forward, run_graph
        del cls.__call__  # fx's own, which shows the line of generated code that raised: a traceback has it, too
        return code

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if outputs_are_collected():  # by hooks of layers, for a model that this one is a part of
            self._refuse_if_released("a call of which Transformers collects hidden states")
            return self._by_pytorch(*args, **kwargs)
        if self._awaits_call:
            self.trace_by(args, kwargs)
        watch = self._watch
        if watch is None or self._is_traced() or not (watch.unchanged(self) if self._is_open else watch.unwritten()):
            by_pytorch = self._call_changed(args, kwargs)
            if by_pytorch is not None:
                return by_pytorch[0]
        if torch._C._len_torch_function_stack() and changes_functions():
            self._refuse_if_released("a call under a mode that PyTorch's functions go through")
            return self._by_pytorch(*args, **kwargs)
        if override_functions(args) or (kwargs and override_functions(kwargs.values())):
            self._refuse_if_released("a call with tensors that have their own way of PyTorch's functions")
            return self._by_pytorch(*args, **kwargs)
        if (are_elsewhere(args) or (kwargs and are_elsewhere(kwargs.values()))) and not self._released:
            return self._by_pytorch(*args, **kwargs)
        if self._checked:
            arranged = None if self._is_whole else self._source[0].arrange(args, kwargs)
            if arranged is None:
                return self._call_other(args, kwargs)
            args, kwargs = arranged
        written = self.written_inputs
        places = (None, None) if written is None or watch is None else (watch.places, watch.written_places)
        if written is not None and written.are_shared(args, kwargs, *places):
            self._refuse_if_released("a call whose inputs share memory, one of which it writes to,")
            if self._source[0].restored:
                raise ValueError(_SHARED)
            return self._by_pytorch(*args, **kwargs)
        tracks = torch.is_grad_enabled() and not self._is_whole
        asks = tracks and _ask_for_gradients(args, kwargs)
        means_another = torch.is_autocast_enabled("cpu") or torch.get_default_dtype() is not self._source[0].dtype
        if (asks or means_another) and not self._released and type(self._tree) is not nn.Module:
            # It may leave gradients out, or track parameters alone, or switch autocast off.
            # Captured graphs have no forward.
            return self._by_pytorch(*args, **kwargs)
        run = self._run_untracked if tracks and not asks else self.run_graph
        is_recorded = torch._C._get_tracing_state() is not None
        try:
            result = run(*args, **kwargs)
        except Exception as error:
            if is_recorded or not self.may_run_again(error):  # torch.jit.trace has stopped recording
                raise
            failed = error
        else:
            if self._release_due is not None:
                self._release()
            return result
        with torch.set_grad_enabled(asks):
            result = self._by_pytorch(*args, **kwargs)  # mostly an error, and then its own
        log.warning("a call raised, and PyTorch's way of it did not: %s: %s", type(failed).__name__, failed)
        return result

    def _call_other(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that the graph is not for: by a further graph, or by plain PyTorch, and then one is made for such."""
        self._refuse_if_released("a call with arguments that it was not traced for")
        module = self.call_kinds.find(args, kwargs)
        if module is not None:
            module._is_open = self._is_open
            return module._call(args, kwargs)
        with self.call_kinds.example(self, args, kwargs) as is_example:
            tracks = torch.is_grad_enabled() and not _ask_for_gradients(args, kwargs)
            if is_example and tracks and not self._follows_gradients:
                result = self._untracked(self._by_pytorch, args, kwargs)  # as the calls of this kind that follow
            else:  # what forward sets stays set
                result = self._by_pytorch(*args, **kwargs)
        self._calls_of_others += not is_example
        return result

    @property
    def _follows_gradients(self) -> bool:
        """Whether forward asks if gradients are enabled, and so must find them as the caller has them."""
        guards = self._source[0].guards
        return guards is not None and guards.without_gradients

    def _run_untracked(self, *args: Any, **kwargs: Any) -> Any:
        """A parameter that plain PyTorch reads would make what follows track gradients that nobody asks for."""
        return self._untracked(self.run_graph, args, kwargs)

    @staticmethod
    def _untracked(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Where gradients are enabled: run without."""
        torch._C._set_grad_enabled(False)  # no_grad() takes longer than all that a call asks before
        try:
            return run(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(True)

    def may_run_again(self, error: Exception) -> bool:
        """Whether a call that raised has changed nothing, so that the model's own forward may have it."""
        is_final = isinstance(error, MemoryError | NoDataError | ZenDNNError | Warning) or interrupts(error)
        return self._only_reads and not self._released and not is_final

    def _by_pytorch(self, *args: Any, **kwargs: Any) -> Any:
        with self.call_kinds.plain_calls.one():
            forward = plain_forward(self.root)
            if self.first_writes is None:
                return forward(*args, **kwargs)
            return self.first_writes.run(self._source[0], forward, args, kwargs)

    def _is_traced(self) -> bool:
        """Whether torch.fx traces: its flag is one for all threads, of which one may make a further graph of this."""
        return is_traced_by_fx() and not self.call_kinds.are_traced_elsewhere

    def _call_changed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """A call that found a change: its result by plain PyTorch, or None where the graph is right (again)."""
        if in_functional_call() or is_watched() or self._is_traced():
            self._refuse_if_released("a call with other parameters")
            self._adopt()
            return (self._by_pytorch(*args, **kwargs),)
        if self.call_kinds.are_traced_elsewhere:  # which counts as hooks that were added
            self._adopt()
            if is_as_watched(self):
                return None
        else:
            with self._lock:
                if self._is_settled():
                    return None
        if self._is_whole or self._follows_gradients or _ask_for_gradients(args, kwargs):
            return (self._by_pytorch(*args, **kwargs),)
        with torch.no_grad():
            return (self._by_pytorch(*args, **kwargs),)

    def trace_by(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take these arguments as the example, if they are one."""
        dtype = self._source[0].dtype
        if in_functional_call() or is_watched() or is_traced_by_fx() or not first_call.means_what_it_says(dtype):
            return
        if reason := first_call.no_example(args, kwargs):
            log.info("%s waits for another call to be traced by: %s", type(self._tree).__name__, reason)
            return
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if not self._awaits_call:  # another thread did it
                return
            with self.call_kinds.plain_calls.none() as is_alone:
                if not is_alone:
                    return
                self._adopt()
                self._awaits_call -= 1
                traced, build, options = self._source
                if (found := first_call.traced_by(traced, args, kwargs)) is not None:
                    self._awaits_call = 0
                    self._take_over(build(found, **options))
                    self._begin_watch(Watch(self))
                elif not self._awaits_call:
                    self._checked = True  # further kinds are made by calls that did not raise

    @property
    def notes(self) -> list[str]:
        """What explain() says of the whole."""
        names = ", ".join(self.optimized_submodules)
        about = [f"Its forward is PyTorch's, which calls optimized submodules: {names}"] if names else []
        traced = self._source[0]
        if self._awaits_call:
            about.append("It came without example inputs: its first call will be the example that it is traced by.")
        if self.call_kinds.modules:
            about.append(
                f"Other kinds of calls than its own graph is for have theirs. {'; '.join(self.call_kinds.texts)}"
            )
        if self._calls_of_others and not names:  # else it is for calls of all kinds
            about.append(
                f"Calls with other arguments than it was traced for, or in another state: {self._calls_of_others}."
                f" They ran as plain PyTorch: {self.call_kinds.reasons.counted}."
            )
        if traced.guards is not None and traced.sizes.note:
            about.append(traced.sizes.note)
        if traced.decided_by is not None:
            about.append("Its example's sizes decided which way forward goes: other sizes may have further graphs.")
        if self._kept_because:
            about.append(f"release_weights=True keeps all parameters: {self._kept_because}")
        if self._seen is None:
            return about
        return [*about, "Parameters or layers were changed: the last call ran as plain PyTorch. The next one packs them"
                " again, unless they were changed once more."]  # fmt: skip

    def release_after_first_call(self, release: Callable[[OptimizedModule], str | None]) -> None:
        """Free, after the first call, the parameters of which only packed copies are needed from then on.

        release  does it, and says "" for that, why it cannot, or None where it is to be asked again after the next
                 call; copies of the module are made as it has settled then
        """
        self._release_due = release
        if not self._awaits_call and (self.optimized_submodules or not self.regions()):
            self._release()  # its calls change nothing about that

    def _release(self) -> None:
        from fx_passes.plan.heap import trim_heap

        with self._lock:
            release, self._release_due = self._release_due, None
            if release is None:  # another thread did it
                return
            was_open = self._is_open
            kept_because = release(self)
            if kept_because is None:
                self._release_due = release
            elif kept_because:
                self._kept_because = kept_because
                warnings.warn(_KEPT.format(kept_because), RuntimeWarning, stacklevel=5)
            else:
                self._released = True
                self.begin_watch()
            self._is_open = was_open
        if self._released:
            trim_heap()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module's. Raises RuntimeError once weights were released."""
        self._refuse_if_released("state_dict()")
        return super().state_dict(*args, **kwargs)

    @property
    def leaves(self) -> dict[str, str]:
        """Submodules that could not be traced and stay whole ("": the model itself), with the reason."""
        return dict(self._source[0].leaves)

    def train(self, mode: bool = True) -> OptimizedModule:
        """Stay in evaluation mode: train(False) is eval(), for layers that are not; train(True) raises RuntimeError."""
        if mode:
            raise RuntimeError(
                "an optimized module has evaluation semantics only (batch normalization is folded, dropout is gone):"
                " train the original model, and optimize it again afterwards"
            )
        parts = [
            part for name, part in self.children_by_name.items() if part is not None and name in self._tree._modules
        ]
        if any(each.training for part in parts for each in part.modules()):
            self.__dict__["_is_open"] = True  # the next call looks for what has changed
            for part in parts:
                part.train(False)
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
        from fx_passes.trace.arrays import moved, together  # which a module from a file does without
        from fx_passes.trace.skeleton import tensors_of

        own = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())}
        others = (*tensors_of(self), *tensors_of(self._tree))  # views of these in other attributes go with them
        for group in together((*own.values(), *others)):
            if any(id(value) in own for value in group):
                memory = moved(group)
                for value in group:
                    own.pop(id(value), None)
                    if isinstance(value, torch.Tensor):
                        value.data = cast(torch.Tensor, memory[id(value)]).detach()
        for tensor in own.values():
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
        again.call_kinds.renew(again, (module._source for module in self.call_kinds.modules))
        again._release_due = self._release_due
        again._is_open = self._is_open = True  # they have one tree
        return again

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizedModule:
        self.follow_changes()
        traced, build, options = self._source
        with structures_copied():
            root = copy.deepcopy(traced.root, memo)
        again: OptimizedModule = build(traced.copy(root), **copy.deepcopy(options, memo))
        for further in self.call_kinds.modules:
            traced, build, options = further._source
            again.call_kinds.renew(again, [(traced.copy(again._tree), build, copy.deepcopy(options, memo))])
        again._owns_storage = True
        again._release_due = self._release_due
        again._is_open = self._is_open  # who holds parts of this one may have been copied along
        return again

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._tree, fx.GraphModule):
            from fx_passes.trace.export import is_exported  # which a module from a file does without

            if is_exported(self._tree):
                raise pickle.PicklingError(_EXPORTED)
        self.follow_changes()
        further = [module._source for module in self.call_kinds.modules]
        return _rebuild, (*self._source, self._is_open, self._release_due, further)


def _ask_for_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor among the arguments requires a gradient."""
    if not kwargs and all(type(value) is torch.Tensor for value in args):
        return any(value.requires_grad for value in args)
    return any(isinstance(v, torch.Tensor) and v.requires_grad for v in pytree.tree_leaves((args, kwargs)))


def _rebuild(
    traced: Traced,
    build: Build,
    options: dict[str, Any],
    is_open: bool = True,
    release: Callable[[OptimizedModule], str | None] | None = None,
    further: Sequence[Source] = (),
) -> OptimizedModule:
    """Unpickle."""
    again: OptimizedModule = build(traced, **options)
    again.call_kinds.renew(again, further)
    again._owns_storage = True
    again._release_due = release
    again._is_open = is_open
    return again
