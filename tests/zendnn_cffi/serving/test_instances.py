"""Workers over one saved module: right answers, pinned, replaced when they die, nothing lost."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zendnn_cffi
from fx_passes.saved.errors import FileError
from tests.support.lowering import noise
from zendnn_cffi.serving import wire
from zendnn_cffi.serving.instances import Instances, instances
from zendnn_cffi.serving.under_way import WorkerDied
from zendnn_cffi.serving.wire import Area, Channel, Ended

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 5)).eval()
    fast = zendnn_cffi.optimize(model, tune="off")
    fast(noise(1, 3, 8, 8))
    path = tmp_path_factory.mktemp("saved") / "m.safetensors"
    zendnn_cffi.save(fast, path, threads=(1, 2))
    return str(path), model


@pytest.fixture(scope="module")
def made(saved: tuple[str, nn.Module]) -> Any:
    with instances(saved[0], n=2, cores=CORES[:2]) as found:
        yield found


@pytest.fixture(scope="module", params=("processes", "threads"))
def any_kind(saved: tuple[str, nn.Module], made: Instances, request: pytest.FixtureRequest) -> Any:
    if request.param == "processes":
        yield made
        return
    with instances(saved[0], n=2, cores=CORES[:2], kind="threads") as found:
        yield found


def test_answers_are_the_models(any_kind: Instances, saved: tuple[str, nn.Module]) -> None:
    inputs = [noise(n, 3, 8, 8) for n in (1, 1, 3, 1, 2, 1)]
    made, futures = any_kind, [any_kind.submit(x) for x in inputs]
    for x, future in zip(inputs, futures, strict=True):
        torch.testing.assert_close(future.result(), saved[1](x), atol=1e-5, rtol=1e-5)
    for x, result in zip(inputs, made.map(inputs), strict=True):
        torch.testing.assert_close(result, saved[1](x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made(inputs[0]), saved[1](inputs[0]), atol=1e-5, rtol=1e-5)


def test_each_has_its_cores_and_they_share_the_weights(made: Instances, saved: tuple[str, nn.Module]) -> None:
    assert made.n == len(set(made.pids)) == 2 and made.cores == [(core,) for core in CORES[:2]]
    for pid, cores in zip(made.pids, made.cores, strict=True):
        assert os.sched_getaffinity(pid) == set(cores)
        assert saved[0] in Path(f"/proc/{pid}/maps").read_text()


def test_threads_have_their_cores_and_nobody_else_does(saved: tuple[str, nn.Module]) -> None:
    seen: list[Any] = []
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    with instances(saved[0], n=2, cores=CORES[:2], kind="threads") as found:
        found._module.register_forward_pre_hook(
            lambda *_: seen.append((tuple(os.sched_getaffinity(0)), torch.get_num_threads()))
        )
        for future in [found.submit(noise(1, 3, 8, 8)) for _ in range(40)]:
            future.result()
        assert found.pids == [] and (torch.get_num_threads(), os.sched_getaffinity(0)) == before
        other: list[int] = []
        thread = threading.Thread(target=lambda: other.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert other == [before[0]]
    assert set(seen) <= {((core,), 1) for core in CORES[:2]} and seen


def test_what_the_model_raises_comes_back(any_kind: Instances) -> None:
    made = any_kind
    with pytest.raises(RuntimeError, match="channels"):
        made(noise(1, 4, 8, 8))
    with pytest.raises(TypeError, match="scale"):
        made(noise(1, 3, 8, 8), scale=3)
    assert made(noise(1, 3, 8, 8)).shape == (1, 5)


class Unknown:
    """Of a module that workers do not have."""

    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise KeyError("not here")


def test_arguments_that_do_not_arrive(made: Instances) -> None:
    before = made.replaced
    with pytest.raises(Exception, match="not here|tests|importlib|module"):
        made(Unknown())
    with pytest.raises(Exception, match="pickle"):
        made(lambda: None)
    assert made(noise(1, 3, 8, 8)).shape == (1, 5) and made.replaced == before


def test_a_worker_that_dies_is_replaced_and_no_call_is_lost(saved: tuple[str, nn.Module]) -> None:
    with instances(saved[0], n=1, cores=CORES[:1]) as found:
        x = noise(1, 3, 8, 8)
        found(x)
        (before,) = found.pids
        os.kill(before, signal.SIGSTOP)  # so that the call is certainly under way
        futures = [found.submit(x) for _ in range(5)]
        time.sleep(0.2)
        os.kill(before, signal.SIGKILL)
        for future in futures:
            torch.testing.assert_close(future.result(60), saved[1](x), atol=1e-5, rtol=1e-5)
        assert found.replaced == 1 and found.pids != [before]


def test_calls_given_to_a_worker_that_dies_are_answered_in_their_order(saved: tuple[str, nn.Module]) -> None:
    """More wait than there are workers, so the process has two of them; each is answered by another one."""
    with instances(saved[0], n=1, cores=CORES[:1]) as found:
        inputs = [noise(n % 3 + 1, 3, 8, 8) for n in range(12)]
        for turn in range(3):
            (pid,) = found.pids
            os.kill(pid, signal.SIGSTOP)
            futures = [found.submit(x) for x in inputs]
            time.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            for x, future in zip(inputs, futures, strict=True):
                torch.testing.assert_close(future.result(60), saved[1](x), atol=1e-5, rtol=1e-5)
            assert found.replaced == turn + 1


def test_calls_beside_one_that_ends_workers_are_answered(saved: tuple[str, nn.Module]) -> None:
    class Deadly:
        def __reduce__(self) -> Any:
            return os._exit, (7,)

    with instances(saved[0], n=1, cores=CORES[:1]) as found:
        x, deadly = noise(1, 3, 8, 8), Deadly()
        given: list[Any] = [x, x, deadly, x, (lambda: None), x, x]
        futures = [found.submit(each) for each in given]
        for each, future in zip(given, futures, strict=True):
            if each is deadly:
                with pytest.raises(WorkerDied):
                    future.result(60)
            elif each is x:
                torch.testing.assert_close(future.result(60), saved[1](x), atol=1e-5, rtol=1e-5)
            else:
                with pytest.raises(Exception, match="pickle"):
                    future.result(60)
        assert found.replaced == 2


def test_a_call_that_ends_each_worker_fails_clearly(saved: tuple[str, nn.Module]) -> None:
    class Deadly:
        def __reduce__(self) -> Any:
            return os._exit, (7,)

    with instances(saved[0], n=1, cores=CORES[:1]) as found:
        deadly: Any = Deadly()
        with pytest.raises(WorkerDied, match="ended two workers, the last with status 7"):
            found(deadly)
        assert found(noise(1, 3, 8, 8)).shape == (1, 5) and found.replaced == 2


def test_closing_answers_what_was_submitted(saved: tuple[str, nn.Module]) -> None:
    found = instances(saved[0], n=1, cores=CORES[:1])
    pids = found.pids
    futures = [found.submit(noise(1, 3, 8, 8)) for _ in range(4)]
    futures[3].cancel()
    found.close()
    found.close()
    assert all(future.result().shape == (1, 5) for future in futures[:3])
    with pytest.raises(CancelledError):
        futures[3].result()
    with pytest.raises(RuntimeError, match="closed"):
        found.submit(noise(1, 3, 8, 8))
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_closing_while_calls_run_and_their_worker_dies(saved: tuple[str, nn.Module]) -> None:
    found, x = instances(saved[0], n=1, cores=CORES[:1]), noise(1, 3, 8, 8)
    (pid,) = found.pids
    os.kill(pid, signal.SIGSTOP)
    futures = [found.submit(x) for _ in range(5)]
    assert futures[4].cancel()
    closing = threading.Thread(target=found.close)
    closing.start()
    time.sleep(0.2)
    assert closing.is_alive()
    (pid,) = found.pids
    os.kill(pid, signal.SIGKILL)
    for future in futures[:4]:
        torch.testing.assert_close(future.result(60), saved[1](x), atol=1e-5, rtol=1e-5)
    closing.join(60)
    assert not closing.is_alive() and futures[4].cancelled() and found.replaced == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in found.pids)


def test_calls_fail_while_no_worker_starts(saved: tuple[str, nn.Module], tmp_path: Path) -> None:
    path, x = tmp_path / "m.safetensors", noise(1, 3, 8, 8)
    path.write_bytes(Path(saved[0]).read_bytes())
    with instances(path, n=1, cores=CORES[:1]) as found:
        (pid,) = found.pids
        path.rename(tmp_path / "elsewhere")
        os.kill(pid, signal.SIGKILL)
        for future in [found.submit(x) for _ in range(3)]:
            with pytest.raises((FileError, OSError)):
                future.result(60)
        assert found.pids == [] and found.replaced == 1
        (tmp_path / "elsewhere").rename(path)
        torch.testing.assert_close(found(x), saved[1](x), atol=1e-5, rtol=1e-5)
        assert len(found.pids) == 1


def test_a_module_is_saved_for_the_workers_threads() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    fast, x, before = zendnn_cffi.optimize(model, tune="off"), noise(4, 32), torch.get_num_threads()
    fast(x)
    with instances(fast, cores=CORES[:2], example_inputs=x) as found:
        folder = Path(found._path).parent
        assert folder.is_dir() and found.n in (1, 2)
        torch.testing.assert_close(found(x), model(x), atol=1e-5, rtol=1e-5)
    assert not folder.exists() and torch.get_num_threads() == before
    with instances(fast, cores=CORES[:2]) as found:
        assert found.n == 2


@pytest.mark.parametrize(
    "arguments, error, message",
    (
        ({"n": 0}, ValueError, "n must be between 1 and"),
        ({"n": 10**6}, ValueError, "n must be between 1 and"),
        ({"n": True}, TypeError, "n must be a number"),
        ({"n": "two"}, TypeError, "n must be a number"),
        ({"kind": "fibres"}, ValueError, "kind must be"),
        ({"cores": []}, ValueError, "cores must name"),
        ({"cores": [0, 0]}, ValueError, "cores must name"),
        ({"cores": [CORES[0], 100_000]}, ValueError, r"may not run on the CPUs \[100000\]"),
        ({"cores": [CORES[0], 100_000], "kind": "threads"}, ValueError, r"may not run on the CPUs \[100000\]"),
        ({"cores": [-1]}, ValueError, r"may not run on the CPUs \[-1\]"),
    ),
)
def test_bad_arguments(
    arguments: dict[str, Any], error: type[Exception], message: str, saved: tuple[str, nn.Module]
) -> None:
    with pytest.raises(error, match=message):
        instances(saved[0], **arguments)


def test_results_can_be_written_to_and_used_in_training(any_kind: Instances, saved: tuple[str, nn.Module]) -> None:
    x = noise(1, 3, 8, 8)
    result = any_kind(x)
    result.add_(1)
    weight = torch.ones(5, requires_grad=True)
    (result * weight).sum().backward()
    torch.testing.assert_close(weight.grad, saved[1](x)[0].detach() + 1, atol=1e-5, rtol=1e-5)


def test_map_takes_inputs_as_they_are_needed(any_kind: Instances, saved: tuple[str, nn.Module]) -> None:
    taken: list[int] = []

    def inputs() -> Iterator[torch.Tensor]:
        for number in itertools.count():
            taken.append(number)
            yield torch.full((1, 3, 8, 8), float(number))

    results = list(itertools.islice(any_kind.map(inputs()), 30))
    for number, result in enumerate(results):
        expected = saved[1](torch.full((1, 3, 8, 8), float(number)))
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-5)
    assert len(taken) < 60


def test_a_forked_child_is_told_and_ends_nothing() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64).eval(), noise(2, 64)
    fast = zendnn_cffi.optimize(model, tune="off")
    fast(x)
    with instances(fast, n=1, cores=CORES[:1]) as found:
        found(x)
        child = os.fork()
        if not child:
            try:
                with found, pytest.raises(RuntimeError, match="make new ones after a fork"):
                    found.submit(x)
                weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # what a child that ends by itself does
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        (pid,) = found.pids
        os.kill(pid, signal.SIGKILL)
        torch.testing.assert_close(found(x), model(x), atol=1e-5, rtol=1e-5)  # its file is still there
        folder = Path(found._path).parent
    assert not folder.exists()


_SCRIPT = """
import os, sys
import torch
import zendnn_cffi
from beside_the_script import Text

x = torch.load("x")
os.chdir("there")
with zendnn_cffi.instances(sys.argv[1], n=1, cores=[min(os.sched_getaffinity(0))]) as made:
    torch.save(made(Text(x)), "../result")
"""
_CLASS = """
class Text:
    def __init__(self, value): self.value = value
    def __reduce__(self): return value_of, (Text, self.value)

def value_of(cls, value): return value
"""


def test_workers_find_what_this_process_finds_and_nothing_else(saved: tuple[str, nn.Module], tmp_path: Path) -> None:
    """Modules beside a script are there; files of the current folder take no library's place."""
    x = noise(1, 3, 8, 8)
    torch.save(x, tmp_path / "x")
    (tmp_path / "app").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "app" / "script.py").write_text(_SCRIPT)
    (tmp_path / "app" / "beside_the_script.py").write_text(_CLASS)
    for name in ("numpy", "select", "queue"):
        (tmp_path / "there" / f"{name}.py").write_text("raise RuntimeError('the file of another')")
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH"))))
    subprocess.run(
        [sys.executable, str(tmp_path / "app" / "script.py"), saved[0]], cwd=tmp_path, check=True,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    torch.testing.assert_close(torch.load(tmp_path / "result"), saved[1](x).detach(), atol=1e-5, rtol=1e-5)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        instances(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(FileError, match="no whole safetensors file"):
        instances(tmp_path / "text", n=1)
    with pytest.raises(TypeError, match="zendnn_cffi.optimize"):
        instances(nn.Linear(2, 2))


def channels(kind: str) -> tuple[Channel, Channel]:
    """Two ends: with areas as between processes, or with the socket alone."""
    a, b = socket.socketpair()
    if kind == "socket":
        return Channel(a), Channel(b)
    first, second = Area.made(), Area.made()
    if not first or not second:
        pytest.skip("no memory that processes share without a name")
    mine, theirs = ([Area(os.dup(area.descriptor)) for area in areas] for areas in (first, second))
    return Channel(a, first, second), Channel(b, theirs, mine, copies=False)


@pytest.fixture(params=("areas", "socket"))
def ends(request: pytest.FixtureRequest) -> Any:
    found = channels(request.param)
    yield found
    for end in found:
        end.close()


_shapes = st.lists(st.integers(0, 5), max_size=4)
_dtypes = st.sampled_from((torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64))


@pytest.mark.parametrize("kind", ("areas", "socket"))
@given(_shapes, _dtypes, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_tensors_arrive_as_they_were(kind: str, shape: list[int], dtype: torch.dtype, rng: Any) -> None:
    tensor = torch.randn([n + 1 if n else 0 for n in shape]).mul(9).to(dtype)
    axes = list(range(tensor.ndim))
    rng.shuffle(axes)
    tensor = tensor.permute(axes)
    if tensor.ndim and tensor.shape[0] > 2 and rng.random() < 0.5:
        tensor = tensor[::2]
    a, b = channels(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_SMALL_BYTES", 1)  # also what is small goes through the area
        a.send({"x": (tensor, "text", None)})
        found, text, nothing = b.receive()["x"]
    assert (found.dtype, found.shape, text, nothing) == (tensor.dtype, tensor.shape, "text", None)
    assert torch.equal(found, tensor)
    if tensor.is_contiguous():
        assert found.is_contiguous()
    for end in (a, b):
        end.close()


def test_channels_last_and_gradients_stay(ends: tuple[Channel, Channel]) -> None:
    x = noise(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    ends[0].send([x, torch.ones(3, requires_grad=True), nn.Parameter(torch.ones(2)), torch.ones(2).expand(4, 2)])
    found = ends[1].receive()
    assert found[0].stride() == x.stride() and found[1].requires_grad and isinstance(found[2], nn.Parameter)
    assert torch.equal(found[3], torch.ones(4, 2))


def test_messages_of_all_sizes_take_turns(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    """An area grows, what is too large for it follows by the socket, and answers outlive the next one."""
    monkeypatch.setattr(wire, "_LARGEST_AREA_BYTES", 1 << 20)
    answers, wanted = [], []

    def answer() -> None:
        for _ in sizes:
            ends[1].send([each + 1 for each in ends[1].receive()])

    sizes = (3, 10_000, 300_000, 0, 5_000, 200_000, 17, 250_000)
    thread = threading.Thread(target=answer)
    thread.start()
    for size in sizes:
        given = [torch.randn(size), torch.randn(7)]
        ends[0].send(given)
        answers.append(ends[0].receive())
        wanted.append([each + 1 for each in given])
    thread.join()
    assert all(torch.equal(a, b) for pair in zip(answers, wanted, strict=True) for a, b in zip(*pair, strict=True))


def test_what_fails_before_it_is_sent_counts_for_neither_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for a message the next one lay in an area that the other end did not look into."""
    a, b = channels("areas")

    def refuse(*args: Any) -> bytes:
        raise MemoryError

    for value in range(6):
        if value % 3 == 1:
            with monkeypatch.context() as patch, pytest.raises(MemoryError):
                patch.setattr(wire, "_HEAD", SimpleNamespace(pack=refuse))
                a.send(torch.full((1 << 16,), -1.0))
        a.send(torch.full((1 << 16,), float(value)))
        found = b.receive()
        assert found[0] == found[-1] == value
    for end in (a, b):
        end.close()


@pytest.mark.parametrize("way", ("send", "receive"))
def test_what_fails_in_the_midst_of_a_message_ends_the_connection(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest was taken for the next message."""
    a, b = channels("socket")
    whole = Channel._send_all if way == "send" else Channel._part

    def first_alone(channel: Channel, *args: Any) -> Any:
        monkeypatch.setattr(Channel, whole.__name__, refuse)
        return whole(channel, *args)

    def refuse(*args: Any) -> Any:
        raise MemoryError

    def use() -> None:
        a.send([torch.ones(1000), torch.ones(2000)])
        b.receive()

    monkeypatch.setattr(Channel, whole.__name__, first_alone)
    with pytest.raises(MemoryError):
        use()
    monkeypatch.undo()
    with pytest.raises(Ended):
        (a if way == "send" else b).receive()
    with pytest.raises(Ended):
        (b if way == "send" else a).receive()
    for end in (a, b):
        end.close()


def test_large_inputs_are_read_where_they_lie_and_answers_are_the_readers() -> None:
    a, b = channels("areas")
    read = []
    for value in range(4):
        a.send(torch.full((1 << 16,), float(value)))
        read.append(b.receive())
        assert read[-1][0] == value and all(x[0] == value - 1 for x in read[-2:-1])  # the one before is still there
    assert len({x.data_ptr() for x in read}) == 2
    kept = []
    for value in range(4):
        b.send(torch.full((1 << 16,), float(value)))
        kept.append(a.receive())
    assert [float(x[0]) for x in kept] == [0.0, 1.0, 2.0, 3.0]
    for end in (a, b):
        end.close()


def test_two_questions_and_two_answers_may_be_under_way() -> None:
    a, b = channels("areas")
    for value in range(6):
        for part in (0.0, 0.5):
            a.send(torch.full((1 << 14,), value + part))
        for _ in range(2):
            b.send(b.receive() * 2)
        for part in (0.0, 0.5):
            assert bool((a.receive() == 2 * (value + part)).all())
    for end in (a, b):
        end.close()


def test_a_system_without_room_for_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    a, b = channels("areas")
    monkeypatch.setattr(os, "posix_fallocate", full)
    x = torch.randn(1 << 13)
    a.send(x)
    assert torch.equal(b.receive(), x)
    for end in (a, b):
        end.close()


@pytest.mark.parametrize("kind", ("areas", "socket"))
def test_a_question_is_sent_while_the_last_answer_is(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is more than a socket holds, and both ends have sent all of theirs before they read."""
    monkeypatch.setattr(wire, "_LARGEST_AREA_BYTES", 1 << 20)  # the way of the socket is for all
    a, b = channels(kind)
    size, received = 1 << 20, list[float]()

    def answer() -> None:
        for _ in range(6):
            b.send(b.receive() + 1)

    def ask() -> None:
        a.send(torch.zeros(size))
        for value in range(1, 7):
            if value < 6:
                a.send(torch.full((size,), float(value)))
            received.append(float(a.receive().unique()))

    threads = [threading.Thread(target=target, daemon=True) for target in (answer, ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert received == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    for end in (a, b):
        end.close()


def test_calls_are_answered_without_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Conv2d(3, 3, 3).eval(), noise(1, 3, 320, 320)
    fast = zendnn_cffi.optimize(model, x, tune="off")
    monkeypatch.setattr(Area, "made", classmethod(lambda cls, directions: []))
    with torch.no_grad(), instances(fast, n=1) as workers:
        found = [workers.submit(x + n) for n in range(6)]
        for n, future in enumerate(found):
            torch.testing.assert_close(future.result(timeout=60), model(x + n), rtol=1e-4, atol=1e-4)


def test_calls_are_answered_where_too_few_files_can_be_opened(
    saved: tuple[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Areas for one direction alone: the parent put questions where the process did not look."""
    made, make = itertools.count(1), os.memfd_create

    def limited(name: str) -> int:
        if next(made) > wire.UNDER_WAY:
            raise OSError(24, "Too many open files")
        return make(name)

    monkeypatch.setattr(os, "memfd_create", limited)
    path, model = saved
    x = noise(64, 3, 8, 8)
    with torch.no_grad(), instances(path, n=1, cores=CORES[:1]) as workers:
        torch.testing.assert_close(workers.submit(x).result(timeout=60), model(x), rtol=1e-4, atol=1e-4)


def test_a_worker_that_cannot_start_leaves_nothing_open(
    saved: tuple[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="Cannot allocate"):
        instances(saved[0], n=1, cores=CORES[:1])
    assert len(os.listdir("/proc/self/fd")) == before


def test_areas_are_given_back() -> None:
    def opened() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:zendnn_cffi")

    before = opened()
    a, b = channels("areas")
    a.send(torch.zeros(1 << 16))
    b.receive()
    for end in (a, b, a):
        end.close()
    assert opened() == before


def test_an_end_that_is_gone() -> None:
    a, b = channels("socket")
    b.close()
    with pytest.raises(Ended):
        a.send(b"x" * 10**7)
    a.close()
    a, b = channels("socket")
    a.end.sendall(b"abc")
    a.close()
    with pytest.raises(Ended):
        b.receive()
    b.close()
