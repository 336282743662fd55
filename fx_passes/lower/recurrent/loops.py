"""A loop over primitives as one call of a candidate."""

from __future__ import annotations

from collections.abc import Sequence

from fx_passes.candidates.candidates import Argument, LoopTemplate, Scratchpad
from zendnn_cffi.primitives.attributes import ARG_SCRATCHPAD
from zendnn_cffi.primitives.primitive import PrimitiveDesc
from zendnn_cffi.runtime.loop_call import Part


def looped(
    steps: Sequence[tuple[PrimitiveDesc, dict[int, Part]]],
    arguments: Sequence[Argument],
    rounds: int,
    kind: str,
    flops: int,
) -> LoopTemplate:
    """A loop of these steps; a scratchpad that they share is one argument more."""
    pads = [(parts, pd.scratchpad_desc) for pd, parts in steps if pd.scratchpad_desc is not None]
    for parts, desc in pads:
        parts[ARG_SCRATCHPAD] = Part(len(arguments), desc)
    if pads:
        arguments = [*arguments, Scratchpad(max((desc for _, desc in pads), key=lambda desc: desc.size_bytes))]
    return LoopTemplate(tuple(steps), tuple(arguments), rounds, kind, flops)
