"""Which function, method, module or overload is which operation: a row for each operator, beside its builder.

A builder has the signature of the torch function it stands for (so positional, keyword and default arguments bind as in
eager) and returns what the node becomes: `Call(op, args, kwargs)`, `Alias(node)` where the operation returns its input,
or `None` where the vocabulary has no exact equal: the node then stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import fx, nn

from fx_passes.graph.graph import AUGMENTED
from fx_passes.graph.hooks import computed_weights, has_hooks
from fx_passes.graph.quantized_tensors import is_understood


class Call(NamedTuple):
    """A call of a vocabulary op; an argument may itself be a Call, which becomes a node in front."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - read only


class Alias(NamedTuple):
    """The value of another node, unchanged."""

    value: Any


Built = Call | Alias | None
Builder = Callable[..., Built]
Parameter = Callable[[str], Any]  # attribute name -> get_attr node (None where the module has none)
ModuleBuilder = Callable[[Any, Parameter, tuple[Any, ...]], Built]  # module, its parameters, arguments of the call
B = TypeVar("B", bound=Builder)

NAMED: dict[str, Builder] = {}  # by the name that torch, F, Tensor and aten share
FUNCTIONS: dict[Any, Builder] = {}
METHODS: dict[str, Builder] = {}
OVERLOADS: dict[Any, Builder] = {}  # of aten operators, where they are not NAMED
FIRST_RESULT: dict[Any, Builder] = {}  # operators with several results, of which the first is the value
MODULES: dict[type[nn.Module], ModuleBuilder] = {}  # of exactly this type
# In-place spellings become the function of the same meaning, once normalize has shown that nobody can tell.
INPLACE: dict[Any, Any] = dict(AUGMENTED)
QUALIFIED: dict[str, Builder] = {}  # by qualified name: libraries that are not installed or not imported cost nothing
# Names of functions, methods and aten operators that refuse operands which the vocabulary's operation takes.
STRICT: set[str] = {"expand_as"}


def row(
    builder: B,
    *names: str,
    functions: Iterable[Any] = (),
    methods: Iterable[str] = (),
    overloads: Iterable[Any] = (),
    first_result: Iterable[Any] = (),
    modules: Mapping[type[nn.Module], Sequence[str] | ModuleBuilder] | None = None,
    qualified: Iterable[str] = (),
    strict: Iterable[str] = (),
) -> B:
    """Enter every spelling whose arguments builder takes, and return builder.

    names         torch.<name>, F.<name>, Tensor.<name>, aten.<name> in any overload, and <name>_, wherever these exist;
                  what another row names by itself is that row's
    functions     functions besides those
    methods       methods of Tensor besides those
    overloads     aten overloads besides those
    first_result  operators whose first result it is
    modules       type -> the attributes that follow the arguments of its call (parameters and buffers as nodes), or a
                  function that builds it
    qualified     qualified names of other libraries' functions
    strict        names, as above, of those that refuse operands which the vocabulary's operation takes
    """
    STRICT.update(strict)
    for name in names:
        NAMED[name] = builder
        for namespace in (torch, F):
            if hasattr(namespace, name):
                function = getattr(namespace, name)
                FUNCTIONS.setdefault(function, builder)
                if hasattr(namespace, name + "_"):
                    INPLACE[getattr(namespace, name + "_")] = function
        if hasattr(torch.Tensor, name):
            METHODS.setdefault(name, builder)
    FUNCTIONS.update(dict.fromkeys(functions, builder))
    METHODS.update(dict.fromkeys(methods, builder))
    OVERLOADS.update(dict.fromkeys(overloads, builder))
    FIRST_RESULT.update(dict.fromkeys(first_result, builder))
    QUALIFIED.update(dict.fromkeys(qualified, builder))
    for kind, built in (modules or {}).items():
        MODULES[kind] = built if callable(built) else _of_attributes(builder, built)
    return builder


def spelled(*names: str, **spellings: Any) -> Callable[[B], B]:
    """A decorator: row() of the builder."""
    return lambda builder: row(builder, *names, **spellings)


def _of_attributes(builder: Builder, names: Sequence[str]) -> ModuleBuilder:
    def build(module: Any, parameter: Parameter, args: tuple[Any, ...]) -> Built:
        held = module._parameters.keys() | module._buffers.keys()
        return builder(*args, *(parameter(name) if name in held else getattr(module, name) for name in names))

    return build


def overload_builder(target: Any) -> Builder | None:
    """The builder of an aten overload, in-place ones included; None if there is none."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    return OVERLOADS.get(target) or NAMED.get(target._opname.rstrip("_"))


def refusal(module: nn.Module) -> str | None:
    """Return why a module of a known type must be called as it is, or None."""
    if has_hooks(module):
        return "it has hooks"
    if "forward" in module.__dict__:
        return "its forward was replaced"
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) is not nn.Parameter and not is_understood(parameter):
            return f"{name} is a {type(parameter).__name__}"
    is_computed = isinstance(getattr(module, "weight", None), torch.Tensor) and "weight" not in module._parameters
    if is_computed or computed_weights(module):
        return "its weight is computed on each call"
    return None


def materialize(
    graph: fx.Graph, argument: Any, place: fx.Node, source: str, made: dict[int, fx.Node] | None = None
) -> Any:
    """argument, of which Calls, also in tuples, became nodes in front of place; made has those by id of the Call."""
    made = {} if made is None else made
    if type(argument) is tuple:
        return tuple(materialize(graph, entry, place, source, made) for entry in argument)
    if not isinstance(argument, Call):
        return argument
    if id(argument) not in made:
        args = materialize(graph, argument.args, place, source, made)
        with graph.inserting_before(place):
            made[id(argument)] = graph.create_node("call_function", argument.op, args, argument.kwargs)
        made[id(argument)].meta["source"] = source
    return made[id(argument)]


def static(*values: Any) -> bool:
    """Whether attributes are known now: no node among or inside them."""
    found: list[fx.Node] = []
    fx.node.map_arg(values, found.append)
    return not found


def spread(value: Any, n: int) -> tuple[int, ...]:
    """One entry per spatial dimension, from one number or a sequence of 1 or n."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


def is_number(value: Any) -> bool:
    """A plain Python number (bool is not one)."""
    return isinstance(value, int | float) and not isinstance(value, bool)
