"""Memory descriptors and memory objects: what they say, what they refuse, and whose memory they keep alive."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zendnn_cffi
from tests.zendnn_cffi.functional.support import few
from zendnn_cffi import Engine, Memory, MemoryDesc, Primitive, PrimitiveDesc, Stream, ZenDNNError
from zendnn_cffi.primitives.memory import default_stream
from zendnn_cffi.primitives.primitive import ARG_DST, ARG_SRC

F32 = torch.float32
SIZES = st.integers(1, 6)


def copied(src: torch.Tensor, through: MemoryDesc) -> torch.Tensor:
    """Return src after a copy into the layout ``through`` and back."""
    plain = MemoryDesc.from_tensor(src)
    middle = Memory(through, torch.zeros(through.size_bytes, dtype=torch.uint8))
    back = torch.zeros_like(src)
    Primitive(PrimitiveDesc.reorder(plain, through)).execute({ARG_SRC: Memory(plain, src), ARG_DST: middle})
    Primitive(PrimitiveDesc.reorder(through, plain)).execute({ARG_SRC: middle, ARG_DST: Memory(plain, back)})
    return back


class TestMemoryDesc:
    @pytest.mark.parametrize(
        ("dims", "tag", "strides"),
        [
            ((2, 3, 5, 7), "nchw", (105, 35, 7, 1)),
            ((2, 3, 5, 7), "nhwc", (105, 1, 21, 3)),
            ((2, 3, 5), "nwc", (15, 1, 3)),
            ((2, 3, 4, 5, 6), "ndhwc", (360, 1, 90, 18, 3)),
            ((4, 6), "ab", (6, 1)),
            ((4, 6), "ba", (1, 4)),
        ],
    )
    def test_tags_and_strides_describe_the_same(self, dims: Any, tag: str, strides: Any) -> None:
        tagged, strided = MemoryDesc(dims, F32, tag), MemoryDesc(dims, F32, strides=strides)
        assert tagged == strided and hash(tagged) == hash(strided)
        assert tagged.strides == strides and tagged.is_plain and tagged.is_dense and not tagged.is_any
        assert tagged.size_bytes == 4 * int(np.prod(dims))
        assert tagged.format == tag

    @pytest.mark.parametrize(
        "dims", [(1, 16, 1, 1), (1, 32, 1, 5), (2, 17, 3, 1), (16, 32, 4, 4), (1, 1, 1, 1), (0, 16, 2, 2)]
    )
    def test_equal_layouts_have_one_hash_and_others_mostly_their_own(self, dims: tuple[int, ...]) -> None:
        """Equality leaves out the stride of a dimension of one; a hash of sizes alone makes each dictionary a list."""
        tags = ("nchw", "nhwc", "cdba", "nChw8c", "nChw16c", "aBcd16b", "ABcd16b16a", "ABcd8a8b")
        layouts = [MemoryDesc(dims, F32, tag) for tag in tags]
        plain = [desc.strides for desc in layouts if desc.strides is not None]
        never_taken = [tuple(s if n > 1 else 977 for n, s in zip(dims, strides, strict=True)) for strides in plain]
        layouts += [MemoryDesc(dims, F32, strides=strides) for strides in never_taken]
        for a in layouts:
            assert all(hash(a) == hash(b) for b in layouts if a == b)
        distinct = [d for i, d in enumerate(layouts) if d not in layouts[:i]]
        assert len({hash(d) for d in distinct}) >= len(distinct) - 2

    def test_without_tag_or_strides_it_is_row_major(self) -> None:
        assert MemoryDesc((2, 3, 4), F32) == MemoryDesc.from_tensor(torch.zeros(2, 3, 4))

    def test_blocked_layouts_are_padded(self) -> None:
        desc = MemoryDesc((2, 20, 5, 6), F32, "nChw16c")
        assert desc.inner_blocks == ((1, 16),) and desc.padded_dims == (2, 32, 5, 6)
        assert desc.size_bytes == 4 * 2 * 32 * 5 * 6
        assert desc.strides is None and not desc.is_plain and desc.format == "nChw16c"
        assert MemoryDesc((32, 16, 3, 3), F32, "OIhw16i16o").format == "ABcd16b16a"

    def test_any_has_no_layout(self) -> None:
        desc = MemoryDesc((2, 3), F32, "any")
        assert desc.is_any and desc.format == "any" and desc.size_bytes == 0 and desc.strides is None

    @few
    @given(st.lists(SIZES, min_size=1, max_size=5), st.randoms(use_true_random=False))
    def test_describes_any_permuted_tensor(self, dims: list[int], random: Any) -> None:
        axes = list(range(len(dims)))
        random.shuffle(axes)
        tensor = torch.randn(dims).permute(axes)
        desc = MemoryDesc.from_tensor(tensor)
        assert desc.dims == tuple(tensor.shape) and desc.strides == tensor.stride()
        assert desc == MemoryDesc(dims, F32).permute(axes)
        assert torch.equal(copied(tensor, MemoryDesc(tensor.shape, F32)), tensor)

    @few
    @given(st.lists(SIZES, min_size=4, max_size=4), st.sampled_from(["nhwc", "nChw16c", "nChw8c", "nchw", "cdba"]))
    def test_copies_through_any_layout_and_back(self, dims: list[int], tag: str) -> None:
        tensor = torch.randn(dims)
        assert torch.equal(copied(tensor, MemoryDesc(dims, F32, tag)), tensor)

    @pytest.mark.parametrize("tag", ["nchw", "nhwc", "nChw16c"])
    def test_submemory_is_a_box_of_the_whole(self, tag: str) -> None:
        whole = MemoryDesc((2, 48, 5, 6), F32, tag)
        part = whole.submemory((2, 16, 5, 6), (0, 32, 0, 0))
        buffer = torch.zeros(whole.size_bytes // 4)
        src = torch.randn(2, 16, 5, 6)
        plain = MemoryDesc.from_tensor(src)
        Primitive(PrimitiveDesc.reorder(plain, part)).execute(
            {ARG_SRC: Memory(plain, src), ARG_DST: Memory(part, buffer)}
        )
        back = torch.zeros(2, 48, 5, 6)
        Primitive(PrimitiveDesc.reorder(whole, MemoryDesc.from_tensor(back))).execute(
            {ARG_SRC: Memory(whole, buffer), ARG_DST: Memory(MemoryDesc.from_tensor(back), back)}
        )
        assert torch.equal(back[:, 32:], src) and not back[:, :32].any()
        assert not part.is_dense and part.offset0 > 0
        rebased, offset_bytes = part.rebased()
        assert rebased.offset0 == 0 and offset_bytes == 4 * part.offset0
        assert part.size_bytes == rebased.size_bytes + offset_bytes <= whole.size_bytes

    def test_reshape_and_with_dtype(self) -> None:
        desc = MemoryDesc((4, 6), F32)
        assert desc.reshape((2, 2, 6)) == MemoryDesc((2, 2, 6), F32)
        assert desc.with_dtype(torch.bfloat16) == MemoryDesc((4, 6), torch.bfloat16)
        with pytest.raises(ValueError, match="elements"):
            desc.reshape((5, 5))
        with pytest.raises(ZenDNNError, match="reshaping"):
            MemoryDesc((4, 6), F32, "ba").reshape((24,))

    def test_equal_content_is_equal_and_other_content_is_not(self) -> None:
        base = MemoryDesc((2, 3), F32)
        assert len({base, MemoryDesc((2, 3), F32, "ab"), MemoryDesc([2, 3], F32, strides=[3, 1])}) == 1
        others = [
            MemoryDesc((2, 3), F32, "ba"),
            MemoryDesc((3, 2), F32),
            MemoryDesc((2, 3), torch.bfloat16),
            MemoryDesc((2, 3), F32, "any"),
        ]
        assert all(base != other for other in others) and base != "desc"

    def test_is_shared_by_copies_and_not_pickled(self) -> None:
        desc = MemoryDesc((2, 3), F32)
        assert copy.deepcopy(desc) is desc and copy.copy(desc) is desc
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(desc)

    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: MemoryDesc((2, -1), F32), ValueError, r"dims\[1\]"),
            (lambda: MemoryDesc((), F32), ValueError, "1 to 12"),
            (lambda: MemoryDesc((1,) * 13, F32), ValueError, "1 to 12"),
            (lambda: MemoryDesc((2, 2.5), F32), TypeError, r"dims\[1\]"),
            (lambda: MemoryDesc((2**40, 2**40), F32), ValueError, "more memory"),
            (lambda: MemoryDesc("23", F32), TypeError, "dims"),
            (lambda: MemoryDesc((2, 3), torch.float64), TypeError, "float64"),
            (lambda: MemoryDesc((2, 3), "f32"), TypeError, "torch.dtype"),
            (lambda: MemoryDesc((2, 3), F32, "nhwc"), ZenDNNError, "nhwc"),
            (lambda: MemoryDesc((2, 3), F32, "f32"), ValueError, "layout name"),
            (lambda: MemoryDesc((2, 3), F32, "engine_create"), ValueError, "layout name"),
            (lambda: MemoryDesc((2, 3), F32, 5), TypeError, "tag"),
            (lambda: MemoryDesc((2, 3), F32, "ab", strides=(3, 1)), ValueError, "not both"),
            (lambda: MemoryDesc((2, 3), F32, strides=(1,)), ValueError, "strides"),
            (lambda: MemoryDesc((2, 3), F32, strides=(2**59, 1)), ValueError, "reach"),
            (lambda: MemoryDesc((3, 4), F32, strides=(2, 1)), ZenDNNError, "smaller ones reach, gaps included"),
            (lambda: MemoryDesc((2, 3), F32).submemory((2, 3), (1, 0)), ValueError, "past"),
            (lambda: MemoryDesc((2, 3), F32).permute((0, 0)), ValueError, "permutation"),
            (lambda: MemoryDesc.from_tensor(torch.zeros(2, device="meta")), ValueError, "meta"),
            (lambda: MemoryDesc.from_tensor([1, 2]), TypeError, "torch tensor"),
        ],
    )
    def test_refusals_name_the_argument(self, make: Callable[[], Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            make()


class TestMemory:
    @pytest.mark.parametrize(
        ("data", "error", "message"),
        [
            (torch.zeros(5), ValueError, "20 bytes.*needs 24"),
            (torch.zeros(2, 3, dtype=torch.float64), TypeError, "float64"),
            (torch.zeros(2, 3, device="meta"), ValueError, "meta"),
            (torch.zeros(2, 3).to_sparse(), ValueError, "to_dense"),
            (torch.zeros(30, dtype=torch.uint8)[1:].view(torch.uint8), ValueError, None),
            (torch._efficientzerotensor((2, 3)), ValueError, "no data"),
            (torch.complex(torch.zeros(2, 3), torch.ones(2, 3)).conj().imag, ValueError, "resolve_neg"),
            (np.zeros((2, 3)), TypeError, "float64"),
            (np.zeros((2, 3), np.float32)[::-1], ValueError, "negative strides"),
            (np.zeros((2, 3), ">f4"), TypeError, "byte order"),
            (np.zeros(5, np.float32), ValueError, "20 bytes"),
            (0, ValueError, "address"),
            (-8, ValueError, "address"),
            ("buffer", TypeError, "torch.Tensor"),
            (True, TypeError, "torch.Tensor"),
        ],
    )
    def test_refuses_what_it_cannot_use(self, data: Any, error: type[Exception], message: str | None) -> None:
        desc = MemoryDesc((2, 3), F32)
        if message is None:
            Memory(desc, data)  # bytes may lie anywhere
            return
        with pytest.raises(error, match=message):
            Memory(desc, data)

    @pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
    def test_refuses_quantized_tensors(self) -> None:
        with pytest.raises(ValueError, match="quantized"):
            Memory(MemoryDesc((2, 3), torch.int8), torch.quantize_per_tensor(torch.zeros(2, 3), 1.0, 0, torch.qint8))

    def test_counts_the_storage_behind_the_first_element(self) -> None:
        buffer = torch.zeros(10)
        assert Memory(MemoryDesc((2, 3), F32), buffer[4:]).data_ptr == buffer[4:].data_ptr()
        with pytest.raises(ValueError, match="20 bytes"):
            Memory(MemoryDesc((2, 3), F32), buffer[5:])

    def test_needs_a_layout(self) -> None:
        with pytest.raises(ValueError, match="any"):
            Memory(MemoryDesc((2, 3), F32, "any"), torch.zeros(6))
        with pytest.raises(TypeError, match="MemoryDesc"):
            Memory("desc", torch.zeros(6))  # type: ignore[arg-type]

    def test_keeps_its_tensor_alive_until_closed_or_rebound(self) -> None:
        tensor, other = torch.zeros(6), torch.zeros(6)
        seen, desc = weakref.ref(tensor), MemoryDesc((6,), F32)
        memory = Memory(desc, tensor)
        del tensor
        gc.collect()
        assert seen() is not None
        handle = memory.handle
        memory.rebind(other)
        assert seen() is None and memory.handle == handle and memory.data_ptr == other.data_ptr()
        seen = weakref.ref(other)
        del other
        memory.close()
        assert seen() is None

    def test_closing_twice_is_allowed_and_use_afterwards_is_not(self) -> None:
        memory = Memory(MemoryDesc((6,), F32), torch.zeros(6))
        memory.close()
        memory.close()
        for use in (lambda: memory.handle, lambda: memory.rebind(torch.zeros(6))):
            with pytest.raises(ValueError, match="closed"):
                use()
        assert "closed" in repr(memory)

    def test_notices_a_storage_that_moved(self) -> None:
        tensor = torch.zeros(6)
        memory = Memory(MemoryDesc((6,), F32), tensor)
        assert memory.is_current()
        tensor.untyped_storage().resize_(0)
        assert not memory.is_current()

    @pytest.mark.parametrize("action", [copy.copy, copy.deepcopy, pickle.dumps])
    def test_is_neither_copied_nor_pickled(self, action: Callable[[Any], Any]) -> None:
        for owner in (Memory(MemoryDesc((6,), F32), torch.zeros(6)), Engine.cpu(), default_stream()):
            with pytest.raises(TypeError, match="owns a C handle"):
                action(owner)

    def test_numpy_arrays_are_memory_too(self) -> None:
        array, out = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((3, 2), np.float32).T
        pd = PrimitiveDesc.reorder(MemoryDesc.from_tensor(array), MemoryDesc.from_tensor(out))
        Primitive(pd).execute(
            {ARG_SRC: Memory(MemoryDesc.from_tensor(array), array), ARG_DST: Memory(MemoryDesc.from_tensor(out), out)}
        )
        assert np.array_equal(out, array)

    def test_writes_to_no_read_only_array(self) -> None:
        """Such may lie in bytes, which never change, or in a mapped file, where a write ends the process."""
        text = bytes(24)
        desc, src = MemoryDesc((6,), F32), torch.ones(6)
        array = np.frombuffer(text, np.float32)
        fixed, copying = Memory(desc, array), Primitive(PrimitiveDesc.reorder(desc, desc))
        with pytest.raises(ValueError, match="dst is a read-only array"):
            copying.execute({ARG_SRC: Memory(desc, src), ARG_DST: fixed})
        assert text == bytes(24)
        copying.execute({ARG_SRC: fixed, ARG_DST: Memory(desc, src)})
        assert not src.any()

    def test_zeroes_no_padding_of_a_read_only_array(self) -> None:
        array = np.ones(16 * 9, np.float32)
        array.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            Memory(MemoryDesc((1, 3, 3, 3), F32, "nChw16c"), array)
        assert array.all() and Memory(MemoryDesc((1, 16, 3, 3), F32, "nChw16c"), array).is_current()

    def test_notices_an_array_that_shrank_where_it_lies(self) -> None:
        array = np.zeros(1 << 20, np.float32)
        memory = Memory(MemoryDesc(array.shape, F32), array)
        assert memory.is_current()
        array.resize(16, refcheck=False)
        assert not memory.is_current()

    def test_many_memories_leave_nothing_behind(self) -> None:
        def resident_kib() -> int:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * 4

        desc, tensor = MemoryDesc((6,), F32), torch.zeros(6)
        growth_kib = []
        for _ in range(3):  # what is lost is lost in each round; what else grows once, as a trimmed heap does, is not
            before = resident_kib()
            for _ in range(10_000):
                Memory(desc, tensor)
            growth_kib.append(resident_kib() - before)
        assert min(growth_kib) < 2048  # a leaked memory object alone is a kibibyte

    def test_rebinding_while_another_thread_executes_is_refused_or_safe(self) -> None:
        desc = MemoryDesc((512, 512), F32)
        src, dst = Memory(desc, torch.ones(512, 512)), Memory(desc, torch.zeros(512, 512))
        primitive = Primitive(PrimitiveDesc.reorder(desc, desc))
        stop, errors = threading.Event(), []

        def execute() -> None:
            while not stop.is_set():
                try:
                    primitive.execute({ARG_SRC: src, ARG_DST: dst})
                except Exception as error:  # reported below
                    errors.append(error)

        torch_threads = torch.get_num_threads()
        thread = threading.Thread(target=lambda: (torch.set_num_threads(torch_threads), execute()))
        thread.start()
        refused = 0
        for _ in range(200):
            try:
                src.rebind(torch.ones(512, 512))
            except ValueError as error:
                assert "in use" in str(error)
                refused += 1
        stop.set()
        thread.join()
        assert not errors and dst.owner is not None and bool((torch.as_tensor(dst.owner) == 1).all())


class TestEngineAndStream:
    def test_the_shared_engine_is_one(self) -> None:
        assert Engine.cpu() is Engine.cpu() and Engine() is not Engine.cpu()

    @pytest.mark.parametrize("arguments", [("gpu",), ("cpu", 1), (None,)])
    def test_there_is_no_other_engine(self, arguments: tuple[Any, ...]) -> None:
        with pytest.raises(ValueError, match="one engine"):
            Engine(*arguments)

    def test_a_closed_engine_leaves_what_was_made_with_it(self) -> None:
        engine = Engine()
        memory, stream = Memory(MemoryDesc((6,), F32), torch.zeros(6), engine), Stream(engine)
        engine.close()
        engine.close()
        stream.wait()
        memory.rebind(torch.ones(6))
        for use in (lambda: engine.handle, lambda: Stream(engine), lambda: Memory(memory.desc, torch.zeros(6), engine)):
            with pytest.raises(ValueError, match="closed"):
                use()

    def test_the_shared_engine_comes_back_after_close(self) -> None:
        before = Engine.cpu().handle
        Engine.cpu().close()
        assert Engine.cpu().handle == before
        assert Memory(MemoryDesc((6,), F32), torch.zeros(6)).handle is not None

    def test_what_is_kept_runs_when_the_shared_engine_was_closed(self) -> None:
        """Kept primitives and streams were refused as another engine's: a model raised, or ran as plain PyTorch."""
        model, x = torch.nn.Conv2d(3, 16, 3, padding=1).eval(), torch.randn(2, 3, 16, 16)
        with torch.inference_mode():
            first = zendnn_cffi.optimize(model, tune="off")
            first(x)
            Engine.cpu().close()
            second = zendnn_cffi.optimize(model, tune="off")
            for fast in (first, second):
                torch.testing.assert_close(fast(x), model(x), atol=1e-5, rtol=1e-5)
                assert zendnn_cffi.explain(fast).offloaded_share == 1.0

    def test_each_thread_has_its_stream(self) -> None:
        streams = [default_stream()]
        thread = threading.Thread(target=lambda: streams.append(default_stream()))
        thread.start()
        thread.join()
        assert streams[0] is default_stream() and streams[0] is not streams[1]
        streams[0].close()
        assert default_stream() is not streams[0]
        with pytest.raises(ValueError, match="closed"):
            streams[0].wait()
