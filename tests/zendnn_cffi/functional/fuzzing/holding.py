"""Random tensors that lie in memory in every way a caller may hold them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

SIZES = (1, 1, 1, 2, 2, 3, 4, 5, 7, 8, 16, 17, 33)
SENTINEL = 119  # what every byte around a result holds


class Plain(torch.Tensor):
    """A subclass that means nothing."""


class Holder:
    """Makes operands: random numbers, held in random ways. All its tensors may share one storage.

    dtype  of floating-point operands
    numpy  whether operands are arrays
    """

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.r.choice([torch.float32, torch.float32, torch.bfloat16])
        self.numpy = self.dtype == torch.float32 and self.r.random() < 0.1
        self._shared = self.noise([20_000])
        self.made: list[tuple[Any, torch.Tensor]] = []  # operands with what they held

    def size(self) -> int:
        return self.r.choice(SIZES)

    def sizes(self, low: int, high: int) -> list[int]:
        return [self.size() for _ in range(self.r.randint(low, high))]

    def chance(self, share: float) -> bool:
        return self.r.random() < share

    def noise(self, shape: Sequence[int]) -> torch.Tensor:
        """Numbers of usual sizes, with exact zeros and halves among them."""
        values = torch.randn(tuple(shape), generator=self.generator)
        return torch.where(values.abs() < 0.1, (values * 40).round() / 2, values)

    def operand(self, shape: Sequence[int], dtype: torch.dtype | None = None, *, positive: bool = False) -> Any:
        """Return a floating-point operand of this shape, held in some way."""
        values = self.noise(shape)
        return self.hold((values.abs() + 0.1 if positive else values).to(dtype or self.dtype), shared=not positive)

    def hold(self, values: torch.Tensor, *, shared: bool = False) -> Any:
        """Return these values held in some way (others, if ``shared``: out of the storage that all share)."""
        ways = [way for way, applies in WAYS if applies(values)]
        held = self.r.choice(ways)(self, values)
        if shared and 0 < values.numel() < 5000 and values.dtype == torch.float32 and self.chance(0.08):
            held = self._from_shared(values.shape)
        if self.numpy and held.dtype != torch.bfloat16:
            held = held.detach().numpy()
        elif self.chance(0.05):
            held = torch.nn.Parameter(held, requires_grad=False) if self.chance(0.5) else held.as_subclass(Plain)
        return self.remember(held)

    def remember(self, held: Any) -> Any:
        self.made.append((held, as_tensor(held).clone()))
        return held

    def _from_shared(self, shape: Sequence[int]) -> torch.Tensor:
        """A view into the storage that operands share, its dimensions in any order, perhaps with gaps."""
        order = list(range(len(shape)))
        self.r.shuffle(order)
        strides, step = [0] * len(shape), self.r.choice([1, 1, 2])
        for axis in order:
            strides[axis] = step
            step *= shape[axis]
        span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        return self._shared.as_strided(tuple(shape), strides, self.r.randint(0, len(self._shared) - span))

    def result(self, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """Return a result to write to, a view into memory that is SENTINEL everywhere."""
        if any(n == 0 for n in shape):
            return torch.empty(tuple(shape), dtype=dtype)
        order = list(range(len(shape)))
        if self.chance(0.4):
            self.r.shuffle(order)
        strides, step = [0] * len(shape), 1
        for axis in reversed(order):
            strides[axis] = step
            step = step * shape[axis] + (self.r.choice([0, 0, 0, 1, 3]) if self.chance(0.3) else 0)
        span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        memory = torch.full(((span + 16) * dtype.itemsize,), SENTINEL, dtype=torch.uint8).view(dtype)
        view = memory.as_strided(tuple(shape), strides, 8)
        view.copy_(self.noise(shape).to(dtype) if dtype.is_floating_point else torch.ones(tuple(shape), dtype=dtype))
        return view


def overwritten(view: torch.Tensor) -> int:
    """How many bytes around a result of ``Holder.result`` were written."""
    if view.numel() == 0:
        return 0
    count = view.untyped_storage().nbytes() // view.dtype.itemsize
    memory = view.detach().as_strided((count,), (1,), 0).clone()
    memory.as_strided(tuple(view.shape), view.stride(), view.storage_offset()).copy_(
        torch.full((view.dtype.itemsize,), SENTINEL, dtype=torch.uint8).view(view.dtype)[0]
    )
    return int((memory.view(torch.uint8) != SENTINEL).sum())


def as_tensor(held: Any) -> torch.Tensor:
    tensor = torch.from_numpy(held) if isinstance(held, np.ndarray) else held.detach()
    return tensor.as_subclass(torch.Tensor)


# ---- ways


def _permuted(h: Holder, values: torch.Tensor) -> torch.Tensor:
    order = list(range(values.dim()))
    h.r.shuffle(order)
    return values.permute(order).contiguous().permute([order.index(i) for i in range(values.dim())])


def _apart(h: Holder, values: torch.Tensor) -> torch.Tensor:
    """Every second element along one dimension of something larger, at an offset."""
    axis, step = h.r.randrange(values.dim()), h.r.choice([2, 3])
    shape = list(values.shape)
    shape[axis] = shape[axis] * step + 1
    wide = torch.full(shape, 77, dtype=values.dtype)
    index = [slice(None)] * values.dim()
    index[axis] = slice(1, None, step)
    view = wide[tuple(index)].narrow(axis, 0, values.shape[axis])
    view.copy_(values)
    return view


def _slice(h: Holder, values: torch.Tensor) -> torch.Tensor:
    axis = h.r.randrange(values.dim())
    wide = torch.full([n + 3 * (i == axis) for i, n in enumerate(values.shape)], 77, dtype=values.dtype)
    if values.dim() in (4, 5) and h.chance(0.5):
        wide = wide.contiguous(memory_format=torch.channels_last if values.dim() == 4 else torch.channels_last_3d)
    view = wide.narrow(axis, 2, values.shape[axis])
    view.copy_(values)
    return view


def _odd_strides(h: Holder, values: torch.Tensor) -> torch.Tensor:
    """Dimensions of size 1 have strides that mean nothing."""
    strides = [h.r.choice([0, 1, 3, 1000]) if n == 1 else s for n, s in zip(values.shape, values.stride(), strict=True)]
    return values.as_strided(tuple(values.shape), strides)


def _expanded(h: Holder, values: torch.Tensor) -> torch.Tensor:
    return values.narrow(h.r.randrange(values.dim()), 0, 1).expand(values.shape)


def _overlapping(h: Holder, values: torch.Tensor) -> torch.Tensor:
    """Rows that begin within the row before."""
    rows, columns = values.shape
    return values.reshape(-1)[: rows + columns - 1].contiguous().as_strided((rows, columns), (1, 1))


def _channels_last(h: Holder, values: torch.Tensor) -> torch.Tensor:
    return values.movedim(1, -1).contiguous().movedim(-1, 1)


WAYS: tuple[tuple[Any, Any], ...] = (
    (lambda h, v: v.contiguous(), lambda v: True),
    (lambda h, v: v.contiguous(), lambda v: True),
    (_permuted, lambda v: v.dim() >= 2),
    (_channels_last, lambda v: v.dim() >= 3),
    (_channels_last, lambda v: v.dim() >= 3),
    (_apart, lambda v: v.dim() >= 1),
    (_slice, lambda v: v.dim() >= 1),
    (_odd_strides, lambda v: 1 in v.shape),
    (_expanded, lambda v: v.dim() >= 1 and 0 not in v.shape),
    (_overlapping, lambda v: v.dim() == 2 and v.numel() >= sum(v.shape)),
    (lambda h, v: torch.complex(v, v + 1).real, lambda v: v.dtype == torch.float32),
    (lambda h, v: torch.stack([v + 1, v], -1).unbind(-1)[1], lambda v: True),
)
