"""What was chosen for a region, kept for the next process: that neither lists, prices nor compares implementations.

It is written as in a saved module (fx_passes.saved.programs), without weights: these are packed from the parameters at
hand. So it holds for other numbers in the same parameters. Regions whose rules look at numbers are left out, but for
whether weights are finite, which is asked again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fx_passes import ops
from fx_passes.candidates.candidates import Weights
from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.graph.graph import is_call
from fx_passes.lower.context import SPREADING
from fx_passes.region.kept import Kept
from fx_passes.region.key import region_key
from fx_passes.region.lowered import LoweredRegion, sliced
from fx_passes.region.region import ZenRegion
from fx_passes.saved.choices import read, write
from fx_passes.saved.errors import FileError, NotSaved
from fx_passes.saved.layouts import Layouts
from fx_passes.saved.programs import Context, Origin, decode_program, encode_program
from zendnn_cffi.collector import collector_paused
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.runtime.sliced_program import SlicedProgram

log = logging.getLogger("zendnn_cffi.saved")

VERSION = 1  # raise it when the meaning of what is written changes
# Operations whose rules ask for no more than shapes and types of constants, and whether these are finite.
_BY_SHAPE: frozenset[Any] = frozenset({
    ops.convolution, ops.deconvolution, ops.linear, ops.matmul, ops.batch_norm, ops.layer_norm, ops.group_norm,
    ops.rms_norm, ops.embedding, ops.eltwise, ops.binary,
})  # fmt: skip


class Remembered:
    """Choices of one region from the cache's folder; as fx_passes.region.keep.Known.

    used  how many became programs
    """

    def __init__(self) -> None:
        self.used = 0
        self._asked: tuple[Any, str] = None, ""  # the last question, and its key: mostly what is noted next

    def wants(self, region: ZenRegion) -> bool:
        """Choices by estimate alone are made again; released weights are there in one layout."""
        return region.options.tune in ("auto", "full") and not isinstance(region.constants, Kept)

    def __call__(
        self, region: ZenRegion, inputs: Sequence[torch.Tensor], kinds: tuple[str, ...], keep: bool
    ) -> LoweredRegion | None:
        if keep or not self.wants(region):  # a file wants what there was to choose from
            return None
        specs = [TensorSpec.of(tensor) for tensor in inputs]
        key = _key(region, specs, kinds)
        self._asked = _question(region, specs, kinds), key
        row = read(key)
        if row is None:
            return None
        try:
            with collector_paused():
                lowered = _decode(row, region, specs, kinds)
        except Exception as error:  # whatever does not fit: it is chosen as if nothing were there
            log.info("%s: what was kept cannot be used (%s: %s)", region.name, type(error).__name__, error)
            return None
        self.used += 1
        return lowered

    @collector_paused()  # a collection would fall into the call that this is part of
    def note(
        self, region: ZenRegion, inputs: Sequence[torch.Tensor], kinds: tuple[str, ...], lowered: LoweredRegion
    ) -> None:
        """Keep what was chosen, where the next process can have the same without looking at numbers."""
        assert lowered.lowering is not None and lowered.lowering.values is not None
        values, layouts = lowered.lowering.values, Layouts()
        origin = FromConstants(values)
        try:
            if reason := _looks_at_numbers(values):
                raise NotSaved(reason)
            if any(o.fallback_reason and o.node.target in SPREADING for o in lowered.lowering.operations):
                raise NotSaved("it reads constants that are not finite, or of unusual shapes")
            graph = region.graph_for(kinds)
            program = encode_program(lowered, layouts, graph, origin.has)
        except NotSaved as reason:
            log.debug("%s: what was chosen is not kept: %s", region.name, reason)
            return
        size = lowered.program.slice_size if isinstance(lowered.program, SlicedProgram) else None
        specs = [TensorSpec.of(tensor) for tensor in inputs]
        row = {"slice": size, "layouts": layouts.written, "program": program}
        asked, key = self._asked
        write(key if asked == _question(region, specs, kinds) else _key(region, specs, kinds), row)


def _question(region: ZenRegion, specs: Sequence[TensorSpec], kinds: tuple[str, ...]) -> Any:
    """What _key() makes a key of, as long as the region's graph and parameters stay."""
    return region.graph, tuple(specs), kinds, region.options, torch.get_num_threads()


def _key(region: ZenRegion, specs: Sequence[TensorSpec], kinds: tuple[str, ...]) -> str:
    """What a choice depends on beside the machine."""
    options = region.options
    own = region_key(region.graph_for(kinds), specs, region.constants, options, exact=True)
    return f"{VERSION} {own} {options.tune} {torch.get_num_threads()} threads"


def _decode(
    row: Mapping[str, Any], region: ZenRegion, specs: Sequence[TensorSpec], kinds: tuple[str, ...]
) -> LoweredRegion:
    graph, layouts = region.graph_for(kinds), Layouts(row["layouts"])
    context = Context(region.constants, region.weights, region.options)

    def origin(values: RegionValues) -> Origin:
        if reason := _looks_at_numbers(values):
            raise FileError(reason)
        for node in values.specs:
            if node.target in SPREADING and not values.are_constants_finite(node):
                raise FileError(f"{node.name} reads constants that are not finite")
        return FromConstants(values)

    def lower(inputs: Sequence[TensorSpec]) -> LoweredRegion:
        return decode_program(row["program"], inputs, context, layouts, graph=graph, origin=origin)

    if row["slice"] is None:
        return lower(specs)
    return sliced(row["slice"], RegionValues(graph, specs, region.constants), specs, graph, lower)


def _looks_at_numbers(values: RegionValues) -> str:
    """Why what is chosen depends on numbers of constants, "" where it asks no more than whether they are finite."""
    for node in values.specs:
        read = [source for source in node.all_input_nodes if source in values.constants]
        if not read:
            continue
        if not is_call(node, *_BY_SHAPE):
            return f"{node.name} reads constants"
        if any(_is_number(values.known(source)) for source in read):
            return f"{node.name} reads a number"
    return ""


def _is_number(value: Any) -> bool:
    """Whether a constant is no tensor of several numbers: rules may make it a part of what they choose."""
    return not all(isinstance(leaf, TensorSpec) and leaf.numel > 1 for leaf in tree_leaves(value))


class FromConstants:
    """Weights by the names of a graph's constants, computed and packed anew."""

    def __init__(self, values: RegionValues) -> None:
        self._values = values
        self._nodes: dict[str, fx.Node] = {node.name: node for node in values.constants}

    def has(self, weights: Weights) -> bool:
        """Whether the key names a constant that has these numbers, row by row."""
        node = self._nodes.get(weights.key)
        if node is None or weights.below or not weights.is_streamed:
            return False
        if weights.late is not None:
            return self._values.is_late(node)
        constant, plain = self._values.constants[node], weights.plain
        return (
            isinstance(constant, torch.Tensor)
            and constant.dtype == plain.dtype
            and constant.data_ptr() == plain.data_ptr()
            and constant.numel() == plain.numel()
            and (constant.stride() == plain.stride() or (constant.is_contiguous() and plain.is_contiguous()))
        )

    def __call__(self, key: str, desc: MemoryDesc, transposed: bool) -> Weights:
        """As fx_passes.saved.programs.Origin. Raises FileError."""
        node = self._nodes.get(key)
        if node is None:
            raise FileError(f"there is no constant {key[:80]}")
        late = self._values.late(node)
        if late is None:
            return Weights(key, self._values.constants[node], desc, transposed=transposed)
        spec = self._values.known(node)
        plain = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        return Weights(key, plain, desc, transposed=transposed, late=late)
