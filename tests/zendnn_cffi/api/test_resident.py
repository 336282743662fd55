"""What the system counts: resident memory of a process whose model has 100 MB of weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_CODE = """
import ctypes, gc, json, torch, zendnn_cffi
from torch import nn

def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096

layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
model = nn.Sequential(*layers).eval()
with torch.no_grad():
    model(torch.randn(1, 2048)), model(torch.randn(8, 2048))
    zendnn_cffi.optimize(nn.Linear(8, 8).eval(), tune="off")(torch.randn(2, 8))
    ctypes.CDLL(None).malloc_trim(0)
    before, found = resident(), {"weights": sum(p.nbytes for p in model.parameters())}
    fast = zendnn_cffi.optimize(model, tune="off")
    for rows in (1, 8, 16):
        fast(torch.randn(rows, 2048))
        found[str(rows)] = resident() - before
    del fast
    zendnn_cffi.cache_clear()
    found["gone"] = resident() - before
print(json.dumps(found))
"""
MIB = 1 << 20


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    values = os.environ | {"ZENDNN_CFFI_CACHE": ""}
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False, env=values)
    assert done.returncode == 0, done.stderr[-2000:]
    counted: dict[str, int] = json.loads(done.stdout)
    return counted


def test_one_row_needs_no_copy(found: dict[str, int]) -> None:
    """Checking and measuring took several times that, and gave it back."""
    assert found["1"] < 24 * MIB


def test_more_rows_need_one_copy(found: dict[str, int]) -> None:
    assert 0.9 * found["weights"] < found["8"] < 1.04 * found["weights"] + 32 * MIB


def test_another_signature_shares_it(found: dict[str, int]) -> None:
    assert found["16"] - found["8"] < 16 * MIB


def test_all_of_it_goes_back(found: dict[str, int]) -> None:
    assert found["gone"] < 24 * MIB
