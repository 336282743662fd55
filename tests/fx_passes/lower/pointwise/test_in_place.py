"""Post-ops as primitives of their own: in as few as the library has, each on what the one before it left."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import fx

from fx_passes.candidates.candidates import Candidate, Operand, Result
from fx_passes.candidates.layouts import row_major
from fx_passes.lower.pointwise.in_place import followed_by, in_place
from fx_passes.lower.post_ops import BinaryPostOp, Chain, EltwisePostOp, PostOp, build_chain
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC, ARG_SRC_1, arg_post_op

SHAPE = (2, 16, 5, 5)
DESC = row_major(SHAPE, torch.float32)
RELU, HALF = EltwisePostOp("relu", 0.0, 0.0), EltwisePostOp("linear", 0.5, 0.0)


def read(kind: str, number: int, shape: tuple[int, ...] = SHAPE) -> BinaryPostOp:
    node = fx.Graph().placeholder(f"other_{number}")
    return BinaryPostOp(kind, node, None, shape, shape, full=shape == SHAPE)


ADD, MUL, ROW = read("add", 1), read("mul", 2), read("mul", 3, (1, 16, 1, 1))


@pytest.mark.parametrize(
    ("post_ops", "kinds"),
    [
        ((RELU,), ["eltwise"]),
        ((ADD,), ["binary"]),
        ((ADD, RELU), ["binary"]),
        ((RELU, ADD), ["eltwise", "binary"]),
        ((RELU, ADD, MUL, HALF), ["eltwise", "binary"]),
        ((RELU, HALF, ROW), ["eltwise", "eltwise", "binary"]),
    ],
    ids=("relu", "add", "add relu", "relu add", "relu add mul half", "relu half row"),
)
def test_as_few_as_there_are(post_ops: Sequence[PostOp], kinds: list[str]) -> None:
    source = fx.Graph().placeholder("source")
    operands = [source, *(p.node for p in post_ops if isinstance(p, BinaryPostOp))]

    def chain_of(entries: Sequence[PostOp]) -> Chain:
        return build_chain(entries, operands, DESC, torch.float32)

    found = in_place(Result(), DESC, post_ops, chain_of)
    assert [template.kind for template in found] == kinds
    read_operands = []
    for template in found:
        assert template.args[ARG_SRC] == template.args[ARG_DST] == Result() and template.flops == 0
        assert not template.pd.implementation.startswith("ref")
        places = (ARG_SRC_1, *map(arg_post_op, range(len(template.pd.attr.post_ops))))
        others = (template.args.get(place) for place in places)
        read_operands += [other.index for other in others if isinstance(other, Operand)]
    assert read_operands == list(range(1, len(operands)))


def test_a_candidate_says_what_follows() -> None:
    (relu,) = in_place(Result(), DESC, (RELU,), lambda entries: build_chain(entries, [], DESC, torch.float32))
    candidate = Candidate("first", (DESC,), DESC, (relu,), overwrites=None)
    made = followed_by(candidate, (relu, relu))
    assert made.calls == (relu, relu, relu) and made.implementation == f"first + {relu.pd.implementation}"
