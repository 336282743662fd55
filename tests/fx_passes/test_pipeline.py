"""All passes together: torchvision's architectures, and random networks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import zendnn_cffi
from fx_passes import pipeline
from fx_passes.graph.verify import VerificationError, verify
from fx_passes.pipeline import PASSES, compile_graph
from tests.support import torchvision_models
from tests.support.graphs import after, check, check_equal, count, image, model_of, outside

# architecture -> (input size, regions, operations of the kinds that matter, operations left outside)
ARCHITECTURES: dict[str, tuple[int, int, dict[str, int], dict[str, int]]] = {
    "resnet18": (64, 1, {"convolution": 20, "batch_norm": 0, "eltwise": 0, "binary": 0}, {}),
    "resnet50": (64, 1, {"convolution": 53, "batch_norm": 0, "eltwise": 0, "binary": 0, "linear": 1}, {}),
    "mobilenet_v2": (64, 1, {"convolution": 52, "batch_norm": 0, "eltwise": 0, "binary": 0}, {}),
    "densenet121": (64, 1, {"convolution": 120, "batch_norm": 62, "eltwise": 0, "concat": 58}, {}),
    "googlenet": (64, 1, {"convolution": 57, "batch_norm": 0, "eltwise": 0, "concat": 9}, {}),
    "inception_v3": (96, 1, {"convolution": 94, "batch_norm": 0, "eltwise": 0, "concat": 15}, {}),
    "squeezenet1_1": (64, 1, {"convolution": 26, "eltwise": 0, "concat": 8}, {}),
    "shufflenet_v2_x0_5": (64, 1, {"convolution": 56, "batch_norm": 0, "chunk": 13, "contiguous": 0}, {}),
    "efficientnet_b0": (64, 1, {"convolution": 81, "batch_norm": 0, "eltwise": 0, "binary": 16}, {}),
    "regnet_y_400mf": (64, 1, {"convolution": 85, "batch_norm": 0, "eltwise": 0, "binary": 16}, {}),
    "mnasnet0_5": (64, 1, {"convolution": 52, "batch_norm": 0, "eltwise": 0, "reduce": 1}, {}),
    "convnext_tiny": (64, 1, {"convolution": 22, "linear": 37, "layer_norm": 23, "binary": 0, "eltwise": 0}, {}),
    "vit_b_16": (224, 1, {"linear": 49, "attention": 12, "layer_norm": 25}, {"size": 2, "eq": 2, "_assert": 2}),
    "swin_t": (64, 16, {"linear": 28, "layer_norm": 29}, {"shifted_window_attention": 12}),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_torchvision(name: str) -> None:
    size, regions, expected, left = ARCHITECTURES[name]
    model = torchvision_models.build(name)
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    gm = compile_graph(model)
    verify(gm)
    with torch.inference_mode():
        want, got = model(x), gm(x)
    # float32 sums in another order, over as many layers as these networks have
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    counted, remaining = count(gm), outside(gm)
    assert len(gm.regions()) == regions
    assert {kind: counted[kind] for kind in expected} == expected
    assert {kind: remaining[kind] for kind in left} == left
    assert left or not remaining
    assert list(gm.state_dict()) == list(model.state_dict())


def test_pipeline_run_twice_is_run_once() -> None:
    gm: Any = after(PASSES[-1].__name__, torchvision_models.build("mobilenet_v3_small"))
    first = str(gm.graph)
    for run_pass in PASSES:
        gm = run_pass(gm)
    assert str(gm.graph) == first


@pytest.mark.parametrize("entry", ["optimize", "torch.compile"])
def test_what_a_pass_fails_on_stays_plain_pytorch_with_a_warning(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of ours is no reason for a model not to run."""

    def fails(gm: Any) -> Any:
        next(iter(gm.graph.find_nodes(op="output"))).args = (None,)  # half of its work is done
        raise IndexError("of a pass")

    monkeypatch.setattr(pipeline, "PASSES", (*PASSES[:5], fails, *PASSES[5:]))
    model = model_of(lambda m, x: m.c(x).relu(), c=nn.Conv2d(3, 3, 1))
    x = torch.randn(2, 3, 5, 4).double()
    with torch.no_grad(), pytest.warns(UserWarning, match=r"runs as plain PyTorch \(IndexError: of a pass\)"):
        torch._dynamo.reset()
        fast: Any = torch.compile(model, backend="zendnn") if entry != "optimize" else zendnn_cffi.optimize(model)
        assert torch.equal(fast(x), model(x)) and torch.equal(fast(x), model(x))
    assert entry != "optimize" or not fast.regions()


def test_debug_logging_verifies(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="zendnn_cffi.passes"):
        compile_graph(model_of(lambda m, x: m.c(x).relu(), c=nn.Conv2d(3, 3, 1)))
    assert "fuse: c absorbs relu (eltwise)" in caplog.text and "partition: zen_region_0" in caplog.text


def test_verify_names_the_node_and_the_rule() -> None:
    gm = compile_graph(model_of(lambda m, x: m.c(x).relu(), c=nn.Conv2d(3, 3, 1)))
    (region,) = gm.regions().values()
    conv = next(n for n in region.graph.nodes if n.op == "call_function")
    conv.kwargs = {**conv.kwargs, "post_ops": (("sum", 1.0),)}
    with pytest.raises(VerificationError, match=r"c: \('sum', 1\.0\) is no post-op"):
        verify(gm)


class Random(nn.Module):
    """A network of random steps, each on one or two of the values before it."""

    def __init__(self, steps: list[tuple[int, int, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, groups=1 + i % 2) for i in range(len(steps)))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in steps)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        values, used = [x], set()
        for i, (kind, a, b) in enumerate(self.steps):
            first, second = a % len(values), b % len(values)
            used |= {first, second}
            values.append(self.step(kind % 14, i, values[first], values[second]))
        return [v for i, v in enumerate(values) if i not in used or i == len(values) - 1]

    def step(self, kind: int, i: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if kind == 0:
            return self.convs[i](a)
        if kind == 1:
            return self.norms[i](a)
        if kind == 2:
            return a + b
        if kind == 3:
            return F.relu(self.convs[i](a) * b, inplace=True)
        if kind == 4:
            return a * torch.sigmoid(F.adaptive_avg_pool2d(b, 1))
        if kind == 5:
            return torch.cat([a, b], 1).chunk(2, 1)[i % 2]
        if kind == 6:
            return self.norms[i](self.convs[i](a)).relu_() - b
        if kind == 7:
            return F.max_pool2d(F.pad(a, (1, 1, 1, 1)), 3, 1)
        if kind == 8:
            return torch.cumsum(a, 1) * 0.1  # not in the vocabulary
        if kind == 9:
            y = self.convs[i](a)
            y += b
            return y.clamp_(-2, 2)
        if kind == 10:
            return a.permute(0, 2, 3, 1).contiguous().reshape(a.size(0), -1, 4).permute(0, 2, 1).reshape(b.shape)
        if kind == 11:
            return self.convs[i](self.norms[i](a)).mul_(0.5)
        if kind == 12:
            return torch.add(a, b, alpha=2) * 0.3
        return F.hardswish(self.convs[i](b)) + 2 * a


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 13), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=10))
def test_random_networks(steps: list[tuple[int, int, int]]) -> None:
    torch.manual_seed(0)
    model = Random(steps).eval()
    torchvision_models.randomize(model)
    model.double()
    gm = check(model, image(2, 4, 5, 6))
    check_equal(model, copy.deepcopy(gm), image(1, 4, 3, 3))
