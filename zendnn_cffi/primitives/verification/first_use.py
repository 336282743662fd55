"""Before an implementation is first used in some kind of way that nothing is known of, it is checked, once per machine.

``functional`` and the handle objects ask here. The compiler compares every candidate with plain PyTorch itself, on its
own shapes: it works under ``unchecked``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from zendnn_cffi.log import get_logger
from zendnn_cffi.primitives.labels import profiler
from zendnn_cffi.primitives.verification import records
from zendnn_cffi.primitives.verification.kinds import kind_of, sizes_of
from zendnn_cffi.primitives.verification.unchecked import is_unchecked, unchecked

if TYPE_CHECKING:
    from zendnn_cffi.primitives.primitive import PrimitiveDesc
    from zendnn_cffi.primitives.verification.check import Verdict

log = get_logger(__name__)

# Operands beyond this are not made for a check, which takes three to five times their memory
LIMIT_BYTES = 1 << 30


def problem(pd: PrimitiveDesc) -> str | None:
    """Return what is wrong with the implementation in this kind of use, None where it is right.

    Known from `make verify-library` on this CPU generation, from an earlier check on this machine, or found out now.
    """
    if is_unchecked() or pd.op is None:
        return None
    kind = kind_of(pd)
    known = records.found(kind)
    if known is None:
        key = f"{kind} | {sizes_of(pd)}"
        known = records.here().get(key)
        if known is None:
            known = _find_out(pd, key)
    return known or None


def _check(pd: PrimitiveDesc) -> Verdict:
    from zendnn_cffi.primitives.verification.check import check

    return check(pd)


def _find_out(pd: PrimitiveDesc, key: str) -> str:
    from zendnn_cffi.primitives.verification.check import NotChecked

    size_bytes = sum(desc.size_bytes for desc in pd.expected_args.values())
    if size_bytes > LIMIT_BYTES:
        log.info("%s: too large to be checked before use (%.1f GiB)", key, size_bytes / 2**30)
        return ""
    start = time.perf_counter()
    with unchecked(), profiler.record_function("zendnn_cffi: check before first use"):
        try:
            verdict = _check(pd)
        except (NotChecked, MemoryError) as error:
            log.info("%s: not checked before use: %s", key, error)
            records.here().put(key, "", keep=False)
            return ""
    took_ms = (time.perf_counter() - start) * 1e3
    if verdict.right:
        log.debug("%s: right, checked in %.1f ms", key, took_ms)
    else:
        log.info("%s: %s; it is not used", key, verdict.problem)
    records.here().put(key, verdict.problem, keep=not verdict.doubtful)
    return verdict.problem
