"""A call of an operator, written out as the forward of a module: as a user would write it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_LITERALS = (type(None), bool, int, str, type(Ellipsis))


def module_of(
    call: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: dict[str, Any], hold: bool = False
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a module whose forward is call(*args, **kwargs), and the tensors to call it with.

    call  a function, or the name of a method of the first argument
    hold  whether the first tensor alone is an argument of forward; the module then holds the others, as
          parameters where they are floating-point, else as buffers
    """
    args, kwargs = copied((args, kwargs))  # samples share tensors, and cases write to them
    writer = _Writer(hold)
    if isinstance(call, str):
        first, *rest = args
        called = f"{writer.expression(first)}.{call}"
    else:
        writer.names["call"], rest, called = call, list(args), "call"
    written = [writer.expression(a) for a in rest]
    written += [f"{name}={writer.expression(value)}" for name, value in kwargs.items()]
    inputs = writer.tensors[:1] if hold else writer.tensors
    parameters = ", ".join(["self", *(f"t{i}" for i in range(len(inputs)))])
    code = f"def forward({parameters}):\n    return {called}({', '.join(written)})\n"
    exec(compile(code, "<a sample of PyTorch's operator database>", "exec"), writer.names)
    module = type("Operator", (nn.Module,), {"forward": writer.names["forward"], "code": code})()
    for i, tensor in enumerate(writer.tensors[1:] if hold else (), 1):
        if tensor.is_floating_point():
            setattr(module, f"t{i}", nn.Parameter(tensor, requires_grad=False))
        else:
            module.register_buffer(f"t{i}", tensor)
    return module.eval(), tuple(inputs)


def copied(tree: Any) -> Any:
    """A deep copy in which tensors have the strides, and share the memory, that they do in the original."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return copy.deepcopy(tree, {id(t): t.clone() for t in tensors if t.layout is not torch.strided})


class _Writer:
    """Python expressions for arguments: tensors become names, what has no literal is a global of the module's code."""

    def __init__(self, hold: bool) -> None:
        self.hold = hold
        self.tensors: list[Tensor] = []
        self.names: dict[str, Any] = {"torch": torch}

    def expression(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) in _LITERALS:
            return repr(value)
        if type(value) is tuple:
            return f"({''.join(f'{self.expression(v)}, ' for v in value)})"
        if type(value) is list:
            return f"[{', '.join(map(self.expression, value))}]"
        if type(value) is dict:
            return f"{{{', '.join(f'{k!r}: {self.expression(v)}' for k, v in value.items())}}}"
        if type(value) is slice:
            return f"slice({', '.join(self.expression(v) for v in (value.start, value.stop, value.step))})"
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def _tensor(self, value: Tensor) -> str:
        known = [id(tensor) for tensor in self.tensors]
        i = known.index(id(value)) if id(value) in known else len(known)
        if i == len(known):
            self.tensors.append(value)
        return f"self.t{i}" if self.hold and i else f"t{i}"
