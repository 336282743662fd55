"""SkeletonModule: a GraphModule that owns a skeleton, and shares parameters, submodules and attributes with it.

What users put, replace or remove on the one is on the other: names lead to the model's own layers and attributes, and
the skeleton's forward computes with what the module has.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import fx, nn

from fx_passes.graph.graph import NamedParts
from fx_passes.graph.hooks import HOOK_ATTRIBUTES

# What reading tells nothing about a module's parts.
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)


# What fx.GraphModule itself keeps on an instance.
_OF_FX = frozenset(fx.GraphModule(nn.Module(), fx.Graph()).__dict__.keys() - nn.Module().__dict__.keys())


class SkeletonModule(NamedParts):
    """An fx.GraphModule without a graph yet, over a skeleton.

    root  the skeleton, which is this module's own

    While nobody has asked for a part of it (is_open is False), nobody can have replaced one.
    State of this class and its subclasses is declared in the class body: a model may have parts and attributes of these
    names, and of methods. They stay the skeleton's, and part() finds them.
    """

    _tree: nn.Module  # as root, for this module's own use
    _is_open: bool
    _follows_tree: bool  # nobody has this module itself: its parts are replaced in the tree alone
    _own: dict[str, nn.Module] | None  # parts that the skeleton has not, once all are there
    _state: ClassVar[frozenset[str]] = _OF_FX

    def __init_subclass__(cls) -> None:
        cls._state = cls._state.union(cls.__dict__.get("__annotations__", ()))

    def __init__(self, root: nn.Module) -> None:
        super().__init__(nn.Module(), fx.Graph(), class_name=type(root).__name__)
        # The very same dicts: what .to() or load_state_dict changes here, it changes in the skeleton. Hooks are called
        # with this module in place of the model; of the skeleton only forward is called, which runs none.
        for name in root.__dict__:
            if name in ("_parameters", "_buffers", "_non_persistent_buffers_set") or name.endswith(HOOK_ATTRIBUTES):
                object.__setattr__(self, name, root.__dict__[name])
        self.__dict__["_modules"].update(root._modules)
        object.__setattr__(self, "_tree", root)
        self._is_open = True  # until it is handed out
        self._follows_tree = False
        self._own = None

    @property
    def root(self) -> nn.Module:
        """The module tree that was traced: its forward is the model's own."""
        self.__dict__["_is_open"] = True
        return self._tree

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
        root = held.get("_tree")
        if root is None:
            return super().__getattr__(name)
        if name in root.__dict__:
            value = root.__dict__[name]
            if not isinstance(value, _SCALARS):
                held["_is_open"] = True
            return value
        if name in root._modules or name in root._parameters or name in root._buffers:
            held["_is_open"] = True
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or not hasattr(type(root), name):
                raise
        return self._of_class(name)

    def _of_class(self, name: str) -> Any:
        """What the model's class has, such as a property. Methods would run the model's own forward, or none at all."""
        if isinstance(inspect.getattr_static(type(self._tree), name), types.FunctionType):
            raise AttributeError(
                f"{name}() is a method of {type(self._tree).__name__}; an optimized module has forward alone."
                " zendnn_cffi.replace_forward(model) keeps the model with all its methods"
            )
        return getattr(self.root, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self)._state or isinstance(value, fx.Graph):  # nn.Module would look for parts of the name first
            object.__setattr__(self, name, value)
            return
        root = self.__dict__.get("_tree")
        if isinstance(value, torch.Tensor | nn.Module) or (root is not None and name in root.__dict__):
            self.__dict__["_is_open"] = True
        is_part = isinstance(value, nn.Parameter | nn.Module)
        if root is None or self._is_its_own(name) or not (is_part or self._is_of_the_skeleton(name, value)):
            super().__setattr__(name, value)
        elif is_part:
            root.__dict__.pop(name, None)
            super().__setattr__(name, value)
            if isinstance(value, nn.Module) and self._own is not None and name not in self._own:
                root._modules[name] = value  # a new one: _adopt() takes no names that the skeleton has not
        elif name in root.__dict__:
            root.__dict__[name] = value
        else:
            setattr(self.root, name, value)

    def _is_its_own(self, name: str) -> bool:
        """Whether a name stands for something of this module, whatever the model has under it."""
        return name in self.__dict__ or isinstance(getattr(type(self), name, None), property)

    def recompile(self) -> Any:
        """As fx.GraphModule's; the code finds parts of any name."""
        code = super().recompile()
        cls: Any = type(self)
        if "_tree" not in self.__dict__:
            return code
        if self.has_clashing_names():
            cls.forward = _by_parts(cls.forward)
        for name in {str(node.target) for node in self.graph.find_nodes(op="call_module")}:
            if name in self._held and name not in self._tree._modules:
                setattr(cls, name, _OwnPart(name))
        return code

    def part(self, name: str) -> Any:
        """What a graph means by a name: a parameter, buffer, submodule or attribute of the model, or a part of this."""
        for held in self._kept_by_name():
            if name in held:
                return held[name]
        attributes = self._tree.__dict__
        return attributes[name] if name in attributes else getattr(self, name)

    def has_clashing_names(self) -> bool:
        """Whether the graph names a part as this class names something of its own."""
        cls = type(self)
        named = (str(node.target) for node in self.graph.nodes if node.op in ("get_attr", "call_module"))
        firsts = {name.partition(".")[0] for name in named}
        return any(n in cls._state or (hasattr(cls, n) and type(getattr(cls, n)) is not _OwnPart) for n in firsts)

    def get_submodule(self, target: str) -> nn.Module:
        """As nn.Module's, for parts of any name."""
        first, _, rest = target.partition(".")
        module = self.__dict__["_modules"].get(first)
        if module is None:
            return super().get_submodule(target)
        self.__dict__["_is_open"] = self._is_open or first in self._tree._modules
        while rest:  # nn.Module's way takes three times as long, for names that only a submodule has
            name, _, further = rest.partition(".")
            held = module.__dict__
            child = None if name in held or hasattr(type(module), name) else held["_modules"].get(name)
            if child is None:
                return module.get_submodule(rest)
            module, rest = child, further
        return module

    def _is_of_the_skeleton(self, name: str, value: Any) -> bool:
        """Whether an attribute that this has not is one that forward reads: what was a buffer may become a tensor."""
        if name in self._tree.__dict__ or (hasattr(type(self._tree), name) and not hasattr(type(self), name)):
            return True
        is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
        return is_tensor and self._own is not None and not any(name in held for held in self._kept_by_name())

    def _kept_by_name(self) -> tuple[dict[str, Any], ...]:
        held = self.__dict__
        return held["_parameters"], held["_buffers"], held["_modules"]

    def __delattr__(self, name: str) -> None:
        """As nn.Module's; the model's own attributes are the skeleton's."""
        root = self.__dict__.get("_tree")
        self.__dict__["_is_open"] = True
        if root is not None and name not in self.__dict__ and name in root.__dict__:
            del root.__dict__[name]
        else:
            super().__delattr__(name)

    def _adopt(self) -> None:
        """Let the skeleton have what was put, or removed, here: submodules in their order, or another dictionary."""
        ours, tree = self._held, self._tree
        if self._follows_tree:
            for name in ("_parameters", "_buffers"):
                self.__dict__[name] = tree.__dict__[name]
            ours.clear()
            ours.update({**tree._modules, **(self._own or {})})
            return
        for name, module in (self._own or {}).items():
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


class _OwnPart(property):
    """A part that the skeleton has not: nn.Module's way to it takes ten times as long as a look into the dictionary."""

    def __init__(self, name: str) -> None:
        def read(module: SkeletonModule) -> Any:
            try:
                return module.__dict__["_modules"][name]
            except KeyError:
                raise AttributeError(name) from None

        super().__init__(read)


class _Parts:
    """What generated code has for self: names lead to parts alone."""

    def __init__(self, module: SkeletonModule) -> None:
        self._module = module

    def __getattribute__(self, name: str) -> Any:
        module: SkeletonModule = object.__getattribute__(self, "_module")
        return module.part(name)


def _by_parts(run_graph: Callable[..., Any]) -> Callable[..., Any]:
    """Generated code that is right for parts of any name."""

    def run(self: SkeletonModule, *args: Any, **kwargs: Any) -> Any:
        return run_graph(_Parts(self), *args, **kwargs)

    return run


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


SkeletonModule._state |= frozenset(SkeletonModule.__annotations__)
for _name in ("_modules", "_parameters", "_buffers"):
    setattr(SkeletonModule, _name, _opening(_name))
