"""Was the machine busy with other work while something was measured?

A thread that another one pushes off its core while it computes counts an involuntary context switch: of all threads of
this process, OpenMP's included, the kernel tells the sum. Measuring ResNet-18 for the first time, two threads on two
cores of a Zen 4 EPYC, kernel ticks 4 ms apart, counted per second and thread:

    quiet machine            19 to 30 (an episode of half a second of 98)      times repeat within 2 % (median), 5 %
    one busy loop beside it  78 to 98      10 % longer (median), a tenth of them 7 times and more
    two busy loops           124 to 127    a tenth of them 50 times and more, whole networks 2.3 to 2.8 times

A limit of 60 lies between: of 130 times it kept 129 and 106 (quiet), 11 (one loop), 1 (two). What was measured beyond
it serves this process and stays out of the file. Not noticed: one busy loop among many cores, whose switches many
threads dilute, and threads kept from running by a quota.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fx_passes.search.database import Database
from zendnn_cffi.engine.contention import involuntary_switches

log = logging.getLogger("zendnn_cffi.search")

LIMIT = 60.0  # switches per second and thread
_FEWEST = 5  # fewer are no rate yet


@dataclass
class Observed:
    """What became of a measurement; known when it has ended."""

    disturbed: bool = False


@contextmanager
def measuring(database: Database) -> Iterator[Observed]:
    """What is put into the database meanwhile is kept by this process alone if other work disturbed it."""
    switches, start, mark = involuntary_switches(), time.perf_counter(), database.mark()
    observed = Observed()
    try:
        yield observed
    finally:
        switches, seconds = involuntary_switches() - switches, time.perf_counter() - start
        observed.disturbed = switches >= _FEWEST and switches > LIMIT * seconds * torch.get_num_threads()
        if observed.disturbed:
            log.info(
                "%d times measured on a busy machine (%d involuntary context switches in %.2f s): not kept on disk",
                database.doubt(mark), switches, seconds,
            )  # fmt: skip
