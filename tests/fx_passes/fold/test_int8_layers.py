"""Exported programs of layers that torchao's quantize_() made: the operations, numbers and files of the module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zendnn_cffi
from fx_passes import ops
from tests.fx_passes.lower.products.test_dynamic import products
from tests.fx_passes.spellings.test_int8_linear import BF16, noise_db
from tests.fx_passes.spellings.test_int8_scaled import KINDS
from tests.support.int8_tensors import CONFIGS, DYNAMIC, block, scaled
from tests.support.lowering import check_regions, noise
from tests.support.quantized import ran

F32 = torch.float32
FREE = torch.export.Dim.DYNAMIC
IN_BF16 = ("rows", "rows, one scale of the weight", "rows, reduced", "outputs", "one scale", "groups", "float8")


def exported(model: nn.Module, x: Tensor, free: bool = False) -> torch.export.ExportedProgram:
    return torch.export.export(model, (x,), dynamic_shapes=({0: FREE, 1: FREE},) if free else None)


def both(model: nn.Module, x: Tensor, program: Any) -> tuple[Any, Any]:
    """model and its program, optimized and called."""
    fasts = zendnn_cffi.optimize(model, (x,), tune="off"), zendnn_cffi.optimize(program, tune="off")
    for fast in fasts:
        fast(x)
    return fasts


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize(
    ("config", "dtype"), [(config, F32) for config in CONFIGS] + [(name, BF16) for name in IN_BF16]
)
def test_a_program_computes_what_the_module_does(config: str, dtype: torch.dtype, free: bool) -> None:
    model, x = block(config, dtype), noise(3, 5, 64, dtype=dtype)
    with torch.no_grad():
        module, program = both(model, x, exported(model, x, free))
        assert torch.equal(program(x), module(x))
        assert ran(program) == ran(module) and len(products(program)) == (2 if config in DYNAMIC else 0)
        if free:
            other = noise(2, 4, 64, dtype=dtype, seed=1)
            assert torch.equal(program(other), module(other))
    check_regions(program)


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("how", KINDS)
def test_inputs_that_weights_scale(how: str, free: bool) -> None:
    model, x = scaled(how), noise(3, 5, 64)
    with torch.no_grad():
        module, program = both(model, x, exported(model, x, free))
        assert torch.equal(program(x), module(x))
    assert ran(program) == ran(module)


@pytest.mark.parametrize("shape", [(5, 64), (1, 64), (1, 1, 64), (2, 3, 5, 64), (64,)])
@pytest.mark.parametrize("config", ["rows", "whole, asymmetric", "outputs", "static"])
def test_shapes(config: str, shape: tuple[int, ...]) -> None:
    model, x = scaled(config) if config == "static" else block(config), noise(*shape)
    for layer in (model.up, model.down) if config == "static" else ():
        layer.weight.act_quant_scale = torch.full((1,) * len(shape), 0.04)
    with torch.no_grad():
        program = exported(model, x)
        module, fast = both(model, x, program)
        assert noise_db(fast(x), model(x)) > 45
        decomposed = zendnn_cffi.optimize(program.run_decompositions(), tune="off")  # of torchao's operators, too
        assert noise_db(decomposed(x), model(x)) > 45
    assert ran(fast) == ran(module) or len(shape) == 1


@pytest.mark.needs("vnni")
@pytest.mark.parametrize("config", ["rows", "outputs", "groups, 4 bits", "float8"])
def test_files(config: str, tmp_path: Path) -> None:
    model, x = block(config), noise(3, 5, 64)
    torch.export.save(exported(model, x), tmp_path / "model.pt2")
    with torch.no_grad():
        fast = zendnn_cffi.optimize(str(tmp_path / "model.pt2"), tune="off")
        assert noise_db(fast(x), model(x)) > 45 and len(products(fast)) == (2 if config in DYNAMIC else 0)
        zendnn_cffi.save(fast, tmp_path / "model.safetensors")
        loaded = zendnn_cffi.load(tmp_path / "model.safetensors")
        assert torch.equal(loaded(x), fast(x))
    assert "up.weight.qdata" in loaded.state_dict() and ran(loaded) == ran(fast)


def choose(x: Tensor, how: str, block_size: list[int]) -> tuple[Tensor, Tensor]:
    given = (torch.int8, -128, 127, 1e-7, F32, torch.int8, True)
    return torch.ops.torchao.choose_qparams_affine(x, how, block_size, *given)


class Rows(nn.Module):
    """A layer as torchao's functions compute it, with one thing that is other.

    change  names what
    """

    def __init__(self, change: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.change, self.k, self.n = change, 32, 32
        self.register_buffer("qdata", torch.randint(-128, 128, (self.n, self.k), generator=generator, dtype=torch.int8))
        self.register_buffer("scale", torch.rand(self.n, 1, generator=generator) / 100)
        self.register_buffer("own", torch.rand(32, generator=generator))

    def forward(self, x: Tensor) -> Any:
        how = "ASYMMETRIC" if self.change in ("no zero points", "another zero point") else "SYMMETRIC"
        s, z = choose(x, how, [1, self.k])
        kept = torch.ops.torchao.quantize_affine(x, [1, self.k], s, z, torch.int8, -128, 127)
        sums = torch._int_mm(kept, self.qdata.t())
        y = sums.to(F32) * (self.own.reshape(-1, 1) if self.change == "another scale" else s.reshape(-1, 1))
        if self.change == "another zero point":
            y = y - (z.reshape(-1, 1) + 1).to(F32) * s.reshape(-1, 1) * self.qdata.sum(-1).to(F32)
        y = y * (self.scale.reshape(-1, 1) if self.change == "scales of rows" else self.scale.flatten())
        y = y + (self.own[:, None] if self.change == "a bias of rows" else self.own)
        if self.change == "written scales":
            self.scale.mul_(1.0)
        return (y, sums) if self.change == "sums are read" else y


CHANGES = ("no zero points", "another zero point", "another scale", "scales of rows", "sums are read", "written scales")


def targets(fast: Any) -> list[Any]:
    regions = fast.regions().values()
    return [node.target for graph in (fast.graph, *(region.graph for region in regions)) for node in graph.nodes]


@pytest.mark.parametrize("change", ["nothing", "a bias of rows", *CHANGES])
def test_near_misses(change: str) -> None:
    model, x = Rows(change).eval(), noise(32, 32)
    fast = zendnn_cffi.optimize(exported(model, x), tune="off")
    with torch.no_grad():
        ours, theirs = fast(x), model(x)
        for a, b in zip(*((y,) if isinstance(y, Tensor) else y for y in (ours, theirs)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
    assert (ops.row_scaled_linear in targets(fast)) == (change in ("nothing", "a bias of rows"))


FLOATS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a factor of the sum": lambda m, x: torch.baddbmm(m.own[:, None], x[None], m.qdata.t().float()[None], alpha=2.0)[0],
    "scales of rows": lambda m, x: x @ m.qdata.t().float() * m.scale.reshape(-1, 1),
    "an integer scale": lambda m, x: x @ m.qdata.t().float() * (m.scale * 400).to(torch.int32).flatten(),
    "not transposed": lambda m, x: x @ m.qdata.float() * m.scale.flatten(),
}


@pytest.mark.parametrize("name", FLOATS)
def test_near_misses_of_weights_alone(name: str) -> None:
    class Floats(Rows):
        def forward(self, x: Tensor) -> Tensor:
            return FLOATS[name](self, x)

    model, x = Floats("").eval(), noise(32, 32)
    fast = zendnn_cffi.optimize(exported(model, x), tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-2)
