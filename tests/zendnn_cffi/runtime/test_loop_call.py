"""Loops over primitives, made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zendnn_cffi import descriptors
from zendnn_cffi.engine.openmp import computing_with
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SCRATCHPAD, ARG_SRC, ARG_SRC_1, ARG_WEIGHTS, Attr
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive, PrimitiveDesc
from zendnn_cffi.runtime.alone import Alone
from zendnn_cffi.runtime.loop_call import LoopCall, Part
from zendnn_cffi.runtime.places import Slot
from zendnn_cffi.runtime.program import OutputSpec, Program

ROWS, WIDTH = 6, 5
ROW_BYTES = 4 * WIDTH


def desc(rows: int) -> MemoryDesc:
    return MemoryDesc((rows, WIDTH), torch.float32, strides=(WIDTH, 1))


def running_sum(first: int = ROW_BYTES, advance: int = ROW_BYTES, rounds: int = ROWS - 1) -> LoopCall:
    """dst[t] = dst[t - 1] + src[t]; the first row of dst stays as it is."""
    row = desc(1)
    pd = PrimitiveDesc(descriptors.binary("add", row, row, row), Attr())
    parts = {
        ARG_SRC: Part(1, row, first - advance, advance),
        ARG_SRC_1: Part(0, row, first, advance),
        ARG_DST: Part(1, row, first, advance),
    }
    args = ((Slot("input"), desc(ROWS)), (Slot("output"), desc(ROWS)))
    return LoopCall("sum", ((Primitive(pd), parts),), args, rounds, "sum", 1)


def copied() -> LoopCall:
    """A loop of one round, whose parts do not move."""
    whole = desc(ROWS)
    parts = {ARG_SRC: Part(0, whole), ARG_DST: Part(1, whole)}
    args = ((Slot("input"), whole), (Slot("output"), whole))
    return LoopCall("copy", ((Primitive(PrimitiveDesc.reorder(whole, whole)), parts),), args, 1)


OUT = OutputSpec((ROWS, WIDTH), (WIDTH, 1), torch.float32)


@pytest.mark.parametrize("reverse", [False, True])
def test_rounds_go_on_where_the_one_before_ended(reverse: bool) -> None:
    loop = running_sum((ROWS - 2) * ROW_BYTES, -ROW_BYTES) if reverse else running_sum()
    program = Program([copied(), loop], [OUT], (), 0)
    x = torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH)
    for inputs in (x, x + 1, x[:].clone()):  # memory moves between runs
        (result,) = program([inputs])
        expected = inputs.flip(0).cumsum(0).flip(0) if reverse else inputs.cumsum(0)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("first", "advance", "rounds"),
    [(ROW_BYTES, ROW_BYTES, ROWS), (0, ROW_BYTES, 1), ((ROWS - 2) * ROW_BYTES, -ROW_BYTES, ROWS), (ROW_BYTES, 4096, 2)],
)
def test_parts_beyond_an_argument_are_refused(first: int, advance: int, rounds: int) -> None:
    with pytest.raises(ValueError, match="lies beyond its argument"):
        running_sum(first, advance, rounds)


@pytest.mark.parametrize("arg", [ARG_SRC, ARG_SRC_1, ARG_DST])
def test_missing_or_small_parts_are_refused(arg: int) -> None:
    loop = running_sum()
    ((primitive, parts),) = loop.steps
    without = {other: part for other, part in parts.items() if other != arg}
    small = {**parts, arg: replace(parts[arg], desc=MemoryDesc((1, 2), torch.float32, strides=(2, 1)))}
    for wrong in (without, small):
        with pytest.raises(ValueError, match="missing or too small"):
            replace(loop, steps=((primitive, wrong),))


def test_a_failure_ends_the_loop() -> None:
    loop = running_sum()
    program = Program([copied(), loop], [OUT], (), 0)
    with program.running([torch.ones(ROWS, WIDTH)]) as context:
        for function, arguments in context.calls:
            assert function(*arguments) == 0
        function, (given, alone, pointers) = context.calls[1]
        without_arguments = [(call, (handle, stream, 0, args)) for call, (handle, stream, _, args) in alone.whole]
        assert function(given, Alone(without_arguments, [True]), pointers) != 0
        assert torch.get_num_threads() == alone.threads


def test_small_primitives_of_a_step_are_computed_by_one_thread() -> None:
    """The step's only primitive adds a row; each round takes the other thread away, and gives it back."""
    program = Program([copied(), running_sum()], [OUT], (), 0)
    with computing_with(2), program.running([torch.ones(ROWS, WIDTH)]) as context:
        _, (_, alone, _) = context.calls[1]
        assert len(alone.whole) == 1 and len(alone.sequence()) == 3


def test_what_it_tells() -> None:
    loop = running_sum()
    assert loop.dtype is torch.float32
    assert loop.implementation.startswith("jit")
    assert loop.bytes_moved == (ROWS - 1) * 3 * ROW_BYTES
    assert loop.label.name.startswith("zendnn::sum jit") and loop.label.node == "sum"
    assert loop.written == [loop.args[1]]


@pytest.mark.needs("avx512")
def test_scratchpads_that_grow_lie_elsewhere() -> None:
    """Another primitive asks for more than the first one did."""
    k, n = 3000, 8
    src, dst = MemoryDesc((1, k), torch.float32, strides=(k, 1)), MemoryDesc((1, n), torch.float32, strides=(n, 1))
    op = descriptors.matmul(src, MemoryDesc((k, n), torch.float32, strides=(n, 1)), None, dst)
    pds = [pd for pd in PrimitiveDesc.every(op, Attr()) if pd.scratchpad_desc is not None]
    assert pds
    pd = pds[0]
    needed = pd.scratchpad_desc
    assert needed is not None
    parts = {ARG_SRC: Part(0, src), ARG_WEIGHTS: Part(1, op.descs["weights"]), ARG_DST: Part(2, dst)}
    args = tuple((Slot("constant", i), d) for i, d in enumerate((src, op.descs["weights"], dst)))
    whole = {**parts, ARG_SCRATCHPAD: Part(3, needed)}
    loop = LoopCall("product", ((Primitive(pd), whole),), (*args, (Slot("arena"), needed)), 2)
    again, reach = loop.with_primitives([Primitive(pd)], Slot("arena", 0, 1 << 20))
    assert reach == 0 and again.args == loop.args
    plain = [other for other in PrimitiveDesc.every(op, Attr()) if other.scratchpad_desc is None]
    if plain:
        bare = LoopCall("product", ((Primitive(plain[0]), parts),), args, 2)
        grown, reach = bare.with_primitives([Primitive(pd)], Slot("arena", 0, 1 << 20))
        assert reach == needed.size_bytes and grown.args[3] == (Slot("arena", 0, 1 << 20), needed)
        assert grown.steps[0][1][ARG_SCRATCHPAD] == Part(3, needed)
