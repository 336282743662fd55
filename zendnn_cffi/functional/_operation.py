"""What surrounds every public function: nobody may look at PyTorch's operations in between, and defaults do not matter.

@operation
def eltwise(src, kind, ...): ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

from zendnn_cffi.primitives import allocation, ambient
from zendnn_cffi.runtime.uncompiled import keep_uncompiled, set_dynamo_hook

_P = ParamSpec("_P")
_R = TypeVar("_R")


def operation(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function as it is called in public.

    It refuses to run where addresses mean nothing: TypeError names the mode or transform. Modes that change what
    PyTorch's functions return do not reach it, and TorchDynamo does not compile it. Too little memory for a copy of an
    operand is a MemoryError.
    """
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        hook = set_dynamo_hook(None)
        try:
            if ambient.is_watched():
                raise TypeError(
                    f"{name} computes on addresses, which {ambient.watcher()} has none of and would not see: "
                    f"call it outside, or use PyTorch's own operation there"
                )
            with torch._C.DisableTorchFunction(), allocation.naming_bytes(name):
                return function(*args, **kwargs)
        finally:
            set_dynamo_hook(hook)

    keep_uncompiled(call, f"{name} calls ZenDNN")
    return cast(Callable[_P, _R], call)
