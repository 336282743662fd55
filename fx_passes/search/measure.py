"""Run one candidate on made-up operands: are its numbers right, and how long does it take?"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import fx

from fx_passes.layout.reorder import reorder_into
from fx_passes.lower.candidates import (
    Argument,
    Candidate,
    Operand,
    Operation,
    PrimitiveTemplate,
    Result,
    Scratchpad,
    Temporary,
    TorchTemplate,
    Weights,
)
from fx_passes.lower.layouts import row_major
from fx_passes.lower.specs import RegionValues
from fx_passes.plan.prepack import prepack
from fx_passes.search import database
from zendnn_cffi import huge_pages
from zendnn_cffi.attributes import ARG_DST, ARG_SRC
from zendnn_cffi.memory import Memory, MemoryDesc
from zendnn_cffi.primitive import Primitive, PrimitiveDesc
from zendnn_cffi.program import Call, PrimitiveCall, Program, Slot, TensorView, TorchCall

# Largest error relative to the largest output. f32: Winograd's transforms and long sums in another order; bf16: inputs,
# weights and result rounded to 8 bits each.
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 3e-2}

CHECK_ONLY = 0.0
_ENOUGH_NS = 20e6
_MIN_RUNS, _MAX_RUNS = 3, 15
_HOPELESS = 2.0  # a first run this many times slower than the best candidate's time is not repeated


class Bench:
    """Operands and the expected result of one operation, shared by its candidates."""

    def __init__(self, operation: Operation, values: RegionValues) -> None:
        self.operation = operation
        generator = torch.Generator().manual_seed(0)
        given = {node: _noise(values, node, generator) for node in dict.fromkeys(operation.operands)}
        self.operands = [given[node] for node in operation.operands]  # a node may be several operands
        with torch.no_grad():
            self.expected: torch.Tensor = values.compute(operation.node, given)

    def check_and_time(self, candidate: Candidate, best_ns: float = math.inf) -> database.Result:
        """Run the candidate; time_ns is inf where its numbers are wrong. best_ns CHECK_ONLY: time one run alone."""
        program, result = self._prepare(candidate)
        first_ns = run_ns(program)
        error = self._error(result, candidate.dst)
        dtype = candidate.dst.dtype
        if not error <= TOLERANCE.get(dtype or torch.float32, 0.0):
            return database.Result(math.inf, error, False)
        if best_ns == CHECK_ONLY or (first_ns > _HOPELESS * best_ns and first_ns > 1e6):
            return database.Result(float(first_ns), error, True)
        return database.Result(fastest_ns(program, first_ns), error, True)

    def _prepare(self, candidate: Candidate) -> tuple[Program, torch.Tensor]:
        """A program of the candidate's calls on buffers of its own, and the buffer that holds the result."""
        buffers = [aligned_buffer(desc) for desc in candidate.srcs]
        for buffer, desc, tensor in zip(buffers, candidate.srcs, self.operands, strict=True):
            reorder_into(tensor, buffer, desc)
        result = len(buffers)
        if candidate.overwrites is not None:
            result = candidate.overwrites
        else:
            buffers.append(aligned_buffer(candidate.dst))
        calls: list[Call] = []
        temporaries: dict[int, Slot] = {}

        def added(buffer: torch.Tensor) -> Slot:
            buffers.append(buffer)
            return Slot("constant", len(buffers) - 1)

        def place(argument: Argument) -> tuple[Slot, MemoryDesc]:
            match argument:
                case Operand(index, seen, offset_bytes):
                    return Slot("constant", index, offset_bytes), seen or candidate.srcs[index]
                case Result(seen, offset_bytes):
                    return Slot("constant", result, offset_bytes), seen or candidate.dst
                case Temporary(index, desc):
                    if index not in temporaries:
                        temporaries[index] = added(aligned_buffer(desc))
                    return temporaries[index], desc
                case Scratchpad(desc):
                    return added(aligned_buffer(desc)), desc
                case Weights():
                    return added(prepack(argument)), argument.desc

        for template in candidate.calls:
            if isinstance(template, TorchTemplate):
                arguments = template.args or (*map(Operand, range(len(candidate.srcs))), Result())
                views = [_view(*place(argument)) for argument in arguments]
                calls.append(
                    TorchCall(
                        self.operation.name, template.function, tuple(views[:-1]), views[-1], self.operation.kind,
                        into=template.into,
                    )
                )  # fmt: skip
                continue
            args = {arg: place(argument) for arg, argument in template.args.items()}
            calls.append(PrimitiveCall(self.operation.name, Primitive(template.pd), args, template.kind))
        return Program(calls, (), buffers), buffers[result]

    def _error(self, result: torch.Tensor, desc: MemoryDesc) -> float:
        """Largest difference from the expected result, relative to its largest value; nan where infinities differ."""
        plain = torch.empty(self.expected.shape or (1,), dtype=self.expected.dtype)
        primitive_source = Memory(desc, result.data_ptr())
        reorder_into(primitive_source, plain, row_major(tuple(plain.shape), plain.dtype))
        actual, expected = plain.reshape(self.expected.shape), self.expected
        difference = float((actual - expected).abs().max())
        if math.isfinite(difference):
            return difference / max(float(expected.abs().max()), 1e-30)
        finite = expected.isfinite()
        if not torch.equal(actual.isfinite(), finite):
            return math.nan
        actual, expected = actual[finite], expected[finite]
        if not expected.numel():
            return 0.0
        scale = expected.abs().max().clamp_min(1e-30)
        return float((actual - expected).abs().max() / scale)


def _view(slot: Slot, desc: MemoryDesc) -> TensorView:
    assert desc.strides is not None and desc.dtype is not None
    return TensorView(slot, desc.dims, desc.strides, desc.dtype)


def _noise(values: RegionValues, node: fx.Node, generator: torch.Generator) -> torch.Tensor:
    """Normal noise in the shape, dtype and strides of a node: a short period repeated, which is quick to make."""
    spec = values.specs[node]
    period = torch.randn(min(spec.numel, 65521), generator=generator)
    repeats = -(-spec.numel // period.numel())
    flat = period.repeat(repeats)[: spec.numel].to(spec.dtype)
    return flat.reshape(spec.shape)


def aligned_buffer(desc: MemoryDesc) -> torch.Tensor:
    """Zeroed memory for a descriptor, of the kind that programs compute in."""
    return huge_pages.allocate(max(desc.size_bytes, 1)).zero_()


def run_ns(program: Program) -> int:
    """Run once; the time inside its calls."""
    return sum(program.run_timed(())[1])


def fastest_ns(program: Program, first_ns: float = math.inf) -> float:
    """The fastest of a few runs: what disturbs a run only ever makes it slower."""
    best, spent, runs = first_ns, 0.0, 0
    while runs < _MAX_RUNS and (spent < _ENOUGH_NS or (runs < _MIN_RUNS and first_ns < _ENOUGH_NS)):
        elapsed = run_ns(program)
        best, spent, runs = min(best, elapsed), spent + elapsed, runs + 1
    return best


def fingerprint(candidate: Candidate) -> str:
    """A key that is equal for equal work: every primitive's descriptor, attributes and implementation."""
    digest = hashlib.sha256()
    for template in candidate.calls:
        if isinstance(template, TorchTemplate):
            digest.update(repr((template.key, *map(_torch_layout, (*candidate.srcs, candidate.dst)))).encode())
            continue
        pd = template.pd
        digest.update(repr((template.kind, pd.implementation, sorted(pd.op.params.items()) if pd.op else ())).encode())
        descs = pd.op.descs if pd.op else {"src": pd.src_desc, "dst": pd.dst_desc}  # a reorder has no descriptor
        for name, desc in sorted(descs.items()):
            digest.update(name.encode() + (desc.key if desc is not None else b"-"))
        for entry in pd.attr.post_ops:
            digest.update(b"".join(part.key if isinstance(part, MemoryDesc) else repr(part).encode() for part in entry))
    return digest.hexdigest()


def _torch_layout(desc: MemoryDesc) -> tuple[object, ...]:
    return desc.dims, desc.dtype, desc.strides


def measurable(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those to measure: views and concatenations in place cost nothing, torch calls without a key have no rival."""
    return [
        c
        for c in candidates
        if c.calls and not c.slices_bytes and all(isinstance(t, PrimitiveTemplate) or t.key for t in c.calls)
    ]


def is_rival(candidate: Candidate) -> bool:
    """Whether PyTorch computes it where primitives do as well."""
    return any(isinstance(t, TorchTemplate) and t.key for t in candidate.calls)


def time_reorder(have: MemoryDesc, want: MemoryDesc) -> float:
    """The time of one reorder, ns."""
    args = {ARG_SRC: (Slot("constant", 0), have), ARG_DST: (Slot("constant", 1), want)}
    call = PrimitiveCall("reorder", Primitive(PrimitiveDesc.reorder(have, want)), args, "reorder")
    program = Program([call], (), [aligned_buffer(have), aligned_buffer(want)])
    return fastest_ns(program, run_ns(program))


def reorder_fingerprint(have: MemoryDesc, want: MemoryDesc) -> str:
    """A key for reorders that take about as long per byte: formats, types, and size to within a factor of two."""
    magnitude = (have.size_bytes + want.size_bytes).bit_length()
    return f"reorder {have.dtype} {have.format} {want.dtype} {want.format} 2^{magnitude} bytes"
