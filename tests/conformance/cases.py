"""Cases: a sample of PyTorch's operator or module database as a model in evaluation mode, and tensors to call it with.

    alone     forward(t0, t1): torch.add(t0, t1, alpha=2)
    network   forward(t0): after(torch.add(before(t0), t1, alpha=2)), with t1 a parameter

before and after are layers that the engine takes, and whose numbers any right implementation computes exactly: products
with one, sums with zero, negative numbers halved. So a network has the tolerances of the operator alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree

from tests.conformance.source import copied, module_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMS = ("alone", "network")
_CONVOLUTIONS = {4: nn.Conv2d, 5: nn.Conv3d}
_SEED = 15


@dataclass(frozen=True)
class Case:
    """A model with the arguments of one call.

    dtype   of the sample
    layers  how many layers surround the operator
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    layers: int = 0


Maker = Callable[[], Case]


@cache
def operators() -> dict[str, Any]:
    """PyTorch's operator database by name and variant.

    The database wraps operators that draw random numbers into functions that seed the generator. Each call is seeded
    here, so that the operators themselves can be called: a forward that seeds stays plain PyTorch.
    """
    from torch.testing._internal import common_methods_invocations as database

    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in database.op_db}


@cache
def modules() -> dict[str, Any]:
    """PyTorch's module database, by names such as nn.Conv2d."""
    from torch.testing._internal.common_modules import module_db

    return {f"nn.{info.name.rpartition('nn.')[2]}": info for info in module_db}


def groups() -> list[str]:
    """The names of all operators, then of all modules."""
    return [*operators(), *modules()]


def vocabulary() -> list[str]:
    """The operators and modules that normalize has a spelling for."""
    from fx_passes.spellings.registry import FUNCTIONS, METHODS, MODULES

    def is_known(op: Any) -> bool:
        short = op.name.rpartition(".")[2]
        found = getattr(torch.nn.functional if "functional" in op.name else torch, short, None)
        return op.op in FUNCTIONS or (found is not None and found in FUNCTIONS) or op.name in METHODS

    known = [name for name, op in operators().items() if is_known(op)]
    return known + [name for name, info in modules().items() if info.module_cls in MODULES]


def cases(group: str, most: int | None = None) -> Iterator[tuple[str, Maker]]:
    """Yield each case of an operator or module: its key (dtype/form/spelling/number), and what makes it.

    most  samples of each dtype, evenly spaced among all (None: all)
    """
    for dtype in DTYPES:
        torch.manual_seed(_SEED)
        yield from module_cases(group, dtype, most) if group in modules() else operator_cases(group, dtype, most)


def _numbered(samples: Any, most: int | None) -> list[tuple[int, Any]]:
    """The samples with their numbers; of more than `most` so many, evenly spaced."""
    found = list(enumerate(samples))
    if most is None or len(found) <= most:
        return found
    return [found[(2 * i + 1) * len(found) // (2 * most)] for i in range(most)]


def operator_cases(group: str, dtype: str, most: int | None) -> Iterator[tuple[str, Maker]]:
    """An operator's samples, as function, as method and in place."""
    op = operators()[group]
    if DTYPES[dtype] not in op.supported_dtypes("cpu"):
        return
    samples = _numbered(op.sample_inputs("cpu", DTYPES[dtype], requires_grad=False), most)
    spellings = {"function": op.get_op(), "method": _method(op.get_method()), "in-place": _method(op.get_inplace())}
    for spelling, call in spellings.items():
        for number, sample in samples if call is not None else ():
            for form in _forms(spelling, sample):
                yield f"{dtype}/{form}/{spelling}/{number}", _operator_maker(call, sample, form, DTYPES[dtype])


def _forms(spelling: str, sample: Any) -> tuple[str, ...]:
    """Where a sample is tried: a method alone is the function alone, and nothing goes through no tensors."""
    if spelling == "method":
        return ("network",)
    tensors = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return FORMS if any(isinstance(t, Tensor) for t in tensors) else ("alone",)


def _method(method: Any) -> str | None:
    """The name by which Tensor has a method; None where it is none of its own."""
    name = getattr(method, "__name__", "")
    return name if hasattr(Tensor, name) else None


def _operator_maker(call: Any, sample: Any, form: str, dtype: torch.dtype) -> Maker:
    def make() -> Case:
        hold = form == "network"
        model, tensors = module_of(call, (sample.input, *sample.args), sample.kwargs, hold)
        return _embedded(model, tensors, {}, dtype) if hold else Case(model, tensors, {}, dtype)

    return make


def module_cases(group: str, dtype: str, most: int | None) -> Iterator[tuple[str, Maker]]:
    """A module's samples in evaluation mode."""
    info = modules()[group]
    if DTYPES[dtype] not in info.supported_dtypes("cpu"):
        return
    samples = info.module_inputs_func(info, device="cpu", dtype=DTYPES[dtype], requires_grad=False, training=False)
    for number, sample in _numbered(samples, most):
        for form in FORMS:
            yield f"{dtype}/{form}/module/{number}", _module_maker(info, sample, form, DTYPES[dtype])


def _module_maker(info: Any, sample: Any, form: str, dtype: torch.dtype) -> Maker:
    def make() -> Case:
        torch.manual_seed(_SEED)
        built, called = sample.constructor_input, sample.forward_input
        model = info.module_cls(*built.args, **built.kwargs).to(dtype).eval()
        args, kwargs = copied((called.args, called.kwargs))
        if any(isinstance(p, UninitializedParameter) for p in model.parameters()):
            model(*args, **kwargs)  # a lazy module: its first call makes them
        model.requires_grad_(False)
        return _embedded(model, args, kwargs, dtype) if form == "network" else Case(model, args, kwargs, dtype)

    return make


class Network(nn.Module):
    """An operator between layers; of several results, the one at `at` goes on."""

    def __init__(self, before: nn.Module | None, operator: nn.Module, after: nn.Module | None, at: int | None) -> None:
        super().__init__()
        self.before, self.operator, self.after, self.at = before, operator, after, at

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = self.operator(x if self.before is None else self.before(x), *args, **kwargs)
        if self.after is None:
            return result
        return self.after(result if self.at is None else result[self.at])


class UnaryNetwork(Network):
    """The same around an operator of one input: symbolic tracing knows no *args."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


def _embedded(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Case:
    """The case of model between layers where its first argument and its result allow them."""
    before = _layer(args[0], dtype) if args else None
    after, at = None, None
    try:
        with torch.no_grad():
            inputs, options = copied((args, kwargs))
            if before is not None:
                inputs = (before(inputs[0]), *inputs[1:])
            result = copy.deepcopy(model)(*inputs, **options)
        found = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, tuple | list) else []
        layers = {i: layer for i, value in enumerate(found) if (layer := _layer(value, dtype)) is not None}
        if layers:
            at, after = next(iter(layers.items()))
            at = None if isinstance(result, Tensor) else at
    except Exception:  # eager raises: so must the optimized network
        pass
    kind = UnaryNetwork if len(args) == 1 and not kwargs else Network
    network = kind(before, model, after, at) if args else model
    return Case(network.eval(), args, kwargs, dtype, (before is not None) + (after is not None))


def _layer(value: Any, dtype: torch.dtype) -> nn.Module | None:
    """A convolution or linear layer and an activation, exact in any arithmetic; None where value is nothing for it."""
    if not isinstance(value, Tensor) or value.dtype != dtype or not value.ndim or not value.numel():
        return None
    if value.layout is not torch.strided:
        return None
    layer: Any
    if value.ndim in _CONVOLUTIONS:
        layer = _CONVOLUTIONS[value.ndim](value.shape[1], value.shape[1], 1)
    else:
        layer = nn.Linear(value.shape[-1], value.shape[-1])
    with torch.no_grad():
        layer.weight.copy_(torch.eye(layer.weight.shape[0]).view_as(layer.weight))
        layer.bias.zero_()
    return nn.Sequential(layer, nn.LeakyReLU(0.5)).to(dtype).eval().requires_grad_(False)
