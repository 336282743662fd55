"""Random calls of every function and object: run in a child process by test_fuzz.py.

    python fuzz.py garbage|right SEED COUNT TRACE

garbage  arguments nobody would pass: each call must return, or raise one of the documented exceptions
right    calls that must succeed: each is compared with plain PyTorch in float64, its operands and the memory around its
         result with what they held before

TRACE always holds the call being made, so that the parent can name the one that killed the process. A failure names the
seed that makes it again: COUNT 1 from there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from tests.zendnn_cffi.functional.fuzzing.garbage import ambient, garbage
from tests.zendnn_cffi.functional.fuzzing.objects import DOCUMENTED
from tests.zendnn_cffi.functional.fuzzing.oracle import make, wrong
from tests.zendnn_cffi.functional.fuzzing.show import show

Note = Callable[[str], None]


def try_garbage(seed: int, note: Note) -> bool:
    """Whether the call returned; AssertionError for an exception that is not documented."""
    torch.manual_seed(seed)
    function, args, kwargs = garbage(seed)
    note(f"{function.__name__} {[show(a) for a in args]} { {k: show(v) for k, v in kwargs.items()} }")
    try:
        with ambient(seed):
            function(*args, **kwargs)
    except DOCUMENTED as error:
        assert str(error), "an exception without a message"
        return False
    return True


def try_right(seed: int, note: Note) -> bool:
    """True; AssertionError where the answer is wrong."""
    holder, case = make(seed)
    note(f"{case.function.__name__} {[show(a) for a in case.args]} { {k: show(v) for k, v in case.kwargs.items()} }")
    fault = wrong(holder, case)
    assert fault is None, fault
    return True


KINDS = {"garbage": try_garbage, "right": try_right}


def main(kind: str, first: int, count: int, trace: Path) -> None:
    returned = 0
    with trace.open("w", buffering=1) as file:

        def note(text: str) -> None:
            file.seek(0)
            file.truncate()
            file.write(f"{seed}: {text}\n")

        for seed in range(first, first + count):
            try:
                returned += KINDS[kind](seed, note)
            except Exception as error:
                raise AssertionError(f"{type(error).__name__} from call {trace.read_text()}") from error
    print(f"{returned} returned, {count - returned} refused")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
