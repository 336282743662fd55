"""A model that symbolic tracing is not enough for, and that came without example inputs, is traced by its first call.

    optimize(model)       the graph is one call of the model, or has submodules that stay whole
    fast(input_ids=ids)   these arguments are the example: torch.export makes the graph, and this call runs it

Calls that no example can be made of run as before, and the next one is asked.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fx_passes.memoize.watched import changes_functions
from fx_passes.trace.compared import copy_of_example
from fx_passes.trace.traced import Traced
from zendnn_cffi.errors import is_of_signal_handler

log = logging.getLogger("zendnn_cffi.passes")

TRIES = 3  # calls that are tried as the example: of wrong arguments there is no graph, and the call raises
_NUMBERS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def no_example(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return why a call's arguments are no example; "" where they are one.

    What a forward may write to is copied before it is traced, so nothing else than tensors, numbers and containers of
    these is taken: not a cache of keys and values.
    """
    for leaf in pytree.tree_leaves((args, kwargs)):
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            if not isinstance(leaf, _NUMBERS):
                return f"an argument is a {type(leaf).__name__}"
        elif leaf.requires_grad:
            return "a tensor among the arguments asks for a gradient"
        elif leaf.device.type != "cpu":
            return f"a tensor among the arguments is on {leaf.device}"
        elif not _is_dense(leaf):
            return "a tensor among the arguments is sparse, nested or quantized"
    return ""


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)


def means_what_it_says(dtype: torch.dtype) -> bool:
    """Whether PyTorch computes now as without modes around the call; dtype: the default when the model came."""
    is_plain = not (torch._C._len_torch_function_stack() and changes_functions())
    return is_plain and not torch.is_autocast_enabled("cpu") and torch.get_default_dtype() is dtype


def traced_by(traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced | None:
    """Trace the same tree by a call; None where its arguments are no example of one."""
    from fx_passes.trace.trace import trace_by_call  # a loaded module does without

    try:
        return trace_by_call(traced, *copy_of_example((args, kwargs)))
    except Exception as error:  # ExampleRefused, mostly
        if is_of_signal_handler(error):
            raise
        log.info("%s was not traced by a call: %s: %s", type(traced.root).__name__, type(error).__name__, error)
        return None
