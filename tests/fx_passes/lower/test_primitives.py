"""Primitives as candidates: which implementations are offered, what they run on, which stay."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from fx_passes.candidates.candidates import Candidate, Operand, Operation, PackedWeights, Result, Scratchpad, Weights
from fx_passes.candidates.layouts import layout, row_major
from fx_passes.candidates.specs import TensorSpec
from fx_passes.lower.context import NotLowered, SplitPostOps
from fx_passes.lower.primitives import (
    candidates,
    first_optimized,
    implementations,
    keep_optimized,
    optimized_implementations,
    remembering,
)
from zendnn_cffi.primitives import descriptors
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_WEIGHTS, PostOps
from zendnn_cffi.primitives.memory import MemoryDesc

F32 = torch.float32
SRC, DST = layout((1, 16, 8, 8), F32, "nhwc"), layout((1, 32, 8, 8), F32, "nhwc")
WEIGHT = MemoryDesc((32, 16, 3, 3), F32, "any")
SAME = {"strides": (1, 1), "dilation": (1, 1), "padding_l": (1, 1), "padding_r": (1, 1)}


def operation(*names: str) -> Operation:
    """An operation with candidates of these implementations."""
    graph = fx.Graph()
    node, spec = graph.placeholder("x"), TensorSpec((1,), F32, (1,))
    found = [Candidate(name, (), row_major((1,), F32), ()) for name in names]
    return Operation(node, "x", "kind", (), spec, found)


def test_reference_implementations_are_not_offered_beside_others() -> None:
    found = [pd.implementation for pd in implementations(descriptors.convolution, SRC, WEIGHT, None, DST, **SAME)]
    assert found
    assert not [name for name in found if name.startswith(("ref", "zendnn"))]


def test_a_reference_implementation_alone_is_offered() -> None:
    inner = row_major((4, 5, 6), F32)
    found = implementations(descriptors.softmax, inner, 0)
    assert [pd.implementation.split(":")[0] for pd in found] == ["ref"]
    assert optimized_implementations(descriptors.softmax, inner, 0) == []
    args = {ARG_SRC: Operand(0), ARG_DST: Result()}
    assert first_optimized(args, "softmax", descriptors.softmax, inner, 0) is None


def test_what_the_library_refuses_has_no_implementation() -> None:
    integers = row_major((4, 8), torch.int32)
    assert implementations(descriptors.softmax, integers, 1) == []  # when an implementation is chosen
    square = row_major((8, 8), torch.int32)
    assert implementations(descriptors.matmul, integers, square, None, integers) == []  # when it is described


def test_post_ops_are_part_of_the_implementation() -> None:
    relu = PostOps().eltwise("relu")
    (pd, *_) = implementations(descriptors.convolution, SRC, WEIGHT, None, DST, post_ops=relu, **SAME)
    assert pd.attr.post_ops == relu


def test_weights_take_the_layout_of_each_implementation() -> None:
    weight = torch.randn(32, 16, 3, 3)
    found = implementations(descriptors.convolution, SRC, WEIGHT, None, DST, **SAME)
    args = {ARG_SRC: Operand(0), ARG_WEIGHTS: PackedWeights("w", weight), ARG_DST: Result()}
    made = candidates(found, args, "convolution", (SRC,), DST, may_overwrite=0)
    assert [c.implementation for c in made] == [pd.implementation for pd in found]
    for candidate, pd in zip(made, found, strict=True):
        (call,) = candidate.calls
        assert call.args[ARG_WEIGHTS] == Weights("w", weight, pd.weights_desc)
        assert any(isinstance(a, Scratchpad) for a in call.args.values()) == (pd.scratchpad_desc is not None)
        assert (candidate.srcs, candidate.dst, candidate.may_overwrite) == ((SRC,), DST, 0)


def test_only_optimized_candidates_stay() -> None:
    kept = keep_optimized(operation("ref:any", "brgemm:avx512_core", "jit:avx2"), "nothing")
    assert [c.implementation for c in kept.candidates] == ["brgemm:avx512_core", "jit:avx2"]


@pytest.mark.parametrize("names", [(), ("ref:any",)])
def test_without_an_optimized_candidate_it_is_not_lowered(names: tuple[str, ...]) -> None:
    with pytest.raises(NotLowered, match="too odd"):
        keep_optimized(operation(*names), "too odd")


def test_post_ops_are_split_off_before_that() -> None:
    with pytest.raises(SplitPostOps) as split:
        keep_optimized(operation("ref:any"), "too odd", post_ops=2, or_reference=True)
    assert split.value.keep == 1
    kept = keep_optimized(operation("ref:any", "ref:other"), "too odd", or_reference=True)
    assert [c.implementation for c in kept.candidates] == ["ref:any"]


def test_equal_layers_are_asked_about_once() -> None:
    plain = PostOps()

    def offered(post_ops: PostOps = plain, dst: MemoryDesc = DST, **others: object) -> list[int]:
        parameters = {**SAME, **others, "post_ops": post_ops}
        return [id(pd) for pd in implementations(descriptors.convolution, SRC, WEIGHT, None, dst, **parameters)]

    relu, other = PostOps().eltwise("relu"), layout((1, 32, 8, 8), F32, "nChw16c")
    with remembering():
        first = offered(relu)
        assert first and offered(PostOps().eltwise("relu")) == first
        others = [offered(), offered(PostOps().eltwise("relu", 0.5)), offered(relu, algorithm="winograd")]
        others += [offered(PostOps().binary("add", DST)), offered(PostOps().binary("add", other)), offered(relu, other)]
        kept = implementations(descriptors.convolution, SRC, WEIGHT, None, DST, **SAME, post_ops=relu)
        kept.clear()  # a list of the caller's own
        assert offered(relu) == first
    found = [id for each in (first, *others) for id in each]
    assert len(set(found)) == len(found)


def test_equal_layers_of_other_regions_are_not_asked_about_again() -> None:
    def offered() -> list[int]:
        with remembering():
            return [id(pd) for pd in implementations(descriptors.convolution, SRC, WEIGHT, None, DST, **SAME)]

    first, threads = offered(), torch.get_num_threads()
    assert first and offered() == first
    try:
        torch.set_num_threads(threads + 1)  # its descriptors are others: they say how much scratch each thread has
        assert not set(offered()) & set(first)
    finally:
        torch.set_num_threads(threads)
    assert offered() == first
