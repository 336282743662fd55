"""An exported graph beside the model's own call, where its code catches exceptions or asks whether it is compiled.

torch.export raises where a forward asks for numbers. Code that catches this goes on by another way than it takes with
numbers, and nothing says so. Code that asks first takes that way at once.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from fx_passes.graph.graph import copy_graph
from fx_passes.graph.hooks import without_hooks
from fx_passes.trace.aside import writes_aside
from fx_passes.trace.guards import Call
from fx_passes.trace.skeleton import skeleton
from zendnn_cffi.errors import is_of_signal_handler

log = logging.getLogger("zendnn_cffi.passes")

_OF_MASKS = (torch.bool, torch.uint8, torch.int32, torch.int64)
_LARGEST_ERROR = 1e-3  # relative to the largest number of a result, in float32 and float64
_LARGEST_ERROR_16 = 0.1


def differs_on_example(root: nn.Module, graph: fx.Graph, example: Call, *, trusted: bool = True) -> bool:
    """Whether graph computes something else than root.forward of the example, as far as that can be told.

    trusted  whether no forward writes to parameters by ways that are no operators
    Where masks leave something out, the same call is compared without that, too: forwards ask whether a mask does.
    A forward that differs from itself tells nothing. Each call begins with the numbers of root.
    """
    if _differs(root, graph, example, trusted):
        return True
    full = _with_full_masks(example)
    return full is not None and _differs(root, graph, full, trusted, is_made=True)


def _with_full_masks(example: Call) -> Call | None:
    """The example with nothing but ones in its masks, tensors of zeros and ones; None where none has zeros."""
    found = False

    def full(leaf: Any) -> Any:
        nonlocal found
        if not isinstance(leaf, torch.Tensor) or leaf.dtype not in _OF_MASKS or leaf.is_nested or not leaf.numel():
            return leaf
        is_readable = leaf.layout is torch.strided and leaf.device.type == "cpu"
        if not is_readable or tuple(map(int, leaf.aminmax())) != (0, 1):
            return leaf
        found = True
        return torch.ones_like(leaf)

    filled: Call = pytree.tree_map(full, example)
    return filled if found else None


def _differs(root: nn.Module, graph: fx.Graph, example: Call, trusted: bool, is_made: bool = False) -> bool:
    """As differs_on_example(), of this call alone; is_made: nobody gave it, so it may be one that makes no sense."""
    rng = torch.get_rng_state()
    try:
        with torch.no_grad():
            expected = call(callable_copy(root, own_parameters=not trusted), example, root)
            if is_made and not all(map(_is_finite, expected)):
                return False
            gm = fx.GraphModule(skeleton(root, own_state=True), copy_graph(graph))
            if agree(call(gm, example, root), expected):
                return False
            return agree(call(callable_copy(root, own_parameters=not trusted), example, root), expected)
    except Exception as error:  # whatever the model raises, or an example that cannot be copied
        if is_of_signal_handler(error):
            raise
        log.info("the exported graph was not compared with the model: %s: %s", type(error).__name__, error)
        return False
    finally:
        torch.set_rng_state(rng)


def _is_finite(result: torch.Tensor) -> bool:
    return result.layout is not torch.strided or not result.is_floating_point() or bool(result.isfinite().all())


def callable_copy(root: nn.Module, *, own_parameters: bool) -> nn.Module:
    """What can be called in place of root.forward, and changes nothing of root."""
    return without_hooks(skeleton(root, own_state=True, own_parameters=own_parameters))


def call(module: nn.Module, example: Call, root: nn.Module) -> list[Any]:
    """The tensors that module returns of a copy of the example.

    root  what module is a copy of: its memory is not written to, where they share some
    """
    args, kwargs = copy_of_example(example)
    with writes_aside(root):
        return [leaf for leaf in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]


def copy_of_example(example: Call) -> Call:
    """A deep copy; of tensors that are results of operations with gradients, too."""
    leaves = (leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor) and not leaf.is_leaf)
    return copy.deepcopy(example, {id(leaf): leaf.detach().clone() for leaf in leaves})


def apart(example: Call) -> Call:
    """The same call with another tensor in each place.

    Of one tensor in two places torch.export reads one place for both, and nothing says that later calls have to.
    """
    seen = set[int]()

    def alone(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and id(leaf) in seen:
            return copy_of_example(((leaf,), {}))[0][0]
        seen.add(id(leaf))
        return leaf

    leaves, structure = pytree.tree_flatten(example)
    result: Call = pytree.tree_unflatten(list(map(alone, leaves)), structure)
    return result


def agree(results: list[torch.Tensor], others: list[torch.Tensor], limit: float | None = None) -> bool:
    """Whether these are as many tensors of the same shapes and dtypes, and as good as equal numbers.

    limit  the largest error, relative to the largest number of a result (None: what graphs may differ by)
    """
    if len(results) != len(others):
        return False
    return all(
        one.shape == other.shape and one.dtype == other.dtype and _are_close(one, other, limit)
        for one, other in zip(results, others, strict=True)
    )


def _are_close(one: torch.Tensor, other: torch.Tensor, limit: float | None) -> bool:
    if one.is_sparse or one.is_quantized or one.layout is not torch.strided:
        return True
    if not one.is_floating_point():
        return torch.equal(one, other) or one.is_complex()
    finite = other.isfinite()
    if not torch.equal(finite, one.isfinite()):
        return False
    if limit is None:
        limit = _LARGEST_ERROR if one.dtype in (torch.float32, torch.float64) else _LARGEST_ERROR_16
    if not finite.all():  # picking numbers takes ten times as long as comparing them
        one, other = one[finite], other[finite]
    return not other.numel() or _largest(one - other) <= limit * _largest(other) + 1e-30


def _largest(x: torch.Tensor) -> float:
    least, most = x.aminmax()
    return max(-float(least), float(most))
