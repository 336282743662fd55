"""Primitive descriptors and primitives: every implementation offered is right, every wrong execution is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zendnn_cffi
from tests.tolerance import assert_close
from zendnn_cffi import (
    Attr,
    Engine,
    Memory,
    MemoryDesc,
    PostOps,
    Primitive,
    PrimitiveDesc,
    Stream,
    UnsupportedError,
    descriptors,
)
from zendnn_cffi.primitives import primitive_cache
from zendnn_cffi.primitives.primitive import (
    ARG_BIAS,
    ARG_DST,
    ARG_SCRATCHPAD,
    ARG_SRC,
    ARG_WEIGHTS,
    arg_name,
    arg_post_op,
)

F32 = torch.float32


def laid_out(tensor: torch.Tensor, desc: MemoryDesc) -> Memory:
    """Return tensor's values in a new memory of another layout."""
    plain = MemoryDesc.from_tensor(tensor)
    memory = Memory(desc, torch.zeros(desc.size_bytes, dtype=torch.uint8))
    Primitive(PrimitiveDesc.reorder(plain, desc)).execute({ARG_SRC: Memory(plain, tensor), ARG_DST: memory})
    return memory


def plain(memory: Memory, shape: Any, dtype: torch.dtype = F32) -> torch.Tensor:
    result = torch.zeros(shape, dtype=dtype)
    desc = MemoryDesc.from_tensor(result)
    Primitive(PrimitiveDesc.reorder(memory.desc, desc)).execute({ARG_SRC: memory, ARG_DST: Memory(desc, result)})
    return result


class Convolution:
    """A small convolution with bias, as descriptors and as tensors."""

    def __init__(
        self, layout: str = "nhwc", algorithm: str = "direct", attr: Attr | None = None, kernel_of: int = 3
    ) -> None:
        torch.manual_seed(0)
        self.x, self.w, self.b = torch.randn(2, 16, 9, 9), torch.randn(32, 16, kernel_of, kernel_of), torch.randn(32)
        self.op = descriptors.convolution(
            MemoryDesc(self.x.shape, F32, layout),
            MemoryDesc(self.w.shape, F32, "any"),
            MemoryDesc.from_tensor(self.b),
            MemoryDesc((2, 32, 9, 9), F32, layout),
            padding_l=kernel_of // 2,
            algorithm=algorithm,
        )
        self.attr = attr
        self.expected = F.conv2d(self.x.double(), self.w.double(), self.b.double(), padding=kernel_of // 2)

    def args(self, pd: PrimitiveDesc) -> dict[int, Memory]:
        assert pd.src_desc and pd.weights_desc and pd.bias_desc and pd.dst_desc
        return {
            ARG_SRC: laid_out(self.x, pd.src_desc),
            ARG_WEIGHTS: laid_out(self.w, pd.weights_desc),
            ARG_BIAS: Memory(pd.bias_desc, self.b),
            ARG_DST: Memory(pd.dst_desc, torch.zeros(pd.dst_desc.size_bytes, dtype=torch.uint8)),
        }


@pytest.mark.needs("avx512")
@pytest.mark.parametrize("algorithm", ["direct", "winograd", "auto"])
@pytest.mark.parametrize("layout", ["any", "nhwc", "nchw", "nChw16c"])
def test_every_implementation_without_a_known_problem_is_right(layout: str, algorithm: str) -> None:
    case = Convolution(layout, algorithm)
    try:
        first = PrimitiveDesc(case.op)
    except UnsupportedError:
        assert algorithm == "winograd" and layout in ("nhwc", "nchw")
        return
    found = list(first.implementations())
    assert found[0].implementation == first.implementation
    for pd in found:
        args = case.args(pd)
        Primitive(pd).execute(args)
        assert_close(plain(args[ARG_DST], case.expected.shape), case.expected, k=16 * 9)


@pytest.mark.parametrize("algorithm", ["direct", "winograd", "auto"])
@pytest.mark.parametrize("layout", ["any", "nhwc", "nchw"])
@pytest.mark.parametrize("attr", [None, Attr(PostOps().eltwise("relu"))], ids=["plain", "relu"])
def test_every_implementation_is_listed_without_a_first_choice(
    attr: Attr | None, layout: str, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = Convolution(layout, algorithm).op
    try:
        first = PrimitiveDesc(op, attr)
    except UnsupportedError:
        with pytest.raises(UnsupportedError, match="listing the implementations"):
            PrimitiveDesc.every(op, attr)
        return
    expected = [pd._identity for pd in first.implementations()]
    monkeypatch.setattr(PrimitiveDesc, "__init__", lambda *_: pytest.fail("the library chose one first"))
    assert [pd._identity for pd in PrimitiveDesc.every(op, attr)] == expected


@pytest.mark.parametrize(("op", "attr", "message"), [(None, None, "op_desc must be"), ("op", "relu", "attr must be")])
def test_listing_wants_descriptors(op: Any, attr: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        PrimitiveDesc.every(Convolution().op if op else op, attr)


def test_none_is_listed_where_all_are_known_to_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrimitiveDesc, "known_problem", "is wrong")
    assert PrimitiveDesc.every(Convolution().op) == []


def own_implementation(primitive: Primitive) -> str:
    lib, ffi = zendnn_cffi.lib, zendnn_cffi.ffi
    slot = ffi.new("const_zendnn_primitive_desc_t *")
    assert lib.zendnn_primitive_get_primitive_desc(primitive.handle, slot) == 0
    return primitive_cache.implementation_name(slot[0])


def test_a_primitive_is_of_its_descriptors_implementation() -> None:
    """The library's cache takes the second of "direct" for the second of "auto", which is another one."""
    primitive_cache.clear()
    for algorithm in ("direct", "auto"):
        first = PrimitiveDesc(Convolution("any", algorithm).op)
        Primitive(first)
        for pd in first.implementations():
            assert own_implementation(Primitive(pd)) == pd.implementation


@pytest.mark.needs("avx512")
def test_a_primitive_is_compiled_from_nothing_that_is_gone() -> None:
    """The library's cache lends descriptors that point to the post-ops of the first one: others may lie there now."""
    case = Convolution("nhwc")
    clipped, other = Attr(PostOps().eltwise("clip", -1.0, 1.0)), Attr(PostOps().eltwise("linear", 100.0, 5.0))
    Primitive(PrimitiveDesc(case.op, clipped))
    gc.collect()
    again = PrimitiveDesc(case.op, clipped)
    held = [PrimitiveDesc(case.op, other) for _ in range(50)]
    primitive_cache.clear()
    args = case.args(again)
    Primitive(again).execute(args)
    assert held and again.implementation.startswith("brgconv")
    assert_close(plain(args[ARG_DST], case.expected.shape), case.expected.clamp(-1, 1), k=16 * 9)


def test_equal_primitives_are_one() -> None:
    """Of equal descriptors for as many threads; not with a scratchpad of its own, nor where anything differs."""
    threads = torch.get_num_threads()

    def handle(attr: Attr | None = None, **options: Any) -> Any:
        return Primitive(PrimitiveDesc(Convolution("nhwc", **options).op, attr)).handle

    first = handle()
    assert handle() is first and handle(Attr(PostOps())) is first
    assert handle(Attr(PostOps().eltwise("relu"))) is not handle(Attr(PostOps().eltwise("relu", 0.5)))
    assert handle(kernel_of=5) is not first and handle(Attr(scratchpad="library")) is not first
    own = PrimitiveDesc(Convolution("nhwc").op)
    try:
        torch.set_num_threads(threads + 1)
        assert handle() is not first
        assert Primitive(own).handle is not handle()  # a descriptor of another number of threads
    finally:
        torch.set_num_threads(threads)
    assert handle() is first
    primitive_cache.clear()
    assert handle() is not first


def test_the_librarys_own_cache_keeps_nothing() -> None:
    keep, size = Primitive(PrimitiveDesc(Convolution().op)), zendnn_cffi.ffi.new("int *")
    assert zendnn_cffi.lib.zendnn_get_primitive_cache_capacity(size) == 0 and size[0] == 0
    assert primitive_cache.capacity() == 1024 and keep


def test_implementations_are_listed_once_in_order_even_after_some_exist() -> None:
    pd = PrimitiveDesc(Convolution(kernel_of=5).op)
    found = list(pd.implementations(everything=True))
    names = [other.implementation for other in found]
    assert len(names) == len(set(names)) >= 4
    for last_created in (4, 2, 0, 5):
        keep = Primitive(found[last_created % len(found)])
        assert [other.implementation for other in pd.implementations(everything=True)] == names
        assert PrimitiveDesc(Convolution(kernel_of=5).op).implementation == names[0]
        del keep


def test_implementations_known_to_be_wrong_are_passed_over() -> None:
    pd = PrimitiveDesc(Convolution("nhwc").op)
    everything = {other.implementation: other.known_problem for other in pd.implementations(everything=True)}
    assert "wrong numbers" in str(everything["x64:gemm:jit"])
    assert "x64:gemm:jit" not in {other.implementation for other in pd.implementations()}
    whole = MemoryDesc((2, 48, 9, 9), F32, "nhwc")
    sliced = descriptors.convolution(
        MemoryDesc((2, 16, 9, 9), F32, "nhwc"),
        MemoryDesc((32, 16, 3, 3), F32, "any"),
        None,
        whole.submemory((2, 32, 9, 9), (0, 16, 0, 0)),
        padding_l=1,
    )
    assert PrimitiveDesc(sliced).implementation.startswith("ref")


def test_queries() -> None:
    pd = PrimitiveDesc(Convolution("any").op)
    assert pd.src_desc is pd.src_desc and pd.src_desc is not None and not pd.src_desc.is_any
    assert set(pd.expected_args) - {ARG_SCRATCHPAD} == {ARG_SRC, ARG_WEIGHTS, ARG_BIAS, ARG_DST}
    assert pd.query_md("workspace") is None
    for what, index in (("nothing", 0), ("src", -1), ("src", "x")):
        with pytest.raises(ValueError, match="must be"):
            pd.query_md(what, index)  # type: ignore[arg-type]
    without = descriptors.convolution(
        MemoryDesc((2, 16, 9, 9), F32, "nhwc"),
        MemoryDesc((32, 16, 3, 3), F32, "any"),
        None,
        MemoryDesc((2, 32, 7, 7), F32, "nhwc"),
    )
    assert PrimitiveDesc(without).bias_desc is None


def test_post_ops_and_their_arguments() -> None:
    residual = torch.randn(2, 32, 9, 9)
    chain = (
        PostOps().eltwise("relu", 0.1).binary("add", MemoryDesc(residual.shape, F32, "nhwc")).eltwise("clip", -1.0, 2.0)
    )
    case = Convolution(attr=Attr(chain))
    pd = PrimitiveDesc(case.op, case.attr)
    args = {**case.args(pd), arg_post_op(1): laid_out(residual, MemoryDesc(residual.shape, F32, "nhwc"))}
    primitive = Primitive(pd)
    primitive.execute(args)
    expected = (F.leaky_relu(case.expected, 0.1) + residual.double()).clamp(-1, 2)
    assert_close(plain(args[ARG_DST], expected.shape), expected, k=16 * 9, scale=case.expected.abs().max().item())
    del args[arg_post_op(1)]
    with pytest.raises(ValueError, match="missing src_1 of post-op 1"):
        primitive.execute(args)


def test_sum_post_op_adds_to_the_destination() -> None:
    case = Convolution(attr=Attr(PostOps().sum(0.5)))
    pd = PrimitiveDesc(case.op, case.attr)
    before = torch.randn(2, 32, 9, 9)
    args = {**case.args(pd), ARG_DST: laid_out(before, pd.dst_desc or pytest.fail("no dst"))}
    Primitive(pd).execute(args)
    assert_close(plain(args[ARG_DST], before.shape), case.expected + 0.5 * before.double(), k=16 * 9)


class TestScratchpad:
    @pytest.mark.needs("avx512")
    def test_is_supplied_when_left_out(self) -> None:
        case = Convolution("any", "winograd")
        pd = PrimitiveDesc(case.op)
        assert pd.scratchpad_desc is not None and pd.scratchpad_desc.size_bytes > 0
        args = case.args(pd)
        Primitive(pd).execute(args)
        assert_close(plain(args[ARG_DST], case.expected.shape), case.expected, k=16 * 9)

    @pytest.mark.needs("avx512")
    def test_may_be_given_and_must_fit(self) -> None:
        case = Convolution("any", "winograd")
        pd = PrimitiveDesc(case.op)
        assert pd.scratchpad_desc is not None
        args = case.args(pd)
        args[ARG_SCRATCHPAD] = Memory(pd.scratchpad_desc, torch.empty(pd.scratchpad_desc.size_bytes, dtype=torch.uint8))
        Primitive(pd).execute(args)
        assert_close(plain(args[ARG_DST], case.expected.shape), case.expected, k=16 * 9)
        args[ARG_SCRATCHPAD] = Memory(MemoryDesc((64,), torch.uint8), torch.empty(64, dtype=torch.uint8))
        with pytest.raises(ValueError, match="scratchpad is"):
            Primitive(pd).execute(args)

    @pytest.mark.needs("avx512")
    def test_of_the_library_stays_in_its_thread(self) -> None:
        case = Convolution("any", "winograd", Attr(scratchpad="library"))
        pd = PrimitiveDesc(case.op, case.attr)
        primitive, args, errors = Primitive(pd), case.args(pd), []

        def execute() -> None:
            try:
                primitive.execute(args)
            except Exception as error:  # looked at below
                errors.append(error)

        primitive.execute(args)
        thread = threading.Thread(target=execute)
        thread.start()
        thread.join()
        assert len(errors) == 1 and isinstance(errors[0], ValueError) and "thread" in str(errors[0])


class TestRefusals:
    def case(self) -> tuple[Primitive, dict[int, Memory]]:
        case = Convolution()
        pd = PrimitiveDesc(case.op)
        return Primitive(pd), case.args(pd)

    def test_of_missing_and_superfluous_arguments(self) -> None:
        primitive, args = self.case()
        with pytest.raises(ValueError, match="takes no mean"):
            primitive.execute({**args, 49: args[ARG_BIAS]})
        del args[ARG_WEIGHTS]
        with pytest.raises(ValueError, match="missing weights"):
            primitive.execute(args)

    def test_of_another_layout(self) -> None:
        primitive, args = self.case()
        args[ARG_SRC] = Memory(MemoryDesc((2, 16, 9, 9), F32, "nchw"), torch.zeros(2, 16, 9, 9))
        with pytest.raises(ValueError, match="src is .*nchw.*needs .*nhwc.*reorder"):
            primitive.execute(args)

    def test_of_unbound_closed_and_moved_memories(self) -> None:
        primitive, args = self.case()
        for spoil, message in (
            (lambda m: m.rebind(None), "not bound"),
            (lambda m: m.owner.untyped_storage().resize_(0), "resized or moved"),
            (lambda m: m.close(), "closed"),
        ):
            src = laid_out(torch.zeros(2, 16, 9, 9), args[ARG_SRC].desc)
            spoil(src)
            with pytest.raises(ValueError, match=message):
                primitive.execute({**args, ARG_SRC: src})

    def test_of_things_that_are_no_memory(self) -> None:
        primitive, args = self.case()
        with pytest.raises(TypeError, match="src must be a Memory"):
            primitive.execute({**args, ARG_SRC: torch.zeros(2)})  # type: ignore[dict-item]

    def test_of_a_closed_primitive_and_stream(self) -> None:
        primitive, args = self.case()
        stream = Stream()
        stream.close()
        with pytest.raises(ValueError, match="stream is closed"):
            primitive.execute(args, stream)
        primitive.close()
        primitive.close()
        with pytest.raises(ValueError, match="primitive .* is closed"):
            primitive.execute(args)

    def test_of_another_thread_count(self) -> None:
        primitive, args = self.case()
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(before + 1)
            with pytest.raises(ValueError, match=f"created for {before} threads"):
                primitive.execute(args)
        finally:
            torch.set_num_threads(before)
        primitive.execute(args)

    @pytest.mark.parametrize("action", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_of_copies(self, action: Callable[[Any], Any]) -> None:
        primitive, _ = self.case()
        for owner in (primitive, primitive.pd, primitive.pd.attr):
            with pytest.raises(TypeError, match="owns a C handle"):
                action(owner)

    def test_of_wrong_types_in_constructors(self) -> None:
        desc = MemoryDesc((2, 3), F32)
        for make, message in (
            (lambda: PrimitiveDesc("op"), "OpDesc"),  # type: ignore[arg-type]
            (lambda: PrimitiveDesc(descriptors.eltwise("relu", desc), "attr"), "Attr"),  # type: ignore[arg-type]
            (lambda: Primitive("pd"), "PrimitiveDesc"),  # type: ignore[arg-type]
            (lambda: PrimitiveDesc.reorder(desc, None), "dst_desc"),  # type: ignore[arg-type]
        ):
            with pytest.raises(TypeError, match=message):
                make()
        with pytest.raises(ValueError, match="keeps them"):
            PrimitiveDesc.reorder(desc, MemoryDesc((3, 2), F32))
        with pytest.raises(ValueError, match="both layouts"):
            PrimitiveDesc.reorder(desc, MemoryDesc((2, 3), F32, "any"))

    def test_of_what_no_implementation_takes_says_what_was_asked(self) -> None:
        a, b, dst = (MemoryDesc(dims, torch.float16) for dims in ((2, 3), (3, 4), (2, 4)))
        with pytest.raises(UnsupportedError, match=r"matmul.*f16\[2, 3\].*f16\[3, 4\]") as caught:
            PrimitiveDesc(descriptors.matmul(a, b, None, dst))
        assert caught.value.status == 3


def test_threads_share_a_primitive_with_memories_of_their_own() -> None:
    case = Convolution()
    pd = PrimitiveDesc(case.op)
    primitive, threads_of_torch, results = Primitive(pd), torch.get_num_threads(), []

    def work() -> None:
        torch.set_num_threads(threads_of_torch)
        args = case.args(pd)
        for _ in range(50):
            primitive.execute(args)
        results.append(plain(args[ARG_DST], case.expected.shape))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for result in results:
        assert_close(result, case.expected, k=16 * 9)


def test_primitives_outlive_what_they_were_made_from() -> None:
    case, engine = Convolution(), Engine()
    pd, stream = PrimitiveDesc(case.op, engine=engine), Stream(engine)
    engine.close()
    primitive, args, expected = Primitive(pd), case.args(pd), case.expected
    del pd
    case.op = None  # type: ignore[assignment]
    primitive.execute(args, stream)
    assert_close(plain(args[ARG_DST], expected.shape), expected, k=16 * 9)


def test_streams_of_other_engines_are_refused() -> None:
    case = Convolution()
    own, shared = PrimitiveDesc(case.op, engine=Engine()), PrimitiveDesc(case.op)
    for pd, stream in ((own, None), (own, Stream()), (shared, Stream(Engine()))):
        with pytest.raises(ValueError, match="another engine"):
            Primitive(pd).execute(case.args(pd), stream)


def test_argument_names() -> None:
    assert arg_name(ARG_SRC) == "src" and arg_name(arg_post_op(2)) == "src_1 of post-op 2"
    assert arg_name(8192 | 17) == "dst (zero points)" and arg_name(7) == "argument 7"
