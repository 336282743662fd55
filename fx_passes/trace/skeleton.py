"""Copies of a module tree whose parameters lie in the memory of the tree they were made from."""

from __future__ import annotations

import collections
import contextlib
import copy
import copyreg
from collections.abc import Container, Iterable, Iterator
from typing import Any, TypeVar

import numpy
import torch
from torch import fx, nn

from fx_passes.graph.hooks import hook_owners
from fx_passes.trace.arrays import arrays_in, moved, shared, together
from fx_passes.trace.quiet import structures_copied
from fx_passes.trace.scripted import share_scripted
from fx_passes.trace.theirs import fields_of

Copied = TypeVar("Copied", bound=torch.Tensor)
_MOST_BYTES = 2 << 30
_MAX_DEPTH = 4  # of containers in attributes that are searched for tensors


class TraceError(RuntimeError):
    """The model cannot become a graph; the message says where and why."""


def skeleton(model: nn.Module, *, own_state: bool = False, own_parameters: bool = False) -> nn.Module:
    """Return a deep copy of the module tree whose parameters and buffers are new objects on the model's storage.

    own_state       buffers, and tensors in other attributes, get storage of their own: a forward may write to them
    own_parameters  so do parameters, where these are at most 2 GiB: user's code may write to them, too
    Numpy arrays that lie in memory of tensors lie in that of their copies; so do tensors in each other's.
    Ties (a module or parameter reachable by two names) stay ties. What Python cannot copy (a lock, a file) is shared,
    and so is what hooks belong to.
    """
    memo: dict[int, Any] = {}
    own_parameters = own_parameters and sum(each.nbytes for each in model.parameters()) <= _MOST_BYTES
    for group in _beside_arrays(model):
        memo |= moved(group) if own_state else {id(v): v.view() for v in group if isinstance(v, numpy.ndarray)}
    for group in together(tensors_of(model)) if own_state else ():
        if own_parameters or not any(isinstance(value, nn.Parameter) for value in group):
            memo = moved(group) | memo
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, torch.nn.parameter.UninitializedTensorMixin):
                raise TraceError(
                    f"parameter {name!r} of {type(module).__name__} has no shape yet (a lazy module): call the model"
                    " once on an input first, then optimize it"
                )
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = _owned(parameter) if own_parameters else _alias(parameter)
        for value in tensors_in([*module._buffers.values(), *module.__dict__.values()]):
            if id(value) not in memo:
                memo[id(value)] = _own(value) if own_state else _view(value)
    memo.update((id(owner), owner) for owner in hook_owners(model))
    found = dict(memo)
    with structures_copied():
        try:
            copied = _deep_copy(model, found)
        except Exception:  # whatever a class raises that does not want to be copied
            for module in model.modules():
                memo.update((id(value), value) for value in module.__dict__.values() if not _can_be_copied(value, memo))
            copied = copy.deepcopy(model, memo)
            found = memo
    _take_attributes(copied, model, found)
    _take_modes(copied, model)
    share_scripted(copied, model, own_state=own_state, own_parameters=own_parameters)
    return copied


def _take_attributes(copied: nn.Module, model: nn.Module, memo: dict[int, Any]) -> None:
    """Let copies of graphs keep values that were set on them, which a model's own code may read: torch.fx drops most.

    Methods, such as PT2E's of how a graph is no longer trained, are the original's.
    """
    copies = dict(copied.named_modules()) if any(isinstance(each, fx.GraphModule) for each in model.modules()) else {}
    for path, own in copies.items():
        module = model.get_submodule(path)
        for name, value in vars(module).items() if isinstance(module, fx.GraphModule) else ():
            if not name.startswith("_") and name not in vars(own) and not callable(value):
                own.__dict__[name] = copy.deepcopy(value, memo)


def _take_modes(copied: nn.Module, model: nn.Module) -> None:
    """Let a copy train, or not, as the model: a copy of what torchvision's create_feature_extractor() made trains."""
    copies = dict(copied.named_modules())
    for path, module in model.named_modules():
        own = copies.get(path)
        if own is None or isinstance(own, torch.jit.ScriptModule):  # where it was frozen it has no mode
            continue
        if own.training != module.training:
            own.train(module.training)  # which may exchange the graph, and sets its children's modes before their turn


def _deep_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """As copy.deepcopy, which takes four times as long: of the twenty attributes of a module most are empty or shared.

    Submodules are copied before what holds them. Those that say themselves how they are copied do so.
    """
    for module in reversed(list(model.modules())):
        if id(module) in memo or not _is_copied_plainly(type(module)):
            continue
        copied = memo[id(module)] = module.__new__(type(module))
        for name, value in (module.__getstate__() if hasattr(module, "__getstate__") else module.__dict__).items():
            copied.__dict__[name] = _copied(value, memo)
    return copy.deepcopy(model, memo)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """As copy.deepcopy; sooner where nothing in value has to be copied that was not."""
    cls = type(value)
    if cls in _ATOMS or (cls is tuple and all(type(item) in _ATOMS for item in value)):
        return value
    if cls in _CONTAINERS and id(value) not in memo:
        if not value:
            return memo.setdefault(id(value), cls())
        if cls is dict and all(type(name) is str and id(item) in memo for name, item in value.items()):
            return memo.setdefault(id(value), {name: memo[id(item)] for name, item in value.items()})
    return copy.deepcopy(value, memo)


OF_MODULES = ("_parameters", "_buffers", "_modules")
_ATOMS = frozenset((bool, int, float, complex, str, bytes, type(None)))  # what nobody can change
_CONTAINERS = frozenset((dict, list, set, collections.OrderedDict))
_FILL_GAPS = (nn.modules.conv._ConvNd,)  # in __setstate__, where an attribute of now is missing in an old pickle
_METHODS = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__new__", "__getnewargs__")


def _is_copied_plainly(cls: type) -> bool:
    """Whether copy.deepcopy of an instance copies its attributes, and nothing else happens."""
    if cls in copyreg.dispatch_table:
        return False
    for base in cls.__mro__:
        if base in (nn.Module, object):
            return True
        if base in _FILL_GAPS:
            continue
        if "__slots__" in vars(base) or any(name in vars(base) for name in (*_METHODS, "__getnewargs_ex__")):
            return False
    return False


def own_tensor(owner: nn.Module, name: str) -> None:
    """Give a parameter, buffer or other attribute of owner storage of its own, with the same contents.

    Another attribute may be a list, tuple, dictionary or object with tensors; what cannot be copied stays shared.
    """
    value = getattr(owner, name)
    if isinstance(value, nn.Parameter):
        owner._parameters[name] = _owned(value)
    elif name in owner._buffers:
        owner._buffers[name] = _own(value)
    elif isinstance(value, torch.Tensor):
        owner.__dict__[name] = _own(value)
    else:
        with contextlib.suppress(Exception):  # whatever an object raises that does not want to be copied
            owner.__dict__[name] = copy.deepcopy(value, {id(each): _own(each) for each in tensors_in(value)})


def own_state(owner: nn.Module, but: Container[int] = ()) -> None:
    """Give owner's buffers and tensors in other attributes storage of their own, those with these ids left out."""
    for name, value in [*owner._buffers.items(), *owner.__dict__.items()]:
        if name not in OF_MODULES and any(id(each) not in but for each in tensors_in(value)):
            own_tensor(owner, name)


def own_written(root: nn.Module, written: Iterable[tuple[str, str]], but: Container[int]) -> list[torch.Tensor]:
    """Give these tensors of a tree, by path of a module and name, new memory; return the new ones. Ties stay ties.

    but  ids of tensors that stay where they are
    """
    values = (held_by(root.get_submodule(path))[name] for path, name in written)
    former = [each for value in values for each in tensors_in(value) if id(each) not in but]
    return _put(root, {id(each): _owned(each) if isinstance(each, nn.Parameter) else _own(each) for each in former})


def written_since(copied: nn.Module, model: nn.Module) -> list[tuple[str, str]]:
    """The tensors of a model, by path of a module and name there, that have other contents in a copy of it."""
    found = []
    for path, module in model.named_modules():
        other = copied.get_submodule(path)
        for name, value in held_by(module).items():
            mine, theirs = list(tensors_in(value)), list(tensors_in(held_by(other).get(name)))
            if len(mine) == len(theirs) and any(map(have_other_bytes, mine, theirs)):
                found.append((path, name))
    return found


class Held:
    """Tensors in attributes of a model, found by where those of its copy lie: a graph of the copy reads the model's."""

    def __init__(self, copied: nn.Module, model: nn.Module) -> None:
        self._found: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        copies = dict(copied.named_modules())
        for path, module in model.named_modules():
            theirs_by_name = copies[path].__dict__ if path in copies else {}
            for name, value in module.__dict__.items():
                if name in OF_MODULES:
                    continue
                mine, theirs = list(tensors_in(value)), list(tensors_in(theirs_by_name.get(name)))
                if len(mine) == len(theirs):
                    self._found.update((_place(their), (my, their)) for my, their in zip(mine, theirs, strict=True))
        self._found.pop((), None)

    def original(self, value: Any) -> Any:
        """What the model has in place of value, if that is one of the copy's, or a view of it; else value itself."""
        if not isinstance(value, torch.Tensor) or (found := self._found.get(_place(value))) is None:
            return value
        mine, theirs = found
        layout = (value.shape, value.stride(), value.storage_offset())
        if layout == (theirs.shape, theirs.stride(), theirs.storage_offset()):
            return mine
        offset = value.storage_offset() - theirs.storage_offset() + mine.storage_offset()
        return mine.detach().as_strided(value.shape, value.stride(), offset)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The memory that a tensor lies in, and its dtype; () where that does not tell it from others."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return ()
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def held_by(module: nn.Module) -> dict[str, Any]:
    """Parameters, buffers and other attributes."""
    others = {name: value for name, value in module.__dict__.items() if name not in OF_MODULES}
    return {**others, **module._buffers, **module._parameters}


def have_other_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have other bytes."""
    if one is other or one.shape != other.shape or one.dtype != other.dtype or one.layout is not torch.strided:
        return False
    if one.is_meta or other.is_meta or one.is_quantized or not one.numel():
        return False
    bits = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return not torch.equal(*bits)


def own_arrays(root: nn.Module) -> list[torch.Tensor]:
    """Give numpy arrays of a tree, and tensors in whose memory they lie, new memory; return the new tensors."""
    return _move(root, _beside_arrays(root))


def own_together(root: nn.Module, wanted: Container[int], but: Container[int]) -> list[torch.Tensor]:
    """Give these tensors of a tree, and others that lie in their memory, new memory; return the new tensors.

    wanted  ids of the former; those that lie by themselves stay
    but     ids of tensors that stay where they are, with all that lie there
    """
    groups = together(tensors_of(root))
    chosen = [group for group in groups if any(id(value) in wanted for value in group)]
    return _move(root, [group for group in chosen if not any(id(value) in but for value in group)])


def _move(root: nn.Module, groups: Iterable[list[Any]]) -> list[torch.Tensor]:
    """Put what moved() makes of each group in its place."""
    memo: dict[int, Any] = {}
    for group in groups:
        memo |= moved(group)
    return _put(root, memo)


def _put(root: nn.Module, memo: dict[int, Any]) -> list[torch.Tensor]:
    """Put what a memo has for tensors and arrays of a tree in their place; return its tensors."""
    found = [value for value in memo.values() if isinstance(value, torch.Tensor)]
    for module in root.modules() if memo else ():
        for held in (module._parameters, module._buffers):
            for name, value in list(held.items()):
                if id(value) in memo:
                    held[name] = memo[id(value)]
        for name, value in module.__dict__.items():
            if name not in OF_MODULES and any(id(each) in memo for each in (*tensors_in(value), *arrays_in(value))):
                others = {id(each): each for each in tensors_in(value)}
                with contextlib.suppress(Exception):  # whatever an object raises that does not want to be copied
                    module.__dict__[name] = copy.deepcopy(value, others | memo)
    return found


def _beside_arrays(root: nn.Module) -> list[list[Any]]:
    """Tensors and arrays of a tree that lie in one piece of memory."""
    attributes = [value for module in root.modules() for value in module.__dict__.values()]
    arrays = [array for value in attributes for array in arrays_in(value)]
    return shared(tensors_of(root), arrays) if arrays else []


def tensors_of(root: nn.Module) -> list[torch.Tensor]:
    """Parameters, buffers and tensors in other attributes of a tree."""
    values = [value for module in root.modules() for value in held_by(module).values()]
    return [tensor for value in values for tensor in tensors_in(value)]


def tensors_in(value: Any, depth: int = 0, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Tensors in value, and in lists, tuples, dictionaries and plain objects in it.

    Only leaves of autograd's graph can be copied.

    seen  ids of objects that were looked into
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _MAX_DEPTH and type(value) not in _ATOMS:
        seen = set() if seen is None else seen
        items: Iterable[Any] = ()
        if isinstance(value, dict):
            items = value.values()
        elif isinstance(value, list | tuple):
            items = value
        elif id(value) not in seen:
            seen.add(id(value))
            items = fields_of(value).values()
        for item in items:
            if not _is_nothing(item):
                yield from tensors_in(item, depth + 1, seen)


def _is_nothing(value: Any) -> bool:
    """Whether there is surely no tensor in it: so it is with most of the twenty attributes of a module."""
    cls = type(value)
    return cls in _ATOMS or (cls in _CONTAINERS and not value)


def _can_be_copied(value: Any, memo: dict[int, Any]) -> bool:
    if isinstance(value, nn.Module) or (
        isinstance(value, dict) and any(isinstance(m, nn.Module) for m in value.values())
    ):
        return True  # each module is looked at by itself
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """A new Parameter on the same storage; a subclass (quantized, distributed, ...) is shared as it is."""
    if type(parameter) is not nn.Parameter:
        return parameter
    return _named_alike(nn.Parameter(parameter.detach(), _may_ask_for_gradients(parameter)), parameter)


def _owned(parameter: nn.Parameter) -> nn.Parameter:
    """The same with storage of its own; a subclass as it is."""
    if type(parameter) is not nn.Parameter:
        return parameter
    return _named_alike(nn.Parameter(parameter.detach().clone(), _may_ask_for_gradients(parameter)), parameter)


def _may_ask_for_gradients(parameter: nn.Parameter) -> bool:
    """One that was made under inference_mode() says that it does, and no other may be made of it that does."""
    return parameter.requires_grad and not parameter.is_inference()


def _view(tensor: torch.Tensor) -> torch.Tensor:
    return _named_alike(tensor.detach(), tensor) if type(tensor) is torch.Tensor else tensor


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The same contents in new memory; what is no plain tensor is shared as it is."""
    return _named_alike(tensor.detach().clone(), tensor) if type(tensor) is torch.Tensor else tensor


def _named_alike(copied: Copied, tensor: torch.Tensor) -> Copied:
    """The copy with the attributes that users gave the tensor."""
    if tensor.__dict__:
        copied.__dict__.update(tensor.__dict__)
    return copied
