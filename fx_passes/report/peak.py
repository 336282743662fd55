"""What this machine can do at most, measured by short runs: arithmetic and memory bandwidth, the roof of a roofline.

Arithmetic: the library's own inner_product and 3x3 convolution on operands that stay in the second-level caches, 256
rows or 196 pixels a thread; the faster one counts. With AVX2 alone the convolution's kernels are the better ones.
Bandwidth: a = b + 2 c over arrays as large as the third-level caches together, counted as two reads and a write.
Each is the best of some runs, kept for the life of the process per thread count (and data type).

Source of the model: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009; of the triad: McCalpin's STREAM.
"""

from __future__ import annotations

import os
import time
from functools import lru_cache
from pathlib import Path

import torch

from fx_passes.candidates.layouts import has_bf16_kernels
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SCRATCHPAD, ARG_SRC, ARG_WEIGHTS
from zendnn_cffi.primitives.descriptors import convolution, inner_product
from zendnn_cffi.primitives.memory import MemoryDesc
from zendnn_cffi.primitives.primitive import Primitive, PrimitiveDesc
from zendnn_cffi.runtime import huge_pages
from zendnn_cffi.runtime.calls import PrimitiveCall
from zendnn_cffi.runtime.places import Slot
from zendnn_cffi.runtime.program import Program

_ROWS_PER_THREAD, _WIDTH = 256, 384  # source and weights of a thread: 1 MB in float32
_CHANNELS, _SIDE = 64, 14  # of a convolution: 200 KB
_PRODUCT_RUNS, _TRIAD_RUNS = 50, 10
_SMALLEST_ARRAY_BYTES = 64 << 20
_CPUS = Path("/sys/devices/system/cpu")


@lru_cache(maxsize=32)
def peak_gflops(dtype: torch.dtype, threads: int) -> float:
    """Return the best rate of products in float32 or bfloat16, GFLOP/s; 0 for other types, and without kernels.

    threads  torch.get_num_threads(), which it runs with
    """
    if dtype not in (torch.float32, torch.bfloat16) or (dtype == torch.bfloat16 and not has_bf16_kernels()):
        return 0.0
    rows = _ROWS_PER_THREAD * threads
    row, weights = MemoryDesc((rows, _WIDTH), dtype), MemoryDesc((_WIDTH, _WIDTH), dtype, "any")
    product = PrimitiveDesc(inner_product(row, weights, None, row))
    image = MemoryDesc((threads, _CHANNELS, _SIDE, _SIDE), dtype, "any")
    window = MemoryDesc((_CHANNELS, _CHANNELS, 3, 3), dtype, "any")
    windows = PrimitiveDesc(convolution(image, window, None, image, padding_l=(1, 1), padding_r=(1, 1)))
    return max(
        2 * rows * _WIDTH * _WIDTH / _shortest_ns(product, "inner_product"),
        2 * threads * _SIDE * _SIDE * 9 * _CHANNELS * _CHANNELS / _shortest_ns(windows, "convolution"),
    )


def _shortest_ns(pd: PrimitiveDesc, kind: str) -> float:
    """The shortest of some runs of a product or convolution."""
    descs = {ARG_SRC: pd.src_desc, ARG_WEIGHTS: pd.weights_desc, ARG_DST: pd.dst_desc}
    descs[ARG_SCRATCHPAD] = pd.scratchpad_desc
    args: dict[int, tuple[Slot, MemoryDesc]] = {}
    buffers: list[torch.Tensor] = []
    for arg, desc in descs.items():
        if desc is not None:
            args[arg] = Slot("constant", len(buffers)), desc
            buffers.append(huge_pages.allocate(desc.size_bytes).zero_())
    program = Program([PrimitiveCall("peak", Primitive(pd), args, kind)], (), buffers)
    return min(program.run_timed(())[1][0] for _ in range(_PRODUCT_RUNS))


@lru_cache(maxsize=32)
def peak_gbytes_per_s(threads: int) -> float:
    """Return the best bandwidth of memory, GB/s. threads: torch.get_num_threads(), which it runs with."""
    elements = max(_SMALLEST_ARRAY_BYTES, _third_level_bytes()) // 4
    with torch.inference_mode(False), torch.no_grad():
        b, c, a = (torch.full((elements,), 1.0, dtype=torch.float32, device="cpu") for _ in range(3))
        times_ns = []
        for _ in range(_TRIAD_RUNS):
            start = time.perf_counter_ns()
            torch.add(b, c, alpha=2.0, out=a)
            times_ns.append(time.perf_counter_ns() - start)
    return 3 * 4 * elements / min(times_ns)


def _third_level_bytes() -> int:
    """The third-level caches of the cores this process may use, together; 0 where the system does not say."""
    sizes: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0):
        cache = _CPUS / f"cpu{cpu}" / "cache" / "index3"
        try:
            shared, size = (cache / "shared_cpu_list").read_text(), (cache / "size").read_text().strip()
            sizes[shared] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            return 0
    return sum(sizes.values())
