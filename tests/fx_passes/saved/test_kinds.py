"""Files of several graphs: a loaded module answers each kind of call as the saved one did, from weights stored once."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zendnn_cffi
from fx_passes.region.keep import ToKeep, lowered_to_keep
from fx_passes.region.region import ZenRegion
from fx_passes.saved.errors import FileError, NotSaved
from fx_passes.search.noise import made_up
from tests.fx_passes.saved.test_container import _rewritten
from tests.fx_passes.saved.test_files import UNWANTED
from tests.support.kinds import (
    IDS,
    KINDS,
    MASK,
    X_MASK,
    Encoder,
    Optional,
    X,
    check,
    nothing_is_made,
    offloaded,
    served,
    there_and_back,
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Encoder, Path]:
    """A module with a graph for all KINDS, its model, and the file."""
    torch.manual_seed(0)
    model = Encoder()
    fast, path = served(model, *KINDS.values()), tmp_path_factory.mktemp("kinds") / "m"
    zendnn_cffi.save(fast, path)
    return fast, model, path


@given(st.permutations(list(KINDS)), st.integers(2, 4))
@settings(max_examples=6, deadline=None)
def test_each_kind_is_answered_at_once(tmp_path_factory: pytest.TempPathFactory, order: list[str], count: int) -> None:
    """Whichever kinds there are, and whichever came first: equal to the last bit, and nothing is made."""
    model, names = Encoder(), order[:count]
    fast = served(model, *(KINDS[name] for name in names))
    loaded = there_and_back(fast, tmp_path_factory.mktemp("m") / "m")
    assert len(loaded.call_kinds.modules) == count - 1
    with nothing_is_made():
        for name in (*reversed(names), *names):
            args, kwargs = KINDS[name]
            check(loaded, model, *args, **kwargs)
            with torch.no_grad():
                assert str(loaded(*args, **kwargs)) == str(fast(*args, **kwargs))
            assert offloaded(loaded, args, kwargs) == offloaded(fast, args, kwargs) >= 1
    regions = loaded.regions()
    assert len(regions) >= count and all(region.known.used == 1 for region in regions.values())
    assert str(zendnn_cffi.explain(loaded)) == str(zendnn_cffi.explain(fast))
    assert list(loaded.state_dict()) == list(model.state_dict())
    for name in KINDS:
        with contextlib.suppress(ValueError):  # refused, or right by a graph that is for more
            check(loaded, model, *KINDS[name][0], **KINDS[name][1])


def test_free_sizes_stay_free(encoder: tuple[Any, Encoder, Path]) -> None:
    _, model, path = encoder
    loaded = zendnn_cffi.load(path)
    for rows, length in ((2, 5), (5, 3), (1, 9)):
        ids, mask = torch.randint(0, 40, (rows, length)), torch.ones(rows, length)
        masked: tuple[Any, ...] = ((ids, mask), {}), ((), {"ids": ids, "mask": mask})
        for args, kwargs in (((ids,), {}), *(masked if rows > 1 else ())):
            check(loaded, model, *args, **kwargs)
            assert offloaded(loaded, args, kwargs) >= 1


class Decoder(nn.Module):
    """A prompt without a cache, then steps with one that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(32, 96)

    def forward(self, x: Tensor, keys: Tensor | None = None, values: Tensor | None = None) -> tuple[Tensor, ...]:
        _, *rest = x.shape
        assert rest
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.both(x).chunk(3, -1))
        if keys is None or values is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True), k, v
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return F.scaled_dot_product_attention(q, keys, values), keys, values


def test_a_prompt_and_steps_of_any_length_are_two_kinds(tmp_path: Path) -> None:
    model, tokens = Decoder(), torch.randn(9, 1, 1, 32)

    def decode(module: Any) -> list[Tensor]:
        with torch.no_grad():
            results, keys, values = module(tokens[:3].reshape(1, 3, 32))
            found = [results]
            for token in tokens[3:]:
                results, keys, values = module(token, keys, values)
                found.append(results)
        return found

    prompt, past = ((tokens[:3].reshape(1, 3, 32),), {}), torch.randn(1, 2, 3, 16)
    fast = served(model, prompt, ((tokens[0], past, past), {}))
    loaded = there_and_back(fast, tmp_path / "m")
    with nothing_is_made():
        torch.testing.assert_close(decode(loaded), decode(model), atol=1e-5, rtol=1e-5)
    assert [(len(region.lowered), region.known.used) for region in loaded.regions().values()] == [(1, 1)] * 2


def test_a_kind_that_the_file_lacks_is_refused_by_name(encoder: tuple[Any, Encoder, Path]) -> None:
    loaded = zendnn_cffi.load(encoder[2])
    with pytest.raises(ValueError, match="saved for other arguments") as error:
        loaded(IDS, MASK.double(), parts=[torch.ones(64)] * 3)
    assert "(ids: int64 of 2 dimensions); (ids: int64 of 2 dimensions, mask: float32 of 2 dim" in str(error.value)
    assert str(error.value).count("(") == len(KINDS) - 1  # a batch of one reads like others
    check(loaded, encoder[1], IDS, MASK)


def test_a_call_of_each_kind_is_enough(tmp_path: Path) -> None:
    """The first call of a kind is plain PyTorch's: its regions had no program, and loading chose them anew."""
    model, fast = Encoder().eval(), None
    fast = zendnn_cffi.optimize(model, tune="off")
    with torch.no_grad():
        fast(IDS)
        fast(IDS, MASK)
    loaded = there_and_back(fast, tmp_path / "m")
    with nothing_is_made():
        for args in ((IDS,), (IDS, MASK)):
            check(loaded, model, *args)
            assert offloaded(loaded, args, {}) == 1


def test_saving_takes_no_random_numbers(tmp_path: Path) -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 24)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.layer(x)) + torch.rand(24)

    fast: Any = zendnn_cffi.optimize(torch.export.export(Noisy().eval(), (X,)), tune="off")
    before = torch.get_rng_state()
    zendnn_cffi.save(fast, tmp_path / "m")
    assert torch.equal(torch.get_rng_state(), before) and all(region.lowered for region in fast.regions().values())


class Wide(nn.Module):
    """Most of its file are weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.small = nn.Linear(256, 768), nn.Linear(768, 256), nn.Linear(256, 16)

    def forward(self, x: Tensor, mask: Tensor | None = None, skip: bool = False) -> Tensor:
        _, *rest = x.shape
        assert rest
        if skip:
            return F.relu(self.small(x))
        hidden = F.relu(self.up(x))
        result: Tensor = self.down(hidden if mask is None else hidden * mask)
        return result


def packed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that calls have packed is there for the file, as where it is for other layouts than calls have."""

    def anew(region: ZenRegion, threads: Any) -> list[ToKeep]:
        wanted = [replace(each, lowered=None) for each in lowered_to_keep(region, threads)]
        region.clear()
        region.weights.clear()
        gc.collect()
        lowered = [region.lower_to_keep(list(map(made_up, each.inputs)), each.kinds)[0] for each in wanted]
        return [replace(each, lowered=found) for each, found in zip(wanted, lowered, strict=True)]

    monkeypatch.setattr("fx_passes.saved.document.lowered_to_keep", anew)


@pytest.mark.parametrize("anew", (False, True))
def test_weights_are_there_once(anew: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed ones, too."""
    model, x, mask = Wide(), torch.randn(64, 256), torch.rand(64, 768)
    calls: tuple[Any, ...] = ((x,), {}), ((x, mask), {}), ((x,), {"skip": True})  # the last one called is held
    one, three = served(model, *calls[:1]), served(model, *calls)
    packed = zendnn_cffi.explain(three).weights.packed_bytes
    if anew:
        packed_anew(monkeypatch)
    there_and_back(one, tmp_path / "one")
    loaded = there_and_back(three, tmp_path / "three")
    alone, together = ((tmp_path / name).stat().st_size for name in ("one", "three"))
    assert alone > 2 * 2 * 256 * 768 * 4 and together < alone + 100_000
    for _ in range(2):
        for args, kwargs in calls:
            check(loaded, model, *args, **kwargs)
        assert 0 < zendnn_cffi.explain(loaded).weights.packed_bytes <= 1.01 * packed
        loaded.invalidate()


def test_a_file_of_one_graph_is_of_the_old_version(tmp_path: Path) -> None:
    from fx_passes.saved.container import read

    calls: tuple[Any, ...] = ((X,), {}), ((X, X_MASK), {})
    for count, version in ((1, 2), (2, 3)):
        there_and_back(served(Optional(), *calls[:count]), tmp_path / "m")
        document, _ = read(tmp_path / "m")
        assert document["version"] == version and ("kinds" in document) == (count == 2)


def test_numbers_of_threads_and_another_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, before = Encoder(), torch.get_num_threads()
    calls = [KINDS[name] for name in ("ids", "mask")]
    fast = served(model, *calls)
    loaded = there_and_back(fast, tmp_path / "m", threads=[1, 2])
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with nothing_is_made():
                for args, kwargs in calls:
                    check(loaded, model, *args, **kwargs)
            assert all(region.known.used == threads for region in loaded.regions().values())
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr("fx_passes.saved.document.machine", lambda: "5.1-zen9-avx4096")
    zendnn_cffi.save(fast, tmp_path / "m")
    monkeypatch.undo()
    loaded = zendnn_cffi.load(tmp_path / "m")
    assert caplog.text.count("saved on 5.1-zen9-avx4096") == 1
    for args, kwargs in calls:
        check(loaded, model, *args, **kwargs)
        assert offloaded(loaded, args, kwargs) == 1


class Foreign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.sum()) > 0 else x


class Half(nn.Module):
    """One of its branches cannot be in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.foreign = nn.Linear(16, 24), Foreign()

    def forward(self, x: Tensor, mask: Tensor | None = None, both: bool = False) -> Any:
        y = F.relu(self.layer(x))
        if mask is not None:
            return self.foreign(y * mask)
        return (y, y + 1) if both else y


def test_a_kind_that_no_file_holds_is_left_out_with_a_warning(tmp_path: Path) -> None:
    model = Half()
    fast = served(model, ((X,), {}), ((X, X_MASK), {}), ((X,), {"both": True}))
    with pytest.warns(UserWarning, match=r"mask: float32 of 2 dimensions, x.*submodule foreign \(Foreign\)") as told:
        zendnn_cffi.save(fast, tmp_path / "m")
    assert len(told) == 1
    loaded = zendnn_cffi.load(tmp_path / "m")
    check(loaded, model, X)
    check(loaded, model, X, both=True)
    assert offloaded(loaded, (X,), {"both": True}) == 1
    with pytest.raises(ValueError, match="saved for other arguments"):
        loaded(X, X_MASK)
    fast = zendnn_cffi.optimize(model, (X, X_MASK), tune="off")
    for args in ((X, X_MASK), (X,)):
        check(fast, model, *args)
    with pytest.raises(NotSaved, match="submodule foreign"):
        zendnn_cffi.save(fast, tmp_path / "m")


class Mixed(nn.Module):
    """One of its branches is kept whole, as it computes under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(16, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        _, *rest = x.shape
        assert rest
        y = F.relu(self.layer(x))
        if mask is not None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.last(y * mask)
        return y


def test_what_is_left_out_leaves_nothing_in_the_file(tmp_path: Path) -> None:
    model = Mixed()
    fast = served(model, ((X,), {}), ((X, X_MASK), {}))
    with pytest.warns(UserWarning, match="mask: float32 of 2 dimensions, x.*its graph reads"):
        zendnn_cffi.save(fast, tmp_path / "left")
    there_and_back(served(model, ((X,), {})), tmp_path / "one")
    loaded = zendnn_cffi.load(tmp_path / "left")
    assert list(loaded.state_dict()) == list(model.state_dict()) and not loaded.call_kinds.modules
    assert (tmp_path / "left").stat().st_size == (tmp_path / "one").stat().st_size
    check(loaded, model, X)


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "graphs in a file of one": lambda d: d.update(version=2),
    "no graphs": lambda d: d.pop("kinds"),
    "none": lambda d: d.update(kinds=[]),
    "a number": lambda d: d.update(kinds=3),
    "an object": lambda d: d.update(kinds={"0": d["kinds"][0]}),
    "rows of nothing": lambda d: d.update(kinds=[None]),
    "an empty row": lambda d: d.update(kinds=[{}]),
    "released": lambda d: d.update(released=True),
    "no graph": lambda d: d["kinds"][0].pop("graph"),
    "no parts": lambda d: d["kinds"][0].update(parts={}),
    "no arguments": lambda d: d["kinds"][0].pop("arguments"),
    "no programs": lambda d: d["kinds"][0].pop("programs"),
    "calls that are no text": lambda d: d["kinds"][0]["arguments"].update(calls=[1]),
    "programs of another region": lambda d: d["kinds"][0].update(programs={"other": []}),
    "weights that are not there": lambda d: next(iter(d["kinds"][0]["programs"].values()))[0].update(
        weights=[["a", "b", False, "zendnn_cffi.packed.99"]]
    ),
    "another function": lambda d: next(
        row for row in next(iter(d["kinds"][0]["parts"].values()))["graph"]["nodes"] if row[0] == "call_function"
    ).__setitem__(2, "builtins.eval"),
    "a part in a layer's place": lambda d: d["kinds"][0]["parts"].update(
        layer=next(iter(d["kinds"][0]["parts"].values()))
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie_about_their_graphs_are_refused(lie: str, tmp_path: Path) -> None:
    there_and_back(served(Optional(), ((X,), {}), ((X, X_MASK), {})), tmp_path / "m")
    _rewritten(tmp_path / "m", LIES[lie], tmp_path / "lie")
    with pytest.raises(FileError):
        zendnn_cffi.load(tmp_path / "lie")


def test_all_kinds_start_without_the_compiler(tmp_path: Path) -> None:
    model = Optional()
    fast = served(model, ((X,), {}), ((X, X_MASK), {}))
    zendnn_cffi.save(fast, tmp_path / "m")
    with torch.no_grad():
        torch.save((X, X_MASK, fast(X), fast(X, X_MASK)), tmp_path / "expected")
    code = f"""
import sys, torch
x, mask, alone, masked = torch.load(sys.argv[2])
given = set(sys.modules)
import zendnn_cffi
fast = zendnn_cffi.load(sys.argv[1])
assert torch.equal(fast(x), alone) and torch.equal(fast(x, mask), masked)
assert [region.known.used for region in fast.regions().values()] == [1, 1]
try:
    fast(x, mask=3)
except ValueError as error:
    assert "x, mask=None" in str(error) and "mask: float32 of 2 dimensions, x" in str(error), error
print([name for name in {UNWANTED.split()} if name in sys.modules and name not in given])
"""
    command = [sys.executable, "-c", code, str(tmp_path / "m"), str(tmp_path / "expected")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_workers_answer_each_kind(encoder: tuple[Any, Encoder, Path]) -> None:
    _, model, path = encoder
    with zendnn_cffi.instances(path, n=1) as workers, torch.no_grad():
        for args, kwargs in KINDS.values():
            torch.testing.assert_close(workers(*args, **kwargs), model(*args, **kwargs), atol=1e-5, rtol=1e-5)
        with pytest.raises(ValueError, match=r"graphs for \(ids: int64 of 2 dimensions\); "):
            workers(IDS, MASK.double(), parts=[torch.ones(64)] * 3)


def test_submodules_of_any_name(tmp_path: Path) -> None:
    """One called `run` could not be loaded."""
    model = nn.Sequential()
    model.add_module("run", nn.Linear(16, 8))
    loaded = there_and_back(served(model, ((X,), {})), tmp_path / "m")
    check(loaded, model, X)
