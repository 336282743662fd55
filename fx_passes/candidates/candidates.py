"""What lowering a node yields: an operation with candidates, each one way to compute it.

A candidate states the layout it wants for every operand and the layout it leaves; its calls name where each argument
comes from, not yet where that lies. Layout assignment picks one candidate per operation, the plan gives it memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import torch
from torch import fx

from fx_passes.candidates.layouts import Layout
from fx_passes.candidates.specs import RegionValues, TensorSpec
from zendnn_cffi.primitives.attributes import ARG_SCRATCHPAD
from zendnn_cffi.primitives.lpgemm import Gemm
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc
from zendnn_cffi.runtime.loop_call import Part
from zendnn_cffi.values import dataclass

# 15 to 60 us were seen on a Zen 4 core: a sum of 12,288 numbers took 6 us alone, 69 in an encoder.
_COLD_TORCH_NS = 15e3
# Two cores read 25 to 55 GB/s. Winograd's weights of 256 channels are 9 MB (tiles of 4x4) or 4 MB (2x2). On 14 x 14
# pixels they take 330 and 380 us alone on a Zen 5 EPYC, 810 and 460 in ResNet-18.
_MEMORY_BYTES_PER_NS, _LARGE_WEIGHTS_BYTES = 30.0, 2 << 20


@dataclass(frozen=True)
class Operand:
    """The operation's operand number `index`, seen through desc (None: as the candidate's layout has it).

    offset_bytes  where in its memory desc begins
    """

    index: int
    desc: MemoryDesc | None = None
    offset_bytes: int = 0


@dataclass(frozen=True)
class Result:
    """The operation's result, seen through desc, which begins offset_bytes into its memory."""

    desc: MemoryDesc | None = None
    offset_bytes: int = 0


@dataclass(frozen=True)
class Weights:
    """A constant tensor in the layout desc, prepacked once. `key` names the constant for sharing between signatures.

    below  further constants, which lie under `plain` along its dimension 0; desc is row-major, in any shape
    transposed  desc describes the constant, a matrix, with its dimensions swapped
    is_streamed  all of it is read, and huge pages are worth asking for where it lies
    late         computes it, of whatever shape; plain is on the meta device then (None: plain is it)
    """

    key: str
    plain: torch.Tensor
    desc: MemoryDesc
    below: tuple[torch.Tensor, ...] = ()
    transposed: bool = False
    is_streamed: bool = True
    late: Callable[[], torch.Tensor] | None = None

    def computed(self) -> Weights:
        """The same with its numbers."""
        return self if self.late is None else replace(self, plain=self.late().reshape(self.plain.shape), late=None)


@dataclass(frozen=True)
class PackedWeights:
    """Weights in the layout that the implementation chooses: primitive_template makes them of an implementation."""

    key: str
    plain: torch.Tensor
    transposed: bool = False
    late: Callable[[], torch.Tensor] | None = None

    def wanted_by(self, pd: PrimitiveDesc) -> Weights:
        desc = pd.weights_desc
        assert desc is not None
        return Weights(self.key, self.plain, desc, transposed=self.transposed, late=self.late)


@dataclass(frozen=True)
class Scratchpad:
    """Temporary memory of one call."""

    desc: MemoryDesc


@dataclass(frozen=True)
class Temporary:
    """Memory that a candidate's calls share, number `index` of those it has; gone after its last call.

    offset_bytes  where in it desc begins
    """

    index: int
    desc: MemoryDesc
    offset_bytes: int = 0


EXPONENTIALS = "exponentials"  # a kind of guards: attention without the row maximum


@dataclass(frozen=True)
class Guard:
    """What must hold of the f32 numbers in temporary number `index` when all of a program has run.

    kind   of candidates that rest on it: where it does not hold, the region is lowered without them, and run again
    holds  is given the numbers of all candidates of the kind, as one tensor
    """

    kind: str
    index: int
    holds: Callable[[torch.Tensor], bool]


Argument = Operand | Result | Weights | Scratchpad | Temporary


@dataclass(frozen=True)
class PrimitiveTemplate:
    """One primitive execution: its descriptor and where every argument comes from.

    flops  None: those of the operation
    """

    pd: PrimitiveDesc
    args: dict[int, Argument]
    kind: str
    flops: int | None = None


Arguments = Mapping[int, Argument | PackedWeights]  # of a primitive, by the numbers that the library gives them


def primitive_template(pd: PrimitiveDesc, args: Arguments, kind: str, flops: int | None = None) -> PrimitiveTemplate:
    """One execution of pd on args, with the weights' layout and the scratchpad that its implementation asks for."""
    own: dict[int, Argument] = {
        place: argument.wanted_by(pd) if isinstance(argument, PackedWeights) else argument
        for place, argument in args.items()
    }
    if pd.scratchpad_desc is not None:
        own[ARG_SCRATCHPAD] = Scratchpad(pd.scratchpad_desc)
    return PrimitiveTemplate(pd, own, kind, flops)


@dataclass(frozen=True)
class TorchTemplate:
    """One plain PyTorch computation over the operands, in the candidate's layouts.

    reason  why no primitive computes it, "" where primitives do as well
    into    function(*operands, result) writes its result itself; otherwise it returns it
    key     equal for equal work: it is measured beside primitives; "" where there are none
    args    what function is called with, in plain layouts, the last one where it writes (into); empty: all operands,
            then the result
    assists a step between primitives that compute the most of it: no rival of theirs
    flops   those of the call, where it has args of its own
    allocate  with into, for a result that grows: makes it, from the first operand
    kind    what profiles call it where it belongs to no operation
    """

    function: Callable[..., Any]
    reason: str
    into: bool = False
    key: str = ""
    args: tuple[Argument, ...] = ()
    assists: bool = False
    flops: int = 0
    allocate: Callable[[torch.Tensor], torch.Tensor] | None = None
    kind: str = "check"


@dataclass(frozen=True)
class GemmTemplate:
    """One product of [M, K] with constant weights by AOCL-BLIS.

    weights   in the layout gemm.weights
    operands  what post-ops read, in their order
    """

    gemm: Gemm
    src: Argument
    weights: Weights
    dst: Argument
    operands: tuple[Argument, ...] = ()

    @property
    def args(self) -> tuple[Argument, ...]:
        return self.src, self.weights, self.dst, *self.operands

    @property
    def key(self) -> str:
        """Equal for equal work."""
        return repr(self.gemm)


@dataclass(frozen=True)
class LoopTemplate:
    """Primitives that run in turn, in so many rounds, each on parts of the arguments that move on from round to round.

    steps  each primitive's descriptor, and the part of an argument that each argument id stands for
    args   the arguments as wholes, a scratchpad that all primitives share among them
    """

    steps: tuple[tuple[PrimitiveDesc, dict[int, Part]], ...]
    args: tuple[Argument, ...]
    rounds: int
    kind: str
    flops: int


Template = PrimitiveTemplate | TorchTemplate | GemmTemplate | LoopTemplate  # of one call


@dataclass(frozen=True)
class Candidate:
    """One way to compute an operation.

    implementation  what explain shows
    srcs            the layout wanted of each operand
    dst             the layout of the result
    calls           what runs; empty for a view, where the result is operand 0's memory seen through dst
    overwrites      operand whose memory becomes the result's (residual sums); None: the result has its own
    may_overwrite   operand whose memory the result may take over where nothing reads it later
    offset_bytes    of a view: where in operand 0's memory its first element lies
    slices_bytes    of a concatenation whose pieces may be written in place: the offset of each in the result; its calls
                    copy one piece each
    cost_ns         measured or estimated time
    guard           of numbers that its calls leave in a temporary
    from_memory     whether cost_ns is the time with the weights, and all else, in no cache
    """

    implementation: str
    srcs: tuple[Layout, ...]
    dst: Layout
    calls: tuple[Template, ...]
    overwrites: int | None = None
    may_overwrite: int | None = None
    slices_bytes: tuple[int, ...] = ()
    cost_ns: float = 0.0
    offset_bytes: int = 0
    guard: Guard | None = None
    from_memory: bool = False

    @property
    def is_view(self) -> bool:
        return not self.calls

    @property
    def expected_ns(self) -> float:
        """cost_ns, and what it costs beyond in a network: large weights and PyTorch's code are in no cache there."""
        if self.from_memory:
            return self.cost_ns
        torch_ns = _COLD_TORCH_NS * sum(isinstance(call, TorchTemplate) for call in self.calls)
        read_bytes = weights_bytes(self)
        if read_bytes < _LARGE_WEIGHTS_BYTES:
            return self.cost_ns + torch_ns
        return math.hypot(self.cost_ns, read_bytes / _MEMORY_BYTES_PER_NS) + torch_ns


@dataclass(eq=False)
class Operation:
    """A node of the region that computes a tensor at run time, with every way found to compute it.

    with_values  lowers the node again with other constants
    """

    node: fx.Node
    name: str
    kind: str
    operands: tuple[fx.Node, ...]
    spec: TensorSpec
    candidates: list[Candidate] = field(default_factory=list)
    flops: int = 0
    fallback_reason: str = ""
    with_values: Callable[[RegionValues], Operation] | None = None


def arguments_of(template: Template) -> tuple[Argument, ...]:
    """What a call's template says of its arguments; none of a PyTorch call on the operands as they are."""
    return tuple(template.args.values()) if isinstance(template, PrimitiveTemplate) else template.args


def weights_of(candidate: Candidate) -> list[Weights]:
    """The constants that the candidate's calls read."""
    return [a for template in candidate.calls for a in arguments_of(template) if isinstance(a, Weights)]


def weights_bytes(candidate: Candidate) -> int:
    """Bytes of the constants that the candidate's calls read, once for those that several of them read."""
    sizes = {(weights.key, weights.desc): weights.desc.size_bytes for weights in weights_of(candidate)}
    return sum(sizes.values())


def temporaries_bytes(candidate: Candidate) -> dict[int, int]:
    """The size of each of the candidate's temporaries: all that its calls see of it."""
    sizes: dict[int, int] = {}
    for template in candidate.calls:
        for argument in arguments_of(template):
            if isinstance(argument, Temporary):
                end = argument.offset_bytes + argument.desc.size_bytes
                sizes[argument.index] = max(sizes.get(argument.index, 0), end)
    return sizes


def measurable(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those to measure: views and concatenations in place cost nothing, torch calls without a key have no rival."""
    return [
        c
        for c in candidates
        if c.calls
        and not c.slices_bytes
        and all(isinstance(t, PrimitiveTemplate | LoopTemplate) or t.key for t in c.calls)
    ]
