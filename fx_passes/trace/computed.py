"""What a forward computes from parameters and buffers while torch.fx traces it, and a graph would keep for good.

    return x + sum(p.sum() for p in self.parameters())        one number, of the values while it was traced
    return x + self.state_dict()["layer.weight"].sum()
    return x * self.scale.sum()                               none: torch.fx has nodes for it
    return x.to(next(self.parameters()).dtype)                none: writes leave it as it is

torch.fx stands for what a forward reads by its name. Other ways, such as parameters(), hand out the tensors themselves.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fx_passes.trace.proxies import asking_frame

# Those that return no tensor, and yet what is in one.
_NUMBERS = ("__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "allclose",
            "equal", "is_nonzero", "item", "numpy", "tolist")  # fmt: skip


# Methods of modules that hand tensors out.
_HANDING = ("_named_members", "state_dict")


@contextmanager
def computing_noted(root: nn.Module, is_handed: bool = False) -> Iterator[list[str]]:
    """Yield a list that gets the name of each function of PyTorch's that computes from tensors of root alone.

    is_handed  whether a forward has them without being handed any, from the dictionaries in which modules keep them

    Calls are heard once code outside of PyTorch was handed tensors, not before. A mode of PyTorch's hears them, and
    within one some functions ask traced values for their class.
    """
    found: list[str] = []
    own, thread = {name: getattr(nn.Module, name) for name in _HANDING}, threading.get_ident()
    with ExitStack() as stack:
        is_heard = False

        def hear() -> None:
            nonlocal is_heard
            if is_heard:
                return
            is_heard = True
            if torch._C._len_torch_function_stack():  # which is left in another order
                found.append("a mode of PyTorch's, and then parameters")
            else:
                stack.enter_context(_Noting([*root.parameters(), *root.buffers()], found))

        def handing(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def hand_out(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() == thread and _is_asked_by_user(sys._getframe(1)):
                    hear()
                return function(*args, **kwargs)

            return hand_out

        if is_handed:
            hear()
        for name, function in own.items():
            setattr(nn.Module, name, handing(function))
        try:
            yield found
        finally:
            for name, function in own.items():
                setattr(nn.Module, name, function)


def _is_asked_by_user(frame: types.FrameType | None) -> bool:
    """Whether the user's code asks, perhaps by way of PyTorch's: torch.fx asks for itself, to name what it finds."""
    while frame is not None and (room := frame.f_globals.get("__name__", "")).startswith("torch."):
        if room.startswith("torch.fx"):
            return False
        frame = frame.f_back
    return asking_frame(frame) is not None


class _Noting(TorchFunctionMode):
    def __init__(self, held: list[torch.Tensor], found: list[str]) -> None:
        super().__init__()
        self._held = {id(tensor) for tensor in held}
        self._found = found

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(id(leaf) in self._held for leaf in pytree.tree_leaves((args, kwargs))):
            name = getattr(func, "__name__", "")
            results = map(type, pytree.tree_leaves(result))  # traced values would note that they are asked for a class
            if name in _NUMBERS or any(issubclass(kind, torch.Tensor) for kind in results):
                self._found.append(name)
        return result
