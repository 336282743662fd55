"""What lowering a region gives: the program, and what it was built from. Files give the same without lowering."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace

import torch
from torch import fx

from fx_passes.candidates.candidates import Candidate, Operation
from fx_passes.candidates.layouts import Layout
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.lower.context import NotLowered, eager_layout
from zendnn_cffi.runtime.program import OutputSpec, Program
from zendnn_cffi.runtime.sharing import Sharing
from zendnn_cffi.runtime.sliced_program import SlicedProgram
from zendnn_cffi.values import dataclass

_SHORT_NS = 50e3  # what takes less is not watched for other work


@dataclass(frozen=True)
class NodeReport:
    """What one node of the region became.

    name            name of the node
    source          what it was in the model
    kind            primitive, "view" or "torch"
    implementation  the implementation that runs, "view" or "torch"
    layout          of the result; its dtype, too, where that is float32 for a value of 16 bits
    post_ops        what was absorbed
    reason          why plain PyTorch runs, else empty
    flops           floating point operations of one run, 0 where not counted
    time_ns         of the chosen implementation alone, measured or estimated; 0 for views
    """

    name: str
    source: str
    kind: str
    implementation: str
    layout: str
    post_ops: tuple[str, ...]
    reason: str
    flops: int
    time_ns: float = 0.0


@dataclass(frozen=True)
class Lowering:
    """What a program was built from: what a file keeps of it (fx_passes.saved).

    graph       with what lowering edited
    operations  an operation for every node that computes something
    choice      a candidate for each
    offered     node -> strides that it had candidates for, where operations have the chosen ones alone
    values      what the nodes stand for, where candidates were chosen among
    """

    graph: fx.Graph
    operations: Sequence[Operation]
    choice: Sequence[Candidate]
    offered: Mapping[fx.Node, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    values: RegionValues | None = None

    def let_go(self) -> None:
        """Free folded weights now: nodes, operations and graphs refer to each other, and the collector comes late."""
        for operation in self.operations:
            operation.candidates, operation.with_values = [], None
        if self.values is not None:
            self.values.constants.clear()


@dataclass(frozen=True)
class LoweredRegion:
    """A program, and what it is made of.

    alone_ns  what one run would take if each operation took no longer than its fastest implementation in any layout,
              alone, its operands in cache, and nothing were reordered; 0 where that was not measured
    is_measured  whether implementations were timed; estimates are given as times otherwise
    times_ns     what each stage of lowering took, of this variant alone, in order
    inputs       what it was lowered for
    lowering     where it was asked for
    sharing      what runs the program beside other work, where it is worth it
    gain         the share of plain PyTorch's time that it saves, where both were measured
    """

    program: Program | SlicedProgram
    nodes: tuple[NodeReport, ...]
    alone_ns: float = 0.0
    is_measured: bool = False
    times_ns: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[TensorSpec, ...] = ()
    lowering: Lowering | None = None
    sharing: Sharing | None = None
    gain: float | None = None

    def shared_by(self, threads: int) -> LoweredRegion:
        """The same, which takes fewer than so many threads while other work takes cores; where it is not too short."""
        if threads == 1 or sum(node.time_ns for node in self.nodes) * self.program.slices < _SHORT_NS:
            return self
        return replace(self, sharing=Sharing(self.program, threads))

    def close(self) -> None:
        """As Program.close."""
        self.program.close()
        if self.sharing is not None:
            self.sharing.close()


def sliced(
    size: int,
    values: RegionValues,
    specs: Sequence[TensorSpec],
    graph: fx.Graph,
    lower: Callable[..., LoweredRegion],
) -> LoweredRegion:
    """The region lowered for `size` samples, run over the batch slice by slice."""
    lowered = lower([replace(spec, shape=(size, *spec.shape[1:])) for spec in specs])
    results = next(iter(graph.find_nodes(op="output"))).all_input_nodes
    outputs = [OutputSpec(s.shape, s.strides, s.dtype) for s in (values.specs[node] for node in results)]
    for whole, part in zip(outputs, lowered.program.outputs, strict=True):
        if (size, *whole.shape[1:]) != part.shape or whole.strides != part.strides:
            raise NotLowered(f"a slice gives {part}, the batch {whole}")
    assert isinstance(lowered.program, Program)
    program = SlicedProgram(lowered.program, size, outputs)
    alone_ns = program.slices * lowered.alone_ns
    return replace(lowered, program=program, alone_ns=alone_ns, inputs=tuple(specs))


def boundary(graph: fx.Graph, values: RegionValues) -> tuple[dict[fx.Node, Layout], list[tuple[fx.Node, TensorSpec]]]:
    """The inputs with the layout each arrives in, and the outputs with the tensor each becomes."""
    arriving = {node: eager_layout(values.specs[node]) for node in graph.find_nodes(op="placeholder")}
    results = next(iter(graph.find_nodes(op="output"))).all_input_nodes
    return arriving, [(node, values.specs[node]) for node in results]


def row_major_copy(src: torch.Tensor) -> torch.Tensor:
    """An input in strides that the library takes. No vocabulary: PyTorch runs it."""
    return src.contiguous()
