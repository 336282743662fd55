"""A program made again for another number of threads: the same bits, on that many threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from fx_passes.region.lowered import LoweredRegion
from fx_passes.region.region import ZenRegion
from zendnn_cffi.engine.openmp import computing_with, thread_count
from zendnn_cffi.runtime import arenas
from zendnn_cffi.runtime.calls import PrimitiveCall, TorchCall
from zendnn_cffi.runtime.other_threads import KeptThreads, for_threads
from zendnn_cffi.runtime.places import Slot, TensorView
from zendnn_cffi.runtime.program import OutputSpec, Program
from zendnn_cffi.runtime.sliced_program import SlicedProgram


class Mixed(nn.Module):
    """Convolutions with a residual sum, pooling, concatenation, linear layers, layer norm, softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 3072), nn.Linear(3072, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        x = (self.second(x) + x).relu()
        x = self.depthwise(torch.cat([x, nn.functional.max_pool2d(x, 3, 1, 1)], 1))
        rows = self.norm(x.flatten(2).transpose(1, 2))
        return self.narrow(nn.functional.gelu(self.wide(rows))).softmax(-1)


def lowered(model: nn.Module, x: torch.Tensor, **options: Any) -> LoweredRegion:
    """Its only region, lowered for x."""
    fast = zendnn_cffi.optimize(model.eval(), (x,), tune="off", **options)
    with torch.no_grad():
        fast(x)
    (region,) = (m for m in fast.modules() if isinstance(m, ZenRegion))
    (found,) = region.lowered.values()
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 3, 15, 17), (2, 3, 8, 8)])
def test_the_bits_are_the_same_on_one_thread(size: tuple[int, ...], dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    program, x = lowered(Mixed(), torch.randn(size), dtype=dtype).program, torch.randn(size)
    alone = for_threads(program, 1, [x])
    assert alone is not None
    made = [call.primitive.num_threads for call in alone.calls if isinstance(call, PrimitiveCall)]
    assert made and set(made) == {1}
    for _ in range(3):
        x = torch.randn(size)
        with computing_with(1):
            (result,) = alone([x])
        assert torch.equal(result, program([x])[0])
    assert alone.constants == program.constants  # no weights are packed again


def test_what_rounds_otherwise_keeps_its_threads() -> None:
    """A sum shared out among threads (here: a PyTorch call that says how many there are) has other bits with fewer."""
    seen: list[int | None] = []

    def threads_into(src: torch.Tensor) -> torch.Tensor:
        seen.append(thread_count())
        return src + torch.get_num_threads()

    shape, strides = (2, 3), (3, 1)
    place = [TensorView(slot, shape, strides, torch.float32) for slot in (Slot("input"), Slot("arena"), Slot("output"))]
    calls = [
        TorchCall("double", lambda x: x * 2, (place[0],), place[1]),
        TorchCall("threads", threads_into, (place[1],), place[2]),
    ]
    program, x = Program(calls, [OutputSpec(shape, strides, torch.float32)], (), 64), torch.randn(shape)
    usual = torch.get_num_threads()
    alone = for_threads(program, 1, [x])
    assert alone is not None and isinstance(alone.calls[1], KeptThreads) and alone.calls[0] is calls[0]
    for attribute in ("name", "kind", "implementation", "flops", "dtype", "bytes_moved"):
        assert getattr(alone.calls[1], attribute) == getattr(calls[1], attribute)
    assert alone.calls[1].label.name == calls[1].label.name
    seen.clear()
    with computing_with(1):
        assert torch.equal(alone([x])[0], x * 2 + usual) and torch.get_num_threads() == 1
    assert seen == [usual] and torch.get_num_threads() == usual


def test_what_is_never_the_same_is_refused() -> None:
    shape, strides = (2, 3), (3, 1)
    place = [TensorView(slot, shape, strides, torch.float32) for slot in (Slot("input"), Slot("output"))]
    numbers = iter(range(1000))
    noise = TorchCall("noise", lambda x: x + next(numbers), (place[0],), place[1])
    program = Program([noise], [OutputSpec(shape, strides, torch.float32)], (), 64)
    assert for_threads(program, 1, [torch.randn(shape)]) is None


def test_outputs_that_grow_are_refused() -> None:
    spec = OutputSpec((2, 3), (3, 1), torch.float32, grows=True)
    assert for_threads(Program([], [spec]), 1, [torch.randn(2, 3)]) is None


def test_slices_are_made_again() -> None:
    torch.manual_seed(0)
    part, whole = lowered(Mixed(), torch.randn(1, 3, 9, 9)).program, torch.randn(3, 3, 9, 9)
    assert isinstance(part, Program)
    (spec,) = part.outputs
    sliced = SlicedProgram(part, 1, [OutputSpec((3, *spec.shape[1:]), spec.strides, spec.dtype)])
    alone = for_threads(sliced, 1, [whole])
    assert isinstance(alone, SlicedProgram)
    with computing_with(1):
        assert torch.equal(alone([whole])[0], sliced([whole])[0])


def test_a_scratchpad_that_grows_lies_behind_the_arena() -> None:
    """From one thread to two: each has its own."""
    torch.manual_seed(0)
    x = torch.randn(1, 3, 30, 30)
    with computing_with(1):
        alone = lowered(Mixed(), x).program
        both = for_threads(alone, 2, [x])
    assert both is not None and both.arena_bytes >= alone.arena_bytes
    scratch = [c.primitive.pd.scratchpad_desc for c in both.calls if isinstance(c, PrimitiveCall)]
    assert any(desc is not None for desc in scratch)
    with computing_with(2):
        assert torch.equal(both([x])[0], alone([x])[0])


def test_both_take_turns_in_one_arena() -> None:
    """They were compared side by side, in an arena each."""
    x = torch.randn(1, 3, 15, 17)
    program = lowered(Mixed(), x).program
    for other in arenas.programs():
        other.free_idle()
    program([x])
    before = arenas.size_bytes()
    alone = for_threads(program, 1, [x])
    assert alone is not None
    with computing_with(1):
        alone([x])
    program([x])
    assert arenas.size_bytes() == before
