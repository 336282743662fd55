"""Was the machine busy with other work while something was measured?

The kernel tells how long each thread was ready to run and had no core. The most that one of two threads waited, of the
time that products took in windows of 0.1 s, two cores of a Zen 4 EPYC:

    quiet machine            0.002 (median), 0.11 (the worst of 24 windows)
    one busy loop beside it  0.66 and more

A limit of 0.2 lies between. Where the kernel does not tell, it is how often threads were pushed off their cores: 19 to
50 times a second and thread on a quiet machine (an episode of half a second of 190), 78 to 98 beside a busy loop.
What was measured beyond a limit serves this process and stays out of the file. Not noticed: threads kept from running
by a quota.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fx_passes.search.database import Database
from zendnn_cffi.engine.contention import involuntary_switches, waited_ns
from zendnn_cffi.values import dataclass

log = logging.getLogger("zendnn_cffi.search")

LIMIT = 0.2  # of the time, that a thread waits for a core
_ONCE_NS = 5e6  # a thread may wait so long however short the time: another one's share of the core
SWITCHES_LIMIT = 60.0  # per second and thread, where waiting is not known
_FEWEST = 5  # fewer are no rate yet


@dataclass
class Observed:
    """What became of a measurement; known when it has ended."""

    disturbed: bool = False


@contextmanager
def measuring(database: Database, of_this_process: bool = False) -> Iterator[Observed]:
    """What is put into the database meanwhile is kept by this process alone if other work disturbed it.

    of_this_process  it is in any case
    """
    waited, switches, start, mark = waited_ns(), involuntary_switches(), time.perf_counter(), database.mark()
    observed = Observed()
    try:
        yield observed
    finally:
        seconds = time.perf_counter() - start
        if waited:
            longest_ns = max((ns - waited.get(thread, 0) for thread, ns in waited_ns().items()), default=0)
            observed.disturbed = longest_ns > LIMIT * seconds * 1e9 + _ONCE_NS
            seen = f"a thread waited {longest_ns / 1e9:.3f} s for a core"
        else:
            switches = involuntary_switches() - switches
            observed.disturbed = switches >= _FEWEST and switches > SWITCHES_LIMIT * seconds * torch.get_num_threads()
            seen = f"{switches} involuntary context switches"
        if observed.disturbed or of_this_process:
            kept = database.doubt(mark)
        if observed.disturbed:
            log.info("%d times measured on a busy machine (%s in %.2f s): not kept on disk", kept, seen, seconds)
