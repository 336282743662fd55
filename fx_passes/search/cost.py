"""Estimated times, for choosing among candidates without measuring: arithmetic over a rate, or bytes over a bandwidth.

The rates are those of one Zen 4 core with AVX-512; only their ratios matter to the choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fx_passes.candidates.candidates import (
    Candidate,
    GemmTemplate,
    LoopTemplate,
    Operation,
    PrimitiveTemplate,
    TorchTemplate,
    weights_bytes,
)
from fx_passes.candidates.layouts import Layout
from fx_passes.search.averages import median

_FLOPS_PER_NS = 110.0  # f32, per core
_TIMES_FLOAT32 = {torch.bfloat16: 2.0, torch.uint8: 4.0, torch.int8: 4.0}
_BYTES_PER_NS = 10.0
_CALL_NS = 2_000.0
_TORCH_CALL_NS = 15_000.0
_NOT_BEFORE = 1.01
_GEMM_CALL_NS = 3_000.0  # so that AOCL-BLIS is taken where it was measured to be faster, never by estimate

_CALLS_NS = {
    PrimitiveTemplate: _CALL_NS,
    TorchTemplate: _TORCH_CALL_NS,
    GemmTemplate: _GEMM_CALL_NS,
    LoopTemplate: _CALL_NS,
}

# Share of the peak by the start of the implementation's name, first match wins. Winograd does 2.25 times fewer
# multiplications with 2x2 tiles (4 with 4x4), at a lower share.
_SHARES = (
    ("jit_wino_4x3", 2.4),
    ("jit_fp32_wino_2x3", 1.5),
    ("brgconv_1x1", 0.90),
    ("brgconv", 0.90),
    ("brdgmm_dw", 0.30),
    ("jit_uni_dw", 0.28),
    ("jit_dw", 0.28),
    ("jit_1x1", 0.86),
    ("jit_bf16", 0.80),
    ("jit:", 0.84),
    ("brgemm", 0.86),  # of inner_product
    ("brg:", 0.90),  # of matmul
    ("jit_int8", 0.80),
    ("x64:gemm_s8u8s32", 0.02),  # of a depthwise convolution 0.005 was seen, of 1x1 0.4: taken where there is no other
    ("x64:gemm", 0.35),
    ("ref", 0.004),
    ("torch:bags", 0.06),  # 300 and 8,400 queries of 12 samples, in maps of up to 80 x 80
    ("torch:grid_sample", 0.006),
)

_SHARE_OF_RECURRENT = 0.6
_SHARE_OF_STEPS = 0.5  # of a recurrent layer in a loop: worth measuring, never taken by estimate

# Kernels for older instruction sets, beside those for AVX-512, and loops in portable C++: by the end of the name.
_NARROW = ((":sse41", 0.25), (":avx2", 0.5), ("spc_bnorm:any", 0.2))


def estimate_ns(operation: Operation, candidate: Candidate, threads: int) -> float:
    """Return the estimated time of one candidate."""
    if candidate.is_view or candidate.slices_bytes:
        return 0.0
    moved = candidate.dst.size_bytes + sum(src.size_bytes for src in candidate.srcs)
    time_ns = moved / _BYTES_PER_NS / _vector_share(candidate) + _weights_bytes(operation, candidate) / _BYTES_PER_NS
    for template in candidate.calls:
        time_ns += _CALLS_NS[type(template)]
    if operation.flops:
        faster = _TIMES_FLOAT32.get(candidate.srcs[0].dtype, 1.0)
        time_ns = max(time_ns, operation.flops / (_FLOPS_PER_NS * faster * threads * _share(candidate)))
    return time_ns


def _weights_bytes(operation: Operation, candidate: Candidate) -> float:
    """The constants that it reads. PyTorch's function holds its own: as many as the fewest of the others."""
    if candidate.implementation != "torch":
        return weights_bytes(candidate)
    others = [other for other in operation.candidates if other.implementation != "torch"]
    return min(map(weights_bytes, others), default=0)


def completed(table_ns: Sequence[float], known_ns: Sequence[float | None]) -> list[float]:
    """Better times where they are known, of an operation's candidates; the table's of the rest, brought to these.

    The rest do not come before the best that is known: the table and what is known were not made to be compared.
    """
    pairs = [(known, table) for known, table in zip(known_ns, table_ns, strict=True) if known is not None]
    if not pairs:
        return list(table_ns)
    scale = median(known / max(1.0, table) for known, table in pairs)
    least = _NOT_BEFORE * min(known for known, _ in pairs)
    return [max(least, scale * t) if k is None else k for k, t in zip(known_ns, table_ns, strict=True)]


def reorder_ns(have: Layout, want: Layout) -> float:
    """Return the estimated time of a reorder."""
    return _CALL_NS + (have.size_bytes + want.size_bytes) / _BYTES_PER_NS


def _share(candidate: Candidate) -> float:
    template = candidate.calls[0]
    if any(isinstance(call, LoopTemplate) for call in candidate.calls):
        return _SHARE_OF_STEPS
    if isinstance(template, PrimitiveTemplate) and template.kind == "rnn":
        return _SHARE_OF_RECURRENT  # "ref" names what calls products of its own
    name = template.pd.implementation if isinstance(template, PrimitiveTemplate) else ""
    if isinstance(template, TorchTemplate):
        name = candidate.implementation
    return _vector_share(candidate) * next((share for start, share in _SHARES if name.startswith(start)), 0.5)


def _vector_share(candidate: Candidate) -> float:
    """Share of the machine's vector width that the kernel uses."""
    return next((factor for isa, factor in _NARROW if candidate.implementation.endswith(isa)), 1.0)
