"""Every call shows up in torch.profiler traces, by the name of its primitive, exactly once a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from tests.support.lowering import net, noise
from zendnn_cffi import Memory, MemoryDesc, Primitive, PrimitiveDesc, backend, descriptors
from zendnn_cffi import functional as zf
from zendnn_cffi.errors import ZenDNNError
from zendnn_cffi.primitives import labels
from zendnn_cffi.primitives.attributes import ARG_DST, ARG_SRC


def traced(run: Callable[[], Any], runs: int = 1, **options: Any) -> list[Any]:
    """The events of some runs that are ours."""
    with torch.no_grad(), torch.profiler.profile(**options) as prof:
        for _ in range(runs):
            run()
    return [e for e in prof.events() if e.name.startswith(("zendnn::", "torch::", "aocl::"))]


def names(module: Any) -> Counter[str]:
    """What the programs of a module are expected to show, once each."""
    found: Counter[str] = Counter()
    for region in module.regions().values():
        for lowered in region.lowered.values():
            for call in lowered.program.calls:
                own = call.implementation == "torch"
                found[f"torch::{call.kind}" if own else f"zendnn::{call.kind} {call.implementation}"] += 1
    return found


def cnn() -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(m[1](m[0](x)))
        return m[4](torch.flatten(F.max_pool2d(F.relu(m[3](m[2](y)) + y), 2), 1))

    model = net(
        forward,
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16),
        nn.Linear(16 * 4 * 4, 5),
    )  # fmt: skip
    return zendnn_cffi.optimize(model, tune="off")


def times(counts: Counter[str], runs: int) -> Counter[str]:
    return Counter({name: runs * count for name, count in counts.items()})


@pytest.mark.parametrize("runs", [1, 3])
def test_each_call_of_a_convolutional_network_is_there_once_a_run(runs: int) -> None:
    gm, x = cnn(), noise(2, 3, 8, 8)
    before = gm(x)
    events = traced(lambda: gm(x), runs, record_shapes=True)
    assert Counter(e.name for e in events) == times(names(gm), runs)
    (region,) = gm.regions().values()
    (lowered,) = region.lowered.values()
    nodes = [e.kwinputs["node"] for e in sorted(events, key=lambda e: e.time_range.start)]
    assert nodes == [call.name for call in lowered.program.calls] * runs
    kinds = {n.split()[0] for n in names(gm)}
    assert kinds >= {"zendnn::convolution", "zendnn::pooling"}
    assert kinds & {"zendnn::matmul", "zendnn::inner_product"}
    assert torch.equal(gm(x), before)


def test_each_call_of_a_compiled_mlp_is_there_once_a_run() -> None:
    backend.register()
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(7, 33), nn.GELU(), nn.Linear(33, 5), nn.Softmax(-1)).eval()
    compiled, x = torch.compile(model, backend="zendnn", options={"tune": "off"}), torch.randn(3, 7)
    with torch.no_grad():
        compiled(x)
    found = Counter(e.name for e in traced(lambda: compiled(x), 2))
    module = backend.compiled_modules()[-1]
    assert found == times(names(module), 2)
    products = ("zendnn::matmul ", "zendnn::inner_product ")
    assert sum(count for name, count in found.items() if name.startswith(products)) == 4
    torch._dynamo.reset()


def test_key_averages_has_a_row_per_primitive_and_implementation() -> None:
    gm, x = cnn(), noise(2, 3, 8, 8)
    gm(x)
    with torch.profiler.profile() as prof:
        gm(x)
    rows = {row.key: row.count for row in prof.key_averages() if row.key.startswith(("zendnn::", "torch::"))}
    assert rows == dict(names(gm))


def test_shapes_are_those_of_the_operands() -> None:
    gm, x = cnn(), noise(2, 3, 8, 8)
    gm(x)
    first = next(e for e in traced(lambda: gm(x), record_shapes=True) if e.name.startswith("zendnn::convolution"))
    assert first.input_shapes[:3] == [[2, 3, 8, 8], [16, 3, 3, 3], [16]]


def test_slices_of_a_batch_are_there_as_often_as_they_run() -> None:
    from zendnn_cffi.runtime.calls import PrimitiveCall
    from zendnn_cffi.runtime.places import Slot
    from zendnn_cffi.runtime.program import OutputSpec, Program
    from zendnn_cffi.runtime.sliced_program import SlicedProgram

    desc = MemoryDesc((2, 6), torch.float32)
    primitive = Primitive(PrimitiveDesc(descriptors.eltwise("tanh", desc)))
    args = {ARG_SRC: (Slot("input"), desc), ARG_DST: (Slot("output"), desc)}
    small = Program([PrimitiveCall("t", primitive, args, "eltwise")], [OutputSpec((2, 6), (6, 1), torch.float32)])
    sliced = SlicedProgram(small, 2, [OutputSpec((6, 6), (6, 1), torch.float32)])
    x = noise(6, 6)
    events = traced(lambda: torch.testing.assert_close(sliced([x])[0], x.tanh()))
    assert [e.name for e in events] == [f"zendnn::eltwise {primitive.pd.implementation}"] * 3


def test_single_primitives_and_functional_calls() -> None:
    desc = MemoryDesc((3, 5), torch.float32)
    primitive, x, y = Primitive(PrimitiveDesc(descriptors.eltwise("abs", desc))), noise(3, 5), torch.empty(3, 5)
    args = {ARG_SRC: Memory(desc, x), ARG_DST: Memory(desc, y)}
    (event,) = traced(lambda: primitive.execute(args), record_shapes=True)
    assert event.name == f"zendnn::eltwise {primitive.pd.implementation}" and event.input_shapes == [[3, 5]]
    assert torch.equal(y, x.abs())

    src, weights = noise(1, 16, 9, 9), noise(16, 16, 3, 3)
    zf.convolution(src, weights, padding=1)  # a check before first use is not in the trace
    got: list[torch.Tensor] = []
    events = traced(lambda: got.append(zf.convolution(src, weights, padding=1)))
    assert [e.name.split()[0] for e in events].count("zendnn::convolution") == 1
    torch.testing.assert_close(got[0], F.conv2d(src, weights, padding=1), atol=1e-3, rtol=1e-4)
    (event,) = traced(lambda: zf.gemm(noise(3, 5), noise(5, 7)), record_shapes=True)
    assert event.name == "aocl::gemm f32f32f32of32" and event.input_shapes == [[3, 5], [5, 7]]


def test_nothing_is_labelled_where_no_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> object:
        raise ZenDNNError("an event without a profiler")  # of others, plain PyTorch has the call again

    gm, x = cnn(), noise(2, 3, 8, 8)
    gm(x)
    monkeypatch.setattr(labels, "_event", refuse)
    gm(x)
    zf.eltwise(x, "relu")
    with torch.profiler.profile(), pytest.raises(ZenDNNError, match="an event without"):
        gm(x)
    gm(x)


def test_without_pytorchs_quick_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "_event", labels._plain_event)
    gm, x = cnn(), noise(2, 3, 8, 8)
    gm(x)
    assert Counter(e.name for e in traced(lambda: gm(x))) == names(gm)


def test_a_failing_call_is_named_in_a_trace_too() -> None:
    from zendnn_cffi.runtime.calls import TorchCall
    from zendnn_cffi.runtime.places import Slot, TensorView
    from zendnn_cffi.runtime.program import OutputSpec, Program

    class Failing(TorchCall):
        def bind(self, context: object) -> Any:
            return (lambda: 2), ()

    view = TensorView(Slot("output"), (2, 3), (3, 1), torch.float32)
    run = Program([Failing("bad", lambda x: x, (), view)], [OutputSpec((2, 3), (3, 1), torch.float32)])
    with torch.profiler.profile(), pytest.raises(ZenDNNError, match="bad.*invalid_arguments"):
        run([])
