"""What every function here does with its arguments: collect, check, allocate the result, run a kernel, hand the result
back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from zendnn_cffi.errors import UnsupportedError
from zendnn_cffi.functional._arrays import as_input, as_output, check_sizes, layout
from zendnn_cffi.functional._kernel import CACHE, Kernel
from zendnn_cffi.primitives import allocation, checks
from zendnn_cffi.primitives.attributes import (
    ARG_DST,
    ARG_WEIGHTS,
    BINARY,
    ELTWISE,
    Attr,
    PostOps,
    arg_post_op,
    kind_value,
)
from zendnn_cffi.primitives.memory import MemoryDesc, dense_strides, plain_desc

_FLOATS = (torch.float32, torch.bfloat16)
_NOTHING = allocation.empty((0,), torch.float32)


class Call:
    """The operands of one call by argument id, and whether the caller speaks numpy."""

    def __init__(self) -> None:
        self.operands: dict[int, torch.Tensor] = {}
        self.post_ops = PostOps()
        self.reads_dst = False
        self._given: dict[str, torch.Tensor] = {}
        self._saw_torch = False
        self._out: Any = None
        self._result: torch.Tensor = _NOTHING
        self._post_tensors: list[tuple[int, torch.Tensor]] = []

    # ---- collecting

    def take(self, value: Any, name: str, dtypes: Sequence[torch.dtype] | None) -> torch.Tensor:
        """Check an input; it is not an operand yet."""
        tensor = as_input(value, name, dtypes)
        if not tensor.is_contiguous() and not checks.strides_are_nested(tensor.shape, tensor.stride()):
            tensor = tensor.contiguous()
        self._saw_torch |= isinstance(value, torch.Tensor)
        self._given[name] = tensor
        return tensor

    def take_dense(self, value: Any, name: str, dtypes: Sequence[torch.dtype] | None) -> torch.Tensor:
        """As ``take``, row-major: for small operands, whose strides the library ignores or no argument describes."""
        return self.take(value, name, dtypes).contiguous()

    def add(self, arg: int, tensor: torch.Tensor) -> None:
        """Make a tensor the operand ``arg``."""
        self.operands[arg] = tensor

    def output(
        self,
        out: Any,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        strides: Sequence[int] | None = None,
        like: torch.Tensor | None = None,
        in_place: str | None = None,
    ) -> torch.Tensor:
        """Check ``out``, or allocate it (with strides, or dense as ``like`` is, or row-major).

        It may be exactly the argument ``in_place``, and overlap no other.
        """
        if out is None:
            if self.reads_dst:
                raise ValueError("a sum post-op adds to what out holds: pass out")
            check_sizes(shape, "the result")
            result = allocation.empty(shape, dtype, _dense_like(like) if like is not None else strides)
        else:
            result = as_output(out, "out", shape, dtype)
            if not checks.strides_are_nested(result.shape, result.stride()):
                raise ValueError(
                    f"out of shape {list(result.shape)} has strides {list(result.stride())}, which the library does not"
                    " take: pass one whose rows begin after all of the row before, gaps included"
                )
            self._check_apart(result, in_place)
            self._out = out
        self.operands[ARG_DST] = self._result = result
        return result

    def _check_apart(self, result: torch.Tensor, in_place: str | None) -> None:
        """Raise ValueError where writing to out would change an input."""
        for name, given in self._given.items() if result.numel() else ():
            if name == in_place and checks.same_view(result, given):
                continue
            if given.numel() and checks.overlap(result, given):
                raise ValueError(f"out shares memory with {name}: pass a buffer of its own, or leave out out")

    def add_post_ops(
        self,
        post_ops: Any,
        shape: Sequence[int],
        dst_desc_strides: Sequence[int] | None = None,
        *,
        without_prelu: str = "",
    ) -> None:
        """Read post-ops given as tuples; see ``functional`` for their spelling. ``shape`` is the result's.

        without_prelu  name of a function whose primitive executes no prelu post-op
        """
        chain = PostOps()
        if isinstance(post_ops, (str, bytes)) or not isinstance(post_ops, (list, tuple)):
            raise TypeError(f"post_ops must be a sequence of tuples such as ('eltwise', 'relu'), got {post_ops!r}")
        for position, entry in enumerate(post_ops):
            name = f"post_ops[{position}]"
            if not isinstance(entry, (tuple, list)) or not entry:
                raise TypeError(f"{name} must be a tuple such as ('eltwise', 'relu'), got {entry!r}")
            if without_prelu and entry[0] == "prelu":
                raise ValueError(
                    f"{name} is a prelu, which {without_prelu} cannot execute: call functional.prelu on the result, or "
                    "pass ('eltwise', 'relu', slope) for one slope"
                )
            chain = self._add_post_op(chain, name, entry, tuple(shape), dst_desc_strides)
        self.post_ops = chain

    def _add_post_op(
        self, chain: PostOps, name: str, entry: Sequence[Any], shape: tuple[int, ...], dst_strides: Sequence[int] | None
    ) -> PostOps:
        match entry:
            case ("eltwise", str() as kind, *numbers) if len(numbers) <= 3:
                kind_value({**ELTWISE, "hardsigmoid": 0}, kind, f"the kind of {name}")
                return chain.eltwise(kind, *(checks.as_float(v, f"a number of {name}") for v in numbers))
            case ("binary", str() as kind, other):
                kind_value(BINARY, kind, f"the kind of {name}")
                tensor = self._post_tensor(other, name, shape)
                whole = tuple(tensor.shape) == shape
                strides = tuple(dst_strides) if whole and dst_strides is not None else dense_strides(tensor.shape)
                self._post_tensors.append((arg_post_op(len(chain)), tensor))
                return chain.binary(kind, plain_desc(tensor.dtype, tuple(tensor.shape), strides))
            case ("prelu", weight):
                tensor = self.take_dense(weight, f"the weight of {name}", (torch.float32,)).reshape(-1)
                channels = shape[1] if len(shape) > 1 else 1
                if tensor.numel() not in (1, channels):
                    raise ValueError(
                        f"the weight of {name} must have 1 or {channels} elements (dim 1 of the result), got "
                        f"{tensor.numel()}"
                    )
                self._post_tensors.append((arg_post_op(len(chain), ARG_WEIGHTS), tensor))
                return chain.prelu(0 if tensor.numel() == 1 else 2)
            case ("sum", *scale) if len(scale) <= 1:
                self.reads_dst = True
                return chain.sum(checks.as_float(scale[0], f"the scale of {name}") if scale else 1.0)
        raise ValueError(
            f"{name} is {entry!r}: it must be ('eltwise', kind[, alpha, beta, scale]), ('binary', kind, other), "
            f"('prelu', weight) or ('sum'[, scale])"
        )

    def _post_tensor(self, other: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a binary post-op's operand with the result's rank, each dimension the result's or 1."""
        if checks.is_number(other):
            return allocation.filled((1,) * len(shape), checks.as_float(other, name), torch.float32)
        tensor = self.take(other, f"the tensor of {name}", _FLOATS)
        if tensor.dim() > len(shape):
            raise ValueError(f"the tensor of {name} has {tensor.dim()} dimensions, the result {len(shape)}")
        tensor = tensor.reshape((1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape))
        if any(d not in (1, s) for d, s in zip(tensor.shape, shape, strict=False)):
            raise ValueError(
                f"the tensor of {name} has shape {list(tensor.shape)}, which does not broadcast to the result's "
                f"{list(shape)}"
            )
        return tensor

    def adopt_post_tensors(self) -> None:
        """Make the post-ops' tensors operands (before ``output``, which checks that none is overwritten)."""
        for arg, tensor in self._post_tensors:
            self.operands[arg] = tensor

    # ---- running

    def layouts(self) -> dict[int, MemoryDesc]:
        """The descriptors of the operands as they lie in memory."""
        return {arg: layout(tensor) for arg, tensor in self.operands.items()}

    def run(self, signature: Hashable, build: Callable[[dict[int, MemoryDesc], Attr], Kernel]) -> Any:
        """Run the kernel of this signature and these layouts (built on first use) and return the result."""
        layouts = self.layouts()
        kernel = CACHE.get(
            (signature, self.post_ops, tuple(layouts.items())), lambda: build(layouts, Attr(self.post_ops))
        )
        kernel.run({arg: tensor.data_ptr() for arg, tensor in self.operands.items()})
        return self.result()

    def result(self) -> Any:
        """Return what the caller gets: its own ``out``, or new memory, as an array where every input was one.

        numpy has no bfloat16: such a result is a tensor.
        """
        result = self._result
        if self._out is not None:
            if isinstance(self._out, torch.Tensor) and not self._out.is_inference():
                torch.autograd.graph.increment_version(self._out)
            return self._out
        return result if self._saw_torch or result.dtype == torch.bfloat16 else result.numpy()


def _dense_like(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in the same order, as torch.empty_like chooses them."""
    return torch.empty_like(tensor, device="meta").stride()


def first_fast(candidates: Sequence[Callable[[], Kernel]]) -> Kernel:
    """Return the first kernel that is not a reference implementation, else the last that exists.

    Reference implementations take any layout, ten to a hundred times slower: a copy into another layout costs less.
    """
    kernel: Kernel | None = None
    failure: UnsupportedError | None = None
    for candidate in candidates:
        try:
            kernel = candidate()
        except UnsupportedError as error:
            failure = error
            continue
        if "ref" not in kernel.implementation.split(":")[0]:
            return kernel
    if kernel is None:
        assert failure is not None
        raise failure
    return kernel
