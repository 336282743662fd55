"""One process of `make verify-library`: runs the cases of a group and writes a line before and after each.

    python -m zendnn_cffi.primitives.verification.child GROUP LOG POSITION SECONDS

GROUP "all" is all of them. POSITION checks were done by processes before. SECONDS, if not 0, is how long a sample of
the cases may take.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import TextIO

import torch

from zendnn_cffi.errors import ZenDNNError
from zendnn_cffi.primitives.primitive import PrimitiveDesc
from zendnn_cffi.primitives.verification.cases import Case
from zendnn_cffi.primitives.verification.check import NotChecked, check
from zendnn_cffi.primitives.verification.groups import groups
from zendnn_cffi.primitives.verification.kinds import kind_of
from zendnn_cffi.primitives.verification.places import Guarded
from zendnn_cffi.primitives.verification.unchecked import unchecked


def main(group: str, log: str, position: int, seconds: float) -> None:
    with open(log, "a", encoding="utf-8", buffering=1) as file, unchecked():
        for number, (case, pd) in enumerate(_checks(group, seconds)):
            if number >= position:
                _one(case, pd, file)
        file.write('{"complete": true}\n')


def _checks(group: str, seconds: float) -> Iterator[tuple[Case, PrimitiveDesc]]:
    """Yield every implementation of every case that no known problem keeps from use."""
    makers = groups().values() if group == "all" else [groups()[group]]
    cases = [case for make in makers for case in make()]
    if seconds:
        random.Random(0).shuffle(cases)
    end = time.monotonic() + seconds
    for case in cases:
        if seconds and time.monotonic() > end:
            return
        yield from ((case, pd) for pd in implementations(case))


def implementations(case: Case) -> list[PrimitiveDesc]:
    """Return the implementations of a case; empty where there is none."""
    op, attr = case.make()
    try:
        if op.kind == "reorder":
            src, dst = op.descs["src"], op.descs["dst"]
            assert src is not None and dst is not None
            return [PrimitiveDesc.reorder(src, dst, attr)]
        return list(PrimitiveDesc(op, attr).implementations())
    except ZenDNNError:
        return []


def _one(case: Case, pd: PrimitiveDesc, file: TextIO) -> None:
    kind = kind_of(pd)
    file.write(json.dumps({"start": kind, "case": case.name}) + "\n")
    try:
        problem = problem_of(pd)
    except NotChecked:
        kind, problem = "", ""
    file.write(json.dumps({"kind": kind, "case": case.name, "problem": problem}) + "\n")


def problem_of(pd: PrimitiveDesc) -> str:
    """Return what is wrong with an implementation, between unreadable pages; "" for nothing."""
    threads = torch.get_num_threads()
    for at_end, count, seed in ((True, threads, 0), (False, 1, 2)):
        torch.set_num_threads(count)
        try:
            verdict = check(pd, partial(Guarded, at_end=at_end), seed)
        finally:
            torch.set_num_threads(threads)
        if not verdict.right:
            return verdict.problem
    return ""


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
