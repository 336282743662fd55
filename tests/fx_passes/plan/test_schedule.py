"""Real programs, read again from their calls alone: what lives, what may be overwritten, what is reordered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from tests.support.lowering import kinds, net, noise, offload, tensors
from tests.support.programs import POISON, check_plan, element_offsets, run_poisoned
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.runtime.calls import PrimitiveCall
from zendnn_cffi.runtime.program import Program


def programs(gm: Any) -> list[Program]:
    """Every program of an optimized module."""
    lowered = [entry for region in gm.regions().values() for entry in region.lowered.values()]
    assert lowered and all(entry is not None for entry in lowered)
    return [entry.program for entry in lowered]


@pytest.mark.parametrize("tag", ("nchw", "nhwc", "nChw16c"))
@pytest.mark.parametrize("shape", ((2, 17, 3, 5), (1, 16, 2, 2), (3, 1, 1, 1)), ids=str)
def test_the_checker_knows_where_elements_lie(tag: str, shape: tuple[int, ...]) -> None:
    """Against a reorder of the library: exactly the bytes it writes."""
    from fx_passes.layout.reorder import reorder_into

    desc = MemoryDesc(shape, torch.float32, tag)
    target = torch.full((desc.size_bytes + 64,), POISON, dtype=torch.uint8)
    start = -target.data_ptr() % 64
    inside = target[start : start + desc.size_bytes]
    reorder_into(torch.ones(shape), inside, desc)
    named = element_offsets(desc)
    assert named.size == len(set(named.tolist())) and named.max() + 4 <= desc.size_bytes
    floats = inside.view(torch.float32)
    written = {4 * i for i in range(floats.numel()) if not floats[i].isnan()}
    assert written == set(named.tolist())


class Block(nn.Module):
    """A residual block with a projection, a concatenation and a gate."""

    def __init__(self, c: int = 17) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.a, self.b, self.p = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 1)
        self.gate, self.last = nn.Conv2d(c, c, 1), nn.Conv2d(2 * c, 5, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = F.relu(self.stem(x))
        y = F.relu(self.b(F.relu(self.a(s))) + self.p(s))
        y = y * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(y, 1)))
        return self.last(torch.cat([F.max_pool2d(y, 3, 1, 1), s], 1)), y.mean((2, 3))


@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
@pytest.mark.parametrize("c", (16, 17))
def test_dead_bytes_do_not_matter(c: int, dtype: torch.dtype | None) -> None:
    found = offload(Block(c).eval(), noise(2, 3, 9, 8), dtype=dtype)
    assert "torch" not in kinds(found)


def test_the_checker_sees_a_bad_plan() -> None:
    """Moving one slot onto another makes it fail: it is not blind."""
    gm = zendnn_cffi.optimize(Block().eval(), tune="off")
    x = noise(2, 3, 9, 8)
    gm(x)
    (program,) = programs(gm)
    good = tensors(program([x]))
    caught = 0
    writers = [c for c in program.calls if isinstance(c, PrimitiveCall) and c.args[ARG_DST][0].space == "arena"]
    for victim in writers[1:]:
        slot, desc = victim.args[ARG_DST]
        other = next(c for c in writers if c.args[ARG_DST][0].offset_bytes != slot.offset_bytes)
        moved = {a: ((other.args[ARG_DST][0], d) if s == slot else (s, d)) for a, (s, d) in victim.args.items()}
        calls = [PrimitiveCall(c.name, c.primitive, moved, c.kind) if c is victim else c for c in program.calls]
        bad = Program(calls, program.outputs, program.constants, program.arena_bytes)
        try:
            result = run_poisoned(bad, [x])
            caught += not all(torch.equal(a, b) for a, b in zip(result, good, strict=True))
        except AssertionError:
            caught += 1
    assert caught == len(writers) - 1


def test_memory_is_reused() -> None:
    """Forty layers need the memory of about two."""
    convs = [nn.Conv2d(16, 16, 3, padding=1) for _ in range(40)]
    gm = zendnn_cffi.optimize(nn.Sequential(*convs).eval(), tune="off")
    gm(noise(1, 16, 16, 16))
    (program,) = programs(gm)
    one = 16 * 16 * 16 * 4
    scratch = max(c.primitive.pd.scratchpad_desc.size_bytes if c.primitive.pd.scratchpad_desc else 0
                  for c in program.calls if isinstance(c, PrimitiveCall))  # fmt: skip
    assert program.arena_bytes <= 2 * one + scratch + 256
    check_plan(program)


def test_a_reorder_is_shared() -> None:
    """Four readers of an nchw input in the library's layout: one reorder."""
    convs = [nn.Conv2d(16, 16, 3) for _ in range(4)]
    gm = zendnn_cffi.optimize(net(lambda m, x: m[0](x) + m[1](x) + m[2](x) + m[3](x), *convs), tune="off")
    gm(noise(1, 16, 12, 12))
    (program,) = programs(gm)
    sources = [c.name for c in program.calls if c.kind == "reorder"]
    assert len(sources) <= 2, sources  # the input once, the result once


def test_element_wise_steps_work_in_place() -> None:
    gm = zendnn_cffi.optimize(
        net(lambda m, x: torch.tanh(torch.sigmoid(torch.exp(m[0](x)))), nn.MaxPool2d(2)), tune="off"
    )
    gm(noise(1, 16, 16, 16))
    (program,) = programs(gm)
    steps = [c.args for c in program.calls if isinstance(c, PrimitiveCall) and c.kind == "eltwise"]
    assert len(steps) == 3 and all(args[ARG_SRC][0] == args[ARG_DST][0] for args in steps)


def test_residual_sums_work_in_place() -> None:
    """A residual that is read once is the result's memory; one that is read again is not."""

    def blocks(m: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for i in range(0, 6, 2):
            x = F.relu(m[i](x) + m[i + 1](x))
        return F.relu(x)

    convs = [nn.Conv2d(16, 16, 1) for _ in range(6)]
    gm = zendnn_cffi.optimize(net(blocks, *convs), tune="off")
    gm(noise(1, 16, 8, 8))
    (program,) = programs(gm)
    in_place = [c for c in program.calls if isinstance(c, PrimitiveCall)
                and any(entry[0] == "sum" for entry in c.primitive.pd.attr.post_ops)]  # fmt: skip
    assert len(in_place) == 3


def test_inputs_and_constants_are_never_written() -> None:
    gm = zendnn_cffi.optimize(
        net(lambda m, x, y: (F.relu(m[0](x) + y), torch.tanh(y)), nn.Conv2d(16, 16, 1)), tune="off"
    )
    gm(noise(1, 16, 8, 8), noise(1, 16, 8, 8))
    for program in programs(gm):
        for call in program.calls:
            dst = call.args[ARG_DST][0] if isinstance(call, PrimitiveCall) else call.dst.slot  # type: ignore[attr-defined]
            assert dst.space in ("arena", "output")


VIEWS: dict[str, tuple[Any, tuple[int, ...]]] = {  # of y, with its size 1 or whole along each dimension; y's shape
    "first row": (lambda y: y[:, :1], (1, 8, 24)),
    "row in the middle": (lambda y: y[:, 3:4], (1, 8, 24)),
    "last column": (lambda y: y[..., -1:], (1, 8, 24)),
    "one number": (lambda y: y[:, :1, :1], (1, 8, 24)),
    "of several samples": (lambda y: y[:1], (3, 8, 24)),
    "of a batch": (lambda y: y[:1], (5, 24)),
    "all, turned": (lambda y: y.transpose(1, 2), (1, 24, 24)),
    "all, seen otherwise": (lambda y: y.view(1, 24, 8).transpose(1, 2), (1, 8, 24)),
    "itself": (lambda y: y, (1, 8, 24)),
}


@pytest.mark.parametrize("operation", (torch.add, torch.sub, torch.mul, torch.maximum), ids=lambda f: f.__name__)
@pytest.mark.parametrize("is_last", (True, False), ids=("to the caller", "read on"))
@pytest.mark.parametrize("name", VIEWS)
def test_a_result_lies_nowhere_near_a_view_that_is_yet_to_be_read(name: str, is_last: bool, operation: Any) -> None:
    """y + y[:, :1]: a sum that took over y's memory would read rows that it has written."""
    view, shape = VIEWS[name]
    again = (lambda y: y) if is_last else F.softplus

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m[0](x)
        return again(operation(y, view(y)))

    model = net(forward, nn.Linear(8, shape[-1], bias=False))
    gm = zendnn_cffi.optimize(model, tune="off")
    gm(noise(*shape[:-1], 8))
    for program in programs(gm):
        check_plan(program)
    offload(model, noise(*shape[:-1], 8))
