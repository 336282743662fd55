"""cache_info() and cache_clear(): what optimized modules keep between calls, in bytes, and how to get it back."""

from __future__ import annotations

from dataclasses import dataclass, fields

from zendnn_cffi.engine.library import is_available
from zendnn_cffi.primitives import primitive_cache
from zendnn_cffi.runtime import arenas
from zendnn_cffi.runtime.recycled import results


@dataclass(frozen=True)
class CacheInfo:
    """What cache_info() returns, over every optimized module that is alive.

    regions                 regions of optimized modules
    programs                programs that regions keep, one per input signature
    programs_limit          the most one region keeps; the least recently used go first
    waiting                 input signatures that run as plain PyTorch until a program pays (`warm_up`)
    arenas_bytes            memory for activations, kept between calls
    arenas_limit_bytes      where arenas together would pass this, those that nobody is using are freed
                            (ZENDNN_CFFI_ARENA_MB, in MiB)
    results_bytes           memory of large results that nobody holds any more, for the next ones; 256 MiB at most
    remembered_bytes        what depends on sizes or masks alone (positions, masks of attention); 256 MiB at most
    packed_weights_bytes    weights in the layouts that kernels want, and folded ones
    original_weights_bytes  the parameters they were made from, shared with the original model
    primitives_limit        compiled primitives that are kept (ZENDNN_PRIMITIVE_CACHE_CAPACITY)
    """

    regions: int
    programs: int
    programs_limit: int
    waiting: int
    arenas_bytes: int
    arenas_limit_bytes: int
    results_bytes: int
    remembered_bytes: int
    packed_weights_bytes: int
    original_weights_bytes: int
    primitives_limit: int

    def __str__(self) -> str:
        lines = []
        for field in fields(self):
            value = getattr(self, field.name)
            shown = f"{value / (1 << 20):.1f} MiB" if field.name.endswith("bytes") else str(value)
            lines.append(f"{field.name.removesuffix('_bytes').replace('_', ' '):17} {shown}")
        return "\n".join(lines)


def cache_info() -> CacheInfo:
    """Return what optimized modules keep between calls."""
    from fx_passes.memoize.combinations import remembered_bytes
    from fx_passes.region.programs import MAX_PROGRAMS
    from fx_passes.region.region import living_regions, weights_bytes

    regions = living_regions()
    originals_bytes, packed_bytes = weights_bytes(regions)
    return CacheInfo(
        regions=len(regions),
        programs=sum(lowered is not None for region in regions for lowered in region.lowered.values()),
        programs_limit=MAX_PROGRAMS,
        waiting=sum(region.patience.waiting for region in regions),
        arenas_bytes=arenas.size_bytes(),
        arenas_limit_bytes=arenas.limit_bytes(),
        results_bytes=results.free_bytes,
        remembered_bytes=remembered_bytes(),
        packed_weights_bytes=packed_bytes,
        original_weights_bytes=originals_bytes,
        primitives_limit=_primitives_limit(),
    )


def cache_clear() -> None:
    """Free programs, arenas, results, what is remembered, packed weights and compiled primitives; the next calls make
    them again.

    Calls that are running keep what they use until they return. What was measured stays known.
    """
    from fx_passes.memoize.combinations import forget_all
    from fx_passes.region.region import living_regions

    for region in living_regions():
        region.clear()
    forget_all()
    for program in arenas.programs():
        program.free_idle()
    results.clear()
    if is_available():
        primitive_cache.clear()


def _primitives_limit() -> int:
    return primitive_cache.capacity() if is_available() else 0
