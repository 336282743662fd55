"""The first answer of a traceable model imports no compiler of PyTorch's, and nothing else that it does not need."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A residual network with what torchvision's are made of. Importing torchvision itself brings everything along.
PROGRAM = '''
import sys
import torch
from torch import nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, n, stride):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(n, 2 * n, 1, bias=False), nn.BatchNorm2d(2 * n), nn.Hardswish())
        self.depthwise = nn.Conv2d(2 * n, 2 * n, 3, stride, 1, groups=2 * n)
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(2 * n, 8, 1), nn.ReLU(),
                                     nn.Conv2d(8, 2 * n, 1), nn.Hardsigmoid())
        self.last = nn.Sequential(nn.Conv2d(2 * n, n, 1, bias=False), nn.BatchNorm2d(n))

    def forward(self, x):
        y = self.depthwise(self.first(x))
        y = self.last(self.squeeze(y) * y)
        return F.relu(x + y) if self.depthwise.stride == (1, 1) else y


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU6(),
                                  nn.MaxPool2d(3, 2, 1, ceil_mode=True))
        self.blocks = nn.Sequential(Block(16, 1), Block(16, 1))
        self.dense = nn.Conv2d(16, 16, 3, 1, 1)
        self.norm = nn.BatchNorm2d(32)
        self.classify = nn.Sequential(nn.Dropout(), nn.Linear(32, 10))

    def forward(self, x):
        x = self.blocks(self.stem(x))
        x = torch.cat([x, self.dense(x)], 1)
        x = F.avg_pool2d(F.relu(self.norm(x)), 2)
        return F.softmax(self.classify(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1)), -1)


model = Network().eval()
images = torch.randn(1, 3, 64, 64)
MAKE_CHANNELS_LAST
given = set(sys.modules)  # Module.to() may have imported PyTorch's compiler already

import zendnn_cffi

fast = zendnn_cffi.optimize(model, tune="off")
with torch.inference_mode():
    assert torch.allclose(fast(images), model(images), atol=1e-4)
assert not fast.leaves
lowered = [program for region in fast.regions().values() for program in region.lowered.values()]
assert lowered and all(lowered), zendnn_cffi.explain(fast)
unwanted = """
torch._dynamo torch._inductor torch.export sympy torch.fx.experimental.symbolic_shapes numpy.random statistics html
fx_passes.saved fx_passes.report.explain fx_passes.report.profile fx_passes.report.drawing
zendnn_cffi.functional zendnn_cffi.backend zendnn_cffi.serving zendnn_cffi.cli
zendnn_cffi.api.quantize zendnn_cffi.api.quantization
""".split()
print([name for name in unwanted if name in sys.modules and name not in given])
'''


CHANNELS_LAST = "model, images = (t.to(memory_format=torch.channels_last) for t in (model, images))"


@pytest.mark.parametrize("change", ["", CHANNELS_LAST], ids=["contiguous", "channels last"])
def test_the_first_answer_imports_no_more_than_it_needs(change: str) -> None:
    program = PROGRAM.replace("MAKE_CHANNELS_LAST", change)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "[]"
