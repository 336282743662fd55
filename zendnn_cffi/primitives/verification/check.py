"""Run a primitive once on noise: are its numbers right, and does it keep to its operands?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from zendnn_cffi.errors import UNIMPLEMENTED, ZenDNNError
from zendnn_cffi.primitives.attributes import (
    ARG_DST,
    ARG_DST_ITER,
    ARG_DST_ITER_C,
    ARG_SCRATCHPAD,
    ARG_SRC,
    ARG_SRC_1,
    ARG_SRC_2,
    COMPARISONS,
)
from zendnn_cffi.primitives.memory import Memory, MemoryDesc
from zendnn_cffi.primitives.verification import layouts
from zendnn_cffi.primitives.verification.noise import argument_descs, operands
from zendnn_cffi.primitives.verification.places import Bordered, Place, Take, border_bytes
from zendnn_cffi.primitives.verification.reference import expected
from zendnn_cffi.primitives.verification.unchecked import unchecked
from zendnn_cffi.values import dataclass

if TYPE_CHECKING:
    from zendnn_cffi.primitives.primitive import Primitive, PrimitiveDesc

# Largest error relative to the largest result: Winograd's transforms and long sums in another order; rounded inputs and
# result; integers may differ by one where a half was rounded another way
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
_WHOLE = ("reorder", "shuffle", "pooling", "pooling_v2", "convolution", "deconvolution", "inner_product", "matmul")
_RESULTS = (ARG_DST, ARG_DST_ITER, ARG_DST_ITER_C)  # of which the first is compared
_JUMPS = COMPARISONS | {"round"}
_FEW = 0.02  # of the elements may fall on the other side of a jump
_MANY = 16  # results that show what is wrong
_WIDE = 1 << 16  # elements up to which the reference computes in float64: it is thirty times as slow


@dataclass(frozen=True)
class Verdict:
    """problem is empty where the numbers are right; else it says what is wrong, after "the implementation".

    doubtful  another time it may be right: the library ran out of something
    """

    problem: str = ""
    doubtful: bool = False

    @property
    def right(self) -> bool:
        return not self.problem


class NotChecked(Exception):
    """There is no reference for this primitive, or its memory cannot be read."""


def check(pd: PrimitiveDesc, take: Take | None = None, seed: int = 0) -> Verdict:
    """Run pd on noise and compare with the reference.

    take     makes memory of so many bytes; default: bytes between poisoned borders
    Raises   NotChecked; MemoryError
    """
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        return _Check(pd, take, seed).run()


class _Check:
    def __init__(self, pd: PrimitiveDesc, take: Take | None, seed: int) -> None:
        self.pd, self.seed = pd, seed
        self.primitive: Primitive | None = None
        self.scale = 0.0
        self.memories: dict[int, Memory] = {}
        self.descs = argument_descs(pd)
        self.reads_dst = any(entry[0] == "sum" for entry in pd.attr.post_ops)
        if ARG_DST not in self.descs or not layouts.is_readable(self.descs[ARG_DST]):
            raise NotChecked(f"{pd}: the layout of dst")
        try:
            self.values = operands(pd, self.descs, seed)
        except NotImplementedError as error:
            raise NotChecked(str(error)) from error
        scratch = pd.expected_args.get(ARG_SCRATCHPAD)
        self.scratch_bytes = scratch.size_bytes if scratch is not None else 0
        border = border_bytes([desc.size_bytes for desc in self.descs.values()])
        self._bag = pd.op is not None and pd.op.kind == "embedding_bag"
        self.places = {
            arg: take(desc.size_bytes) if take else Bordered(desc.size_bytes, border, self._poison(arg))
            for arg, desc in self.descs.items()
        }
        self.scratch: Place | None = None
        if self.scratch_bytes:
            rounded = -(-self.scratch_bytes // 64) * 64
            self.scratch = take(rounded) if take else Bordered(rounded, 4096)

    def _poison(self, arg: int) -> int:
        """Indices beyond an operand must not lead into memory that does not exist: there, they are 0."""
        return 0 if self._bag and arg in (ARG_SRC_1, ARG_SRC_2) else 0xFF

    def run(self) -> Verdict:
        """Run on other numbers in the same memory, too: some implementations keep weights by their address.

        Of few results more are looked at: one number seldom shows that a relu is missing.
        """
        try:
            runs = [self.values]
            for number in range(1, 2 if math.prod(self.descs[ARG_DST].dims) >= _MANY else 6):
                runs.append(operands(self.pd, self.descs, self.seed + number))
            wanted = [self._expected(values) for values in runs]
            self.scale = max(_largest(result) for result in wanted)  # of one result alone, terms may cancel out
            for values, result in zip(runs, wanted, strict=True):
                if problem := self._once(values, result):
                    return Verdict(problem)
            return Verdict()
        except ZenDNNError as error:
            return Verdict(f"fails: {error}", doubtful=error.status != UNIMPLEMENTED)

    def _once(self, values: dict[int, torch.Tensor], wanted: torch.Tensor) -> str:
        self.values = values
        for arg, desc in self.descs.items():
            if arg != ARG_DST or self.reads_dst:
                self._write(arg, desc)
        before = {arg: place.inside.clone() for arg, place in self.places.items()}
        if self.primitive is None:
            self._prepare()
        assert self.primitive is not None
        self.primitive.execute(self.memories)
        return self._misplaced(before) or self._difference(wanted)

    def _prepare(self) -> None:
        self.memories = {arg: Memory(desc, self.places[arg].inside) for arg, desc in self.descs.items()}
        if self.scratch is not None:
            self.memories[ARG_SCRATCHPAD] = Memory(self.pd.expected_args[ARG_SCRATCHPAD], self.scratch.inside)
        self.primitive = self.pd.create()

    def _expected(self, given: dict[int, torch.Tensor]) -> torch.Tensor:
        assert self.pd.op is not None
        size = max(value.numel() for value in given.values())
        wide = torch.float64 if size <= _WIDE else torch.float32
        indices = (ARG_SRC_1, ARG_SRC_2) if self._bag else ()
        values = {arg: v.long() if arg in indices else v.to(wide) for arg, v in given.items()}
        if not self.reads_dst:
            values.pop(ARG_DST, None)
        try:
            return expected(self.pd.op, self.pd.attr, values)
        except NotImplementedError as error:
            raise NotChecked(str(error)) from error

    def _write(self, arg: int, desc: MemoryDesc) -> None:
        if layouts.is_readable(desc):
            layouts.write(self.values[arg], self.places[arg].inside, desc)
            return
        shared = desc.outer_strides is not None and layouts.overlaps(desc)
        if desc.is_any or shared or desc.dtype not in (torch.float32, torch.bfloat16, torch.int8):
            raise NotChecked(f"{self.pd}: the layout of {desc}")
        _pack(self.values[arg], self.places[arg].inside, desc, type(self.pd))

    def _misplaced(self, before: dict[int, torch.Tensor]) -> str:
        """Say where it wrote outside its result."""
        if not all(place.is_intact() for place in self.places.values()):
            return "writes beyond its operands"
        for arg, place in self.places.items():
            if arg not in _RESULTS and not torch.equal(place.inside, before[arg]):
                return "writes into an operand that it should read"
        gaps = layouts.gaps(self.descs[ARG_DST])
        if gaps is not None and not torch.equal(self.places[ARG_DST].inside[gaps], before[ARG_DST][gaps]):
            return "writes between the elements of a strided result"
        return ""

    def _difference(self, wanted: torch.Tensor) -> str:
        desc = self.descs[ARG_DST]
        assert desc.dtype is not None
        actual = layouts.read(self.places[ARG_DST].inside, desc).to(wanted.dtype)
        if actual.shape != wanted.shape:
            raise NotChecked(f"{self.pd}: the reference has shape {list(wanted.shape)}, dst {list(actual.shape)}")
        if not desc.dtype.is_floating_point:
            limits = torch.iinfo(desc.dtype)
            wanted, scale = wanted.round().clamp(limits.min, limits.max), 1.0
            allowed = 1.0 if self._rounds() else 0.0
        else:
            floor = 1.0 if self.pd.op is not None and "softmax" in self.pd.op.kind else 1e-30
            allowed, scale = self._tolerance(), max(self.scale, floor)
        differences = (actual - wanted).abs_()
        if float(differences.max()) <= allowed * scale:  # false for what is no number, too
            return ""
        finite = wanted.isfinite()
        if not finite.any():
            return ""
        differences = differences[finite].nan_to_num(math.inf)
        wrong = differences > allowed * scale
        if self._jumps() and float(wrong.double().mean()) <= _FEW:
            return ""
        if not wrong.any():
            return ""
        worst = float(differences.max()) / scale
        return f"gives wrong numbers (error {worst:.1e}, allowed {allowed:.0e})"

    def _tolerance(self) -> float:
        types = {desc.dtype for arg, desc in self.descs.items() if arg in (ARG_SRC, ARG_DST)}
        return max(TOLERANCE.get(dtype, 0.0) for dtype in types if dtype is not None)

    def _rounds(self) -> bool:
        """Whether an integer result comes from numbers between integers."""
        attr, op = self.pd.attr, self.pd.op
        assert op is not None
        plain = not attr.post_ops.entries and not attr.scales_key
        return not plain or op.kind not in _WHOLE or str(op.params.get("kind")).startswith("avg")

    def _jumps(self) -> bool:
        assert self.pd.op is not None
        kinds = [self.pd.op.params.get("kind"), *(entry[1] for entry in self.pd.attr.post_ops)]
        return any(isinstance(kind, str) and kind in _JUMPS for kind in kinds)


def _largest(values: torch.Tensor) -> float:
    """Return the largest absolute value that is finite, 0 where there is none."""
    low, high = torch.aminmax(values.nan_to_num(0.0, 0.0, 0.0))
    return max(-float(low), float(high))


def _pack(tensor: torch.Tensor, buffer: torch.Tensor, desc: MemoryDesc, kind: type[PrimitiveDesc]) -> None:
    """Write a tensor in a packed layout, by the library's own reorder."""
    plain = MemoryDesc(desc.dims, tensor.dtype)
    with unchecked():
        reorder = kind.reorder(plain, desc).create()
    aligned = torch.empty(desc.size_bytes, dtype=torch.uint8, device="cpu")
    reorder.execute({ARG_SRC: Memory(plain, tensor.contiguous()), ARG_DST: Memory(desc, aligned)})
    buffer.copy_(aligned)
