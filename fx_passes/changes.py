"""Noticing what was changed on an optimized module since its graph was made and its weights were packed.

    optimizer.step(), copy_(), load_state_dict() of the model it shares storage with    a version counter
    p.data = q, p.data = p.data.t(), vector_to_parameters(), swap_tensors()             an address, a view
    layer.weight = nn.Parameter(...), layer.bias = None, functional_call()              another object under a name
    module.layer = nn.Linear(...), prune, parametrize                                   another object, or none
    layer._parameters = {...}, layer.forward = f, other orders of layers                another dictionary
    register_forward_hook()                                                             the count of all hooks ever made
    conv.stride = (2, 2), block.scale = 0.5, model.config.sizes[0] = 7                  fx_passes/trace/attributes.py

All of it is asked at each call, by reading words of memory where they lie (zendnn_cffi.runtime); version counters and
hooks alone where nobody has had a part of the optimized module in hands (OptimizedModule.is_open). What modules hold is
compared only where one of their dictionaries was changed. Writes that PyTorch itself does not count, p.data.add_(1) and
those through numpy, cannot be seen.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as module_of_torch
from torch.nn.utils import stateless
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from fx_passes.aliasing.inputs import Places
from fx_passes.graph.graph import CREATED
from fx_passes.graph.hooks import computed_weights, has_hooks
from fx_passes.graph.inner import find, is_plain, plain_tensors, value_of
from fx_passes.region.kept import Kept
from fx_passes.trace.attributes import Attributes
from fx_passes.trace.skeleton import OF_MODULES, tensors_in
from fx_passes.trace.state import is_torch_s
from zendnn_cffi.runtime.dictionaries import Dictionaries
from zendnn_cffi.runtime.locations import Locations
from zendnn_cffi.runtime.versions import Versions

if TYPE_CHECKING:
    from fx_passes.watched_module import WatchedModule

_version = operator.attrgetter("_version")
_is_training = operator.itemgetter("training")
# Modules that compute the same in training: of others, the flag is watched.
_SAME_IN_TRAINING = (nn.Linear, nn.modules.conv._ConvNd, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity,
                     nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.LayerNorm, nn.Embedding,
                     nn.modules.pooling._MaxPoolNd, nn.modules.pooling._AvgPoolNd,
                     nn.modules.pooling._AdaptiveAvgPoolNd)  # fmt: skip


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Batch normalization in training mode updates the former by a kernel that leaves their version counters alone.
RUNNING, COUNTER = ("running_mean", "running_var"), "num_batches_tracked"


def counters_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return what batch normalizations count in when they update these running statistics: their version counters tell.

    Whose statistics these are is found among all objects, in tens of milliseconds.
    """
    wanted = {id(tensor) for tensor in tensors}
    holders = gc.get_referrers(*tensors) if wanted else []
    found = (d[COUNTER] for d in holders if isinstance(d, dict) and any(id(d.get(n)) in wanted for n in RUNNING)
             and isinstance(d.get(COUNTER), torch.Tensor))  # fmt: skip
    return list({id(counter): counter for counter in found}.values())


class Contents:
    """What tells whether tensors were written to, or were given other memory or another view of it."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self._parts = list(map(plain_tensors, self.tensors))
        plain = list(itertools.chain(*self._parts))
        # Inference tensors have no version counter.
        self._counted = [t for t in plain if not t.is_inference()]
        self._versions = list(map(_version, self._counted))
        self._quickly = Versions(self._counted)
        self._locations = Locations(plain)

    def unwritten(self) -> bool:
        """Whether nobody wrote to them in place."""
        return self._quickly.unchanged()

    def unchanged(self) -> bool:
        """Whether nobody wrote to them, or gave them other memory."""
        return self._quickly.unchanged() and self._locations.unchanged()

    def changed(self) -> list[int]:
        """The positions of those that somebody wrote to, or gave other memory."""
        written = {id(t) for t, version in zip(self._counted, self._versions, strict=True) if t._version != version}
        changed = written.union(map(id, self._locations.changed()))
        return [i for i, tensors in enumerate(self._parts) if not changed.isdisjoint(map(id, tensors))]


class Watch:
    """What an optimized module was when this was made.

    structure  modules, their order, shapes and ties of parameters: with attributes, all that its graph may depend on
    """

    def __init__(self, gm: WatchedModule) -> None:
        root = gm._tree
        modules = list(_outside_leaves(root, frozenset(gm.leaves)))
        children = [m._modules for _, m in modules if m._modules or not is_torch_s(m) or isinstance(m, _CONTAINERS)]
        if not modules:  # the model is called as a whole: by what was put here in place of its parts
            children = [root._modules]
        self._children = [gm.children_by_name if d is root._modules else d for d in children]
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        for _, module in modules:
            for held in (module._parameters, module._buffers):
                self._owners += [held] * len(held)
                self._names += held
        inside = {id(module) for _, module in modules}
        constants = _constants(gm, root, inside, self._owners, self._names)
        called = [m for m in _leading_to(root, constants) if id(m) not in inside]
        self._children += [m._modules for m in called if m._modules]
        self._known_children = [list(d.items()) for d in self._children]
        constants |= _computed_from(gm, modules, constants, self._owners, self._names)
        self._tensors = list(map(operator.getitem, self._owners, self._names))
        self.constants = list(constants)
        self.contents = Contents(constants.values())
        trained = [m for _, m in modules if m is not root and not (is_torch_s(m) and isinstance(m, _SAME_IN_TRAINING))]
        # torch.compile's modules have the flag of the module that they hold
        self._attributes = [m.__dict__ for m in trained if "training" in m.__dict__]
        self._training = list(map(_is_training, self._attributes))
        # Hooks of all modules are run by modules alone.
        self._hooks = -1 if has_global_hooks() else RemovableHandle.next_id
        self._root = root.__dict__
        self._held = gm._held
        self.own = {name: module for name, module in gm._held.items() if name not in root._modules}
        self._modules = [module for _, module in modules]
        self._by_name = [
            held
            for module in self._modules
            for held in (module._parameters, module._buffers)
            if held or not is_torch_s(module)
        ]
        self._names_of = list(map(_kept, self._modules))
        self._parts = list(map(_parts, self._modules))  # held, so that nothing else gets their ids
        self._made_of = self._ids()
        self._known_names = list(map(list, self._by_name))
        self._plain = Attributes(self._modules)
        of_wrapped = [each.__dict__ for each in self._tensors if isinstance(each, torch.Tensor) and not is_plain(each)]
        of_called = [held for m in called for held in (m._parameters, m._buffers)]
        dictionaries = [*self._children, *self._by_name, *of_called, *self._plain.dictionaries, *of_wrapped]
        self._dictionaries = Dictionaries(dictionaries, self._holds_the_same)
        self.structure = self._describe(modules)
        self._written = [] if gm.written_inputs is None else gm.written_inputs.tensors_of(gm)

    def unchanged(self, gm: WatchedModule) -> bool:
        """Whether all is as it was, as far as can be noticed."""
        own = gm.__dict__
        try:
            return (
                RemovableHandle.next_id == self._hooks
                and own["_modules"] is self._held
                and own["_parameters"] is self._root["_parameters"]
                and own["_buffers"] is self._root["_buffers"]
                and self._dictionaries.unchanged()
                and (self._plain.looks_unchanged() or self._plain.unchanged())
                and self.contents.unchanged()
            )
        except (KeyError, RuntimeError):  # a name that is gone, a tensor without an address
            return False

    def _holds_the_same(self) -> bool:
        """Whether the dictionaries of the modules hold what they did, as far as graphs depend on it."""
        return (
            [list(d.items()) for d in self._children] == self._known_children
            and all(map(operator.is_, map(operator.getitem, self._owners, self._names), self._tensors))
            and list(map(list, self._by_name)) == self._known_names
            and list(map(_is_training, self._attributes)) == self._training
            and self._ids() == self._made_of
            and self._plain.unchanged()
        )

    def _ids(self) -> list[tuple[Any, ...]]:
        """What each module is made of, and the names of parameters and buffers that an attribute hides."""
        return [
            (*map(id, _parts(module)), *(names & module.__dict__.keys()))
            for module, names in zip(self._modules, self._names_of, strict=True)
        ]

    def unwritten(self) -> bool:
        """As unchanged(), where nobody holds what could be replaced: what others share memory with was not written."""
        return RemovableHandle.next_id == self._hooks and self.contents.unwritten()

    def gives_graph_of(self, before: Watch) -> bool:
        """Whether the graph that was made when `before` was is this one's, too."""
        return self.structure == before.structure and before._plain.unchanged()

    def has_dtypes_of(self, before: Watch) -> bool:
        """Whether parameters and buffers have the dtypes that they had when `before` was made."""
        now, then = ([kind and kind[2] for _, _, kind in watch.structure[0]] for watch in (self, before))
        return now == then

    def expire(self) -> None:
        """Let unchanged() be False."""
        self._hooks = -1

    def same_tensors(self, other: Watch) -> bool:
        """Whether the same objects are under the same names."""
        if self._names != other._names or len(self._tensors) != len(other._tensors):
            return False
        return all(map(operator.is_, self._tensors, other._tensors))

    def keeps_tensors_of(self, before: Watch) -> bool:
        """Whether each tensor of then is still there, and was not written to since."""
        mine = set(map(id, self._tensors))
        return before.contents.unchanged() and all(id(tensor) in mine for tensor in before._tensors)

    @functools.cached_property
    def places(self) -> Places:
        """Where the constants lie."""
        return Places(self.contents.tensors)

    @functools.cached_property
    def written_places(self) -> Places:
        """Where those lie that the graph writes to."""
        return Places(self._written)

    def written(self, before: Watch) -> set[str]:
        """Names of constants that are other tensors, or were written to, since `before`."""
        old = {name: i for i, name in enumerate(before.constants)}
        stale = set(before.contents.changed())
        found = {
            name
            for name, tensor in zip(self.constants, self.contents.tensors, strict=True)
            if name not in old or old[name] in stale or before.contents.tensors[old[name]] is not tensor
        }
        owners = [name.removesuffix(COUNTER) for name in found if name.rpartition(".")[2] == COUNTER]
        return found.union(f"{owner}{name}" for owner in owners for name in RUNNING)

    def _describe(self, modules: list[tuple[str, nn.Module]]) -> Any:
        first: dict[int, int] = {}  # ties: the same object under two names
        tensors = []
        for number, tensor in enumerate(self._tensors):
            shape = None if tensor is None or tensor.is_nested else tensor.shape
            kind = None if tensor is None else (type(tensor), shape, tensor.dtype, tensor.device)
            tensors.append((self._names[number], first.setdefault(id(tensor), number), kind))
        parts = []
        for path, module in modules:
            hidden = {name: id(module.__dict__[name]) for name in _kept(module) & module.__dict__.keys()}
            own_forward = id(module.__dict__.get("forward"))
            parts.append((path, id(module), type(module), own_forward, list(module._modules), hidden))
        return tensors, parts, self._training


def _parts(module: nn.Module) -> tuple[Any, ...]:
    """The class, the dictionaries and a forward of its own, None where it has the class's."""
    own = module.__dict__
    return type(module), own["_parameters"], own["_buffers"], own["_modules"], own.get("forward")


def _kept(module: nn.Module) -> set[str]:
    """Names of parameters and buffers."""
    return module._parameters.keys() | module._buffers.keys()


def _outside_leaves(root: nn.Module, leaves: frozenset[str]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that the graph was made through, by path; a module under two names counts once.

    Those with hooks are called as they are: whatever is done to them, each call sees it.
    """
    seen: set[int] = set()
    pending = [("", root)]
    while pending:
        path, module = pending.pop()
        if path in leaves or id(module) in seen or isinstance(module, torch.jit.ScriptModule):
            continue
        if module is not root and has_hooks(module):
            continue
        seen.add(id(module))
        yield path, module
        parts = [(name, m) for name, m in module._modules.items() if m is not None]  # some say of themselves: empty
        pending += [(f"{path}.{name}" if path else name, m) for name, m in reversed(parts)]


def _constants(
    gm: WatchedModule, root: nn.Module, inside: set[int], owners: list[dict[str, Any]], names: list[str]
) -> dict[str, torch.Tensor]:
    """What regions and remembered results were made from, by name; attributes that are no parameters join owners."""
    found: dict[str, torch.Tensor] = {}
    read = (part.constants.still if isinstance(part.constants, Kept) else part.constants for part in gm.keeping())
    for name in dict.fromkeys(name for names_of_part in read for name in names_of_part):
        try:
            owner, attribute, part = find(root, name)
            value = value_of(owner, attribute, part)
        except AttributeError:
            continue  # the structure changed, as where a parameter became None
        if attribute in computed_weights(owner):
            continue  # a weight that each call makes anew, of others
        if id(owner) not in inside and not isinstance(owner, torch.jit.ScriptModule):
            # it is called as it is, and yet the graph reads something of it
            for held in (owner._parameters, owner._buffers):
                if attribute in held:
                    owners.append(held)
                    names.append(attribute)
        if isinstance(value, torch.Tensor):
            found[name] = value
        if attribute in owner.__dict__:
            owners.append(owner.__dict__)
            names.append(attribute)
        if part:
            _join(owner, attribute, part, owners, names)
        if attribute in RUNNING and isinstance(counter := owner._buffers.get(COUNTER), torch.Tensor):
            found[f"{name.removesuffix(attribute)}{COUNTER}"] = counter
    return found


def _leading_to(root: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """The modules on the way to parameters of these names, each once."""
    found: dict[int, nn.Module] = {}
    for name in names:
        module = root
        for step in name.split(".")[:-1]:
            below = module._modules.get(step)
            if below is None or isinstance(below, torch.jit.ScriptModule):
                break
            module = found[id(below)] = below
    return [*found.values()]


def _join(owner: nn.Module, attribute: str, part: str, owners: list[dict[str, Any]], names: list[str]) -> None:
    """Let a tensor that a tensor is made of be one of owners' names, too: another object may take its place."""
    *between, last = part.split(".")
    holder = functools.reduce(getattr, between, getattr(owner, attribute))
    if last in holder.__dict__:
        owners.append(holder.__dict__)
        names.append(last)


_FROM = "computed from "  # before a name: of what the graph's constants may have been made of


def changes_graph(names: Iterable[str]) -> bool:
    """Whether one of these, which were written to, is no constant of a graph, but what a constant was computed from."""
    return any(name.startswith(_FROM) for name in names)


def _computed_from(
    gm: WatchedModule,
    modules: list[tuple[str, nn.Module]],
    constants: dict[str, torch.Tensor],
    owners: list[dict[str, Any]],
    names: list[str],
) -> dict[str, torch.Tensor]:
    """Tensors in attributes, which join owners: forward computes while it is traced, self.scale * 2 or int(self.n).

    Globals and the like are among them; that a name stands for another tensor is seen elsewhere (trace/named.py).

    Those that are constants themselves are left out where the graph has no others: what was computed of them.
    """
    graph = None if gm.is_released else gm._source[0].graph
    if graph is None:
        return {}
    has_computed = any(node.meta.get(CREATED) for node in graph.find_nodes(op="get_attr"))
    known = set() if has_computed else {id(tensor) for tensor in constants.values()}
    found: dict[str, torch.Tensor] = {}
    for path, module in modules:
        others = {*OF_MODULES, *computed_weights(module)}
        for name, value in module.__dict__.items():
            if name in others:
                continue
            tensors = [each for each in tensors_in(value) if id(each) not in known]
            found.update((f"{_FROM}{path}.{name} {i}", each) for i, each in enumerate(tensors))
            if tensors and isinstance(value, torch.Tensor):
                owners.append(module.__dict__)
                names.append(name)
    if (named := gm._source[0].named) is not None:
        found.update((f"{_FROM}{name}", each) for name, each in named.tensors() if id(each) not in known)
    return found


@functools.cache
def count_fused_steps() -> None:
    """From now on, let optimizers made with fused=True count as writers: their kernels leave version counters alone."""

    def count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if group.get("fused"):
                written = [p for p in group["params"] if p.grad is not None and not p.is_inference()]
                torch.autograd.graph.increment_version(written)

    register_optimizer_step_post_hook(count)


def has_global_hooks() -> bool:
    """Whether something is to be called with every module's forward."""
    hooks = ("_global_forward_hooks", "_global_forward_pre_hooks")
    return any(getattr(module_of_torch, name, None) for name in hooks)


def in_functional_call() -> bool:
    """Whether torch.func.functional_call is on the stack: the parameters are those of one call."""
    code = getattr(stateless._functional_call, "__code__", None)
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
