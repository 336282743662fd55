"""Programs made by hand: slots, contexts, timing, slices, failures."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest
import torch

from zendnn_cffi import descriptors
from zendnn_cffi.errors import ZenDNNError
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SCRATCHPAD, ARG_SRC, ARG_WEIGHTS, Attr
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive, PrimitiveDesc
from zendnn_cffi.runtime import arenas
from zendnn_cffi.runtime.calls import PrimitiveCall, TorchCall
from zendnn_cffi.runtime.places import Slot, TensorView
from zendnn_cffi.runtime.program import OutputSpec, Program
from zendnn_cffi.runtime.sliced_program import SlicedProgram

SHAPE, STRIDES = (4, 6), (6, 1)
DESC = MemoryDesc(SHAPE, torch.float32, strides=STRIDES)
INPUT, OUTPUT, ARENA = Slot("input"), Slot("output"), Slot("arena", 0, 64)
OUT = OutputSpec(SHAPE, STRIDES, torch.float32)


def eltwise(kind: str, src: Slot, dst: Slot, desc: MemoryDesc = DESC) -> PrimitiveCall:
    """One eltwise primitive from a slot to a slot."""
    pd = PrimitiveDesc(descriptors.eltwise(kind, desc), Attr())
    return PrimitiveCall(kind, Primitive(pd), {ARG_SRC: (src, desc), ARG_DST: (dst, desc)}, "eltwise")


def view(slot: Slot) -> TensorView:
    return TensorView(slot, SHAPE, STRIDES, torch.float32)


def program() -> Program:
    """tanh into the arena, twice that in torch, in place, then abs into the output."""
    double = TorchCall("double", lambda x: x * 2, (view(ARENA),), view(ARENA))
    return Program([eltwise("tanh", INPUT, ARENA), double, eltwise("abs", ARENA, OUTPUT)], [OUT], (), 64 + 96)


X = torch.linspace(-3, 3, 24).reshape(SHAPE)


def test_it_runs_its_calls_in_order() -> None:
    (result,) = program()([X])
    torch.testing.assert_close(result, (X.tanh() * 2).abs())


def test_results_are_new_and_inputs_move() -> None:
    run = program()
    (first,), (second,) = run([X]), run([X * 0.5])
    kept = first.clone()
    run([X + 1])
    assert torch.equal(first, kept) and first.data_ptr() != second.data_ptr()
    torch.testing.assert_close(second, ((X * 0.5).tanh() * 2).abs())
    offset = torch.cat([X, X + 1])[2:6]
    torch.testing.assert_close(run([offset])[0], (offset.tanh() * 2).abs())


def test_strided_inputs_and_outputs_of_torch_calls() -> None:
    strides = (1, 4)
    call = TorchCall("copy", lambda x: x + 1, (TensorView(INPUT, SHAPE, strides, torch.float32),),
                     TensorView(OUTPUT, SHAPE, strides, torch.float32))  # fmt: skip
    turned = X.t().contiguous().t()
    (result,) = Program([call], [OutputSpec(SHAPE, strides, torch.float32)])([turned])
    assert result.stride() == strides and torch.equal(result, turned + 1)


def test_a_call_may_write_its_result_itself() -> None:
    call = TorchCall("exp", lambda x, out: torch.exp(x, out=out), (view(INPUT),), view(OUTPUT), into=True)
    torch.testing.assert_close(Program([call], [OUT])([X])[0], X.exp())


@pytest.mark.parametrize("source", (INPUT, ARENA), ids=("before the run", "in the run"))
def test_an_output_that_grows_is_made_from_what_it_grows_from(source: Slot) -> None:
    """Of an input before the run, of what the run computes within it."""
    made: list[int] = []

    def allocate(x: torch.Tensor) -> torch.Tensor:
        made.append(len(ran))
        return torch.empty(x.shape[0] + 1, x.shape[1])

    ran: list[str] = []
    first = TorchCall("copy", lambda x, out: ran.append("copy") or out.copy_(x), (view(INPUT),), view(ARENA), into=True)
    grown = TensorView(OUTPUT, SHAPE, STRIDES, torch.float32, grows=True)
    grow = TorchCall(
        "grow", lambda x, out: torch.cat((x, x[:1]), out=out), (view(source),), grown, into=True, allocate=allocate
    )
    (result,) = Program([first, grow], [replace(OUT, grows=True)], (), 160)([X])
    assert torch.equal(result, torch.cat((X, X[:1])))
    assert made == [0 if source == INPUT else 1]


def test_a_first_run_in_inference_mode() -> None:
    """What it leaves behind can be written to elsewhere."""
    made = program()
    with torch.inference_mode():
        made([X])
    torch.testing.assert_close(made([X])[0], (X.tanh() * 2).abs())


def test_an_output_may_be_what_a_call_returns() -> None:
    grown = TensorView(OUTPUT, SHAPE, STRIDES, torch.float32, grows=True)
    call = TorchCall("twice", lambda x: torch.cat((x, x)), (view(INPUT),), grown)
    (result,) = Program([call], [replace(OUT, grows=True)])([X])
    assert torch.equal(result, torch.cat((X, X)))


def test_constants_and_offsets() -> None:
    constant = torch.cat([torch.zeros(SHAPE), torch.full(SHAPE, -2.0)])
    call = eltwise("abs", Slot("constant", 0, 96), OUTPUT)
    (result,) = Program([call], [OUT], [constant])([])
    assert torch.equal(result, torch.full(SHAPE, 2.0))


def test_times_of_every_call() -> None:
    (result,), times = program().run_timed([X])
    assert len(times) == 3 and all(t > 0 for t in times)
    torch.testing.assert_close(result, (X.tanh() * 2).abs())


def test_one_thread_keeps_one_context_and_threads_have_their_own() -> None:
    run = program()
    for _ in range(5):
        run([X])
    assert run.contexts == 1
    barrier, seen = threading.Barrier(2), []

    def wait(x: torch.Tensor) -> torch.Tensor:
        barrier.wait(10)
        return x

    call = TorchCall("wait", wait, (view(ARENA),), view(OUTPUT))
    together = Program([eltwise("tanh", INPUT, ARENA), call], [OUT], (), 160)
    workers = [threading.Thread(target=lambda n=n: seen.append((n, together([X * n])[0]))) for n in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for n, result in seen:
        torch.testing.assert_close(result, (X * n).tanh())
    assert len(seen) == 2 and together.contexts == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_what_a_parent_computes_in_is_not_in_use_in_its_child() -> None:
    """Nobody gives it back there, and whoever waits until no program runs would wait for ever."""
    run = program()
    with run.running([X]):
        child = os.fork()
        if child == 0:
            is_idle = not arenas.are_in_use()
            os._exit(0 if is_idle and torch.allclose(run([X])[0], (X.tanh() * 2).abs(), atol=1e-5) else 1)
        assert os.waitpid(child, 0)[1] == 0 and arenas.are_in_use()


def test_arenas_are_aligned() -> None:
    call = TorchCall(
        "where", lambda x: torch.full(SHAPE, float(x.data_ptr() % 64)), (view(Slot("arena")),), view(OUTPUT)
    )
    assert Program([call], [OUT], (), 96)([X])[0].eq(0).all()


def test_closed_programs_still_work_and_keep_nothing() -> None:
    run = program()
    run([X])
    run.close()
    assert run.contexts == 0
    torch.testing.assert_close(run([X])[0], (X.tanh() * 2).abs())
    assert run.contexts == 0


def test_a_failing_call_is_named() -> None:
    class Failing(TorchCall):
        def bind(self, context: object) -> object:  # type: ignore[override]
            return (lambda: 2), ()

    run = Program([eltwise("tanh", INPUT, OUTPUT), Failing("bad", lambda x: x, (), view(OUTPUT))], [OUT])
    for call in (run, run.run_timed):
        with pytest.raises(ZenDNNError, match="bad.*invalid_arguments") as caught:
            call([X])
        assert caught.value.status == 2


@pytest.mark.needs("avx512")
def test_a_scratchpad_that_is_missing_or_too_small_is_refused() -> None:
    src, weights, dst = (MemoryDesc(shape, torch.float32) for shape in ((3, 5), (5, 7), (3, 7)))
    op = descriptors.matmul(src, weights, None, dst)
    pd = next(pd for pd in PrimitiveDesc(op).implementations() if pd.scratchpad_desc is not None)
    assert pd.scratchpad_desc is not None
    args = {ARG_SRC: (INPUT, src), ARG_WEIGHTS: (Slot("constant"), weights), ARG_DST: (OUTPUT, dst)}
    with pytest.raises(ValueError, match=r"product: .*matmul.* needs a scratchpad of \d+ bytes, got none"):
        PrimitiveCall("product", Primitive(pd), args, "matmul")
    small = Slot("arena"), MemoryDesc((8,), torch.uint8)
    with pytest.raises(ValueError, match="got 8: give"):
        PrimitiveCall("product", Primitive(pd), {**args, ARG_SCRATCHPAD: small}, "matmul")

    call = PrimitiveCall("product", Primitive(pd), {**args, ARG_SCRATCHPAD: (Slot("arena"), pd.scratchpad_desc)})
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    (y,) = Program([call], [OutputSpec((3, 7), (7, 1), torch.float32)], [b], pd.scratchpad_desc.size_bytes)([a])
    torch.testing.assert_close(y, a @ b)
    library = PrimitiveDesc(op, Attr(scratchpad="library"))
    PrimitiveCall("product", Primitive(library), args, "matmul")  # the library has its own


def test_a_python_error_passes_through() -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    run = Program([TorchCall("fail", fail, (view(INPUT),), view(OUTPUT))], [OUT])
    with pytest.raises(KeyError, match="mine"):
        run([X])


def test_slices_of_a_batch() -> None:
    part = MemoryDesc((2, 6), torch.float32, strides=STRIDES)
    small = Program([eltwise("tanh", INPUT, OUTPUT, part)], [OutputSpec((2, 6), STRIDES, torch.float32)])
    sliced = SlicedProgram(small, 2, [OUT])
    assert sliced.slices == 2 and sliced.calls == small.calls and sliced.arena_bytes == 0
    torch.testing.assert_close(sliced([X])[0], X.tanh())
    (result,), times = sliced.run_timed([X])
    torch.testing.assert_close(result, X.tanh())
    assert len(times) == 1
