"""The comparison engine: an optimized model runs on oneDNN, in a process of its own, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.depthwise, self.norm = nn.Conv2d(16, 16, 3, groups=16), nn.BatchNorm2d(16)
        self.prelu, self.linear = nn.PReLU(16), nn.Linear(16 * 9, 5)

    def forward(self, x):
        y = F.relu(self.stem(x))
        y = F.relu(self.conv(y) + y)
        y = F.max_pool2d(self.prelu(self.norm(self.depthwise(y))), 2)
        return torch.softmax(F.gelu(self.linear(y.flatten(1))), -1)

model, x = Net().eval(), torch.randn(2, 3, 8, 8)
"""


def run(code: str, tmp_path: Path) -> str:
    settings = dict(os.environ, ZENDNN_CFFI_CACHE=str(tmp_path), PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=settings, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("tune", ["off", "auto"])
@pytest.mark.parametrize("dtype", ["None", "torch.bfloat16"])
def test_a_model_runs_on_onednn(tune: str, dtype: str, tmp_path: Path) -> None:
    code = f"""
from benchmarks import onednn
version = onednn.use()
assert version.startswith("2.6"), version
{MODEL}
import zendnn_cffi
fast = zendnn_cffi.optimize(model, (x,), dtype={dtype}, tune="{tune}")
with torch.no_grad():
    expected, got = model(x), fast(x)
    torch.testing.assert_close(got, expected, atol=1e-2 if {dtype} else 1e-5, rtol=0)
    assert torch.equal(fast(x), got)
maps = open("/proc/self/maps").read()
assert "libdnnl" in maps and "ZenDNN" not in maps
for node in zendnn_cffi.explain(fast).nodes:
    print(node.became, node.implementation)
"""
    lines = run(code, tmp_path).splitlines()
    kinds = [line.split()[0] for line in lines]
    if tune == "off":
        assert kinds.count("convolution") == 3 and {"pooling", "inner_product"} <= set(kinds), lines
    assert any("avx" in line for line in lines), lines


def test_it_must_come_first(tmp_path: Path) -> None:
    code = """
import zendnn_cffi.primitives.attributes
from benchmarks import onednn
try:
    onednn.use()
except RuntimeError as error:
    print(error)
"""
    assert "in use already" in run(code, tmp_path)
