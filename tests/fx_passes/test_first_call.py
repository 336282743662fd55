"""Models that need example inputs, and came without: their first call is the example."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zendnn_cffi
from fx_passes import first_call
from tests.support.detector import Detector
from tests.support.exported import needs_export

LOG = "zendnn_cffi.passes"


class Listed(nn.Module):
    """torch.fx cannot trace it, torch.export can."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Tensor]:
        _, *rest = x.shape
        assert needs_export(x) and len(rest) == 1
        hidden = F.relu(self.first(x)) * scale
        return {"out": self.last(hidden if mask is None else hidden * mask)}


class Inside(nn.Module):
    """A model that torch.fx traces but for one submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.listed = nn.Linear(12, 16), Listed()

    def forward(self, x: Tensor) -> Tensor:
        return self.listed(F.relu(self.before(x)))["out"]


class Data(nn.Module):
    """No graph, whatever it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if float(x.sum()) > 0 else self.linear(-x)


class Written(Listed):
    """Writes to its argument."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        _, *rest = x.shape
        assert rest
        x.mul_(2.0)
        return self.last(F.relu(self.first(x)))


class Cache:
    """Neither a tensor nor a number: a call may write to it."""


class Cached(Listed):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:  # type: ignore[override]
        _, *rest = x.shape
        if cache is not None:
            cache.seen = rest
        return self.last(F.relu(self.first(x)))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def optimized(model: nn.Module, **options: Any) -> Any:
    return zendnn_cffi.optimize(model.eval(), tune="off", **options)


def check(fast: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Both give the same answer, and leave the same arguments."""
    theirs = copy.deepcopy((args, kwargs))
    actual, expected = fast(*args, **kwargs), model(*theirs[0], **theirs[1])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(args, theirs[0], atol=0, rtol=0)


def offloaded(fast: Any) -> int:
    """How many products run on the engine, of all regions and kinds of calls."""
    kept = [lowered for region in fast.regions().values() for lowered in region.lowered.values()]
    return sum(node.kind == "inner_product" for lowered in kept for node in lowered.nodes)


def test_the_first_call_is_the_example() -> None:
    model = Listed()
    fast = optimized(model)
    assert not fast.regions() and "first call" in str(zendnn_cffi.explain(fast))
    check(fast, model, torch.randn(3, 16))
    assert offloaded(fast) == 2 and not fast.leaves
    assert "first call" not in str(zendnn_cffi.explain(fast))
    for rows in (1, 2, 7):
        check(fast, model, torch.randn(rows, 16))
    assert offloaded(fast) == 8, "other sizes are lowered, not left to the model"
    assert "other arguments" not in str(zendnn_cffi.explain(fast))
    check(fast, model, torch.randn(3, 16), scale=0.5)
    check(fast, model, torch.randn(3, 16), torch.randn(3, 24))
    assert len(fast.call_kinds.modules) == 2 and "other arguments" not in str(zendnn_cffi.explain(fast))


def test_arguments_by_name() -> None:
    model = Listed()
    fast = optimized(model)
    check(fast, model, mask=torch.rand(3, 24), x=torch.randn(3, 16))
    assert offloaded(fast) == 2
    check(fast, model, torch.randn(5, 16), torch.rand(5, 24))
    assert offloaded(fast) == 4


def test_a_submodule_alone_asks_for_it() -> None:
    model = Inside()
    fast = optimized(model)
    assert list(fast.leaves) == ["listed"]
    check(fast, model, torch.randn(3, 12))
    assert not fast.leaves and offloaded(fast) == 3


def test_what_torch_fx_takes_for_one_operation_asks_for_it() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    fast = optimized(model)
    with torch.no_grad():
        check(fast, model, torch.randn(2, 5, 16))
        assert offloaded(fast) == 4
        check(fast, model, torch.randn(3, 7, 16))
    assert offloaded(fast) == 8


def test_submodules_of_a_model_that_is_no_graph() -> None:
    model, picture = Detector().eval(), torch.randn(3, 16, 17)
    fast = optimized(model)
    actual, expected = fast([picture]), model([picture])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert [*fast.optimized_submodules] == [*optimized(model, example_inputs=([picture],)).optimized_submodules] != []
    assert any(region.lowered for region in fast.regions().values())


def test_a_model_that_traces_by_itself_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(first_call, "traced_by", lambda *args: calls.append(args))
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
    check(optimized(model), model, torch.randn(2, 16))
    assert not calls


def test_no_graph_at_all_is_tried_once_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Data()
    with caplog.at_level(logging.WARNING, logger=LOG):
        fast = optimized(model)
        assert not caplog.records, "nothing is known yet"
        for _ in range(4):
            check(fast, model, torch.randn(3, 16))
    said = [record.getMessage() for record in caplog.records if record.name == LOG]
    assert [line.partition(":")[0] for line in said] == ["Data stays plain PyTorch"]
    assert "with example_inputs" not in said[0]
    assert "first call" not in str(zendnn_cffi.explain(fast))


def test_a_call_that_raises_is_no_example() -> None:
    model = Listed()
    fast = optimized(model)
    with pytest.raises(RuntimeError, match="shapes"):
        fast(torch.randn(3, 17))
    check(fast, model, torch.randn(3, 16))
    assert offloaded(fast) == 2


def test_arguments_that_the_forward_writes_to_are_written_once() -> None:
    model = Written()
    fast = optimized(model)
    for _ in range(3):
        check(fast, model, torch.randn(3, 16))


@pytest.mark.parametrize("odd", ("cache", "gradient", "autocast", "functional_call", "meta", "float64"))
def test_a_call_that_is_no_example_leaves_the_next_one_to_be(odd: str) -> None:
    model = Cached().eval()
    fast, x = optimized(model), torch.randn(3, 16)
    if odd == "cache":
        caches = Cache(), Cache()
        torch.testing.assert_close(fast(x, caches[0]), model(x, caches[1]))
        assert vars(caches[0]) == vars(caches[1]) != {}
    elif odd == "gradient":
        x.requires_grad_()
        fast(x).sum().backward()
        assert x.grad is not None
        x = x.detach()
    elif odd == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            assert fast(x).dtype == torch.bfloat16
    elif odd == "functional_call":
        others = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        assert not torch.func.functional_call(fast, others, (x,)).any()
    elif odd == "meta":
        with pytest.raises((RuntimeError, NotImplementedError)):
            fast(x.to("meta"))
    else:
        torch.set_default_dtype(torch.float64)
        try:
            torch.testing.assert_close(fast(x), model(x))
        finally:
            torch.set_default_dtype(torch.float32)
    assert not fast.regions()
    check(fast, model, x)
    assert offloaded(fast) == 2


def test_inference_mode() -> None:
    model = Listed()
    fast = optimized(model)
    with torch.inference_mode():
        check(fast, model, torch.randn(3, 16))
    check(fast, model, torch.randn(4, 16))
    assert offloaded(fast) == 4


def test_sizes_are_fixed_where_asked_for() -> None:
    model = Listed()
    fast = optimized(model, dynamic=False)
    for rows in (3, 5):
        check(fast, model, torch.randn(rows, 16))
    assert offloaded(fast) == 2


@pytest.mark.parametrize("how", ("deepcopy", "copy", "pickle"))
def test_copies_from_before_the_first_call_have_their_own(how: str) -> None:
    model = Listed()
    fast = optimized(model)
    again = pickle.loads(pickle.dumps(fast)) if how == "pickle" else getattr(copy, how)(fast)
    for each in (again, fast):
        check(each, model, torch.randn(3, 16))
        assert offloaded(each) == 2


def test_copies_from_after_it_have_its_graph() -> None:
    model = Listed()
    fast = optimized(model)
    check(fast, model, torch.randn(3, 16))
    for again in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert again.regions()
        check(again, model, torch.randn(4, 16))


def test_what_is_changed_before_the_first_call_counts() -> None:
    model = Listed().eval()
    fast = optimized(model)
    with torch.no_grad():
        model.first.weight.mul_(3.0)
    other = nn.Linear(24, 8)
    fast.last = model.last = other
    for _ in range(3):
        check(fast, model, torch.randn(3, 16))
    assert offloaded(fast) == 2
    with torch.no_grad():
        model.first.weight.mul_(0.5)
    for _ in range(3):
        check(fast, model, torch.randn(3, 16))


def test_an_edited_graph_stays() -> None:
    fast = optimized(Inside())
    output = [*fast.graph.nodes][-1]
    with fast.graph.inserting_before(output):
        output.args = (fast.graph.call_function(torch.neg, (output.args[0],)),)
    fast.recompile()
    x = torch.randn(3, 12)
    torch.testing.assert_close(fast(x), -fast.root(x), atol=1e-5, rtol=1e-5)


def test_weights_are_released_after_it() -> None:
    model = Listed()
    fast, x = optimized(model, release_weights=True), torch.randn(3, 16)
    expected = model(x)
    torch.testing.assert_close(fast(x), expected, atol=1e-5, rtol=1e-5)
    assert fast.is_released
    torch.testing.assert_close(fast(x), expected, atol=1e-5, rtol=1e-5)


def test_threads_that_call_first_trace_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    trace = first_call.traced_by
    monkeypatch.setattr(first_call, "traced_by", lambda *args: traced.append(1) or trace(*args))
    model = Listed()
    fast, x = optimized(model), torch.randn(3, 16)
    expected, answers = model(x)["out"], []
    threads = [threading.Thread(target=lambda: answers.append(fast(x)["out"])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4 and len(traced) == 1
    for answer in answers:
        torch.testing.assert_close(answer, expected, atol=1e-5, rtol=1e-5)


def test_a_file_needs_the_call(tmp_path: Any) -> None:
    model = Listed()
    fast, x = optimized(model), torch.randn(3, 16)
    with pytest.raises(ValueError, match="call it"):
        zendnn_cffi.save(fast, tmp_path / "model.safetensors")
    expected = fast(x)["out"]
    zendnn_cffi.save(fast, tmp_path / "model.safetensors")
    torch.testing.assert_close(zendnn_cffi.load(tmp_path / "model.safetensors")(x)["out"], expected)
