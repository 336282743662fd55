"""What a region was lowered to, for each signature, as JSON; and programs that a loaded region has of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fx_passes.candidates.specs import RegionValues, TensorSpec
from fx_passes.lower.context import NotLowered
from fx_passes.plan.prepack import as_it_lies, layout_digest
from fx_passes.region.keep import SavedFor, ToKeep
from fx_passes.region.lowered import LoweredRegion, sliced
from fx_passes.region.region import ZenRegion
from fx_passes.saved.encoding import decode, encode
from fx_passes.saved.errors import FileError
from fx_passes.saved.layouts import Layouts
from fx_passes.saved.programs import Context, decode_program, encode_program, packed_weights
from fx_passes.saved.references import check_inputs
from fx_passes.saved.released import packed_as
from zendnn_cffi.collector import collector_paused
from zendnn_cffi.runtime.sliced_program import SlicedProgram

log = logging.getLogger("zendnn_cffi.saved")


def encode_lowered(
    kept: ToKeep,
    region: ZenRegion,
    plain: Mapping[str, torch.Tensor],
    *,
    layouts: Layouts,
    packed: dict[str, torch.Tensor],
    held: list[torch.Tensor],
) -> dict[str, Any]:
    """What a region was lowered to for one signature; packed weights are added to `packed`.

    plain  the parameters that are in the file under their own names
    held   packed weights are added: regions of other graphs share them for as long as somebody holds them
    """
    inputs = [[list(s.shape), encode(s.dtype, lambda _: None), list(s.strides)] for s in kept.inputs]
    row: dict[str, Any] = {"threads": kept.threads, "inputs": inputs, "kinds": list(kept.kinds)}
    if kept.lowered is None:
        return {**row, "plain": kept.reason}
    assert kept.lowered.lowering is not None
    program = kept.lowered.program
    originals = {tensor.data_ptr(): name for name, tensor in plain.items() if tensor.nbytes}
    weights, seen = [], set[tuple[str, str, bool]]()
    for wanted in packed_weights(kept.lowered.lowering):
        key = wanted.key, layout_digest(wanted.desc), wanted.transposed
        if key in seen:
            continue
        seen.add(key)
        tensor = region.weights.get(wanted)
        held.append(tensor)
        name = originals.get(tensor.data_ptr())
        if name is None or wanted.desc.size_bytes > plain[name].nbytes:
            name = packed_as(as_it_lies(tensor, wanted.desc.size_bytes), packed)
        weights.append([*key, name])
    size = program.slice_size if isinstance(program, SlicedProgram) else None
    return {**row, "slice": size, "weights": weights, "program": encode_program(kept.lowered, layouts)}


def signatures_in(programs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What the rows that encode_lowered returned are for, by region."""
    keys = ("threads", "inputs", "kinds")
    return {name: [{key: row[key] for key in keys} for row in rows] for name, rows in programs.items()}


def saved_for(rows: Sequence[Mapping[str, Any]], graph: fx.Graph) -> tuple[SavedFor, ...]:
    """The same as a region of this graph has it."""
    found = tuple(SavedFor(row["threads"], tuple(_inputs_of(row)), tuple(row["kinds"])) for row in rows)
    for each in found:
        check_inputs(graph, each.inputs, each.threads, each.kinds)
    return found


class SavedPrograms:
    """What a region of a loaded module was lowered to, for some signatures.

    rows  of the document; one that does not fit here is forgotten, with a warning
    told  numbers of threads of which the log says that the file is not for them; regions of a module share it
    used  how many became programs
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], layouts: Layouts, told: set[int]) -> None:
        self._rows = [(_inputs_of(row), row) for row in rows]
        self._layouts, self._told = layouts, told
        self.used = 0

    def __call__(
        self, region: ZenRegion, inputs: Sequence[torch.Tensor], kinds: tuple[str, ...], keep: bool
    ) -> LoweredRegion | None:
        """As fx_passes.region.keep.Known."""
        threads = torch.get_num_threads()
        fitting = [e for e in self._rows if tuple(e[1]["kinds"]) == kinds and _fits(e[0], inputs, region)]
        entry = next((entry for entry in fitting if entry[1]["threads"] == threads), None)
        if entry is None:
            if fitting and not keep and threads not in self._told:  # save() asks for what is wanted
                self._told.add(threads)
                known = ", ".join(str(count) for count in sorted({row["threads"] for _, row in fitting}))
                log.warning(
                    "saved for %s threads, called with %d: implementations are chosen again in the first call."
                    " save(module, path, threads=[%s, %d]) makes a file for these, too.", known, threads, known, threads
                )  # fmt: skip
            return None
        saved, row = entry
        if "plain" in row:
            raise NotLowered(row["plain"])
        context = Context(region.constants, region.weights, region.options)
        try:
            lowered = self._decode(row, saved, region, context, keep)
        except Exception as error:  # whatever does not fit any longer: it is lowered as if nothing had been saved
            log.warning("%s: what was saved cannot be used (%s: %s)", region.name, type(error).__name__, error)
            self._rows.remove(entry)
            return None
        self.used += 1
        return lowered

    def wants(self, region: ZenRegion) -> bool:
        """As fx_passes.region.keep.Known: save() asks for what is to be in a file."""
        return False

    def note(
        self, region: ZenRegion, inputs: Sequence[torch.Tensor], kinds: tuple[str, ...], lowered: LoweredRegion
    ) -> None:
        """As fx_passes.region.keep.Known."""

    def _decode(
        self, row: Mapping[str, Any], saved: Sequence[TensorSpec], region: ZenRegion, context: Context, keep: bool
    ) -> LoweredRegion:
        results = len(next(iter(region.graph.find_nodes(op="output"))).all_input_nodes)

        def lower(inputs: Sequence[TensorSpec]) -> LoweredRegion:
            with collector_paused():
                found = decode_program(row["program"], inputs, context, self._layouts, keep)
            if len(found.program.outputs) != results:
                raise FileError(f"a program of {len(found.program.outputs)} results, where there are {results}")
            return found

        if row["slice"] is None:
            return lower(saved)
        graph = region.graph_for(tuple(row["kinds"]))
        return sliced(row["slice"], RegionValues(graph, saved, region.constants), saved, graph, lower)


def _inputs_of(row: Mapping[str, Any]) -> list[TensorSpec]:
    return [
        TensorSpec(tuple(shape), decode(dtype, lambda _: None), tuple(strides))
        for shape, dtype, strides in row["inputs"]
    ]


def _fits(saved: Sequence[TensorSpec], inputs: Sequence[torch.Tensor], region: ZenRegion) -> bool:
    """Whether a program for the saved inputs is one for these."""
    if len(saved) != len(inputs):
        return False
    for number, (spec, tensor) in enumerate(zip(saved, inputs, strict=True)):
        if region.key_of(number, tensor) != region.key_of(number, spec):
            return False
    return True
