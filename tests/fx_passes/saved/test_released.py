"""Modules whose parameters were released are copied, pickled and saved with what is left: packed weights."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import zendnn_cffi
from fx_passes.region.kept import Kept
from fx_passes.region.region import weights_bytes
from fx_passes.saved.errors import FileError
from fx_passes.saved.layouts import Layouts
from fx_passes.saved.released import decode_kept, encode_kept
from tests.support.lowering import net, noise
from tests.tolerance import assert_close

X = noise(2, 3, 9, 9)
HOWS = ("deepcopy", "copy", "pickle", "file")
BOUND = 8.0  # times the parameters' bytes: Winograd's transformed weights, and those that are kept plain beside them


def model() -> nn.Module:
    """Folded, residual, Winograd's, depthwise and linear weights."""
    torch.manual_seed(0)
    return net(
        _forward,
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.Conv2d(32, 32, 3, groups=32),
        nn.Linear(32, 10),
    )


def _forward(m: Any, x: torch.Tensor) -> torch.Tensor:
    first = m[0](x)
    return m[4](F.gelu(m[3](F.relu(m[2](m[1](first)) + first))).mean((2, 3)))


def again(how: str, gm: Any, folder: Path) -> Any:
    """The module copied, pickled or saved and back."""
    if how == "file":
        zendnn_cffi.save(gm, folder / "m")
        return zendnn_cffi.load(folder / "m")
    ways: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "copy": copy.copy}
    return ways[how](gm) if how in ways else pickle.loads(pickle.dumps(gm))


def constants_of(gm: Any) -> Kept:
    (region,) = gm.regions().values()
    assert isinstance(region.constants, Kept)
    return region.constants


@pytest.mark.parametrize("example", (False, True), ids=("traced", "exported"))
@pytest.mark.parametrize("dtype", (None, torch.bfloat16), ids=str)
def test_same_numbers_and_no_parameters(example: bool, dtype: torch.dtype | None, tmp_path: Path) -> None:
    original = model()
    gm = zendnn_cffi.optimize(original, (X,) if example else None, dtype=dtype, tune="off", release_weights=True)
    expected = gm(X)
    for first in HOWS:
        one = again(first, gm, tmp_path)
        for second in HOWS:
            two = again(second, one, tmp_path)
            for made in (one, two):
                assert torch.equal(made(X), expected), (first, second)
                assert sum(p.numel() for p in made.parameters()) == 0
                with pytest.raises(RuntimeError, match="release_weights"):
                    made.state_dict()
            (region,) = two.regions().values()
            assert all(region.lowered.values()) and len(region.lowered) == 1
            assert weights_bytes([region])[1] < BOUND * sum(p.nbytes for p in original.parameters())
    if example:
        return
    other = noise(1, 3, 12, 7)
    oracle = copy.deepcopy(original).double()(other.double()).detach()
    for how in HOWS:
        assert_close(again(how, gm, tmp_path)(other), oracle, dtype=dtype or torch.float32, k=300)


def test_packed_weights_are_there_once(tmp_path: Path) -> None:
    """What is kept of a weight is what programs read; copy.copy shares it, deepcopy does not."""
    gm = zendnn_cffi.optimize(model(), tune="off", release_weights=True)
    gm(X)
    own = {form.packed.data.data_ptr() for form in constants_of(gm).forms.values()}
    for how in HOWS:
        made = again(how, gm, tmp_path)
        made(X)
        kept = {form.packed.data.data_ptr() for form in constants_of(made).forms.values()}
        assert (kept == own) == (how == "copy") and (kept & own == set()) == (how != "copy")
        (region,) = made.regions().values()
        (lowered,) = region.lowered.values()
        assert kept <= {t.data_ptr() for t in lowered.program.constants}
        made.invalidate()
        made(X)
        (lowered,) = region.lowered.values()
        assert kept <= {t.data_ptr() for t in lowered.program.constants}


def test_a_file_holds_no_parameters(tmp_path: Path) -> None:
    original = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).eval()
    gm = zendnn_cffi.optimize(original, tune="off", release_weights=True)
    gm(noise(8, 256))
    zendnn_cffi.save(gm, tmp_path / "m")
    tensors = load_file(tmp_path / "m")
    assert {"0.weight", "2.bias"} <= tensors.keys() and not any(tensors[n].numel() for n in ("0.weight", "2.weight"))
    assert sum(t.nbytes for t in tensors.values()) < 1.05 * sum(p.nbytes for p in original.parameters())


def test_a_copy_made_before_the_first_call_is_released_by_its_own() -> None:
    gm = zendnn_cffi.optimize(model(), tune="off", release_weights=True)
    for made in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        assert not made.is_released and made.state_dict()
        made(X)
        assert made.is_released
    assert not gm.is_released


class Sorting(nn.Module):
    """Parameters that the outer graph reads, too, and a submodule that stays plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(32, 50), Counting()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.calls(self.linear(x)) + torch.sort(self.linear.bias).values


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x


def test_beside_plain_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    gm = zendnn_cffi.optimize(Sorting().eval(), tune="off", release_weights=True)
    x = noise(4, 32)
    expected = gm(x)
    assert gm.linear.weight.numel() == 0 and gm.linear.bias.numel() == 50
    for how in ("deepcopy", "copy", "pickle"):
        assert torch.equal(again(how, gm, tmp_path)(x), expected)
    with pytest.raises(ValueError, match="Counting"):
        zendnn_cffi.save(gm, tmp_path / "m")


class Tied(nn.Module):
    """An operation outside of regions reads the only parameter, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.sort(self.linear.weight).values


class Branching(nn.Module):
    """No graph: PyTorch calls the layers that are optimized."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) if x.sum() > 0 else x


# Model -> why its parameters are kept, and whether that is known before a call.
KEPT: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    "read elsewhere": (Tied, "outside of regions read", False),
    "no graph": (Branching, "the model's own forward", True),
    "no region": (nn.Identity, "no operation", True),
}


@pytest.mark.parametrize("case", KEPT)
def test_what_cannot_be_released_is_told_and_changes_are_noticed(case: str) -> None:
    torch.manual_seed(0)
    build, why, known_before = KEPT[case]
    original, x = build().eval(), noise(32, 32).abs()
    with warnings.catch_warnings(record=True) as before:
        warnings.simplefilter("always")
        gm = zendnn_cffi.optimize(original, (x,), tune="off", release_weights=True)
    with warnings.catch_warnings(record=True) as during, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(2):
            assert_close(gm(x), original(x), k=32)
    told = [str(warning.message) for warning in (before if known_before else during)]
    assert len(told) == 1 and len(before) + len(during) == 1 and why in told[0]
    assert why in str(zendnn_cffi.explain(gm)) and not gm.is_released
    gm.state_dict()
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.mul_(0.5)
        for _ in range(3):
            assert_close(gm(x), original(x), k=32)


def test_a_first_call_that_lowers_nothing_releases_later() -> None:
    """One that asks for gradients, say: regions leave it to PyTorch."""
    gm = zendnn_cffi.optimize(model(), tune="off", release_weights=True)
    gm(X.clone().requires_grad_())
    assert not gm.is_released
    gm(X)
    assert gm.is_released


@pytest.mark.parametrize("change", ({0: "nothing"}, {1: (32, 3, 3, 4)}, {1: (-32, -864)}, {2: 3}, {3: 99}, {4: True}))
def test_rows_that_lie_are_refused(change: dict[int, Any]) -> None:
    gm = zendnn_cffi.optimize(model(), tune="off", release_weights=True)
    gm(X)
    layouts, tensors = Layouts(), dict[str, torch.Tensor]()
    rows = encode_kept(constants_of(gm), layouts, tensors)
    name = next(name for name, row in rows.items() if len(row) > 3 and len(row[1]) == 4)
    for place, value in change.items():
        rows[name][place] = value
    with pytest.raises((FileError, KeyError)):
        decode_kept(rows, layouts, tensors)


def test_memory_that_is_too_short_is_refused() -> None:
    gm = zendnn_cffi.optimize(model(), tune="off", release_weights=True)
    gm(X)
    layouts, tensors = Layouts(), dict[str, torch.Tensor]()
    rows = encode_kept(constants_of(gm), layouts, tensors)
    assert [*decode_kept(rows, layouts, tensors)]
    with pytest.raises(FileError):
        decode_kept(rows, layouts, {name: tensor[:-1] for name, tensor in tensors.items()})


class Shared(nn.Module):
    """A scale that the caller gets to see, too: it is there after its product with the weights was packed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.other = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("scale", noise(16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x) * self.scale, self.scale


@pytest.mark.parametrize("how", HOWS)
def test_writes_to_what_is_still_there_are_noticed(how: str, tmp_path: Path) -> None:
    """The packed weights would be those from before."""
    gm = zendnn_cffi.optimize(Shared().eval(), tune="off", release_weights=True)
    x = noise(4, 16)
    gm(x)
    assert gm.is_released
    made = again(how, gm, tmp_path)
    _, scale = made(x)
    made(x)
    with torch.no_grad():
        scale.add_(1.0)
    with pytest.raises(RuntimeError, match="parameters or layers were changed"):
        made(x)


class HalfTied(nn.Module):
    """Of two regions one keeps its parameter, which is read outside of it, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.tied = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.tied(torch.sort(self.first(x)).values) + torch.sort(self.tied.weight).values
        return result


@pytest.mark.parametrize("how", HOWS)
def test_writes_to_what_was_not_released_are_followed(how: str, tmp_path: Path) -> None:
    model, x = HalfTied().eval(), noise(32, 32)
    gm = zendnn_cffi.optimize(HalfTied().eval(), tune="off", release_weights=True)
    gm(x)
    made: Any = again(how, gm, tmp_path)
    assert made.is_released and made.first.weight.numel() == 0
    for _ in range(3):
        with torch.no_grad():
            made.tied.weight.mul_(1.5)
            model.tied.weight.mul_(1.5)
            assert_close(made(x), model(x), dtype=torch.float32, k=32)


class Drawing(nn.Module):
    """Its graph has operators that torch.export wrote, inside of a part and outside of all."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x)[0], torch.rand(3)


@pytest.mark.parametrize("how", HOWS)
def test_operators_of_exported_graphs(how: str, tmp_path: Path) -> None:
    """Pickle does not take them."""
    gm = zendnn_cffi.optimize(Drawing().eval(), tune="off", release_weights=True)
    x = noise(2, 5, 16)
    expected, _ = gm(x)
    assert gm.is_released
    targets = {type(node.target) for node in gm.graph.nodes}
    assert torch._ops.OpOverload in targets
    for made in (again(how, gm, tmp_path), again("pickle", again(how, gm, tmp_path), tmp_path)):
        result, drawn = made(x)
        assert torch.equal(result, expected) and drawn.shape == (3,)
        assert {type(node.target) for node in made.graph.nodes} == targets
