"""Further graphs of a module, for calls that its own is not for: with another optional tensor, flag, dtype or rank.

    fast(ids)                the module's own graph
    fast(ids, mask)          no graph is for this call: PyTorch computes it, and then it is the example of one
    fast(ids, mask)          that one computes it

Each is a module over the same tree. Calls that have a graph go on while another one is made. Those that have none wait:
a forward that runs beside disturbs tracing (fx_passes/plain_calls.py). A call whose code raises is no example. Of calls
that differ in a number alone (the count of a loop) the second one is: the first of them may be the only one. So is the
second call of a kind with sizes that the kind's graph is not for, as the model branches on them.

Where an example's sizes decided which way a graph goes, torch.export makes the first further one, as it may be for all
sizes; that takes longer.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fx_passes.changes import Watch
from fx_passes.first_call import means_what_it_says, no_example
from fx_passes.memoize.watched import is_watched
from fx_passes.plain_calls import PlainCalls, Reasons
from fx_passes.trace.call_kind import Kind, form_of, kind_of
from fx_passes.trace.compared import copy_of_example
from fx_passes.trace.guards import Call
from fx_passes.trace.sizes import Free, FreeSizes
from fx_passes.trace.skeleton import OF_MODULES, skeleton
from fx_passes.trace.traced import Traced
from zendnn_cffi.engine.library import is_available
from zendnn_cffi.errors import is_of_signal_handler
from zendnn_cffi.locks import new_lock

if TYPE_CHECKING:
    from fx_passes.module import OptimizedModule

Source = tuple[Traced, Callable[..., Any], dict[str, Any]]  # what a module is made of

log = logging.getLogger("zendnn_cffi.passes")

MOST_KINDS = 8  # graphs of one module, its own included: more kinds of calls stay plain PyTorch
_MOST_TRIES = 16  # examples that are traced in all: some give no graph
_MOST_BY_SIZES = 2  # further graphs of one kind, as its first may be for few sizes
_NOT_FOR_IT = "other sizes, or another state of PyTorch or the program, than the graph of such calls is for"
_MOST_WAITING = 64  # kinds that came once, and are remembered until they come again


class CallKinds:
    """The further graphs of one module.

    modules  one for each kind of call, over the module's own tree
    reasons  why calls stayed plain PyTorch
    """

    def __init__(self) -> None:
        self.modules: list[OptimizedModule] = []
        self.reasons = Reasons()
        self._known: dict[Kind, str] = {}  # that have a graph (""), or cannot have one, and why
        self._exported: set[Kind] = set()  # whose graph's example decided, and of which another was to be for all sizes
        self._waiting: dict[Kind, None] = {}
        self._plain: dict[tuple[Any, ...], str] = {}  # calls for which there will be no graph, and why
        self._tries = 0
        self._by_sizes: dict[Kind, int] = {}  # how many graphs were asked for as others were not for a call's sizes
        self._has_asked_symbols = False  # for a graph of all sizes, where the module's own is for its example's
        self._traced_in = 0  # the thread that does
        self._lock = new_lock()
        self.plain_calls = PlainCalls()

    @property
    def are_traced_elsewhere(self) -> bool:
        """Whether another thread traces one."""
        return self._traced_in not in (0, get_ident())

    def remember(self, traced: Traced) -> None:
        """The kinds of calls that need no further graph."""
        if traced.kind is not None:
            self._known[traced.kind] = ""

    def forget_tried(self) -> None:
        """The model was changed: what could not be traced may be now."""
        self._known.clear()
        self._by_sizes.clear()
        self._exported.clear()
        self._plain = {}
        self._tries = 0
        for module in self.modules:
            self.remember(module._source[0])

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OptimizedModule | None:
        """The module whose graph is for this call, if there is one."""
        for module in self.modules:
            if not module._is_whole and module._source[0].arrange(args, kwargs) is not None:
                return module
        return None

    @contextmanager
    def example(self, owner: OptimizedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[bool]:
        """While PyTorch computes a call that no graph is for: at the end its arguments are the example of one.

        owner    the module that these further graphs are of
        Yields   whether they are; not where a kind was tried before, or another thread traces
        """
        form, traced = form_of(args, kwargs), owner._source[0]
        if form is not None and (refused := self._plain.get(form)):
            self._note(refused)
            yield False
            return
        kind = kind_of(traced.parameters, args, kwargs) if self._is_example(owner, args, kwargs) else None
        if kind is None or not self._is_wanted(kind, owner, args, kwargs) or not self._begin():
            yield False
            return
        try:
            copied, watch = _copy_of((args, kwargs)), owner._watch
            yield copied is not None
            if copied is not None and watch is not None:
                self._waiting.pop(kind, None)
                self._tries += 1
                if kind in self._known:
                    self._by_sizes[kind] = self._by_sizes.get(kind, 0) + 1
                try:
                    with torch.inference_mode(False), torch.no_grad(), self.plain_calls.none() as is_alone:
                        if is_alone:
                            self._add(kind, copied, owner, watch)
                except Exception as error:  # whatever a class raises that does not want to be copied or traced
                    if is_of_signal_handler(error):
                        raise
                    self._refuse(kind, f"{type(error).__name__}: {error}")
        finally:
            self._traced_in = 0
            self._lock.release()

    def _is_example(self, owner: OptimizedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if (reason := _alone(owner)) or (reason := no_example(args, kwargs)):
            self._note(reason)
        return not reason

    def _is_wanted(self, kind: Kind, owner: OptimizedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of a kind is to be the example of a graph."""
        sizes = owner._source[0].sizes
        if self._asks_symbols(sizes):
            return True
        branches = self._branches_on_sizes(kind, owner, args, kwargs)
        if refused := self._known.get(kind):
            self._note(refused)
            self._leave_plain(refused, args, kwargs)
        elif (kind in self._known and not branches) or (
            sizes.free is Free.NOTHING and any(map(kind.differs_by_sizes, self._known))
        ):
            self._note(_NOT_FOR_IT)
            if owner._is_whole and not self.modules:  # there is no graph, of which sizes or a state could be others
                self._leave_plain(_NOT_FOR_IT, args, kwargs)
        elif len(self.modules) >= MOST_KINDS - 1:
            self._note(f"{MOST_KINDS} kinds of calls came before")
        elif self._tries >= _MOST_TRIES:
            self._note(f"{_MOST_TRIES} kinds of calls were tried before")
        elif kind not in self._waiting and branches:
            self._let_wait(kind, "sizes that the graph of such calls is not for, and")
        elif kind not in self._waiting and any(map(kind.differs_by_number, [*self._known, *self._waiting])):
            self._let_wait(kind, "a number")
        else:
            return True
        return False

    def _leave_plain(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ask no more of calls of this one's form."""
        form = form_of(args, kwargs)
        if form is not None and len(self._plain) < _MOST_WAITING:
            self._plain = {**self._plain, form: reason}

    def _branches_on_sizes(
        self, kind: Kind, owner: OptimizedModule, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a kind has a graph, which could be for other sizes, and is not for those of a call."""
        if self._known.get(kind) != "" or self._by_sizes.get(kind, 0) >= _MOST_BY_SIZES:
            return False
        alike = self._alike(kind, owner)
        decides = any(traced.decided_by is not None for traced in alike)
        return bool(alike) and all(
            (decides or traced.sizes.free is Free.ALL) and traced.is_for_other_sizes(args, kwargs) for traced in alike
        )

    def _alike(self, kind: Kind, owner: OptimizedModule) -> list[Traced]:
        """The graphs of a kind."""
        return [each._source[0] for each in (owner, *self.modules) if each._source[0].kind == kind]

    def _let_wait(self, kind: Kind, what: str) -> None:
        """Remember a kind until it comes again."""
        while len(self._waiting) >= _MOST_WAITING:
            self._waiting.pop(next(iter(self._waiting)), None)
        self._waiting[kind] = None
        self._note(f"{what} that came for the first time: the second such call is an example")

    def _asks_symbols(self, sizes: FreeSizes) -> bool:
        """Whether the next graph is to be symbolic tracing's, for all sizes; it is asked for once."""
        return sizes.others_by_symbols and not self._has_asked_symbols

    def _begin(self) -> bool:
        """Whether this thread is the one to trace."""
        if not self._lock.acquire(blocking=False):
            self._note("a graph for another call was made meanwhile, by another thread")
            return False
        if self._traced_in:  # a finalizer, or a signal handler, in the midst of it
            self._lock.release()
            return False
        self._traced_in = get_ident()
        return True

    def for_all_sizes(self, owner: OptimizedModule) -> OptimizedModule | None:
        """The graph that torch.export makes in place of the owner's, for which the example's sizes decided.

        None where none can be made.
        """
        traced, watch = owner._source[0], owner._watch
        example, kind = traced.decided_by, traced.kind
        if example is None or kind is None or watch is None:
            return None
        if (found := self._exported_for(example)) is not None or _alone(owner) or not self._begin():
            return found
        try:
            self._exported.discard(kind)
            with torch.inference_mode(False), torch.no_grad(), self.plain_calls.none() as is_alone:
                if is_alone:
                    self._add(kind, example, owner, watch)
        finally:
            self._traced_in = 0
            self._lock.release()
        return self._exported_for(example)

    def _exported_for(self, call: Call) -> OptimizedModule | None:
        """The module whose graph torch.export made, and which is for this call."""
        exported = [each for each in self.modules if each._source[0].guards is not None]
        return next((each for each in exported if each._source[0].arrange(*call) is not None), None)

    def _add(self, kind: Kind, example: Call, owner: OptimizedModule, watch: Watch) -> None:
        """Make the module for calls of which this is one.

        watch  of the owner when the call came: what was changed meanwhile is for the next call to trace
        """
        from fx_passes.trace.own_memory import own_what_is_written  # modules from files do without both
        from fx_passes.trace.trace import trace_kind

        private = skeleton(owner._tree)  # the tree stays as it is until there is a graph
        sizes = owner._source[0].sizes
        by_symbols = self._asks_symbols(sizes)
        self._has_asked_symbols |= by_symbols
        alike = self._alike(kind, owner)
        decides = any(traced.decided_by is not None for traced in alike)
        if is_second := decides and kind not in self._exported:
            self._exported.add(kind)
            found = trace_kind(private, *example, sizes._replace(has_one_graph=True), by_symbols)
            if found.graph is None or found.sizes.free is not Free.ALL:
                for traced in alike:
                    traced.serve_all_sizes()
        if not is_second or found.graph is None:
            found = trace_kind(private, *example, sizes, by_symbols)
        if found.graph is None:
            self._refuse(kind, next(iter(found.leaves.values()), ""))
            return
        with owner._lock:
            if owner._watch is not watch or not is_as_watched(owner):
                return
            with _changing_tree((owner, *self.modules)):
                traced = found.copy(owner._tree)
                _graft(private, owner._tree)
                if not owner._owns_storage:
                    own_what_is_written((traced,), (), owner._source[0].shared)
                module = self._made(owner, (traced, *owner._source[1:]))
            if module._source[0].arrange(*example) is None:
                self._refuse(kind, "its graph is not for its own example")
                return
            self.remember(traced)
            self.take(owner, module)
            log.info("%s has a graph for further calls: %s", type(owner._tree).__name__, kind.text)

    def _made(self, owner: OptimizedModule, source: Source) -> OptimizedModule:
        traced, build, options = source
        module: OptimizedModule = build(traced, **options)
        self._subordinate(owner, module)
        return module

    def _subordinate(self, owner: OptimizedModule, module: OptimizedModule) -> None:
        """Let a module over the owner's tree be one of its further graphs."""
        module._follows_tree = True
        module._owner = weakref.ref(owner)
        module.write_first_by(owner.first_writes)
        module.call_kinds.plain_calls = self.plain_calls
        module.begin_watch()
        module._is_open = True

    @property
    def texts(self) -> list[str]:
        """Which calls each further graph is for."""
        return [f"kind_{number}: {module._source[0].calls}" for number, module in enumerate(self.modules, 2)]

    def take(self, owner: OptimizedModule, module: OptimizedModule) -> None:
        """Let a module compute calls that its graph is for."""
        self.modules = [*self.modules, module]
        self._plain = {}
        self.share_packed(owner)

    def renew(self, owner: OptimizedModule, every: Iterable[Source]) -> None:
        """Have modules that are made of these, as a copy of a module has."""
        for source in every:
            self.remember(source[0])
            self.take(owner, self._made(owner, source))

    def adopt(self, owner: OptimizedModule, module: OptimizedModule) -> None:
        """Have a module that was made over the owner's tree, as one from a file."""
        self._subordinate(owner, module)
        self.remember(module._source[0])
        self.take(owner, module)

    def share_packed(self, owner: OptimizedModule) -> None:
        """Let regions of all graphs keep weights once that are packed to the same bytes."""
        if not self.modules:
            return
        regions = [region for region in owner.regions().values() if hasattr(region, "weights")]
        stores = [region.weights for region in regions]
        for store in stores:
            store.share_with(stores)

    def _refuse(self, kind: Kind, reason: str) -> None:
        self._known[kind] = f"no graph for {kind.text}: {reason}".splitlines()[0]
        self._note(self._known[kind], 0)

    def _note(self, reason: str, calls: int = 1) -> None:
        """Say why calls stay plain PyTorch; none yet where an example alone came."""
        if self.reasons.add(reason, calls):
            log.info("a call stays plain PyTorch: %s", reason)


def _is_exported(tree: nn.Module) -> bool:
    from fx_passes.trace.export import is_exported  # modules from files do without

    return is_exported(tree)


def _alone(owner: OptimizedModule) -> str:
    """Why a module has no further graphs; "" where it may have."""
    traced, tree = owner._source[0], owner._tree
    if traced.restored or type(tree) is nn.Module or isinstance(tree, torch.jit.ScriptModule) or _is_exported(tree):
        return "the code of its forward is not there"
    if owner._follows_tree:
        return "it stands for a part of another module"
    if owner.optimized_submodules:
        return "its submodules are optimized, not the whole"
    if owner._release_due is not None:
        return "its parameters are about to be released"
    if owner._awaits_call or is_watched() or not is_available() or not means_what_it_says(traced.dtype):
        return "a call under a mode of PyTorch's, or without the library"
    return ""


def is_as_watched(module: OptimizedModule) -> bool:
    """Whether a module's graph and packed weights are those of the tree as it is; hooks of others count for nothing."""
    before, now = module._watch, Watch(module)
    return before is not None and now.gives_graph_of(before) and not now.written(before)


@contextmanager
def _changing_tree(modules: Sequence[OptimizedModule]) -> Iterator[None]:
    """While tracing adds to a tree that modules share: what they notice of that is no change of the user's."""
    still = [each for each in modules if is_as_watched(each)]
    owner, tree = modules[0], modules[0]._tree
    before = set(tree._modules)
    yield
    owner._held.update({name: part for name, part in tree._modules.items() if name not in before})
    for each in still:
        each._adopt()
        now = Watch(each)
        if each._watch is not None and now.keeps_tensors_of(each._watch):
            each._begin_watch(now)


def _copy_of(call: Call) -> Call | None:
    """A copy of a call's arguments, before they are written to; None where they cannot be copied."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            return copy_of_example(call)
    except Exception:  # whatever a class raises that does not want to be copied
        return None


def _graft(private: nn.Module, tree: nn.Module) -> None:
    """Give the tree what tracing put on the private one: tensors that forward makes, and parts under a mode."""
    for path, module in list(private.named_modules()):
        try:
            owner = tree.get_submodule(path)
        except AttributeError:
            continue  # inside of what was put there
        kept: list[tuple[dict[str, Any], dict[str, Any]]] = [(module.__dict__, owner.__dict__)]
        kept += [(module.__dict__[name], owner.__dict__[name]) for name in OF_MODULES]
        for theirs, ours in kept:
            ours.update({name: value for name, value in theirs.items() if name not in ours})
