"""Small primitives computed by the calling thread alone: which, in which order, and that its threads come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zendnn_cffi
from zendnn_cffi import descriptors
from zendnn_cffi.engine.openmp import computing_with
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_SRC_1, Attr, PostOps
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive, PrimitiveDesc
from zendnn_cffi.runtime.alone import Alone, is_small
from zendnn_cffi.runtime.calls import PrimitiveCall, TorchCall
from zendnn_cffi.runtime.places import Slot, TensorView
from zendnn_cffi.runtime.program import OutputSpec, Program

F32 = torch.float32


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert torch.get_num_threads() == 2, "a test left another number of threads"
    torch.set_num_threads(before)


def desc(*dims: int) -> MemoryDesc:
    return MemoryDesc(dims, F32, strides=tuple(torch.empty(dims, device="meta").stride()))


def binary(rows: int, post_ops: PostOps | None = None) -> PrimitiveDesc:
    row = desc(rows, 1024)
    return PrimitiveDesc(descriptors.binary("add", row, row, row), Attr(post_ops or PostOps()))


def eltwise(kind: str, rows: int) -> PrimitiveDesc:
    return PrimitiveDesc(descriptors.eltwise(kind, desc(rows, 1024)))


def described(pd: PrimitiveDesc) -> bool:
    return is_small(pd, pd.expected_args)


@pytest.mark.parametrize(
    ("make", "small"),
    (
        (lambda: binary(8), True),  # 96 KiB
        (lambda: binary(9), False),
        (lambda: binary(8, PostOps().eltwise("relu").eltwise("linear", 2.0)), True),
        (lambda: binary(8, PostOps().eltwise("gelu_erf")), False),
        (lambda: binary(1, PostOps().eltwise("gelu_erf")), True),
        (lambda: binary(8, PostOps().binary("mul", desc(8, 1024))), False),  # a fourth operand
        (lambda: eltwise("relu", 12), True),
        (lambda: eltwise("relu", 13), False),
        (lambda: eltwise("tanh", 2), True),
        (lambda: eltwise("tanh", 3), False),
        (lambda: PrimitiveDesc(descriptors.reduction("max", desc(23, 1024), desc(23, 1))), True),
        (lambda: PrimitiveDesc(descriptors.reduction("max", desc(24, 1024), desc(24, 1))), False),
        (lambda: PrimitiveDesc(descriptors.layer_normalization(desc(3, 1024), 1e-5)), True),
        (lambda: PrimitiveDesc(descriptors.layer_normalization(desc(4, 1024), 1e-5)), False),
        (lambda: PrimitiveDesc(descriptors.softmax(desc(4, 64), 1)), False),  # made for its threads
        (lambda: PrimitiveDesc(descriptors.matmul(desc(2, 8), desc(8, 8), None, desc(2, 8))), False),
    ),
)
def test_which_primitives_are_small(make: Callable[[], PrimitiveDesc], small: bool) -> None:
    assert described(make()) is small


def told(count: list[int]) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """A call that notes the number of threads it has."""
    return (lambda: count.append(torch.get_num_threads())), ()


@pytest.mark.parametrize(
    "small", ([False], [True], [True, True], [False, True, False], [True, False, True], [False, True, True]), ids=str
)
def test_a_run_of_small_calls_has_one_thread(small: list[bool]) -> None:
    seen: list[int] = []
    alone = Alone([told(seen) for _ in small], small)
    changes = sum(a != b for a, b in zip([False, *small], [*small, False], strict=True))
    sequence = alone.sequence()
    assert len(sequence) == len(small) + changes
    for function, arguments in sequence:
        assert not function(*arguments)
    assert seen == [1 if one else 2 for one in small]
    assert torch.get_num_threads() == 2


def test_a_thread_with_another_number_makes_the_calls_as_they_are() -> None:
    seen: list[int] = []
    alone = Alone([told(seen)] * 2, [True, False])
    with computing_with(3):
        sequence = alone.sequence()
        assert sequence is alone.whole
        alone.restore(sequence)
        with alone.with_its_threads(True):
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 3


def test_one_thread_alone_changes_nothing() -> None:
    with computing_with(1):
        alone = Alone([told([])], [True])
        assert alone.sequence() is alone.whole


INPUT, OUTPUT, ARENA = Slot("input"), Slot("output"), Slot("arena", 0, 64)
SHAPE = (4, 6)
ROW = desc(*SHAPE)


def small_then(function: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    """abs, which is small, into the arena; then what is given; then abs again."""

    def call(src: Slot, dst: Slot) -> PrimitiveCall:
        pd = PrimitiveDesc(descriptors.eltwise("abs", ROW))
        return PrimitiveCall("abs", Primitive(pd), {ARG_SRC: (src, ROW), ARG_DST: (dst, ROW)}, "eltwise")

    place = TensorView(ARENA, SHAPE, (6, 1), F32)
    return Program(
        [call(INPUT, ARENA), TorchCall("then", function, (place,), place), call(ARENA, OUTPUT)],
        [OutputSpec(SHAPE, (6, 1), F32)],
        (),
        160,
    )


def test_pytorch_between_small_primitives_has_all_threads() -> None:
    seen: list[int] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return x * -2

    program, x = small_then(note), torch.randn(SHAPE)
    assert torch.equal(program([x])[0], (x * 2).abs())
    assert torch.equal(program.run_timed([x])[0][0], (x * 2).abs())
    with torch.profiler.profile():
        assert torch.equal(program([x])[0], (x * 2).abs())
    assert seen == [2, 2, 2]
    context = program._idle[0]
    assert len(context.alone.sequence()) == 3 + 4  # one and all again, twice


@pytest.mark.parametrize("error", (KeyboardInterrupt, RuntimeError))
def test_threads_come_back_after_an_error(error: type[BaseException]) -> None:
    """Where a small call itself does not return: a signal comes behind it."""

    def fail() -> None:
        raise error

    program = small_then(lambda x: x)
    program([torch.randn(SHAPE)])
    context = program._idle[0]
    context.alone = Alone([(fail, ())], [True])
    with pytest.raises(error):
        program([torch.randn(SHAPE)])
    assert torch.get_num_threads() == 2


def test_threads_come_back_after_a_status() -> None:
    program = small_then(lambda x: x)
    program([torch.randn(SHAPE)])
    context = program._idle[0]
    context.alone = Alone([(lambda: 2, ())] * 3, [True, False, True])
    with pytest.raises(zendnn_cffi.ZenDNNError, match="abs"):
        program([torch.randn(SHAPE)])
    assert torch.get_num_threads() == 2


def test_results_are_the_same_bits() -> None:
    """Of each kind, by one thread and by two."""
    x = torch.randn(20, 1024)
    scale = torch.randn(1024)
    both = []
    for pd in (
        PrimitiveDesc(descriptors.layer_normalization(desc(3, 1024), 1e-5, scale=False, shift=False)),
        PrimitiveDesc(descriptors.eltwise("tanh", desc(2, 1024))),
        PrimitiveDesc(descriptors.reduction("sum", desc(20, 1024), desc(20, 1))),
        PrimitiveDesc(descriptors.binary("mul", desc(8, 1024), desc(1, 1024), desc(8, 1024))),
    ):
        results = []
        for count in (1, 2):
            src, dst = pd.src_desc, pd.dst_desc
            assert src is not None and dst is not None and described(pd)
            out = torch.zeros(dst.dims)
            args = {ARG_SRC: zendnn_cffi.Memory(src, x[: src.dims[0]]), ARG_DST: zendnn_cffi.Memory(dst, out)}
            if pd.op is not None and pd.op.kind == "binary":
                args[ARG_SRC_1] = zendnn_cffi.Memory(desc(1, 1024), scale[None])
            with computing_with(count):
                Primitive(pd).execute(args)
            results.append(out)
        both.append(torch.equal(*results))
    assert both == [True] * 4


def test_a_network_of_small_layers() -> None:
    """Their results are those of PyTorch, the thread keeps its number, and the plan has one thread for a part of it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).eval()
    x = torch.randn(3, 64)
    fast = zendnn_cffi.optimize(model, (x,))
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert torch.get_num_threads() == 2
    (region,) = fast.regions().values()
    (lowered,) = region.lowered.values()
    assert [call.kind for call in lowered.program.calls if isinstance(call, PrimitiveCall) and call.is_small] == [
        "layer_normalization"
    ]


@pytest.mark.parametrize("kind", (nn.LSTM, nn.GRU))
def test_loops_over_steps(kind: type[nn.LSTM | nn.GRU]) -> None:
    layer, x = kind(8, 520).eval(), torch.randn(6, 1, 8)
    fast = zendnn_cffi.optimize(layer, (x,))
    with torch.no_grad():
        torch.testing.assert_close(fast(x)[0], layer(x)[0])
    assert torch.get_num_threads() == 2
