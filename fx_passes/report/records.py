"""What a profile says of each call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrimitiveTime:
    """One call of a program: median wall time over the runs, summed where one run makes the call several times.

    region             name of the region it is in
    name               node of the graph ("a for b": the reorder of a's value for reader b)
    kind               primitive, "reorder" or "torch"
    implementation     the implementation that ran
    time_ns            median wall time
    flops              floating point operations, counted as direct arithmetic; 0 where not counted
    bytes_moved        bytes of operands, weights and result, each once, wherever they lie
    dtype              data type of the source, such as "float32"
    peak_gflops        what this machine does at most in this dtype (fx_passes.report.peak), 0 where not measured
    peak_gbytes_per_s  what its memory gives at most
    """

    region: str
    name: str
    kind: str
    implementation: str
    time_ns: int
    flops: int
    bytes_moved: int = 0
    dtype: str = ""
    peak_gflops: float = 0.0
    peak_gbytes_per_s: float = 0.0

    @property
    def gflops(self) -> float:
        """Rate in GFLOP/s, 0 where operations are not counted."""
        return self.flops / self.time_ns if self.time_ns else 0.0

    @property
    def gbytes_per_s(self) -> float:
        """Rate in GB/s."""
        return self.bytes_moved / self.time_ns if self.time_ns else 0.0

    @property
    def intensity(self) -> float:
        """Floating point operations per byte."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0

    @property
    def bound(self) -> str:
        """What the roofline says bounds it: "arithmetic", or "memory" if its bytes came from there."""
        return "arithmetic" if self._arithmetic_share > self._memory_share else "memory"

    @property
    def peak_share(self) -> float:
        """Share of the peak of what bounds it. Above 1: Winograd's algorithm, or bytes that were in a cache."""
        return max(self._arithmetic_share, self._memory_share)

    @property
    def _arithmetic_share(self) -> float:
        return self.gflops / self.peak_gflops if self.peak_gflops else 0.0

    @property
    def _memory_share(self) -> float:
        return self.gbytes_per_s / self.peak_gbytes_per_s if self.peak_gbytes_per_s else 0.0
