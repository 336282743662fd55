"""Run one candidate on made-up operands: are its numbers right, and how long does it take?"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import cached_property

import torch

from fx_passes.candidates.candidates import (
    Argument,
    Candidate,
    GemmTemplate,
    LoopTemplate,
    Operand,
    Operation,
    Result,
    Scratchpad,
    Temporary,
    TorchTemplate,
    Weights,
    temporaries_bytes,
)
from fx_passes.candidates.conversions import fastest_conversion, in_steps, is_by_torch
from fx_passes.candidates.folds import largest_absolute
from fx_passes.candidates.layouts import RANGES, Layout, Quantized, in_memory, row_major
from fx_passes.candidates.specs import RegionValues
from fx_passes.layout.reorder import reorder_into
from fx_passes.plan.materialise import materialise
from fx_passes.plan.prepack import prepack
from fx_passes.search import database
from fx_passes.search.from_memory import empty_caches
from fx_passes.search.noise import give_signs, noise_for, twins_on_noise
from fx_passes.search.scratch import Scratch
from zendnn_cffi.primitives.memory import Memory, MemoryDesc
from zendnn_cffi.primitives.primitive import PrimitiveDesc
from zendnn_cffi.runtime import huge_pages
from zendnn_cffi.runtime.places import Slot
from zendnn_cffi.runtime.program import Program

# Largest error relative to the largest output. f32: Winograd's transforms and long sums in another order; bf16 and f16:
# inputs, weights and result rounded to 8 and 11 bits each.
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
ONE_STEP = 1.0  # of the result's scale: a number midway between two integers may become either

CHECK_ONLY = 0.0
_ENOUGH_NS = 12e6
_MIN_RUNS, _MAX_RUNS = 3, 15
_MAX_RUNS_FROM_MEMORY = 5  # emptying the caches takes longer than the run
# A first run so much slower than the best candidate's time is not repeated: this many times, and by more than what a
# kernel takes that makes its code then (2.6 ms were seen).
_HOPELESS, _FIRST_NS = 2.0, 10e6
_TOUCHING_NS = 1e6  # a longer first run may touch its pages for the first time: tables of 600 MB took 70 ms, not 0.4
_BEHIND = 1.2  # after a few runs, the fastest of them so many times slower ends it
_KEPT_BYTES = 256 << 20  # of operands in candidates' layouts
_ENOUGH_NUMBERS, _MOST_DRAWS = 32, 12  # compared before a candidate counts as right; times operands are drawn for it
_ORDINARY = 1e6  # the largest result of ordinary numbers, and the inverse of the smallest
_CHUNK = 1 << 18  # elements compared at once: what lies between stays in cache


def tolerance(candidate: Candidate, reference: torch.dtype) -> float:
    """The error allowed to a candidate: what it writes may be wider than what it reads; of integers in steps.

    reference  dtype of what it is compared with, which may be narrower than both
    """
    if isinstance(candidate.dst, Quantized):
        return ONE_STEP
    if candidate.dst.dtype in RANGES and candidate.srcs and candidate.srcs[0].dtype in TOLERANCE:
        return ONE_STEP  # it quantizes
    dtypes = (desc.dtype or torch.float32 for desc in (candidate.dst, *candidate.srcs))
    return max(TOLERANCE.get(dtype, 0.0) for dtype in (reference, *dtypes))


class Bench:
    """Operands and the expected result of one operation, shared by its candidates. Not thread-safe.

    scratch  where its memory comes from; `close` gives all of it back
    draw     which of the possible operands
    from_memory  whether the weights are in no cache when a call comes
    """

    def __init__(
        self,
        operation: Operation,
        values: RegionValues,
        scratch: Scratch | None = None,
        draw: int = 0,
        *,
        from_memory: bool = False,
    ) -> None:
        self.operation, self.values = operation, values
        self._before = empty_caches if from_memory else None
        self.scratch = scratch or Scratch()
        generator = torch.Generator().manual_seed(draw)
        given = {node: noise_for(values, node, generator) for node in dict.fromkeys(operation.operands)}
        give_signs(operation.node, given)
        self.operands = [given[node] for node in operation.operands]  # a node may be several operands
        self._twins, values = twins_on_noise(operation, values, generator, fingerprint)
        self._noisy = values
        with torch.no_grad():
            self.expected: torch.Tensor = values.compute(operation.node, given)
        self._arranged: dict[tuple[int, Layout], torch.Tensor] = {}
        self._arranged_bytes = 0
        self._taken: list[torch.Tensor] = []

    def check_and_time(self, candidate: Candidate, best_ns: float = math.inf) -> database.Result:
        """Run the candidate; time_ns is inf where its numbers are wrong. best_ns CHECK_ONLY: time a run or two."""
        try:
            program, result = self._prepare(self._twin(candidate))
            first_ns = run_ns(program)
            error = self._error(result, candidate.dst)
            if not error <= tolerance(candidate, self.expected.dtype):
                return database.Result(math.inf, error, False)
            if best_ns == CHECK_ONLY and first_ns > _TOUCHING_NS:
                first_ns = min(first_ns, run_ns(program))
            if best_ns == CHECK_ONLY or first_ns > _HOPELESS * best_ns + _FIRST_NS:
                return database.Result(database.kept_ns(first_ns), error, True)
            return database.Result(database.kept_ns(fastest_ns(program, first_ns, best_ns, self._before)), error, True)
        finally:
            while self._taken:
                self.scratch.give_back(self._taken.pop())

    @property
    def draws(self) -> int:
        """How many draws of operands say something: one number may be on the side where a wrong relu is right."""
        return max(1, min(_MOST_DRAWS, _ENOUGH_NUMBERS // max(self.expected.numel(), 1)))

    def time_again(self, candidate: Candidate) -> float:
        """Return the time of a candidate whose numbers are known to be right, ns."""
        try:
            program, _ = self._prepare(self._twin(candidate))
            return database.kept_ns(fastest_ns(program, run_ns(program), before=self._before))
        finally:
            while self._taken:
                self.scratch.give_back(self._taken.pop())

    def _twin(self, candidate: Candidate) -> Candidate:
        """The same work on constants that are noise."""
        return candidate if self._twins is None else self._twins.get(fingerprint(candidate), candidate)

    def holds_for_others(self, result: database.Result) -> bool:
        """Whether a verdict is one on equal work elsewhere, too: it comes from ordinary numbers, not odd weights."""
        if self._twins is not None and result.right:
            return True
        ordinary = self._twins is not None or 1 / _ORDINARY < self._scale < _ORDINARY
        return ordinary and bool(self.expected.isfinite().all())

    def close(self) -> None:
        """Give the memory back: no candidate follows."""
        for buffer in self._arranged.values():
            self.scratch.give_back(buffer)
        self._arranged.clear()

    def _buffer(self, size_bytes: int) -> torch.Tensor:
        """Memory for as long as one candidate is looked at; not initialised."""
        self._taken.append(self.scratch.take(max(size_bytes, 1)))
        return self._taken[-1]

    def _arrange(self, tensor: torch.Tensor, index: int, desc: Layout, *, shared: bool = True) -> torch.Tensor:
        """A tensor, number `index`, in the layout desc: the same memory for all candidates that only read it."""
        if shared and (found := self._arranged.get((index, desc))) is not None:
            return found
        size_bytes = max(desc.size_bytes, 1)
        if shared and self._arranged_bytes + size_bytes <= _KEPT_BYTES:
            buffer = self._arranged[index, desc] = self.scratch.take(size_bytes)
            self._arranged_bytes += size_bytes
        else:
            buffer = self._buffer(size_bytes)
        reorder_into(tensor, buffer, desc)
        return buffer

    def _prepare(self, candidate: Candidate) -> tuple[Program, torch.Tensor]:
        """A program of the candidate's calls on buffers of its own, and the buffer that holds the result."""
        buffers = [
            self._arrange(tensor, index, desc, shared=index != candidate.overwrites)
            for index, (tensor, desc) in enumerate(zip(self.operands, candidate.srcs, strict=True))
        ]
        result = len(buffers)
        if candidate.overwrites is not None:
            result = candidate.overwrites
        else:  # zeroed: the right numbers of a candidate before must not be taken for this one's
            buffers.append(self._buffer(candidate.dst.size_bytes).zero_())
        temporaries: dict[int, Slot] = {}
        sizes = temporaries_bytes(candidate)

        def added(buffer: torch.Tensor) -> Slot:
            buffers.append(buffer)
            return Slot("constant", len(buffers) - 1)

        def place(argument: Argument) -> tuple[Slot, MemoryDesc]:
            match argument:
                case Operand(index, seen, offset_bytes):
                    return Slot("constant", index, offset_bytes), seen or in_memory(candidate.srcs[index])
                case Result(seen, offset_bytes):
                    return Slot("constant", result, offset_bytes), seen or in_memory(candidate.dst)
                case Temporary(index, desc, offset_bytes):
                    if index not in temporaries:
                        temporaries[index] = added(self._buffer(sizes[index]))
                    return temporaries[index].behind(offset_bytes), desc
                case Scratchpad(desc):
                    return added(self._buffer(desc.size_bytes)), desc
                case Weights():
                    return added(prepack(argument)), argument.desc

        operation, operands = self.operation, len(candidate.srcs)
        calls = [materialise(template, operation.name, operation, operands, place) for template in candidate.calls]
        return Program(calls, (), buffers), buffers[result]

    def _error(self, result: torch.Tensor, desc: Layout) -> float:
        """Largest difference from the expected result, relative to its largest value; nan where infinities differ."""
        if isinstance(desc, Quantized):
            return self._steps(result, desc)
        assert desc.dtype is not None
        if desc.size_bytes == self.expected.numel() * desc.dtype.itemsize:  # no padding, no gaps: compared as it lies
            wanted = self._arrange(self.expected, -1, desc)
            actual, expected = (buffer[: desc.size_bytes].view(desc.dtype) for buffer in (result, wanted))
        else:
            actual, expected = self._plain(result, desc), self.expected.reshape(-1)
        if self.expected.dtype == torch.float16:
            actual = actual.half().float()  # what is too large for it becomes infinite
        differences = [*map(_largest_difference, actual.split(_CHUNK), expected.split(_CHUNK))]
        difference = math.nan if any(map(math.isnan, differences)) else max(differences)
        if expected.dtype in RANGES:
            return difference  # in steps
        if math.isfinite(difference):
            return difference / max(self._scale, 1e-30)
        finite = expected.isfinite()
        if not torch.equal(actual.isfinite(), finite):
            return math.nan
        if not bool(finite.any()):
            return 0.0
        actual, expected = actual[finite], expected[finite]
        return _largest_difference(actual, expected) / max(largest_absolute(expected), 1e-30)

    def _steps(self, result: torch.Tensor, desc: Quantized) -> float:
        """Largest difference from the expected result in integers; nan where that is one number throughout."""
        wanted = self._arrange(self.expected, -1, desc)
        actual, expected = (buffer[: desc.size_bytes].view(desc.dtype) for buffer in (result, wanted))
        if expected.numel() >= _ENOUGH_NUMBERS and bool((expected == expected[0]).all()):
            return math.nan  # all of it saturated: whatever else is wrong would not show
        pairs = zip(actual.split(_CHUNK), expected.split(_CHUNK), strict=True)
        return max(_largest_difference(a.short(), e.short()) for a, e in pairs)

    def _plain(self, result: torch.Tensor, desc: Layout) -> torch.Tensor:
        """A result, row by row."""
        dtype, size_bytes = self.expected.dtype, self.expected.numel() * self.expected.element_size()
        plain = self._buffer(size_bytes)[:size_bytes].view(dtype).view(self.expected.shape or (1,))
        numbers = desc if isinstance(desc, Quantized) else None
        memory = Memory(in_memory(desc), result.data_ptr())
        reorder_into(memory, plain, row_major(tuple(plain.shape), dtype), numbers=numbers)
        return plain.view(-1)

    @cached_property
    def _scale(self) -> float:
        """The largest result; of few numbers, which may all be small by chance, the largest of several draws."""
        largest = largest_absolute(self.expected)
        for draw in range(self.draws if self.draws > 1 else 0):
            generator = torch.Generator().manual_seed(draw)
            given = {node: noise_for(self.values, node, generator) for node in dict.fromkeys(self.operation.operands)}
            with torch.no_grad():
                other = largest_absolute(self._noisy.compute(self.operation.node, given))
            largest = max(largest, other) if math.isfinite(other) else largest
        return largest


def _largest_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.dtype in RANGES:
        actual, expected = actual.short(), expected.short()  # 8 bits wrap around
    return largest_absolute(actual - expected)


def aligned_buffer(desc: Layout) -> torch.Tensor:
    """Zeroed memory for a descriptor, of the kind that programs compute in."""
    return huge_pages.allocate(max(desc.size_bytes, 1)).zero_()


def run_ns(program: Program) -> int:
    """Run once; the time inside its calls."""
    return sum(program.run_timed(())[1])


def fastest_ns(
    program: Program, first_ns: float = math.inf, best_ns: float = math.inf, before: Callable[[], None] | None = None
) -> float:
    """The fastest of a few runs: what disturbs a run only ever makes it slower. Fewer where best_ns is out of reach.

    before  called before each run; the first one, before which it was not called, does not count then
    """
    fastest, spent, runs = math.inf if before else first_ns, 0.0, 0
    most = _MAX_RUNS_FROM_MEMORY if before else _MAX_RUNS
    while runs < most and (spent < _ENOUGH_NS or (runs < _MIN_RUNS and first_ns < _ENOUGH_NS)):
        if runs >= _MIN_RUNS and fastest > _BEHIND * best_ns:
            break
        if before is not None:
            before()
        elapsed = run_ns(program)
        fastest, spent, runs = min(fastest, elapsed), spent + elapsed, runs + 1
    return fastest


def fingerprint(candidate: Candidate) -> str:
    """A key that is equal for equal work: every primitive's descriptor, attributes and implementation."""
    digest = hashlib.sha256()
    for template in candidate.calls:
        if isinstance(template, TorchTemplate):
            digest.update(repr((template.key, *map(_torch_layout, (*candidate.srcs, candidate.dst)))).encode())
            continue
        if isinstance(template, GemmTemplate):
            digest.update(template.key.encode())
            continue
        rough = any(isinstance(desc, Quantized) for desc in (*candidate.srcs, candidate.dst))
        if isinstance(template, LoopTemplate):
            digest.update(f"{template.rounds} rounds".encode())
            for pd, parts in template.steps:
                digest.update(_work_of(pd, template.kind, rough))
                places = [(arg, p.argument, p.offset_bytes, p.advance_bytes) for arg, p in sorted(parts.items())]
                digest.update(repr(places).encode())
            continue
        digest.update(_work_of(template.pd, template.kind, rough))
    return digest.hexdigest()


def _work_of(pd: PrimitiveDesc, kind: str, rough: bool) -> bytes:
    """A primitive's descriptor, attributes and implementation."""
    parts = [repr((kind, pd.implementation, sorted(pd.op.params.items()) if pd.op else ())).encode()]
    descs = pd.op.descs if pd.op else {"src": pd.src_desc, "dst": pd.dst_desc}  # a reorder has no descriptor
    for name, desc in sorted(descs.items()):
        parts.append(name.encode() + (desc.key if desc is not None else b"-"))
    for entry in pd.attr.post_ops:
        parts += [_described(part, rough) for part in entry]
    if scales := pd.attr.scales_key:
        numbers, *rest = scales
        parts.append(repr((len(numbers) if rough and isinstance(numbers, tuple) else numbers, *rest)).encode())
    return b"".join(parts)


def _described(part: object, rough: bool) -> bytes:
    """A part of a post-op. rough: scales of integers are others in each layer, of equal work otherwise."""
    if isinstance(part, MemoryDesc):
        return part.key
    return repr(0.5 if rough and isinstance(part, float) and part not in (0.0, 1.0) else part).encode()


def _torch_layout(desc: Layout) -> tuple[object, ...]:
    return desc.dims, desc.dtype, desc.strides


def is_rival(candidate: Candidate) -> bool:
    """Whether PyTorch computes it where primitives do as well."""
    return any(isinstance(t, TorchTemplate) and t.key and not t.assists for t in candidate.calls)


def time_reorder(have: Layout, want: Layout) -> float:
    """The time of a conversion, ns: of one reorder, or of those that take its place."""
    return sum(_time_one_reorder(*step) for step in in_steps(have, want))


def _time_one_reorder(have: Layout, want: Layout) -> float:
    buffers = [aligned_buffer(have), aligned_buffer(want)]

    def place(argument: Argument) -> tuple[Slot, MemoryDesc]:
        match argument:
            case Operand(_, desc) if desc is not None:
                return Slot("constant", 0), desc
            case Result(desc) if desc is not None:
                return Slot("constant", 1), desc
            case Weights(_, plain, desc):
                buffers.append(plain)
            case Scratchpad(desc):
                buffers.append(aligned_buffer(desc))
            case _:
                raise AssertionError(f"{argument} of a reorder")
        return Slot("constant", len(buffers) - 1), desc

    call = materialise(fastest_conversion(have, want), "reorder", None, 1, place)
    program = Program([call], (), buffers)
    return fastest_ns(program, run_ns(program))


def reorder_fingerprint(have: Layout, want: Layout) -> str:
    """A key for reorders that take about as long per byte: formats, types, and size to within a factor of two."""
    magnitude = (have.size_bytes + want.size_bytes).bit_length()
    zero_points = sum(isinstance(desc, Quantized) and desc.numerics.zero_point != 0 for desc in (have, want))
    beside = f" {zero_points} zero points" if zero_points else ""
    beside += " torch" if is_by_torch(have, want) else ""
    beside += " in two" if len(in_steps(have, want)) > 1 else ""
    return f"reorder {have.dtype} {have.format} {want.dtype} {want.format}{beside} 2^{magnitude} bytes"
