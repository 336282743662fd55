"""Regions under use: signatures, threads, modes of PyTorch, changed parameters, copies, memory."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import zendnn_cffi
from fx_passes.region import programs as programs_module
from fx_passes.region import region as region_module
from fx_passes.region.options import RegionOptions
from fx_passes.region.region import ZenRegion
from tests.support.lowering import net, noise
from tests.tolerance import assert_close
from zendnn_cffi.errors import ZenDNNError
from zendnn_cffi.runtime import arenas
from zendnn_cffi.runtime.program import Program


class Small(nn.Module):
    """A convolution, a residual and a classifier; a class that pickle finds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.again = nn.Conv2d(3, 17, 3, padding=1), nn.BatchNorm2d(17), nn.Conv2d(17, 17, 1)
        self.fc = nn.Linear(17, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn(self.conv(x)))
        y = F.relu(self.again(y) + y)
        return self.fc(y.mean((2, 3)))


@pytest.fixture
def model() -> Small:
    torch.manual_seed(0)
    made = Small().eval()
    made.bn.running_mean.copy_(noise(17))  # type: ignore[operator, union-attr]
    return made


@pytest.fixture
def gm(model: Small) -> Any:
    return zendnn_cffi.optimize(model, tune="off")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No warning unless a test expects one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*TracerWarning.*")
        yield


def region(gm: Any) -> ZenRegion:
    (found,) = gm.regions().values()
    assert isinstance(found, ZenRegion)
    return found


def same(gm: Any, model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        assert_close(gm(x), model(x), k=153)


def test_a_profile_may_end_during_a_call(gm: Any, model: Small) -> None:
    """In another thread: the call had seen that it is to be timed."""
    x = noise(2, 3, 8, 8)
    gm(x)
    asked = iter((lambda _, program, inputs: program.run_timed(inputs)[0],))

    class Ending(ZenRegion):
        @property
        def on_run(self) -> Any:
            return next(asked, None)

    region(gm).__class__ = Ending
    same(gm, model, x)
    assert next(asked, None) is None


# --- signatures ---


def test_the_least_recently_used_program_goes(gm: Any, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs_module, "MAX_PROGRAMS", 4)
    for batch in (1, 2, 3, 4, 1, 5, 1, 6, 1, 7):
        same(gm, model, noise(batch, 3, 4, 4))
        assert len(region(gm).lowered) <= 4
    assert {signature[1][0][0] for signature in region(gm).lowered} == {1, 5, 6, 7}
    same(gm, model, noise(2, 3, 4, 4))


def test_weights_are_packed_once_for_all_signatures(gm: Any) -> None:
    gm(noise(2, 3, 8, 8))
    size = region(gm).weights.size_bytes()
    for batch in (3, 4, 6):
        gm(noise(batch, 3, 8, 8))
    assert region(gm).weights.size_bytes() <= 2 * size


@pytest.mark.parametrize(
    "change",
    (
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x[:1].expand(4, -1, -1, -1),
        lambda x: x.expand(4, 3, 9, 8)[::2],
        lambda x: x.transpose(2, 3),
        lambda x: x[:, :, 1:-1, 2:],
        lambda x: x[:, :, ::2],
        lambda x: x.flip(2),
        lambda x: torch.cat([x, x], 3)[:, :, :, 3:9],
        lambda x: torch._neg_view(x),
        lambda x: torch._efficientzerotensor(x.shape),
        lambda x: x.flatten().as_strided((4, 3, 5, 5), (9, 6, 2, 1)),
        lambda x: x.as_strided((2, 3, 5, 5), (3, 1, 6, 1), 7),
        lambda x: torch.view_as_complex(torch.stack([x, x + 1], -1)).imag,
        lambda x: torch.view_as_complex(torch.stack([x, x + 1], -1)).conj().imag,
        lambda x: nn.Parameter(x),
        lambda x: x[:1],
    ),
)
def test_strides(gm: Any, model: nn.Module, change: Any) -> None:
    x = noise(4, 3, 9, 8)
    given = change(x)
    kept = given.clone()
    same(gm, model, given)
    same(gm, model, given)
    assert torch.equal(given, kept)


def test_windows_that_overlap_run_on_copies(gm: Any, model: nn.Module) -> None:
    x = noise(4, 3, 9, 8)
    for _ in range(2):
        same(gm, model, x.flatten().as_strided((4, 3, 5, 5), (9, 6, 2, 1)))
    assert all(region(gm).lowered.values()) and len(region(gm).lowered) == 1


@pytest.mark.parametrize("is_warm", (True, False))
@pytest.mark.parametrize("size_bytes", (0, 64, 2 * 3 * 6 * 6 * 4 - 4))
@pytest.mark.parametrize("layout", (torch.contiguous_format, torch.channels_last))
def test_inputs_without_memory_are_refused(
    gm: Any, model: nn.Module, is_warm: bool, size_bytes: int, layout: torch.memory_format
) -> None:
    """Eager PyTorch reads what lies there, or ends the process."""
    x = noise(2, 3, 6, 6).contiguous(memory_format=layout)
    if is_warm:
        same(gm, model, x)
    gone = x.clone(memory_format=torch.preserve_format)
    gone.untyped_storage().resize_(size_bytes)
    with pytest.raises(ValueError, match=r"an input of zen_region_0, float32\[2, 3, 6, 6\], has no data"):
        gm(gone)
    last = torch.cat([x, x])[2:]
    last.untyped_storage().resize_(x.nbytes)
    with pytest.raises(ValueError, match="has no data"):
        gm(last)
    same(gm, model, x)


def test_other_shapes_after_a_warm_up(gm: Any, model: nn.Module) -> None:
    for shape in ((2, 3, 8, 8), (1, 3, 5, 7), (2, 3, 8, 8), (5, 3, 1, 1), (1, 3, 5, 7)):
        same(gm, model, noise(*shape))
    assert len(region(gm).lowered) == 3


def test_unbatched_and_empty_inputs(gm: Any, model: nn.Module) -> None:
    assert gm(noise(0, 3, 4, 4)).shape == (0, 5)
    (reason,) = (region(gm).reason(s) for s in region(gm).lowered)
    assert "empty" in reason


@pytest.mark.parametrize("dtype", (torch.float64, torch.float16, torch.int32, torch.bfloat16))
def test_what_pytorch_refuses_is_refused_in_its_words(gm: Any, model: nn.Module, dtype: torch.dtype) -> None:
    x = noise(2, 3, 4, 4).to(dtype)
    with pytest.raises(RuntimeError) as theirs:
        model(x)
    for _ in range(2):
        with pytest.raises(RuntimeError) as ours:
            gm(x)
        assert str(ours.value).split(":")[0] == str(theirs.value).split(":")[0]
    with pytest.raises(RuntimeError, match="channels"):
        gm(noise(2, 4, 4, 4))
    same(gm, model, noise(2, 3, 4, 4))


def test_float64_models_run_as_they_are(model: Small) -> None:
    wide = model.double()
    gm = zendnn_cffi.optimize(wide)
    x = noise(2, 3, 4, 4).double()
    torch.testing.assert_close(gm(x), wide(x))
    assert all("float64" in node.reason for node in zendnn_cffi.explain(gm).nodes)


def test_bfloat16_models(model: Small) -> None:
    low = copy.deepcopy(model).bfloat16()
    gm = zendnn_cffi.optimize(low, tune="off")
    x = noise(2, 3, 8, 8)
    result = gm(x.bfloat16())
    assert result.dtype == torch.bfloat16
    assert_close(result, copy.deepcopy(low).double()(x.bfloat16().double()), dtype=torch.bfloat16, k=153)
    assert any(node.offloaded for node in zendnn_cffi.explain(gm).nodes)


def test_sparse_and_other_tensors_go_to_pytorch(gm: Any) -> None:
    x = noise(2, 3, 4, 4)
    gm(x)
    for odd in (x.to_sparse(), x.to_mkldnn()):
        with pytest.raises(RuntimeError):
            gm(odd)


# --- modes ---


def test_grad_modes(gm: Any, model: nn.Module) -> None:
    x = noise(2, 3, 6, 6)
    assert not gm(x).requires_grad and not gm(x).is_inference()
    with torch.no_grad():
        assert not gm(x).requires_grad
    with torch.inference_mode():
        inside = gm(x)
        assert inside.is_inference()
    assert torch.equal(gm(x), inside)
    with torch.inference_mode():
        made_inside = noise(2, 3, 6, 6)
    assert torch.equal(gm(made_inside), inside)


def test_gradients_of_inputs_are_eagers(gm: Any, model: nn.Module) -> None:
    x, y = (noise(2, 3, 6, 6).requires_grad_() for _ in range(2))
    gm(x).square().sum().backward()
    model(y).square().sum().backward()
    assert_close(x.grad, y.grad, k=512)
    assert not region(gm).lowered, "plain PyTorch"
    with torch.no_grad():
        assert not gm(x).requires_grad
    assert region(gm).lowered


def test_function_transforms(gm: Any, model: nn.Module) -> None:
    x = noise(2, 3, 6, 6)
    gm(x)
    expected = torch.func.vmap(model)(x[:, None])
    assert_close(torch.func.vmap(gm)(x[:, None]), expected.detach(), k=153)
    ones = torch.ones_like(x)
    assert_close(torch.func.jvp(gm, (x,), (ones,))[1], torch.func.jvp(model, (x,), (ones,))[1].detach(), k=153)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, ones)
        assert forward_ad.unpack_dual(gm(dual)).tangent is not None
    ours, theirs = (torch.func.grad(lambda x, f=f: f(x).sum())(x) for f in (gm, model))
    assert_close(ours, theirs, k=512)


@pytest.mark.filterwarnings("ignore")
def test_tracers(gm: Any, model: nn.Module) -> None:
    """What is traced is PyTorch's operations, not results of one run."""
    x, other = noise(2, 3, 6, 6), noise(2, 3, 6, 6, seed=1)
    gm(x)
    warnings.simplefilter("ignore")
    assert_close(torch.jit.trace(gm, x)(other), model(other).detach(), k=153)
    assert_close(torch.export.export(gm, (x,)).module()(other), model(other).detach(), k=153)
    with FlopCounterMode(display=False) as counter:
        gm(x)
    assert counter.get_total_flops() > 0


def test_fake_and_meta_tensors(gm: Any, model: nn.Module) -> None:
    x = noise(2, 3, 6, 6)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert gm(mode.from_tensor(x)).shape == (2, 5)
    on_meta = copy.deepcopy(gm).to("meta")
    assert on_meta(x.to("meta")).shape == (2, 5)
    same(gm, model, x)


def test_default_device_and_dtype(gm: Any, model: nn.Module) -> None:
    x = noise(2, 3, 6, 6)
    expected = model(x).detach()
    with torch.device("meta"):
        first, second = gm(x), gm(x)
    assert_close(first, expected, k=153)
    assert torch.equal(first, second)
    try:
        torch.set_default_dtype(torch.float64)
        assert_close(gm(x[:1]), expected[:1], k=153)
    finally:
        torch.set_default_dtype(torch.float32)


def test_autocast(gm: Any, model: nn.Module) -> None:
    x = noise(2, 3, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        ours, theirs = gm(x), model(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert_close(ours, model.double()(x.double()).detach(), dtype=torch.bfloat16, k=153)
    assert not region(gm).lowered


def test_number_of_threads(gm: Any, model: nn.Module) -> None:
    x, before = noise(2, 3, 6, 6), torch.get_num_threads()
    try:
        for threads in (1, 2, 1, 3):
            torch.set_num_threads(threads)
            same(gm, model, x)
        assert {signature[0] for signature in region(gm).lowered} == {1, 2, 3}
    finally:
        torch.set_num_threads(before)


# --- threads ---


@pytest.mark.parametrize("tune", ("off", "auto"))
def test_two_threads_at_once(model: Small, tune: str) -> None:
    """First calls and repeated ones, of equal and of different shapes: right, and the same bits each time."""
    gm = zendnn_cffi.optimize(model, tune=tune)
    inputs = [noise(n, 3, 8, 8) for n in (1, 2)]
    expected = [model(x).detach() for x in inputs]
    results: list[list[torch.Tensor]] = [[], []]
    start = threading.Barrier(2)

    def work(me: int) -> None:
        start.wait()
        for turn in range(40):
            results[me].append(gm(inputs[(me + turn) % 2]))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for me in range(2):
        assert len(results[me]) == 40
        for turn, result in enumerate(results[me]):
            assert_close(result, expected[(me + turn) % 2], k=153)
            assert torch.equal(result, results[me][turn % 2])
            assert torch.equal(result, results[0][(me + turn) % 2])


def test_a_thread_that_invalidates(gm: Any, model: nn.Module) -> None:
    x, stop = noise(2, 3, 8, 8), threading.Event()
    expected, failures = model(x).detach(), []

    def disturb() -> None:
        while not stop.is_set():
            gm.invalidate()

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        for turn in range(15):
            result = gm(x) if turn % 3 else gm(x.clone().requires_grad_()).detach()
            failures += [turn] if not torch.allclose(result, expected, atol=1e-4) else []
    finally:
        stop.set()
        disturber.join()
    assert not failures


# --- parameters, copies ---


def test_load_state_dict_is_noticed(gm: Any, model: nn.Module) -> None:
    x, other = noise(2, 3, 6, 6), Small().eval()
    before = gm(x)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    gm.load_state_dict(other.state_dict())
    same(gm, other, x)
    assert not torch.equal(gm(x), before)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    plain = gm(x.clone().requires_grad_())
    assert_close(plain.detach(), other(x).detach(), k=153)


def test_conversion_is_noticed(gm: Any, model: nn.Module) -> None:
    x = noise(2, 3, 6, 6)
    gm(x)
    low = copy.deepcopy(gm).to(torch.bfloat16)
    assert low(x.bfloat16()).dtype == torch.bfloat16
    assert_close(low(x.bfloat16()), copy.deepcopy(model).double()(x.double()).detach(), dtype=torch.bfloat16, k=153)
    same(gm, model, x)
    assert copy.deepcopy(gm).double()(x.double()).dtype == torch.float64


def test_uncounted_writes_need_invalidate(gm: Any, model: Small) -> None:
    x = noise(2, 3, 6, 6)
    gm(x)
    model.fc.weight.data.mul_(2)
    model.bn.running_var.numpy()[:] *= 3  # type: ignore[operator, union-attr]
    gm.invalidate()
    same(gm, model, x)


def test_copies_and_pickles(gm: Any, model: nn.Module) -> None:
    x = noise(2, 3, 6, 6)
    result = gm(x)
    saved = io.BytesIO()
    torch.save(gm, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for again in (copy.deepcopy(gm), copy.copy(gm), pickle.loads(pickle.dumps(gm)), loaded):
        assert torch.equal(again(x), result)
        assert list(again.state_dict()) == list(model.state_dict())
        assert region(again).options == region(gm).options and region(again) is not region(gm)
    deep = copy.deepcopy(gm)
    with torch.no_grad():
        model.fc.weight.zero_()
    deep.invalidate()
    assert torch.equal(deep(x), result)


@pytest.mark.needs("bf16")
def test_options_are_kept(model: Small) -> None:
    gm = zendnn_cffi.optimize(model, dtype=torch.bfloat16, tune="off", allow_winograd=False)
    expected = RegionOptions(torch.bfloat16, False, "off")
    assert region(pickle.loads(pickle.dumps(gm))).options == region(copy.deepcopy(gm)).options == expected


# --- memory, failures ---


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_repeated_calls_keep_memory_and_bits(gm: Any) -> None:
    x = noise(4, 3, 16, 16)
    first = gm(x)
    for _ in range(100):
        gm(x)
    growth = []
    for _ in range(3):  # memory that malloc gave back before may come back once
        gc.collect()
        before = resident_bytes()
        for _ in range(1000):
            assert torch.equal(gm(x), first)
        gc.collect()
        growth.append(resident_bytes() - before)
    assert min(growth) < 2 << 20, growth  # one tensor kept a call would be 3 MB and more in each round
    (program,) = (lowered.program for lowered in region(gm).lowered.values() if lowered is not None)
    assert isinstance(program, Program) and len(program._idle) == 1


def test_fifty_batch_sizes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs_module, "MAX_PROGRAMS", 32)
    model = net(lambda m, x: F.max_pool2d(m[0](x), 2), nn.Conv2d(3, 16, 1))
    gm = zendnn_cffi.optimize(model, tune="off")
    gc.collect()
    before = len(arenas.programs())
    with zendnn_cffi.warm_up():
        for batch in range(1, 51):
            gm(noise(batch, 3, 12, 12))
    gc.collect()
    assert len(region(gm).lowered) == 32
    assert len(arenas.programs()) <= before + 32, "what was dropped is kept by something"


class Alive(TorchDispatchMode):
    """Counts the tensors of `shape` that are alive at once."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.most = shape, 0
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == self.shape:
            self.made.append(weakref.ref(out))
            self.most = max(self.most, sum(ref() is not None for ref in self.made))
        return out


def test_plain_pytorch_keeps_no_value_longer_than_it_is_read() -> None:
    """A large batch's activations, all alive at once, would not fit the memory."""

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first = y = F.relu(m[0](x))
        for _ in range(8):
            y = torch.sigmoid(m[0](y))
        return y + first

    model, x = net(forward, nn.Conv2d(3, 3, 3, padding=1)), noise(2, 3, 5, 5)
    gm = zendnn_cffi.optimize(model, tune="off")
    (region,) = gm.regions().values()
    alive = Alive((2, 3, 5, 5))
    with torch.no_grad():
        with alive:
            result = region.run_plain([x])
        assert_close(result, model(x), k=27)
    assert len(alive.made) >= 9 and alive.most <= 4


def test_defects_end_in_plain_pytorch(gm: Any, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("fx_passes.region.variants.choose_variant", fail)
    x = noise(2, 3, 6, 6)
    with pytest.warns(UserWarning, match="zen_region_0 could not be lowered.*ZeroDivisionError: a defect") as caught:
        same(gm, model, x)
        same(gm, model, x)
    assert len(caught) == 1
    assert "a defect" in zendnn_cffi.explain(gm).nodes[0].reason


class RanOutOfTime(Exception):
    """As a signal handler raises it, for a request that takes too long."""


@pytest.mark.parametrize("error", [RanOutOfTime, TimeoutError])
def test_an_interrupted_first_call_raises_and_the_next_one_lowers(
    gm: Any, model: nn.Module, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def interrupted(*_: Any) -> Any:
        raise error("enough")

    x = noise(2, 3, 6, 6)
    with monkeypatch.context() as patch:
        patch.setattr("fx_passes.region.variants.choose_variant", interrupted)
        with pytest.raises(error, match="enough"):
            gm(x)
    same(gm, model, x)
    assert all(region(gm).lowered.values())


def test_a_primitive_that_fails_is_named(gm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = noise(2, 3, 6, 6)
    gm(x)
    (lowered,) = region(gm).lowered.values()
    assert lowered is not None and isinstance(lowered.program, Program)
    (context,) = lowered.program._idle
    context.calls[1] = (lambda *_: 2, ())
    name = lowered.program.calls[1].name
    with pytest.raises(ZenDNNError, match=name):
        gm(x)
    gm(x)  # with a context of its own


def test_no_library(model: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    gm = zendnn_cffi.optimize(model)
    monkeypatch.setattr(region_module, "is_available", lambda: False)
    monkeypatch.setattr(region_module, "unavailable_reason", lambda: "gone")
    same(gm, model, noise(2, 3, 6, 6))
    assert {node.reason for node in zendnn_cffi.explain(gm).nodes} == {"gone"}


def test_its_text(gm: Any) -> None:
    assert "lowered for 0 signatures" in repr(region(gm))
    gm(noise(1, 3, 4, 4))
    assert "lowered for 1 signatures" in repr(region(gm))


def test_several_outputs_and_inputs() -> None:
    fn = lambda m, x, y: (m[0](x), F.relu(m[0](x) + y), y * 2 + x.mean())  # noqa: E731
    model = net(fn, nn.Conv2d(3, 3, 3, padding=1))
    gm = zendnn_cffi.optimize(model, tune="off")
    x, y = noise(2, 3, 6, 6), noise(2, 3, 6, 6, seed=1)
    results = gm(x, y)
    assert isinstance(results, tuple)
    for ours, theirs in zip(results, model(x, y), strict=True):
        assert_close(ours, theirs.detach(), k=27)


def test_weights_folded_before_a_change_are_not_kept_after_it(
    model: Small, gm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain PyTorch in a region folds once; a thread that was held up there brought the old numbers back, for good."""
    (region,) = gm.regions().values()
    fold = region_module.evaluate_constants

    def held_up(*args: Any) -> Any:
        folded = fold(*args)
        with torch.no_grad():
            model.bn.weight.mul_(3)
        region.invalidate()  # as another thread does, which saw the change
        return folded

    x = torch._neg_view(noise(2, 3, 6, 5))  # stays plain PyTorch
    with torch.no_grad():
        monkeypatch.setattr(region_module, "evaluate_constants", held_up)
        gm(x)
        monkeypatch.setattr(region_module, "evaluate_constants", fold)
        assert_close(gm(x), model(x), k=144)
