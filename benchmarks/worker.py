"""A long-lived process that runs one contender on one case, one command at a time.

    python benchmarks/worker.py CONTENDER CASE_JSON

Commands and answers are JSON lines on the original stdin and stdout; whatever libraries print goes to stderr.

    {"do": "load"}                 -> {"ready_s": ...}      from weights loaded to the first answer computed
    {"do": "run", "times": n}      -> {"times_ns": [...]}
    {"do": "check", "file": path}  -> {}                    outputs of one call, as .npz
    {"do": "status"}               -> {"peak_bytes": ..., "resident_bytes": ..., "notes": {...}}
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # the checkout comes last, so that an installed zendnn_cffi wins over the source tree
    sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parent.parent)]

from benchmarks.case import REFERENCE_ROWS, Case
from benchmarks.contenders import CONTENDERS
from benchmarks.provisional import provisional, settle
from benchmarks.runners import Runner


class Worker:
    """Answers the driver's commands; `load` must be the first."""

    def __init__(self, contender: str, case: Case) -> None:
        self.contender, self.case = CONTENDERS[contender], case
        self.runner: Runner | None = None

    def load(self) -> dict[str, Any]:
        start = self.contender.start_of(self.case)
        began = time.perf_counter()
        self.runner = start()
        self.runner.run()
        ready_s = time.perf_counter() - began
        settle()
        gc.collect()
        gc.freeze()
        return {"ready_s": ready_s}

    def run(self, times: int) -> dict[str, Any]:
        assert self.runner is not None
        call, clock, times_ns = self.runner.run, time.perf_counter_ns, []
        for _ in range(times):
            start = clock()
            call()
            times_ns.append(clock() - start)
        return {"times_ns": times_ns}

    def check(self, file: str) -> dict[str, Any]:
        assert self.runner is not None
        outputs = self.runner.outputs(self.runner.run())
        batch = self.case.batch
        np.savez(file, *(array[:REFERENCE_ROWS] if array.shape[:1] == (batch,) else array for array in outputs))
        return {}

    def status(self) -> dict[str, Any]:
        assert self.runner is not None
        with open("/proc/self/status") as lines:
            sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmHWM", "VmRSS"))}
        memory = {"peak_bytes": int(sizes["VmHWM"]) * 1024, "resident_bytes": int(sizes["VmRSS"]) * 1024}
        unsettled = {"provisional": count} if (count := provisional()) else {}
        return memory | {"notes": self.runner.notes() | unsettled}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(sys.argv[1], Case.from_json(sys.argv[2]))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(worker, command.pop("do"))(**command)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
