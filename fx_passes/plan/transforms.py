"""What transformed weights may add to memory where parameters are to be released."""

from __future__ import annotations

from collections.abc import Sequence

from fx_passes.candidates.candidates import Candidate, Operation, PrimitiveTemplate, Weights

_TRANSFORMED_SHARE = 0.05  # of all parameters' bytes, that Winograd's transformed weights may take in addition


def limit_transforms(operations: Sequence[Operation], parameters_bytes: int) -> None:
    """Take Winograd candidates from operations, the last first, until what they add to memory is a small share.

    Transformed weights are up to four times as large, and the plain ones cannot be made from them again. Early layers
    have few channels, so little weight, and gain the most.
    """
    budget = int(parameters_bytes * _TRANSFORMED_SHARE)
    for operation in operations:
        fits = [c for c in operation.candidates if _transformed_bytes(c) <= budget]
        if fits:
            operation.candidates = fits
            budget -= max(map(_transformed_bytes, fits))


def _transformed_bytes(candidate: Candidate) -> int:
    """Bytes of weights that plain ones cannot be made from."""
    templates = [t for t in candidate.calls if isinstance(t, PrimitiveTemplate)]
    weights = [a for t in templates for a in t.args.values() if isinstance(a, Weights)]
    return sum(w.desc.size_bytes for w in weights if w.desc.outer_strides is None)
