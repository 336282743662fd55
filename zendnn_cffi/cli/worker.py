"""A process of `bench`: one contender on some cores, which runs when it is told to.

    python -m zendnn_cffi.cli.worker '{"model": ..., "contender": ..., "batch": 1, ...}'

It answers {"error": ..., "first_s": ...} once it is ready. Then it reads lines, each a number of seconds, and answers
each with the times of its calls in nanoseconds. A contender that fails answers {"failed": ...}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

_LEAST_CALLS = 3


def main(text: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr
    job = json.loads(text)
    os.sched_setaffinity(0, job["cores"])

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        run, about = _prepared(job)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        answer({"failed": f"{type(error).__name__}: {lines[0]}"[:200]})
        return
    answer(about)
    for line in sys.stdin:
        answer(_times_ns(run, float(line)))


def _prepared(job: dict[str, Any]) -> tuple[Any, dict[str, float]]:
    """The call, warm, and how it differs from eager in float32 relative to the largest number."""
    import torch

    from zendnn_cffi.cli.contenders import CONTENDERS, difference, tensors
    from zendnn_cffi.cli.models import find

    torch.set_num_threads(job["threads"])
    torch.set_grad_enabled(False)
    found = find(job["model"], job["batch"])
    expected = [each.clone() for each in tensors(found.model(*found.args, **found.kwargs))]
    begun = time.perf_counter()
    run = CONTENDERS[job["contender"]](found, getattr(torch, job["dtype"]))
    result = tensors(run())
    first_s = time.perf_counter() - begun
    error = difference(result, expected)
    if job["contender"] == "zendnn_cffi":
        from fx_passes.region.later import later

        later.measure_now()  # else a thread does so while others are measured
    _times_ns(run, 1.0)
    return run, {"error": error, "first_s": first_s}


def _times_ns(run: Any, seconds: float) -> list[int]:
    times: list[int] = []
    end = time.perf_counter_ns() + int(seconds * 1e9)
    while len(times) < _LEAST_CALLS or time.perf_counter_ns() < end:
        begun = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begun)
    return times


if __name__ == "__main__":
    main(sys.argv[1])
