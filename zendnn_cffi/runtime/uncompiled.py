"""What TorchDynamo runs as it is: it compiles each Python function that is called, and cannot follow ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
