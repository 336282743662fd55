"""Candidates that a file has no form for: those that call PyTorch, or rest on a guard.

The node's rule lowers it once more, and the candidate is recognised among what the rule offers. Rules are the compiler,
which most files do without: fx_passes.saved.programs imports this where it is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import fx

from fx_passes.candidates.candidates import Candidate, Operation
from fx_passes.candidates.specs import RegionValues
from fx_passes.lower.context import LoweringContext
from fx_passes.lower.rules import Readers, lower_node
from fx_passes.region.options import RegionOptions
from fx_passes.saved.errors import FileError
from fx_passes.search.measure import fingerprint

_LONGEST = 1 << 48  # strides, in elements


class Rules:
    """The rules for one graph.

    operations  what nodes became so far; grows
    covering    node -> the one before it that its operation covers
    """

    def __init__(
        self,
        graph: fx.Graph,
        values: RegionValues,
        options: RegionOptions,
        operations: dict[fx.Node, Operation],
        covering: Mapping[fx.Node, fx.Node],
    ) -> None:
        overwritable = Readers(graph).last_to_read
        self._context = LoweringContext(
            values, options.dtype, overwritable, options.allow_winograd, options.without, covering, operations
        )

    @property
    def offered(self) -> Mapping[fx.Node, list[tuple[int, ...]]]:
        """Strides that operands of what was found had candidates for."""
        return self._context.offered

    def find(
        self, node: fx.Node, wanted: str, offered: Mapping[fx.Node, list[tuple[int, ...]]]
    ) -> tuple[Operation, Candidate]:
        """The node lowered again, and its candidate of that identity. Raises FileError where there is none.

        offered  strides that its operands had candidates for: rules offer candidates that take these
        """
        for strides in (each for every in offered.values() for each in every):
            if any(type(step) is not int or not 0 <= step <= _LONGEST for step in strides):
                raise FileError(f"{node.name} reads no operand with strides {str(strides)[:80]}")
        self._context.offered.update(offered)
        operation = lower_node(node, self._context)
        for candidate in operation.candidates:
            if identity(candidate) == wanted:
                return operation, candidate
        raise FileError(f"{node.name}: what was chosen is not offered any longer")


def identity(candidate: Candidate) -> str:
    """What a candidate is recognised by among those of one operation."""
    layouts = [getattr(desc, "key", None) or repr(desc).encode() for desc in (*candidate.srcs, candidate.dst)]
    kinds = [(type(t).__name__, getattr(t, "key", ""), getattr(t, "into", False)) for t in candidate.calls]
    about = (candidate.implementation, candidate.overwrites, candidate.offset_bytes, candidate.slices_bytes, kinds)
    text = repr(about).encode() + b"|".join(layouts) + fingerprint(candidate).encode()
    return hashlib.sha256(text).hexdigest()[:32]
