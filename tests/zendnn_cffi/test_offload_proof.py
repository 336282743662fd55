"""What really ran, by ZenDNN's own log rather than by ours; and what ten thousand calls leave behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

_RESNET50 = """
import sys
sys.path.append({root!r})
import torch, zendnn_cffi
from demo import vision
model = vision.build("resnet50", calibrate=False)
gm = zendnn_cffi.optimize(model, tune="off")
image = torch.randn(1, 3, 64, 64)
with torch.inference_mode():
    gm(image)
    print("second call", flush=True)
    gm(image)
    print("done", flush=True)
print("classifier:", next(node for node in zendnn_cffi.explain(gm).nodes if node.name == "fc").implementation)
"""
_TEN_THOUSAND = """
import json, re
from pathlib import Path
import torch, zendnn_cffi
from torch import nn

def resident_kib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text(encoding="ascii")).group(1))

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
gm = zendnn_cffi.optimize(model, tune="off")
image = torch.randn(2, 3, 16, 16)
with torch.inference_mode():
    first = gm(image)
    for _ in range(200):
        gm(image)
    before = resident_kib()
    different = sum(not torch.equal(gm(image), first) for _ in range(10_000))
    growth = resident_kib() - before
print(json.dumps([zendnn_cffi.explain(gm).offloaded_share, different, growth]))
"""
_GROWTH_KIB = 4096  # allocator noise; a leak of one small tensor a call would be forty times this


def _executed(script: str) -> tuple[Counter[str], str]:
    """Primitives by kind that ZenDNN says it executed between the marks "second call" and "done"; the last line."""
    environment = {**os.environ, "ZENDNN_PRIMITIVE_LOG_ENABLE": "1", "ZENDNN_LOG_OPTS": "PROF:2"}
    environment["BLIS_NUM_THREADS"] = "2"  # what AOCL-BLIS computes is in no log, and not offered then
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    between = run.stdout.partition("second call")[2].partition("done")[0]
    executed = Counter(re.findall(r"zendnn_primitive_execute,cpu,(?:plugin_op:,)?(\w+),", between))
    return executed, run.stdout.splitlines()[-1]


def test_all_53_convolutions_of_resnet50_run_in_zendnn() -> None:
    root = str(Path(__file__).resolve().parents[2])
    executed, classifier = _executed(_RESNET50.format(root=root))
    # A 1x1 convolution may run as one product over all pixels; the last layer is one as well, if it is not in PyTorch.
    assert classifier.startswith("classifier: "), classifier
    products = 0 if "torch" in classifier else 1
    assert executed["convolution"] + executed["inner_product"] + executed["matmul"] == 53 + products, executed
    assert executed["convolution"] >= 17, executed  # all that are not 1x1


def test_ten_thousand_calls_give_the_same_bits_and_leave_no_memory_behind() -> None:
    """A process of its own: what other tests' threads take or give back meanwhile is not ours."""
    run = subprocess.run([sys.executable, "-c", _TEN_THOUSAND], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    offloaded_share, different, growth = json.loads(run.stdout)
    assert offloaded_share == 1.0
    assert different == 0
    assert growth < _GROWTH_KIB
