"""What was chosen is found again by the next module like it; where anything differs, it is chosen anew."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zendnn_cffi
from fx_passes.saved import choices
from tests.fx_passes.saved.test_programs import NETS
from tests.support.lowering import net, noise
from tests.support.quantized_steps import Scale
from tests.tolerance import assert_close

SMALL = "convolution"
OF_ONE_REGION = [name for name in NETS if name != "plain PyTorch inside"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for choices; nothing is measured, and counts as known all the same."""
    monkeypatch.setenv("ZENDNN_CFFI_CACHE", str(tmp_path))
    monkeypatch.setattr("fx_passes.search.turn.Turn.allows", lambda *_, **__: False)
    yield tmp_path / choices.FOLDER


def called(model: Any, *inputs: torch.Tensor, **options: Any) -> Any:
    """The region of the model, optimized and called; its answers are right."""
    fast = zendnn_cffi.optimize(model, **options)
    with torch.no_grad():
        assert_close(fast(*inputs), model(*inputs))
    (region,) = fast.regions().values()
    return region


def implementations(region: Any) -> list[tuple[str, str]]:
    (lowered,) = region.lowered.values()
    return [(node.name, node.implementation) for node in lowered.nodes]


def kept(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("name", OF_ONE_REGION)
def test_the_next_module_chooses_nothing(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = NETS[name]
    first = called(make(), noise(*shape))
    assert len(kept(folder)) == 1 and first.known.used == 0
    monkeypatch.setattr("fx_passes.region.variants.choose_variant", None)
    model = make()
    for parameter in model.parameters():  # other numbers
        parameter.data.mul_(1.5)
    again = called(model, noise(*shape))
    assert again.known.used == 1 and implementations(again) == implementations(first)


def test_a_batch_in_slices_is_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fx_passes.region.variants.variant_names", lambda *_: ["2"])
    shape = (4, 16, 9, 9)
    called(NETS[SMALL][0](), noise(*shape))
    region = called(NETS[SMALL][0](), noise(*shape))
    (lowered,) = region.lowered.values()
    assert region.known.used == 1 and lowered.program.slices == 2


def test_weights_folded_late_are_packed_anew(folder: Path) -> None:
    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).eval()
        model[1].running_mean.normal_()  # type: ignore[operator, union-attr]
        return model

    x = noise(1, 16, 9, 9)
    assert called(make(0), x).known.used == 0
    assert called(make(1), x).known.used == 1


@pytest.mark.parametrize("what", ["_library", "_code", "_variables"])
def test_another_machine_or_package_chooses_anew(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = NETS[SMALL]
    called(make(), noise(*shape))
    monkeypatch.setattr(choices, what, lambda: "another")
    assert called(make(), noise(*shape)).known.used == 0


def test_a_variable_of_the_library_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = NETS[SMALL]
    called(make(), noise(*shape))
    monkeypatch.setenv("ZENDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    assert called(make(), noise(*shape)).known.used == 0
    monkeypatch.delenv("ZENDNN_PRIMITIVE_CACHE_CAPACITY")
    monkeypatch.setenv("ZENDNN_CFFI_LOG", "ERROR")
    assert called(make(), noise(*shape)).known.used == 1


@pytest.mark.parametrize("options", [{"tune": "full"}, {"allow_winograd": False}])
def test_other_options_choose_anew(options: dict[str, Any]) -> None:
    make, shape = NETS[SMALL]
    called(make(), noise(*shape))
    assert called(make(), noise(*shape), **options).known.used == 0


def test_other_inputs_parameters_and_threads_choose_anew() -> None:
    make, shape = NETS[SMALL]
    called(make(), noise(*shape))
    assert called(make(), noise(shape[0] + 1, *shape[1:])).known.used == 0
    assert called(net(lambda m, x: F.relu(m[0](x) + x), nn.Conv2d(16, 16, 5, padding=2)), noise(*shape)).known.used == 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        assert called(make(), noise(*shape)).known.used == 0
    finally:
        torch.set_num_threads(threads)


def test_other_scales_choose_anew() -> None:
    """Times know them by one key; a choice holds numbers."""

    class Rounded(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = Scale("float", scale, 3, torch.uint8, (0, 255))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pooled = F.max_pool2d(self.scale.dequantize(self.scale.quantize(x)), 2)
            return self.scale.quantize(pooled)

    x = noise(2, 8, 6, 6)
    found = [called(Rounded(scale).eval(), x).known.used for scale in (0.05, 0.05, 0.1)]
    assert found == [0, 1, 0]


def test_no_collection_of_garbage_while_a_choice_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    write = choices.write

    def writing(*about: Any) -> None:
        seen.append(gc.isenabled())
        write(*about)

    monkeypatch.setattr("fx_passes.saved.remembered.write", writing)
    called(NETS[SMALL][0](), noise(*NETS[SMALL][1]))
    assert seen == [False] and gc.isenabled()


def test_choices_by_estimate_are_not_kept(folder: Path) -> None:
    make, shape = NETS[SMALL]
    called(make(), noise(*shape))
    (path,) = kept(folder)
    path.unlink()
    assert called(make(), noise(*shape), tune="off").known is None and not kept(folder)


def test_weights_that_are_not_finite_choose_anew(folder: Path) -> None:
    model, shape = NETS[SMALL][0](), NETS[SMALL][1]
    called(model, noise(*shape))
    with torch.no_grad():
        next(model.parameters())[0, 0, 0, 0] = float("inf")
    fast = zendnn_cffi.optimize(model)
    with torch.no_grad():
        torch.testing.assert_close(fast(noise(*shape)), model(noise(*shape)), equal_nan=True)
    assert all(region.known.used == 0 for region in fast.regions().values()) and len(kept(folder)) == 1


def test_what_was_chosen_for_weights_that_are_not_finite_is_not_kept(folder: Path) -> None:
    model, shape = net(lambda m, x: F.relu(m[1](m[0](x))), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 3)), (1, 16, 9, 9)
    with torch.no_grad():
        next(model.parameters())[0, 0, 0, 0] = float("inf")
        zendnn_cffi.optimize(model)(noise(*shape))
    assert not kept(folder)


class Scaled(nn.Module):
    """Multiplies by a number that is a parameter: a rule may make it a part of a post-op."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = nn.Conv2d(16, 16, 1), nn.Parameter(torch.tensor(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(x) * self.scale + 1)


LOOK_AT_NUMBERS: dict[str, Callable[[float], nn.Module]] = {
    "a factor": Scaled,
    "one slope": lambda slope: nn.Sequential(nn.Conv2d(16, 16, 1), nn.PReLU(init=slope), nn.Conv2d(16, 4, 1)),
}


@pytest.mark.parametrize("name", LOOK_AT_NUMBERS)
def test_rules_that_look_at_numbers_choose_anew(name: str, folder: Path) -> None:
    x = noise(1, 16, 8, 8)
    for number in (0.25, 3.0):
        torch.manual_seed(0)
        assert called(LOOK_AT_NUMBERS[name](number).eval(), x).known.used == 0
    assert not kept(folder)


def damaged(path: Path, how: str) -> bytes:
    whole = path.read_bytes()
    row = json.loads(zlib.decompress(whole))
    match how:
        case "cut off":
            return whole[: len(whole) // 2]
        case "other bytes":
            return b"\0" * len(whole)
        case "no object":
            row = [1]
        case "no operations":
            row["program"]["operations"] = []
        case "beyond its memory":
            row["program"]["operations"][0]["srcs"] = row["program"]["operations"][0]["srcs"][:-1]
        case "another constant":
            return zlib.compress(json.dumps(row).replace('"weights", "', '"weights", "another_').encode())
        case "another implementation":
            return zlib.compress(json.dumps(row).replace(":avx", ":another").encode())
    return zlib.compress(json.dumps(row).encode())


@pytest.mark.parametrize(
    "how",
    ["cut off", "other bytes", "no object", "no operations", "beyond its memory", "another constant",
     "another implementation"],
)  # fmt: skip
def test_a_damaged_file_is_as_good_as_none(how: str, folder: Path) -> None:
    make, shape = NETS[SMALL]
    first = called(make(), noise(*shape))
    (path,) = kept(folder)
    path.write_bytes(damaged(path, how))
    again = called(make(), noise(*shape))
    assert again.known.used == 0 and implementations(again) == implementations(first)
    assert called(make(), noise(*shape)).known.used == 1  # it was written again


def test_a_file_is_saved_with_all_there_was_to_choose_from(tmp_path: Path) -> None:
    make, shape = NETS[SMALL]
    called(make(), noise(*shape))
    model = make()
    fast: Any = zendnn_cffi.optimize(model)
    fast(noise(*shape))
    zendnn_cffi.save(fast, tmp_path / "model")
    loaded: Any = zendnn_cffi.load(tmp_path / "model")
    with torch.no_grad():
        assert_close(loaded(noise(*shape)), model(noise(*shape)))
    assert [region.known.used for region in (*fast.regions().values(), *loaded.regions().values())] == [1, 1]


def small() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 4))
    return nn.Sequential(*layers).eval()


CODE = """
import sys, torch, zendnn_cffi
from tests.fx_passes.saved.test_remembered import small
given = {*sys.modules}
model, x = small(), torch.ones(1, 3, 8, 8)
fast = zendnn_cffi.optimize(model)
assert torch.allclose(fast(x), model(x), atol=1e-5)
names = ("fx_passes.region.variants", "fx_passes.search.tuner", "fx_passes.lower.rules", "sqlite3")
print([region.known.used for region in fast.regions().values()], [n for n in names if n in {*sys.modules} - given])
"""


def test_a_second_process_starts_without_searching() -> None:
    called(small(), torch.ones(1, 3, 8, 8))
    package, checkout = Path(zendnn_cffi.__file__).parents[1], Path(__file__).parents[3]  # of this process, of tests
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(package), str(checkout)))}
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=env, cwd="/")
    assert done.stdout.splitlines()[-1:] == ["[1] []"], done.stderr
