"""What is said of one node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


# What a node became that computes nothing worth counting.
_NO_COMPUTATION = ("view", "number", "check", "movement", "container")


def is_torch(implementation: str) -> bool:
    """Whether it is a kernel of PyTorch's: "torch", or "torch:" and which one."""
    return implementation.partition(":")[0] == "torch"


@dataclass(frozen=True)
class NodeExplanation:
    """One node of the optimized graph.

    region          name of the region it is in, "" for what stayed in the outer graph
    signature       shapes of the inputs it was lowered for, "" before the first call
    name, source    the node, and the module or function it comes from
    became          the primitive; "view"; "torch"; "waiting" before the first call. Outside of regions also "number" (a
                    size), "check" (an assertion), "movement" (data moved by PyTorch, often a view),
                    "container" (results put together)
    implementation  the implementation that runs, such as "brgconv:avx512_core"
    layout          memory layout of the result
    post_ops        operations absorbed into it
    reason          why it is not the engine's, "" if it is
    flops           floating point operations of one run, 0 where not counted
    time_ns         its time alone, measured (or estimated, where nothing was), None where not known
    """

    region: str
    signature: str
    name: str
    source: str
    became: str
    implementation: str
    layout: str
    post_ops: tuple[str, ...]
    reason: str
    flops: int = 0
    time_ns: float | None = None

    @property
    def computes(self) -> bool:
        """Whether it computes something: no view, size, assertion or mere movement of data."""
        return self.became not in _NO_COMPUTATION

    @property
    def offloaded(self) -> bool:
        """Whether the engine computes it."""
        return self.computes and self.became not in ("torch", "waiting")

    @property
    def in_engine(self) -> bool:
        """Whether its time is the engine's: a region may have PyTorch's own kernel called by a program."""
        return self.offloaded and not is_torch(self.implementation)
