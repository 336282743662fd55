"""Names of the functions that a saved graph may call: a closed list, so that a file cannot name anything else.

zen.convolution            the vocabulary
operator.add, math.ceil    numbers and sizes
aten.embedding.default     PyTorch's operators, as torch.export writes them
torch.cat, functional.pad  functions of PyTorch that are operators
functional.interpolate     those of torch.nn.functional that are written of operators
linalg.linalg_norm         those of its other rooms, by the names that PyTorch has for them
tensor.t                   methods of tensors that are called as functions
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

from fx_passes import ops
from fx_passes.graph.graph import AUGMENTED
from fx_passes.memoize.masks import asked_once
from fx_passes.region.lowered import row_major_copy
from fx_passes.saved.errors import FileError, NotSaved


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OPERATORS = _names("""
    add and_ eq floordiv ge getitem gt imatmul index inv invert le lshift lt matmul mod mul ne neg not_ or_ pos pow
    rshift setitem sub truediv xor
""") | {operation.__name__ for operation in AUGMENTED}
_MATH = _names("ceil fabs floor isqrt log log2 prod sqrt trunc")
_BUILTINS = _names("abs bool float getattr int len max min pow round sum")
_FORBIDDEN = _names("from_file record_stream set_ set_data")  # operators that reach beyond tensors: files, other memory
_SPECIAL = _names("__and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__")
_CHECKED_NUMBERS = _names("_assert_scalar sym_constrain_range sym_constrain_range_for_size")  # operators of no tensors
_CHECKS = _names("_assert sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt")
_METHODS = _names("""
    bfloat16 bool byte char contiguous cpu dim double element_size expand_as flatten float half int is_contiguous
    is_floating_point item long ndimension nelement numel shape short size stride to type type_as view_as
""")
_ATTRIBUTES = _names("""
    H T device dtype imag indices is_cpu is_cuda is_meta is_quantized is_sparse itemsize layout mH mT
    nbytes ndim real requires_grad shape values
""")
# Functions of torch.nn.functional that are written in Python, of tensors and numbers alone.
_COMPOSED = _names("""
    adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices affine_grid
    cross_entropy dropout1d dropout2d dropout3d fold gaussian_nll_loss grid_sample gumbel_softmax interpolate
    local_response_norm logsigmoid lp_pool1d lp_pool2d lp_pool3d max_unpool1d multilabel_soft_margin_loss normalize
    softmin softsign tanhshrink threshold upsample upsample_bilinear upsample_nearest
""")
_OURS = (*ops.VOCABULARY, row_major_copy, asked_once)
_VOCABULARY = {function.__name__: function for function in _OURS}
_OF_TORCH = {"torch": torch, "functional": functional}
_BY_PREFIX = {"fft": torch.fft, "linalg": torch.linalg, "special": torch.special}  # torch.fft.rfft is called fft_rfft


def name_of(target: Any) -> str:
    """Return the name of a function that a node calls. Raises NotSaved for one that is not on the list."""
    name = getattr(target, "__name__", "")
    if _VOCABULARY.get(name) is target:
        return f"zen.{name}"
    if isinstance(target, torch._ops.OpOverload):
        full = f"{target.namespace}.{target._opname}.{target._overloadname}"
        if target.namespace == "aten" and (_is_operator(target._opname) or target._opname in _CHECKED_NUMBERS):
            return full
        raise NotSaved(f"the operator {full}, which is none of PyTorch's own")
    for room, module, names in (("operator", operator, _OPERATORS), ("math", math, _MATH), ("", builtins, _BUILTINS)):
        if name in names and getattr(module, name) is target:
            return f"{room or 'builtins'}.{name}"
    for room, of_torch in _OF_TORCH.items():
        if getattr(of_torch, name, None) is target and (_is_operator(name) or name in _CHECKS):
            return f"{room}.{name}"
    for room, module in _BY_PREFIX.items():
        if name.startswith(f"{room}_") and _in_room(module, room, name) is target:
            return f"{room}.{name}"
    if getattr(torch.Tensor, name, None) is target and (name in _METHODS or _is_operator(name)):
        return f"tensor.{name}"
    if composed := next((n for n in sorted(_COMPOSED) if getattr(functional, n, None) is target), None):
        return f"functional.{composed}"  # some have another __name__
    where = getattr(target, "__module__", "") or type(target).__module__
    raise NotSaved(
        f"the function {where}.{name or type(target).__name__}, which is none of PyTorch's own: optimize what"
        " torch.export.export(model, example_inputs) returns, which holds PyTorch's operators alone"
    )


def function_of(name: Any) -> Callable[..., Any]:
    """Return the function of a name. Raises FileError for one that is not on the list."""
    room, _, rest = str(name).partition(".")
    found: Any = None
    if room == "zen":
        found = _VOCABULARY.get(rest)
    elif room == "aten":
        opname, _, overload = rest.partition(".")
        if _is_operator(opname) or opname in _CHECKED_NUMBERS:
            found = getattr(getattr(torch.ops.aten, opname), overload, None)
            found = found if isinstance(found, torch._ops.OpOverload) else None
    elif room in _OF_TORCH and (_is_operator(rest) or rest in _CHECKS):
        found = getattr(_OF_TORCH[room], rest, None)
    elif room == "functional" and rest in _COMPOSED:
        found = getattr(functional, rest, None)
    elif room in _BY_PREFIX:
        found = _in_room(_BY_PREFIX[room], room, rest)
    elif room == "tensor":
        found = getattr(torch.Tensor, rest, None) if rest in _METHODS or _is_operator(rest) else None
    else:
        tables = {"operator": (operator, _OPERATORS), "math": (math, _MATH), "builtins": (builtins, _BUILTINS)}
        module, names = tables.get(room, (None, frozenset[str]()))
        found = getattr(module, rest) if rest in names else None
    if found is None:
        raise FileError(f"no saved graph calls {str(name)[:80]!r}")
    function: Callable[..., Any] = found
    return function


def _in_room(module: Any, room: str, name: str) -> Any:
    """torch.fft.rfft for fft_rfft, None for what is no operator there."""
    return getattr(module, name.removeprefix(f"{room}_"), None) if _is_operator(name) else None


def check_method(name: Any, error: type[Exception]) -> str:
    """Return the name of a method of tensors that a graph may call, else raise error."""
    if isinstance(name, str) and (name in _METHODS or _is_operator(name)):
        return name
    raise error(f"no saved graph calls the method {str(name)[:80]!r}")


def check_arguments(target: Any, args: Any, error: type[Exception]) -> None:
    """Raise error where getattr is asked for more than what a tensor is."""
    if target is getattr and (len(args) != 2 or args[1] not in _ATTRIBUTES):
        raise error(f"no saved graph reads the attribute {str(args[1:])[:80]}")


@lru_cache(maxsize=4096)
def _is_operator(name: str) -> bool:
    """Whether PyTorch has an operator of this name, one of tensors alone."""
    if not name.isidentifier() or name in _FORBIDDEN or (name.startswith("__") and name not in _SPECIAL):
        return False
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    schemas = (getattr(packet, overload)._schema for overload in packet.overloads())
    return any("Tensor" in str(part.type) for schema in schemas for part in (*schema.arguments, *schema.returns))
