"""Files that are damaged, cut off or lie: refused with an error or of no consequence; no crash, no half a file."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zendnn_cffi
from fx_passes.plan.prepack import as_it_lies
from fx_passes.saved.container import (
    KEY,
    _digest,
    _nameless,
    by_alignment,
    checksum,
    checksum_of_all,
    padded,
    read,
    write,
)
from fx_passes.saved.errors import FileError, NotSaved
from tests.support.lowering import noise


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Linear(16 * 36, 5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        result: torch.Tensor = self.last((y if mask is None else y * mask).flatten(1))
        return result


Calls = list[tuple[torch.Tensor, ...]]
Saved = tuple[Path, Calls, list[torch.Tensor]]


@pytest.fixture(scope="module", params=(1, 2), ids=("one graph", "two graphs"))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A file, calls of each kind that it has a graph for, and what comes of them."""
    torch.manual_seed(0)
    x = noise(1, 3, 8, 8)
    fast, calls = zendnn_cffi.optimize(Net().eval(), tune="off"), [(x,), (x, noise(1, 16, 6, 6))][: request.param]
    for call in calls:
        fast(*call)
    path = tmp_path_factory.mktemp("saved") / "m.safetensors"
    zendnn_cffi.save(fast, path)
    return path, calls, [fast(*call) for call in calls]


def _damaged(data: bytes, seed: int) -> bytes:
    """One of many ways to harm a file."""
    rng = random.Random(seed)
    place = rng.choice((rng.randrange(len(data)), rng.randrange(min(len(data), 9000)), rng.randrange(8)))
    match seed % 8:
        case 0:
            return data[:place]
        case 1:
            return data + rng.randbytes(rng.randrange(1, 99))
        case 2:
            return data[:place] + data[place + rng.randrange(1, 99) :]
        case 3:
            return data[:place] + rng.randbytes(8) + data[place:]
        case 4:  # another length of the header
            return struct.pack("<Q", rng.choice((0, 1, len(data), 2**63, rng.randrange(2**32)))) + data[8:]
        case 5:  # pages in another order
            a, b = rng.randrange(len(data) // 4096) * 4096, rng.randrange(len(data) // 4096) * 4096
            pages = bytearray(data)
            pages[a : a + 4096], pages[b : b + 4096] = data[b : b + 4096], data[a : a + 4096]
            return bytes(pages)
    flipped = bytearray(data)
    flipped[place] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def test_500_damaged_files(saved: Saved, tmp_path: Path) -> None:
    path, calls, expected = saved
    data, refused, same = path.read_bytes(), 0, 0
    for seed in range(500):
        harmed = _damaged(data, seed)
        (tmp_path / "m").unlink(missing_ok=True)
        (tmp_path / "m").write_bytes(harmed)
        try:
            loaded = zendnn_cffi.load(tmp_path / "m")
        except FileError:
            refused += 1
            continue
        for call, result in zip(calls, expected, strict=True):
            assert torch.equal(loaded(*call), result), seed  # a blank in the header, two equal pages
        same += 1
    assert refused > 400 and refused + same == 500


def _rewritten(path: Path, change: Any, target: Path) -> None:
    """The file with a document that was changed, and says that it was not."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    document = json.loads(header["__metadata__"][KEY])
    change(document)
    text = json.dumps(document)
    header["__metadata__"].update({KEY: text, f"{KEY}.sha256": _digest(text)})
    fresh = json.dumps(header).encode()
    fresh += b" " * (-(len(fresh) + 8) % 4096)
    target.write_bytes(struct.pack("<Q", len(fresh)) + fresh + data[8 + length :])


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for key, part in value.items() for leaf in _leaves(part, (*path, key))]
    if isinstance(value, list):
        return [leaf for number, part in enumerate(value) for leaf in _leaves(part, (*path, number))]
    return [path]


def _zip(path: Path) -> None:
    """One with odd entries: outside of itself, twice the same, none of which is what it says."""
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
        warnings.simplefilter("ignore")
        for name in (
            "../../data.pkl",
            "archive/data.pkl",
            "archive/data.pkl",
            "/etc/x",
            "archive/.data/serialization_id",
        ):
            archive.writestr(name, b"cos\nsystem\n(S'true'\ntR.")


def _headed(header: bytes, length: int | None = None) -> Callable[[Path], None]:
    header += b" " * (-len(header) % 8)  # so that all data is summed up at once
    given = struct.pack("<Q", len(header) if length is None else length) + header + bytes(16)
    return lambda path: path.write_bytes(given) and None


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _one(**row: Any) -> bytes:
    return json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | row}).encode()


def _described(text: str, left_out: str = "") -> bytes:
    """A header that is right, with this text as description."""
    metadata = {KEY: text, f"{KEY}.sha256": _digest(text)}
    metadata.pop(left_out, None)
    return json.dumps({"__metadata__": metadata, **json.loads(_one())}).encode()


def _table(place: list[Any], **other: Any) -> str:
    """A description of the tensor, which lies about its sum."""
    row = {"dtype": "F32", "shape": [4], "data_offsets": place}
    return json.dumps({"table": {"a": row}, "sums": {"a": "0"}, "whole": "0"} | other)


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("hello " * 9),
    "gzip": lambda path: path.write_bytes(gzip.compress(bytes(1 << 20))),
    "zip": _zip,
    "pickle": lambda path: torch.save({"a": torch.ones(9)}, path),
    "program": lambda path: path.write_bytes(Path(sys.executable).resolve().read_bytes()[: 1 << 20]),
    "folder": lambda path: path.mkdir(),
    "sparse": _sparse,
    "long header": _headed(b"{}", 2**62),
    "header that ends beyond the file": _headed(b"{}", 99_000_000),
    "deep": _headed(b"[" * 100_000),
    "deep metadata": _headed(b'{"__metadata__":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "twice the same name": _headed(b'{"a":' + _one()[6:-1] + b"," + _one()[1:]),
    "huge shape": _headed(_one(shape=[2**62, 2**62])),
    "huge offsets": _headed(_one(data_offsets=[0, 2**63])),
    "offsets backwards": _headed(_one(data_offsets=[16, 0])),
    "negative": _headed(_one(shape=[-4])),
    "fraction": _headed(_one(shape=[0.5])),
    "unknown dtype": _headed(_one(dtype="F33")),
    "no dtype": _headed(_one(dtype=None)),
    "not unicode": _headed(b'{"\xff": 1}'),
    "description without a sum": _headed(_described("9" * 10**7, f"{KEY}.sha256")),
    "description that is too deep": _headed(_described("[" * 10**5)),
    "description that ends early": _headed(_described('{"table": ')),
    "description of another kind": _headed(_described("[1]")),
    "description without tables": _headed(_described("{}")),
    "description of no number": _headed(_described('{"table": NaN}')),
    "description of other rows": _headed(_described('{"table": {"a": 3}}')),
    "description without places": _headed(
        _described('{"table": {"a": {"dtype": "F32", "shape": [4]}}, "sums": {"a": 0}}')
    ),
    "description without sums": _headed(_described(_table([0, 16], sums={}))),
    "description of no places": _headed(_described(_table([0, "x"]))),
    **{
        f"description of a place from {begin} to {end}": _headed(_described(_table([begin, end])))
        for begin, end in ((0, 2**40), (2**20, 2**20 + 16), (-(2**30), 16 - 2**30), (-(2**62), 2**62), (True, 17))
    },
    "description of another sum": _headed(_described(_table([0, 16]))),
}

_FOREIGN = """
import resource, sys
from fx_passes.saved.errors import FileError
from fx_passes.saved.files import load
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    try:
        load(path)
        print("taken")
    except FileError:
        print("refused")
    except BaseException as error:
        print(type(error).__name__, str(error)[:200])
    sys.stdout.flush()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_foreign_files_are_refused_in_little_memory(tmp_path: Path) -> None:
    paths = []
    for number, make in enumerate(FOREIGN.values()):
        paths.append(tmp_path / f"m{number}.safetensors")
        make(paths[-1])
    command = [sys.executable, "-c", _FOREIGN, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    *found, grown_kib = done.stdout.splitlines() or [""]
    assert dict(zip(FOREIGN, found, strict=False)) == dict.fromkeys(FOREIGN, "refused"), done.stderr[-2000:]
    assert int(grown_kib) < 300 << 10  # kB; one of the headers is 100 MB long, as the format allows


_LIES = """
import sys, torch, zendnn_cffi
calls = torch.load(sys.argv[2])
for path in sys.argv[3:]:
    try:
        loaded = zendnn_cffi.load(path)
    except Exception as error:
        continue
    for call in calls:
        try:
            with torch.no_grad():
                loaded(*call)
        except Exception as error:
            pass
print("alive")
"""


def test_documents_that_lie_end_no_process(saved: Saved, tmp_path: Path) -> None:
    """Numbers, names and layouts of programs changed, and the sums made right: whatever comes of it, no crash."""
    path, calls, _ = saved
    torch.save(calls, tmp_path / "calls")
    rng, files = random.Random(0), []

    def change(document: dict[str, Any]) -> None:
        programs = {key: document[key] for key in ("programs", "layouts", "parts", "kinds") if key in document}
        places = _leaves(programs)
        *above, last = rng.choice(places)
        holder: Any = programs
        for step in above:
            holder = holder[step]
        old = holder[last]
        if isinstance(old, bool) or old is None:
            holder[last] = rng.choice((True, 3, "x", [1]))
        elif isinstance(old, int):
            holder[last] = rng.choice((old + 1, old - 1, -old, 2 * old + 7, 10**6, 2**31, 2**62, -1))
        else:
            holder[last] = rng.choice(("", "aten.from_file.default", "builtins.eval", "relu", -1, None, ["node", "x"]))

    for number in range(120):
        files.append(str(tmp_path / f"m{number}"))
        _rewritten(path, change, Path(files[-1]))
    command = [sys.executable, "-c", _LIES, "", str(tmp_path / "calls"), *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("alive\n"), (done.returncode, done.stderr[-2000:])


@pytest.mark.parametrize(
    "name", ("builtins.eval", "builtins.exec", "os.system", "torch.load", "aten.from_file.default", "zen.nothing", "x")
)
def test_no_other_function_can_be_named(name: str, saved: Saved, tmp_path: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        rows = next(iter(document["parts"].values()))["graph"]["nodes"]
        next(row for row in rows if row[0] == "call_function")[2] = name

    _rewritten(saved[0], change, tmp_path / "m")
    with pytest.raises(FileError, match="no saved graph calls"):
        zendnn_cffi.load(tmp_path / "m")


def test_another_version_says_so(saved: Saved, tmp_path: Path) -> None:
    _rewritten(saved[0], lambda document: document.update(version=99), tmp_path / "m")
    with pytest.raises(FileError, match="version 99, this package reads versions 2 and 3: save it again"):
        zendnn_cffi.load(tmp_path / "m")


def test_a_file_of_other_tensors_says_so(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(3)}, tmp_path / "m")
    with pytest.raises(FileError, match="not written by zendnn_cffi.save"):
        zendnn_cffi.load(tmp_path / "m")


@given(
    st.lists(
        st.tuples(
            st.sampled_from((torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)),
            st.lists(st.integers(0, 40), max_size=3),
        ),
        max_size=6,
    )
)
@settings(max_examples=40, deadline=None)
def test_what_is_read_is_what_was_written(tensors: list[tuple[torch.dtype, list[int]]]) -> None:
    import tempfile

    given_tensors = by_alignment(
        {f"t{i}": torch.randn(shape).mul(9).to(dtype) for i, (dtype, shape) in enumerate(tensors)}
    )
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "m", {"a": [1, "b"]}, given_tensors)
        document, found = read(Path(folder) / "m")
        assert document["a"] == [1, "b"] and found.keys() == given_tensors.keys()
        for name, tensor in given_tensors.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
            assert found[name].data_ptr() % tensor.element_size() == 0
        assert os.listdir(folder) == ["m"]


@pytest.mark.parametrize("has_nameless", (True, False))
def test_who_fails_leaves_the_old_file_alone(
    tmp_path: Path, has_nameless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path = tmp_path / "m"
    write(path, {}, {"a": torch.ones(3)})
    before = path.read_bytes()
    assert read(path)[1]["a"].tolist() == [1.0, 1.0, 1.0]
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
        write(path, {}, {"a": torch.zeros(3)})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("has_nameless", (True, False))
def test_several_write_to_one_path_at_once(tmp_path: Path, has_nameless: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path, all_wrote = tmp_path / "m", threading.Barrier(4)
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (sync(file), all_wrote.wait(30)))
    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(write, path, {}, {"a": torch.full((1000,), float(n))}) for n in range(4)]:
            future.result()
    written = read(path)[1]["a"]
    assert bool((written == written[0]).all()) and os.listdir(tmp_path) == ["m"]


def test_the_longest_name_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / ("m" * os.pathconf(tmp_path, "PC_NAME_MAX"))
    write(path, {}, {"a": torch.ones(3)})
    assert read(path)[1]["a"].tolist() == [1.0, 1.0, 1.0]


_SAVES = """
import os, signal, sys, torch
from pathlib import Path
from fx_passes.saved.container import write
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
write(Path(sys.argv[1]), {}, {"a": torch.zeros(1000)})
"""


def test_who_is_killed_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    write(tmp_path / "m", {}, {"a": torch.ones(3)})
    done = subprocess.run([sys.executable, "-c", _SAVES, str(tmp_path / "m")], cwd=Path(__file__).parents[3])
    assert done.returncode == -signal.SIGKILL
    assert read(tmp_path / "m")[1]["a"].tolist() == [1.0, 1.0, 1.0]
    if _nameless(tmp_path) is not None:
        assert os.listdir(tmp_path) == ["m"]


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    (tmp_path / "v1").touch(0o600)
    (tmp_path / "v1").chmod(0o600)
    (tmp_path / "current").symlink_to("v1")
    write(tmp_path / "current", {}, {"a": torch.ones(3)})
    assert (tmp_path / "current").is_symlink() and (tmp_path / "v1").stat().st_mode & 0o777 == 0o600
    assert torch.equal(read(tmp_path / "v1")[1]["a"], torch.ones(3))


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no file"):
        write(tmp_path / "pipe", {}, {"a": torch.ones(3)})
    assert (tmp_path / "pipe").is_fifo() and len([*tmp_path.iterdir()]) == 1


def test_weights_lie_on_cache_lines(saved: Saved) -> None:
    _, tensors = read(saved[0])
    assert all(t.data_ptr() % 64 == 0 for name, t in tensors.items() if name.startswith("zendnn_cffi.packed."))


def test_a_dtype_that_safetensors_lacks(tmp_path: Path) -> None:
    with pytest.raises(NotSaved, match="a is of torch.complex128"):
        write(tmp_path / "m", {}, {"a": torch.ones(2, dtype=torch.complex128)})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("size", (1, 7, 8, 65536, 65543, 200000))
def test_any_flipped_bit_changes_the_sum(size: int) -> None:
    flat = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    before, rng = checksum(flat), random.Random(size)
    for _ in range(20):
        place, bit = rng.randrange(size), 1 << rng.randrange(8)
        flat[place] ^= bit
        assert checksum(flat) != before
        flat[place] ^= bit
    assert checksum(flat) == before


@given(st.lists(st.integers(0, 5000), max_size=6), st.integers(0, 2**31))
def test_the_sum_of_all_is_that_of_the_bytes(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(256, (size,), generator=generator, dtype=torch.uint8) for size in sizes]
    whole = torch.cat([torch.empty(0, dtype=torch.uint8), *tensors])
    digest = hashlib.sha256(whole[whole.numel() // 1024 * 1024 :].numpy().tobytes())
    digest.update(whole[: whole.numel() // 1024 * 1024].view(torch.int64).view(-1, 128).sum(1).numpy().tobytes())
    assert checksum_of_all(tensors) == digest.hexdigest()[:16]


def test_pages_in_another_order_are_noticed(tmp_path: Path) -> None:
    """Also within what is summed up at once to say which tensor is damaged."""
    write(tmp_path / "m", {}, {"a": torch.arange(1 << 18, dtype=torch.int32)})
    data = bytearray((tmp_path / "m").read_bytes())
    first = len(data) - (1 << 20)
    data[first : first + 8192] = data[first + 4096 : first + 8192] + data[first : first + 4096]
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(FileError, match="its data is not what was written"):
        read(tmp_path / "m")
    assert read(tmp_path / "m", verify=False)[1]["a"][0] == 1024


def test_bytes_as_they_lie() -> None:
    tensor = torch.arange(12, dtype=torch.int32).view(3, 4).t()[1:]
    found = as_it_lies(tensor, 44)
    assert found.view(torch.int32).tolist() == list(range(1, 12)) and found.data_ptr() == tensor.data_ptr()
    assert padded(found).numel() == 64 and padded(torch.zeros(128, dtype=torch.uint8)).numel() == 128


_KILLED = """
import sys, torch, zendnn_cffi
from torch import nn
fast = zendnn_cffi.optimize(nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).eval(), tune="off")
fast(torch.ones(4, 1024))
print("ready", flush=True)
while True:
    zendnn_cffi.save(fast, sys.argv[1])
"""


def test_who_is_ended_while_saving_leaves_the_file_whole(tmp_path: Path) -> None:
    rng = random.Random(1)
    path = tmp_path / "m"
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", _KILLED, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert zendnn_cffi.load(path)(torch.ones(4, 1024)).shape == (4, 1024)
