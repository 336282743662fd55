"""What TorchDynamo runs as it is: it compiles each Python function that is called, and cannot follow ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zendnn_cffi.locks import making

# The hook by which it compiles. It is private, so it may be absent.
_dynamo: Any = torch._C._dynamo.eval_frame
set_dynamo_hook: Callable[[Any], Any] = getattr(_dynamo, "set_eval_frame", lambda hook: None)


def keep_uncompiled(function: Any, why: str) -> None:
    """Let TorchDynamo break its graph at function, and not compile it by itself.

    function  calls set_dynamo_hook(None), and gives the hook back: what it calls is not compiled either
    """
    code = function.__code__
    if hasattr(_dynamo, "set_code_exec_strategy"):
        action = _dynamo._FrameAction
        _dynamo.set_code_exec_strategy(code, _dynamo._FrameExecStrategy(action.SKIP, action.DEFAULT))
    elif hasattr(_dynamo, "skip_code"):
        _dynamo.skip_code(code)
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = why


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Let functions that torch.compile made, those of PyTorch's own among them, run as they are written.

    TorchDynamo never again compiles a function that it met under a dispatch mode, as torch.cond's. It compiles what
    that one calls instead, and may raise there. Its stance is one for all threads, so one thread at a time is in here.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with making():
        hook = set_dynamo_hook(None)  # it sets no stance while it compiles
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            set_dynamo_hook(hook)
