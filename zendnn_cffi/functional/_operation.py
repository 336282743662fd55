"""What surrounds every public function: nobody may look at PyTorch's operations in between, and defaults do not matter.

@operation
def eltwise(src, kind, ...): ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from zendnn_cffi.primitives import allocation, ambient

_P = ParamSpec("_P")
_R = TypeVar("_R")
# By this hook TorchDynamo compiles each Python function that is called. It is private, so it may be absent.
_dynamo: Any = torch._C._dynamo.eval_frame
_set_dynamo_hook: Callable[[Any], Any] = getattr(_dynamo, "set_eval_frame", lambda hook: None)


def operation(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the function as it is called in public.

    It refuses to run where addresses mean nothing: TypeError names the mode or transform. Modes that change what
    PyTorch's functions return do not reach it, and TorchDynamo does not compile it. Too little memory for a copy of an
    operand is a MemoryError.
    """
    name = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        hook = _set_dynamo_hook(None)
        try:
            if ambient.is_watched():
                raise TypeError(
                    f"{name} computes on addresses, which {ambient.watcher()} has none of and would not see: "
                    f"call it outside, or use PyTorch's own operation there"
                )
            with torch._C.DisableTorchFunction(), allocation.naming_bytes(name):
                return function(*args, **kwargs)
        finally:
            _set_dynamo_hook(hook)

    attributes: Any = call
    _skip(attributes.__code__)
    attributes._torchdynamo_disable = True
    attributes._torchdynamo_disable_msg = f"{name} calls ZenDNN"
    return cast(Callable[_P, _R], call)


def _skip(code: Any) -> None:
    """Let TorchDynamo run this function as it is. Without it, it says that it cannot compile the hook's change."""
    if hasattr(_dynamo, "set_code_exec_strategy"):
        action = _dynamo._FrameAction
        _dynamo.set_code_exec_strategy(code, _dynamo._FrameExecStrategy(action.SKIP, action.DEFAULT))
    elif hasattr(_dynamo, "skip_code"):
        _dynamo.skip_code(code)
