"""Random edits of an optimized module, and of the model that it was made of, leave both with the same answers.

Layers are replaced, taken out and put back, parameters written and replaced, attributes, modes and hooks changed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import zendnn_cffi
from tests.support.random_networks import SLOW

WIDTH = 12
Edit = Callable[[Any, random.Random], object]


class Block(nn.Module):
    """Layers, and what else a forward may read: numbers, flags, a dictionary, a list, a layer that may be None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.batch = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)
        self.act: nn.Module = nn.ReLU()
        self.extra: nn.Module | None = None
        self.scale, self.residual, self.options, self.shifts = 0.5, True, {"add": 0.25}, [0.1]

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.batch(self.norm(self.linear(x)))) * self.scale + self.options["add"]
        for shift in self.shifts:
            y = y + shift
        if self.extra is not None:
            y = y + self.extra(x)
        return x + y if self.residual else y


class Edited(nn.Module):
    """By kind: torch.fx traces it, torch.export alone does, or it is no graph and its blocks are."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.flag, self.power = kind, False, 1.0
        self.first, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.register_buffer("offset", torch.zeros(WIDTH))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.adapter: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "exported":
            _, *rest = x.shape
            assert rest
        if self.kind == "parts" and float(x.sum()) > 1e3:
            x = -x
        y = self.first(x) * self.gain + self.offset
        for block in self.blocks:
            y = block(y)
        y = torch.tanh(y) if self.flag else y
        y = y if self.adapter is None else self.adapter(y)
        return self.head(y) * self.power


class Scaled(nn.Linear):
    """As large a layer, with another forward."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.5


def one_block(model: Any, rng: random.Random) -> Any:
    return model.blocks[rng.randrange(len(model.blocks))]


def one_layer(model: Any, rng: random.Random) -> Any:
    return rng.choice([model.first, model.head, *(block.linear for block in model.blocks)])


def linear(model: Any, rng: random.Random, inputs: int = WIDTH, outputs: int = WIDTH) -> nn.Linear:
    torch.manual_seed(rng.randrange(1000))
    return nn.Linear(inputs, outputs).to(model.gain.dtype)


def put_back(model: Any, rng: random.Random) -> None:
    head = model.head if rng.random() < 0.5 else linear(model, rng, outputs=5)
    del model.head
    model.head = head


def new_values(like: Tensor, rng: random.Random) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(rng.randrange(1000))).to(like.dtype) * 0.3


def give_data(model: Any, rng: random.Random) -> None:
    weight = one_layer(model, rng).weight
    weight.data = new_values(weight, rng)


def replace_weight(model: Any, rng: random.Random) -> None:
    layer = one_layer(model, rng)
    layer.weight = nn.Parameter(new_values(layer.weight, rng))


def load(model: Any, rng: random.Random) -> None:
    state = {name: new_values(value, rng).abs() + 0.1 for name, value in model.state_dict().items()}
    counts = {name: torch.zeros_like(value) for name, value in model.state_dict().items() if not value.ndim}
    model.load_state_dict({**state, **counts})


def toggle_hook(model: Any, rng: random.Random) -> None:
    layer = one_layer(model, rng)
    if layer._forward_hooks:
        layer._forward_hooks.clear()
        layer.register_forward_hook(lambda *_: None).remove()  # as a handle's remove() counts
    else:
        layer.register_forward_hook(lambda module, args, result: result * 1.1)


def normalize_weight(model: Any, rng: random.Random) -> None:
    if type(layer := one_block(model, rng).linear) is nn.Linear:
        parametrizations.weight_norm(layer)


def prune_weight(model: Any, rng: random.Random) -> None:
    if type(layer := one_block(model, rng).linear) is nn.Linear and not hasattr(layer, "weight_orig"):
        prune.l1_unstructured(layer, "weight", 0.4)


def append(model: Any, rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(1000))
    if len(model.blocks) < 5:
        model.blocks.append(Block().to(model.gain.dtype).eval())


def swap(model: Any, rng: random.Random) -> None:
    model.blocks[0], model.blocks[-1] = model.blocks[-1], model.blocks[0]


def toggle_forward(model: Any, rng: random.Random) -> None:
    layer = one_layer(model, rng)
    if "forward" in layer.__dict__:
        del layer.forward
    else:
        layer.forward = lambda x: type(layer).forward(layer, x) + 0.3


def toggle_class(model: Any, rng: random.Random) -> None:
    layer = one_layer(model, rng)
    layer.__class__ = {nn.Linear: Scaled, Scaled: nn.Linear}.get(type(layer), type(layer))


def tie(model: Any, rng: random.Random) -> None:
    first, last = model.blocks[0].linear, model.blocks[-1].linear
    if (
        type(first) is type(last) is nn.Linear
        and not hasattr(first, "weight_orig")
        and not hasattr(last, "weight_orig")
    ):
        first.weight = last.weight


EDITS: dict[str, Edit] = {
    "a layer of a block": lambda m, r: setattr(one_block(m, r), "linear", linear(m, r)),
    "the first layer": lambda m, r: setattr(m, "first", linear(m, r, inputs=8)),
    "the last layer, taken out and put back": put_back,
    "a layer where none was": lambda m, r: setattr(m, "adapter", linear(m, r)),
    "no layer where one was": lambda m, r: setattr(m, "adapter", None),
    "a layer in a block where none was": lambda m, r: setattr(one_block(m, r), "extra", linear(m, r)),
    "another activation": lambda m, r: setattr(one_block(m, r), "act", r.choice((nn.GELU(), nn.SiLU(), nn.Identity()))),
    "no normalization": lambda m, r: setattr(one_block(m, r), "norm", nn.Identity()),
    "eps": lambda m, r: setattr(one_block(m, r).norm, "eps", r.choice((1e-5, 0.1, 0.5))),
    "eps of the statistics": lambda m, r: setattr(one_block(m, r).batch, "eps", r.choice((1e-5, 0.01))),
    "a number": lambda m, r: setattr(one_block(m, r), "scale", r.random()),
    "a flag of a block": lambda m, r: setattr(one_block(m, r), "residual", r.random() < 0.5),
    "an item": lambda m, r: one_block(m, r).options.update(add=r.random()),
    "an element": lambda m, r: one_block(m, r).shifts.append(r.random() * 0.1),
    "a flag": lambda m, r: setattr(m, "flag", not m.flag),
    "a number of the model": lambda m, r: setattr(m, "power", r.choice((1.0, 0.5, 2.0))),
    "values in place": lambda m, r: one_layer(m, r).weight.mul_(1 + r.random() * 0.2),
    "other memory": give_data,
    "another parameter": replace_weight,
    "no bias": lambda m, r: setattr(one_layer(m, r), "bias", None),
    "a parameter of the model": lambda m, r: setattr(m, "gain", nn.Parameter(new_values(m.gain, r))),
    "a buffer": lambda m, r: setattr(m, "offset", new_values(m.offset, r)),
    "a buffer in place": lambda m, r: m.offset.add_(0.1),
    "statistics": lambda m, r: one_block(m, r).batch.running_mean.add_(0.05),
    "all values": load,
    "a block's mode": lambda m, r: one_block(m, r).train(r.random() < 0.5),
    "the mode": lambda m, r: m.eval(),
    "the dtype": lambda m, r: m.double() if m.gain.dtype is torch.float32 else m.float(),
    "a hook": toggle_hook,
    "a parametrization": normalize_weight,
    "pruning": prune_weight,
    "a block more": append,
    "a block less": lambda m, r: m.blocks.pop(-1) if len(m.blocks) > 1 else None,
    "other blocks' places": swap,
    "another list of the blocks": lambda m, r: setattr(m, "blocks", nn.ModuleList([*m.blocks][::-1])),
    "a forward of a layer's own": toggle_forward,
    "another class": toggle_class,
    "one weight for two": tie,
    "what asks for gradients": lambda m, r: m.requires_grad_(r.random() < 0.5),
}


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """What it returns, or the class of what it raises: PyTorch refuses some edits of what was edited before."""
    try:
        return function(*args)
    except Exception as error:
        return type(error)


def edited(kind: str, steps: list[tuple[str, int]], has_example: bool) -> Any:
    """Edit both, compare calls after each edit, and return the optimized module."""
    torch.manual_seed(len(steps))
    model, x = Edited(kind).eval(), torch.randn(6, 8)
    fast = zendnn_cffi.optimize(copy.deepcopy(model), (x,) if has_example else None, tune="off")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
        for name, seed in steps:
            refused, as_well = (outcome(EDITS[name], each, random.Random(seed)) for each in (model, fast))
            assert isinstance(refused, type) == isinstance(as_well, type), f"{name}: {refused}, {as_well}"
            for rows in (6, 6, 3)[: 1 + seed % 3]:
                given = x[:rows].to(model.gain.dtype) * (1 + seed % 5)
                want, got = outcome(model, given), outcome(fast, given)
                if isinstance(want, type):
                    assert got is want, f"after {name}: {got}"
                else:
                    assert isinstance(got, Tensor), f"after {name}: {got}"
                    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=f"after {name}: {{}}".format)
    return fast


@settings(max_examples=15, deadline=None, suppress_health_check=SLOW)
@given(
    st.sampled_from(("traced", "exported", "parts")),
    st.lists(st.tuples(st.sampled_from(sorted(EDITS)), st.integers(0, 999)), min_size=1, max_size=6),
    st.booleans(),
)
def test_answers_follow_edits(kind: str, steps: list[tuple[str, int]], has_example: bool) -> None:
    edited(kind, steps, has_example)


@pytest.mark.parametrize("kind", ("traced", "parts"))
@pytest.mark.parametrize("name", EDITS)
def test_each_edit_alone(kind: str, name: str) -> None:
    fast = edited(kind, [(name, 2), (name, 5)], has_example=True)
    parts = fast.optimized_submodules.values() if kind == "parts" else (fast,)
    assert parts and all(part.regions() for part in parts)


@torch.no_grad()
def test_a_mode_that_was_changed_in_between() -> None:
    """eval() of the whole left a block in training."""
    fast = edited("parts", [("a block's mode", seed) for seed in range(4)] + [("the mode", 0)], has_example=True)
    assert not any(module.training for module in fast.modules())
