"""What transformed weights may add to memory where parameters are to be released."""

from __future__ import annotations

from collections.abc import Sequence

from fx_passes.candidates.candidates import Candidate, Operation, weights_of

_TRANSFORMED_SHARE = 0.05  # of all parameters' bytes, that transformed weights may take in addition


def limit_transforms(operations: Sequence[Operation], parameters_bytes: int) -> None:
    """Take candidates with transformed weights from operations, the last first, until what they add is a small share.

    Winograd's are up to four times as large. The plain ones are not made again from those, nor from AOCL-BLIS's. Early
    layers have few channels, so little weight, and gain the most.
    """
    budget = int(parameters_bytes * _TRANSFORMED_SHARE)
    for operation in operations:
        fits = [c for c in operation.candidates if _transformed_bytes(c) <= budget]
        if fits:
            operation.candidates = fits
            budget -= max(map(_transformed_bytes, fits))


def _transformed_bytes(candidate: Candidate) -> int:
    """Bytes of weights that plain ones cannot be made from."""
    weights = weights_of(candidate)
    return sum(w.desc.size_bytes for w in weights if w.desc.outer_strides is None)
