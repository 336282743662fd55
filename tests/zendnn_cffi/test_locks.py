"""Forks while a thread makes programs, and calls from finalizers and signal handlers: nothing waits for itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fx_passes
import zendnn_cffi

_BEGIN = """
import faulthandler, gc, os, signal, sys, threading
faulthandler.dump_traceback_later(100, exit=True)
import torch
from torch import nn
import zendnn_cffi
from zendnn_cffi import functional as zf

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU()).eval().requires_grad_(False)
x = torch.randn(2, 3, 20, 20)
fast = zendnn_cffi.optimize(model, tune="off")
right = lambda v: torch.testing.assert_close(fast(v), model(v), rtol=1e-4, atol=1e-4)
a, b = torch.randn(5, 24), torch.randn(7, 24)
products = lambda: torch.testing.assert_close(zf.inner_product(a, b), a @ b.T, rtol=1e-4, atol=1e-4)
"""

_FORK = """
right(x), products()
stop = False
def make():
    n = 0
    while not stop:
        n += 1
        fast(torch.randn(2, 3, 5 + n % 90, 20)), zf.inner_product(torch.randn(1 + n % 500, 24), b)
thread = threading.Thread(target=make)
thread.start()
children = []
for number in range(2):
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(60)  # faulthandler's own lock waits for a thread that is not in the child
            right(x), products()  # what the parent had made
            right(torch.randn(1, 3, 9, 9 + number))  # what it had not
            code = 0
        finally:
            os._exit(code)
    children.append(child)
codes = [os.waitpid(child, 0)[1] for child in children]
stop = True
thread.join()
right(x)
assert codes == [0] * 2, codes
print("fine")
"""

_SIGNALS = """
calls = 0
def handle(*_):
    global calls
    calls += 1
    try:
        fast(x) if calls % 2 else zf.inner_product(a, b)
    except Exception:
        pass  # amid a trace, whose mode refuses real tensors; it does not wait
    zendnn_cffi.cache_info()
zendnn_cffi.cache_info()  # imported before: the second signal may come while the first one's handler imports
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
for n in range(25):
    fast(torch.randn(2, 3, 5 + n, 20)), zf.inner_product(torch.randn(1 + n, 24), b)
signal.setitimer(signal.ITIMER_REAL, 0)
right(x), right(torch.randn(2, 3, 5, 20)), products()
assert calls > 5, calls
print("fine")
"""

_FINALIZERS = """
calls = 0
class Last:
    def __init__(self):
        self.me = self  # only the collector finds it
    def __del__(self):
        global calls
        calls += 1
        fast(x), zf.inner_product(a, b), zendnn_cffi.cache_info()
gc.set_threshold(40, 2, 2)
for n in range(15):
    for _ in range(20):
        Last()
    fast(torch.randn(2, 3, 5 + n, 20)), zf.inner_product(torch.randn(1 + n, 24), b)
    big = zf.eltwise(torch.randn(300, 300), "relu")
gc.set_threshold(700, 10, 10)
right(x), right(torch.randn(2, 3, 5, 20)), products()
assert calls > 20, calls
print("fine")
"""


@pytest.mark.parametrize("threads", ("", "2"))
@pytest.mark.parametrize("script", (_FORK, _SIGNALS, _FINALIZERS), ids=("fork", "signals", "finalizers"))
def test_in_a_process_of_its_own(script: str, threads: str) -> None:
    """Also where OMP_NUM_THREADS is set, which some of the library's kernels read themselves."""
    others = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _BEGIN + script],
        env={**others, "OMP_NUM_THREADS": threads} if threads else others,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0 and done.stdout.endswith("fine\n"), done.stdout + done.stderr[-3000:]


def test_every_lock_is_one_of_these() -> None:
    """threading.Lock is for locks that nobody waits for."""
    folders = [Path(str(package.__file__)).parent for package in (zendnn_cffi, fx_passes)]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    found = {f.name: len(re.findall(r"threading\.(R?Lock|Condition|Semaphore)\(", f.read_text())) for f in files}
    assert {name: count for name, count in found.items() if count} == {"locks.py": 1, "arenas.py": 1}
